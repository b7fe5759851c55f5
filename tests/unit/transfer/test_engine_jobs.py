"""Pulls by TransferEngine with a scripted library: what arrives, what is refused, what ends by its deadline, and the bounds."""

import asyncio
import math
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvpool.clock import Deadline
from kvpool.errors import PeerNotAsked, PeerUnreachable, Refused
from kvpool.ids import ConnectionId
from kvpool.peers.asking import STAGES
from kvpool.peers.control import records as r
from kvpool.transfer.child.frames import Frames
from kvpool.transfer.child.service import DaemonLink
from kvpool.transfer.engine import child
from kvpool.transfer.engine import engine as engine_module
from kvpool.transfer.engine.engine import LIBRARIES, Half, MoveEnd, PullingNode
from kvpool.transfer.engine.job import PARTS_AHEAD, EngineJob, PartFailed
from kvpool.transfer.transport import Ending
from tests.rigs.native_directory import EXTENTS
from tests.rigs.transfer.engine_pair import CHUNKS, PULLER, Pair, Side, engine_pair, on_engines_of, until
from tests.rigs.transfer.scripted_engine import Script
from tests.rigs.transfer.stream_node import EXTENT_BYTES, payload

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=list(LIBRARIES))
def library(request: pytest.FixtureRequest) -> str:
    """One whose owners are read from, and one whose owners write."""
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory, library: str) -> AsyncIterator[Pair]:
    """Engines that serve all tests which end none of their processes."""
    async with engine_pair(tmp_path_factory.mktemp("engines"), library) as serving:
        yield serving


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines: Pair) -> AsyncIterator[Pair]:
    async with on_engines_of(engines) as made:
        yield made


only_reads = pytest.mark.parametrize("library", ["mooncake"], indirect=True)
only_writes = pytest.mark.parametrize("library", ["nixl"], indirect=True)


@pytest.fixture
def brief_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner was asked to write, and has not, is waited for so long."""
    monkeypatch.setattr(engine_module, "EXPECTED_S", 2.0)


@pytest.fixture
def lasting_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the owner's word gives a range back."""
    monkeypatch.setattr(engine_module, "EXPECTED_S", 1e6)


def arrived(pair: Pair) -> None:
    for name in range(CHUNKS):
        assert pair.here.node.chunk(name) == payload(name)


async def nothing_is_taken(pair: Pair) -> None:
    """Every range comes back, those of reads that nobody needed any more when they have ended."""
    engine = pair.here.engine
    await until(lambda: engine.quarantined_bytes == 0, "the reads have ended")
    taken = [engine.reserve_range(Half.READ, engine.extent_bytes_max, name) for name in ("a", "b")]
    assert all(taken)
    for one in taken:
        assert one is not None
        engine.give(one)


@pytest.mark.parametrize("has_checks", [True, False])
async def test_chunks_arrive_with_their_bytes_extent_by_extent(pair: Pair, has_checks: bool) -> None:
    ends = await pair.pull(pair.order(has_checks=has_checks))
    assert [(one.chunk, one.ending, one.fault) for one in ends] == [(n, Ending.DONE, "") for n in range(5)]
    arrived(pair)
    rows = [row for stage in pair.link.asked for row in range(stage.first, stage.first + stage.rows)]
    assert rows == list(range(5 * EXTENTS))  # extent 0 of all chunks, then extent 1, …
    assert len(pair.link.asked) > 1
    size = 5 * EXTENTS * EXTENT_BYTES
    assert pair.here.engine.stats()["read_bytes"] == pair.owner.engine.stats()["served_bytes"] == size
    await nothing_is_taken(pair)


async def test_one_wrong_extent_ends_its_chunk_alone(pair: Pair) -> None:
    source = pair.here if pair.here.engine.writes else pair.owner
    memory = source.engine.process.memory
    assert memory is not None
    first = 0 if pair.here.engine.writes else memory.size // 2

    def strike(staged: r.Staged) -> r.Staged:
        if staged.part == 1:
            memory.view()[first + 2 * EXTENT_BYTES] ^= 255
        return staged

    pair.link.change = strike
    ends = await pair.pull(pair.order())
    assert [one.ending for one in ends] == [Ending.DONE, Ending.DONE, Ending.WRONG, Ending.DONE, Ending.DONE]


@pytest.mark.parametrize("has_checks", [True, False])
async def test_checksums_of_another_chunk_are_no_proof(pair: Pair, has_checks: bool) -> None:
    """The owner's answer has other checksums than were promised, or than its bytes."""
    pair.link.change = lambda staged: replace(staged, checks=bytes(len(staged.checks)))
    ends = await pair.pull(pair.order(has_checks=has_checks))
    assert {(one.ending, one.fault) for one in ends} == {(Ending.WRONG, "checksum")}


@only_reads
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"server": "192.0.2.1:15000"}, "foreign"),
        ({"server": "[::1]:15000"}, "foreign"),
        ({"address": 1 << 62}, "broken"),
        ({"server": "127.0.0.1:9"}, "broken"),
    ],
)
async def test_places_that_are_not_the_owners_are_not_read(pair: Pair, change: dict[str, object], fault: str) -> None:
    pair.link.change = lambda staged: replace(staged, **change)  # type: ignore[arg-type]
    ends = await pair.pull(pair.order())
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, fault)}
    assert not await pair.here.transport.accepts(pair.order())  # the stream is used for a while


async def _blames_the_puller_and_begins_anew(pair: Pair) -> None:
    engine = pair.owner.engine
    assert list(engine._blamed) == [PULLER.peer]
    pair.owner.follow(Script())
    await until(lambda: engine.process.lives == 2 and engine.is_serving, "it was started again")


@only_writes
@pytest.mark.usefixtures("brief_quarantine")
@pytest.mark.parametrize(
    "change",
    [{"address": 1 << 62}, {"address": 1}, {"agent": b"here/9"}],
    ids=str,
)
async def test_places_that_are_not_the_pullers_are_not_written(pair: Pair, change: dict[str, Any]) -> None:
    pair.link.ask = lambda stage: replace(stage, **change) if isinstance(stage, r.StageInto) else stage
    ends = await pair.pull(pair.order())
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "broken")}
    assert not await pair.here.transport.accepts(pair.order())  # the stream is used for a while


@only_writes
@pytest.mark.parametrize(
    ("node", "change"),
    [("another", {}), ("here", {"agent": b"another/9"}), ("here", {"agent": bytes(300)})],
    ids=str,
)
async def test_an_agent_of_another_node_is_not_written_to(
    pair: Pair, lasting_quarantine: None, node: str, change: dict[str, Any]
) -> None:
    """Whoever asks has to be who the agent names; the puller hears that nothing was written."""
    pair.link.puller = replace(PULLER, name=node)
    pair.link.ask = lambda stage: replace(stage, **change) if isinstance(stage, r.StageInto) else stage
    ends = await pair.pull(pair.order())
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "other_transport")}
    assert not await pair.here.transport.accepts(pair.order())  # the stream is used for a while
    await nothing_is_taken(pair)


@only_reads
async def test_an_address_of_a_former_life_is_not_read(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        assert [one.ending for one in await pair.pull(pair.order())] == [Ending.DONE] * 5
        lives = pair.here.engine.process.lives
        pair.link.change = lambda staged: replace(staged, life=b"another!")
        assert not pair.here.engine.knows(pair.owner.engine.server, b"another!")
        assert pair.here.engine.process.lives == lives  # not for one such claim within a minute


async def test_chunks_that_left_their_slots_are_gone(pair: Pair) -> None:
    pair.link.change = lambda staged: replace(staged, gone=bytes([1]) + staged.gone[1:])
    ends = await pair.pull(pair.order())
    assert ends[0].fault == "gone"
    assert ends[0].ending is Ending.WRONG


async def test_a_read_that_hangs_ends_in_time_and_its_range_stays_in_quarantine(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        pair.mover.follow(Script(is_stuck=True))
        ends = await pair.pull(pair.order(stall_s=1.0, timeout_s=10.0))
        assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "late")}
        engine = pair.here.engine
        held = engine.quarantined_bytes
        assert held > 0
        assert engine.reserve_range(Half.READ, engine.extent_bytes_max, "owner") is None  # it counts as the node's
        rest = list(iter(lambda: engine.reserve_range(Half.READ, EXTENT_BYTES, "owner"), None))
        ends = await pair.pull(pair.order(timeout_s=0.1))
        assert {one.fault for one in ends} == {"late"}, "what has its room is its own"
        for one in rest:
            engine.give(one)
        assert not any(pair.here.node.chunk(name).strip(bytes(1)) for name in range(CHUNKS)), "nothing has landed"
        pair.mover.follow(Script())
        await until(lambda: engine.quarantined_bytes == 0, "the late moves have ended, and the ranges are back")
        assert not any(pair.here.node.chunk(name).strip(bytes(1)) for name in range(CHUNKS)), "late bytes are nobody's"
        assert engine.process.lives == 1
        await nothing_is_taken(pair)
        assert pair.here.engine.stats()["late_reads"] > 0


async def test_too_much_in_quarantine_ends_the_process(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.here.engine
        pair.here.follow(Script(is_stuck=True))
        for name in ("a", "b"):
            into = engine.reserve_range(Half.READ, engine.extent_bytes_max, name)
            assert into is not None
            if engine.writes:
                ended = engine.expect(into, timeout_s=0.01).ended
            else:
                ended = engine.read(into, pair.owner.engine.server, 1 << 40, size=100, timeout_s=0.01)
            assert await ended is MoveEnd.LATE
            engine.give(into)
        pair.here.follow(Script())
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "another life has begun")
        await nothing_is_taken(pair)
        assert [one.ending for one in await pair.pull(pair.order())] == [Ending.DONE] * 5


@only_writes
@pytest.mark.usefixtures("brief_quarantine")
async def test_what_nobody_writes_any_more_comes_back_and_the_process_stays(pair: Pair) -> None:
    """An owner that has died with its daemon sends nothing."""
    pair.link.change = lambda _: None
    pair.owner.follow(Script(fails=True))
    ends = await pair.pull(pair.order(timeout_s=0.5))
    assert {one.ending for one in ends} == {Ending.FAILED}
    assert pair.here.engine.quarantined_bytes > 0
    await nothing_is_taken(pair)
    assert pair.here.engine.process.lives == 1


class _Notices:
    """A library that has heard marks, once."""

    def __init__(self, *marks: bytes) -> None:
        self.facts: Mapping[str, Any] = {}
        self.met = 0
        self._marks = list(marks)

    @property
    def notices(self) -> "_Notices":
        return self

    def submit(self, other: Any, offset: int, address: int, size: int) -> int:
        raise AssertionError((other, offset, address, size))

    def look(self, number: int) -> int:
        raise AssertionError(number)

    def notify(self, other: Any, mark: bytes) -> bool:
        raise AssertionError((other, mark))

    def heard(self) -> list[bytes]:
        found, self._marks = self._marks, []
        return found

    def close(self) -> None:
        """Nothing to give back."""


@only_writes
async def test_a_mark_that_comes_before_the_daemons_request_is_not_lost(library: str) -> None:
    """An owner may be faster than this node's process is with what its daemon has sent before."""
    assert library == "nixl"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60.0)
        client = _Notices(b"mark one", b"mark two")
        moves = child._Moves(DaemonLink(theirs), client)
        threading.Thread(target=moves.look_after, daemon=True).start()
        await until(lambda: not client._marks, "both were heard")
        moves.take_request(1, child.EXPECT, b"mark two")
        moves.take_request(2, child.EXPECT, b"mark 3..")
        moves.take_request(0, child.CALL_OFF, b"mark 3..")
        frames = Frames()
        answers: list[Any] = []
        while len(answers) < 2:
            answers += frames.feed(ours.recv(1 << 16))
        assert answers == [[1, [0]], [2, [child.CALLED_OFF]]]


class _Busy(_Notices):
    """A library whose moves never end. `begun`: to whom, in turn. `looks`: how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.looks = 0

    def submit(self, other: Any, offset: int, address: int, size: int) -> int:
        assert size <= child.PIECE_BYTES, (offset, address)
        self.begun.append(other[0])
        return len(self.begun)

    def look(self, number: int) -> int:
        self.looks += number == 1
        return 0

    def heard(self) -> list[bytes]:
        self.looks += 1
        return []


@only_writes
async def test_pieces_of_a_node_that_takes_none_leave_room_for_others(library: str) -> None:
    assert library == "nixl"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = _Busy()
        moves = child._Moves(DaemonLink(theirs), client)
        for number in range(1, child.PIECES_MAX):
            moves.take_request(number, child.MOVE, ["stuck", b"agent"], 0, 0, child.PIECE_BYTES, b"mark....")
        moves.take_request(100, child.MOVE, ["other", b"agent"], 0, 0, 2 * child.PIECE_BYTES, b"mark....")
        threading.Thread(target=moves.submit_all, daemon=True).start()
        await until(lambda: client.begun.count("other") == 2, "the other's bytes move")
        assert client.begun.count("stuck") == child.NODE_PIECES_MAX


@only_writes
async def test_what_does_not_come_takes_few_looks(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of an owner that has died is in quarantine for a minute and a half."""
    assert library == "nixl"
    monkeypatch.setattr(child, "QUIET_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = _Busy()
        moves = child._Moves(DaemonLink(theirs), client)
        moves.take_request(1, child.EXPECT, b"mark....")
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        threading.Thread(target=moves.look_after, daemon=True).start()
        await until(lambda: client.looks > 20, "it looks")
        assert client.looks <= (loop.time() - begun_s) / child.QUIET_NAP_S + 2


@only_writes
@pytest.mark.parametrize(
    ("error", "quarantine"),
    [
        (PeerNotAsked("not connected"), "lasting_quarantine"),
        (PeerUnreachable("no answer in time"), "brief_quarantine"),
        (Refused(r.RefusalCode.BUSY, "too many"), "lasting_quarantine"),
        (Refused(r.RefusalCode.TRANSPORT, "another protocol"), "lasting_quarantine"),
        (Refused(r.RefusalCode.UNWRITTEN, "it could not write"), "brief_quarantine"),
        (Refused(r.RefusalCode.FAILED, "no answer by the deadline"), "brief_quarantine"),
    ],
    ids=str,
)
async def test_a_range_is_used_again_only_where_nothing_of_it_can_be_written(
    pair: Pair, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, error: Exception, quarantine: str
) -> None:
    request.getfixturevalue(quarantine)

    def fail(stage: r.AnyStage, timeout_s: float) -> "asyncio.Future[Any]":
        assert isinstance(stage, r.StageInto), timeout_s
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answered.set_exception(error)
        return answered

    monkeypatch.setattr(pair.link, "request", fail, raising=False)
    engine = pair.here.engine
    assert {one.ending for one in await pair.pull(pair.order())} == {Ending.FAILED}
    if quarantine == "brief_quarantine":
        assert engine.quarantined_bytes > 0
        await asyncio.sleep(0.5)  # long enough for the process to answer
        assert engine.quarantined_bytes > 0, "until EXPECTED_S"
    else:
        await until(lambda: engine.quarantined_bytes == 0, "it is called off")
        assert engine.counts["failed_reads"] == 0
    await nothing_is_taken(pair)


@only_writes
async def test_a_question_that_never_got_its_turn_is_not_sent_behind_the_pulls_end(pair: Pair) -> None:
    """Its owner would know of no pull, and its range be in doubt."""
    around, nobody = pair.here.transport._around, ConnectionId(0)
    for _ in range(STAGES.at_once):
        await around.asking._turns.begin_turn("owner", nobody)
    assert pair.here.transport.submit(pair.order())
    await until(lambda: around.asked, "it waits for its turn")
    engine = pair.here.engine
    assert engine.process.asked == 0, "nothing is expected of a question that is not sent"
    for task in pair.here.transport._running.values():
        task.cancel()
    assert {one.ending for one in await pair.ends()} == {Ending.CANCELLED}
    assert engine.quarantined_bytes == 0
    await until(lambda: not around.asked, "it waits no longer")
    for _ in range(STAGES.at_once):
        around.asking._turns.end_turn("owner", nobody)
    await nothing_is_taken(pair)
    assert pair.link.asked == []


@only_writes
async def test_a_part_that_is_written_is_answered_when_nothing_of_it_is_written_any_more(pair: Pair) -> None:
    """Whatever ends it: a later Stage, then the pull's end."""
    engine = pair.owner.engine
    pair.owner.follow(Script(is_stuck=True))
    written = pair.link.request(pair.stage(1, 0, 2), 5.0)
    await until(lambda: engine.process.asked, "it is being written")
    pair.link.request(pair.stage(2, 2, 0, ended=(1).to_bytes(4, "little")), 5.0)
    await asyncio.sleep(0)
    pair.owner.parts.drop(1)
    await asyncio.sleep(0.2)
    assert engine.process.asked == 1
    assert not written.done()
    pair.owner.follow(Script())
    assert (await written).address, "it was written"
    assert engine.quarantined_bytes == 0


@only_writes
async def test_a_part_that_was_given_up_and_whose_write_fails_is_in_doubt(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.owner.engine
        pair.owner.follow(Script(is_stuck=True))
        written = pair.link.request(pair.stage(1, 0, 2), 5.0)
        await until(lambda: engine.process.asked, "it is being written")
        pair.owner.parts.drop(1)
        engine.process.kill("a test")
        with pytest.raises(Refused) as refusal:
            await written
        assert refusal.value.code == r.RefusalCode.UNWRITTEN
        assert engine._blamed == {}, "its own daemon has ended it"
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "it was started again")


@only_writes
async def test_a_process_that_dies_blames_whose_write_was_under_way(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.owner.engine
        assert await pair.here.transport.accepts(pair.order())
        pair.owner.follow(Script(is_stuck=True))
        written = pair.link.request(pair.stage(1, 0, 2), 5.0)
        await until(lambda: engine.process.asked, "it is being written")
        assert engine.process.process is not None
        os.kill(engine.process.process.pid, signal.SIGKILL)
        with pytest.raises(Refused) as refusal:
            await written
        assert refusal.value.code == r.RefusalCode.UNWRITTEN
        await _blames_the_puller_and_begins_anew(pair)
        assert {one.fault for one in await pair.pull(pair.order())} == {"other_transport"}
        assert not await pair.here.transport.accepts(pair.order()), "it gets the stream"
        pair.link.puller = PullingNode("here", "key of another", PULLER.host)
        assert (await pair.link.request(pair.stage(50, 0, 2), 5.0)).address, "others are written to"


@only_writes
async def test_a_write_that_does_not_begin_blames_its_peer_alone(tmp_path: Path, library: str) -> None:
    """The process ends with it; others' writes end, too."""
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.owner.engine
        pair.owner.follow(Script(is_stuck=True))
        first = pair.link.request(pair.stage(1, 0, 2), 5.0)
        await until(lambda: engine.process.asked == 1, "it is being written")
        (number,) = engine.process._waiting
        pair.link.puller = PullingNode("here", "key of another", PULLER.host)
        second = pair.link.request(pair.stage(2, 2, 2), 5.0)
        await until(lambda: engine.process.asked == 2, "both are")
        engine.process._take_answer(number, [child.HUNG])
        for written in (first, second):
            with pytest.raises(Refused):
                await written
        await _blames_the_puller_and_begins_anew(pair)


@only_writes
async def test_a_ping_that_was_just_sent_excuses_nobody(tmp_path: Path, library: str) -> None:
    """A second write brings one about whenever its node likes."""
    async with engine_pair(tmp_path, library) as pair:
        engine, loop = pair.owner.engine, asyncio.get_running_loop()
        _hang_after(pair.owner, 2.0)
        pair.owner.follow(Script(is_stuck=True))
        written = pair.link.request(pair.stage(1, 0, 2), 5.0)
        await until(lambda: engine.process.asked, "it is being written")
        loop.call_later(1.9, lambda: setattr(engine, "_pinged_s", loop.time()))
        with pytest.raises(Refused):
            await written
        await _blames_the_puller_and_begins_anew(pair)


@only_writes
async def test_a_process_that_has_met_many_agents_begins_anew_when_nothing_is_expected(
    tmp_path: Path, library: str
) -> None:
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.here.engine
        most = engine.process.facts["met_max"]
        into = engine.reserve_range(Half.READ, EXTENT_BYTES, "owner")
        assert into is not None
        expected = engine.expect(into, timeout_s=1e6)
        for met in (most - 1, most, 2 * most - 1):
            engine._met = met
            engine._renew_where_worn()
            assert not engine.process._is_killed, "another node may still write"
        engine.call_off(into, expected)
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "it began anew")
        engine.give(into)
        into = engine.reserve_range(Half.READ, EXTENT_BYTES, "owner")
        assert into is not None
        expected = engine.expect(into, timeout_s=1e6)
        engine._met = 2 * most
        engine._renew_where_worn()
        assert await expected.ended is MoveEnd.FAILED, "in any case"
        engine.give(into)
        await until(lambda: engine.process.lives == 3 and engine.is_serving, "it began anew")
        assert engine._blamed == {}


@only_writes
async def test_a_late_answer_counts_until_the_quarantine_ends(
    pair: Pair, lasting_quarantine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner says that nothing was written, after its puller has given up."""
    asked: list[tuple[r.AnyStage, float, asyncio.Future[Any]]] = []

    def hold(stage: r.AnyStage, timeout_s: float) -> "asyncio.Future[Any]":
        asked.append((stage, timeout_s, asyncio.get_running_loop().create_future()))
        return asked[-1][2]

    monkeypatch.setattr(pair.link, "request", hold, raising=False)
    engine = pair.here.engine
    ends = await pair.pull(pair.order(stall_s=0.1))
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "late")}
    assert not await pair.here.transport.accepts(pair.order()), "the path is at fault"
    assert engine.quarantined_bytes > 0
    assert asked
    for stage, timeout_s, answered in asked:
        assert timeout_s > 1e5, "the link listens as long"
        assert not answered.done()
        answered.set_result(r.Staged(stage.pull, stage.part, "127.0.0.1:1", bytes(r.LIFE_BYTES), 0, b"", b""))
    await nothing_is_taken(pair)


async def test_a_node_that_cannot_be_reached_is_not_asked_at_once_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stage: r.AnyStage, timeout_s: float) -> "asyncio.Future[Any]":
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answered.set_exception(PeerNotAsked(f"{stage} within {timeout_s}"))
        return answered

    assert await pair.here.transport.accepts(pair.order())
    monkeypatch.setattr(pair.link, "request", fail, raising=False)
    assert {one.fault for one in await pair.pull(pair.order())} == {"unreachable"}
    assert not await pair.here.transport.accepts(pair.order())
    await nothing_is_taken(pair)


async def test_one_nodes_quarantine_and_a_part_of_another_end_nothing(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.here.engine
        pair.here.follow(Script(is_stuck=True))
        for name, size in (("hostile", engine.extent_bytes_max), ("healthy", engine.part_bytes(1))):
            into = engine.reserve_range(Half.READ, size, name)
            assert into is not None
            if engine.writes:
                ended = engine.expect(into, timeout_s=0.01).ended
            else:
                ended = engine.read(into, pair.owner.engine.server, 1 << 40, size=100, timeout_s=0.01)
            assert await ended is MoveEnd.LATE
            engine.give(into)
        assert engine.quarantined_bytes == engine.extent_bytes_max + engine.part_bytes(1)
        assert not engine.process._is_killed
        engine.process.kill("a test")
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "another life has begun")


@only_writes
async def test_an_owner_that_writes_names_no_place_of_its_own(pair: Pair) -> None:
    engine = pair.owner.engine
    port, base = engine.process.facts["port"], engine.process.facts["base"]
    question = r.Stage(98, 0, b"", 0, 0, engine.settings.way, 0)
    greeting = replace(pair.stage(0, 0, 0), pull=99)
    for stage in (question, greeting, pair.stage(1, 0, 2)):
        staged = await pair.link.request(stage, 5.0)
        assert staged.address, "it serves"
        assert staged.server.rpartition(":")[2] == "1" != str(port)
        if stage is question:
            assert staged.address < base


@only_writes
async def test_a_write_that_would_begin_too_late_is_none(engines: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its puller would use the range for others before it ends."""
    monkeypatch.setattr(r, "INTO_BEGIN_S", -1.0)
    async with on_engines_of(engines) as pair:
        staged = await pair.link.request(pair.stage(1, 0, 2, wait_ms=0), 5.0)
        assert (staged.address, staged.gone) == (0, b"")
        assert pair.owner.engine._used == {}


def _hang_after(side: Side, hang_s: float) -> None:
    side.engine.settings = replace(side.engine.settings, hang_s=hang_s)
    side.engine.process._kind = replace(side.engine.process._kind, hang_s=hang_s)


@only_writes
async def test_a_node_whose_writes_do_not_end_is_blamed_and_not_written_to(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.owner.engine
        _hang_after(pair.owner, 1.0)
        pair.owner.follow(Script(is_stuck=True))
        written = pair.link.request(pair.stage(1, 0, 2), 5.0)
        with pytest.raises(Refused) as refusal:
            await written
        assert refusal.value.code == r.RefusalCode.UNWRITTEN
        pair.owner.follow(Script())
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "it was started again")
        assert engine.blames(PULLER.peer)
        greeting = replace(pair.stage(0, 0, 0), pull=99)
        for stage in (pair.stage(2, 0, 2), greeting, r.Stage(98, 0, b"", 0, 0, engine.settings.way, 0)):
            with pytest.raises(Refused) as refusal:
                await pair.link.request(stage, 5.0)
            assert refusal.value.code == r.RefusalCode.TRANSPORT
        assert not engine.blames("here"), "whoever takes its name"
        pair.link.puller = PullingNode("here", "key of another", PULLER.host)
        assert (await pair.link.request(pair.stage(3, 0, 2), 5.0)).address


@only_writes
@pytest.mark.parametrize("side", ["owner", "here"])
async def test_a_process_that_hangs_by_itself_is_found_and_nobody_is_blamed(
    tmp_path: Path, library: str, side: str
) -> None:
    async with engine_pair(tmp_path, library) as pair:
        struck, other = (pair.owner, pair.here) if side == "owner" else (pair.here, pair.owner)
        process = struck.engine.process
        _hang_after(struck, 1.0)
        assert process.process is not None
        os.kill(process.process.pid, signal.SIGSTOP)
        ends = await pair.pull(pair.order(timeout_s=0.3))
        assert {one.ending for one in ends} == {Ending.FAILED}
        await until(lambda: process.lives == 2 and process.is_serving, "it was started again")
        assert struck.engine._blamed == other.engine._blamed == {}


@only_writes
async def test_a_question_that_was_left_behind_gives_its_range_back(engines: Pair) -> None:
    """The owner had not begun to write when the pull ended, and says so."""
    async with on_engines_of(engines, rate=1) as pair:
        assert pair.here.transport.submit(pair.order())
        engine = pair.owner.engine
        await until(lambda: engine.counts["served_bytes"] > 8 * EXTENT_BYTES, "a part waits for its time")
        for task in pair.here.transport._running.values():
            task.cancel()
        assert {one.ending for one in await pair.ends()} == {Ending.CANCELLED}
        assert pair.here.engine.quarantined_bytes > 0
        pair.owner.parts.drop(1)
        await until(lambda: pair.here.engine.quarantined_bytes == 0, "the answer has come")
        assert pair.here.engine.process.lives == 1


@pytest.mark.usefixtures("brief_quarantine")
@pytest.mark.parametrize("script", [Script(fails=True), Script(refuses=True)])
async def test_reads_that_fail_are_failures_and_the_stream_is_used_next(pair: Pair, script: Script) -> None:
    assert await pair.here.transport.accepts(pair.order())
    pair.mover.follow(script)
    ends = await pair.pull(pair.order())
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "broken")}
    assert not await pair.here.transport.accepts(pair.order())


@pytest.mark.usefixtures("brief_quarantine")
@pytest.mark.parametrize("side", ["owner", "here"])
async def test_an_end_of_either_process_fails_the_pull_and_is_survived(tmp_path: Path, library: str, side: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        ended = pair.owner if side == "owner" else pair.here
        pair.mover.follow(Script(is_stuck=True))
        assert pair.here.transport.submit(pair.order())
        await until(lambda: pair.mover.engine.process.asked, "bytes are about to move")
        process = ended.engine.process.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        await until(lambda: not ended.engine.is_serving, "it has ended")
        pair.mover.follow(Script())
        ends = await pair.ends()
        assert {one.ending for one in ends} == {Ending.FAILED}
        await until(lambda: ended.engine.process.lives == 2 and ended.engine.is_serving, "it was started again")
        await nothing_is_taken(pair)


async def test_an_abort_inside_the_library_ends_nothing_but_its_process(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        pair.mover.follow(Script(aborts=True))
        ends = await pair.pull(pair.order())
        assert {one.ending for one in ends} == {Ending.FAILED}
        assert pair.mover.engine.problem()
        assert not await pair.here.transport.accepts(pair.order())
        pair.mover.follow(Script())
        await until(lambda: pair.mover.engine.is_serving, "it was started again")


async def test_an_owner_that_stages_nothing_is_late(pair: Pair) -> None:
    pair.link.change = lambda staged: replace(staged, checks=b"", gone=b"", address=0)
    ends = await pair.pull(pair.order(timeout_s=0.3))
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "late")}
    await nothing_is_taken(pair)


async def test_a_buffer_that_others_have_taken_is_no_fault_of_the_node(pair: Pair) -> None:
    engine = pair.here.engine
    for timeout_s in (0.1, 0.11, 0.12, 0.13, 0.14):
        held = [engine.reserve_range(Half.READ, engine.extent_bytes_max, name) for name in ("a", "b")]
        ends = await pair.pull(pair.order(timeout_s=timeout_s))
        assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "full")}
        assert await pair.here.transport.accepts(pair.order())
        for one in held:
            assert one is not None
            engine.give(one)
    assert not [stage for stage in pair.link.asked if stage.part], "no part was asked for"
    await nothing_is_taken(pair)


@pytest.mark.parametrize(
    ("raised", "reported", "is_of_path"),
    [
        ("unreachable", "late", True),
        ("refused", "refused", False),
        ("full", "full", False),
        ("away", "away", True),  # no part can be read for a while, whosever fault it is
        ("other_transport", "other_transport", True),
    ],
)
async def test_only_an_answer_that_does_not_come_is_late_at_the_deadline(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, raised: str, reported: str, is_of_path: bool
) -> None:
    async def fail_at_the_end(job: EngineJob, window: object, deadline: Deadline) -> None:
        await until(deadline.has_passed, "the deadline has passed")
        raise PartFailed(raised, "scripted")

    monkeypatch.setattr(EngineJob, "_fetch_all", fail_at_the_end)
    ends = await pair.pull(pair.order(timeout_s=0.01))
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, reported)}
    assert await pair.here.transport.accepts(pair.order()) is not is_of_path


async def test_parts_may_come_with_fewer_rows_than_were_asked_for(pair: Pair) -> None:
    def shorten(staged: r.Staged) -> r.Staged:
        rows = max(1, len(staged.gone) - 2)
        return replace(staged, checks=staged.checks[: 4 * rows], gone=staged.gone[:rows])

    pair.link.change = shorten
    assert [one.ending for one in await pair.pull(pair.order())] == [Ending.DONE] * 5
    arrived(pair)
    await nothing_is_taken(pair)


async def test_a_closed_transport_reports_what_it_drops(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        pair.here.follow(Script(is_stuck=True))
        assert pair.here.transport.submit(pair.order())
        await until(lambda: pair.link.asked, "it has begun")
        closing = asyncio.ensure_future(pair.here.transport.close())
        ends = await pair.ends()
        assert {(one.ending, one.fault) for one in ends} == {(Ending.CANCELLED, "cancelled")}
        assert await closing
        assert pair.here.transport.submit(pair.order()) == 0


async def test_one_node_has_a_part_of_the_buffer_and_others_the_rest(pair: Pair) -> None:
    engine = pair.here.engine
    most = engine.extent_bytes_max
    first = engine.reserve_range(Half.SERVED, most, "a")
    assert first is not None
    assert engine.reserve_range(Half.SERVED, 1, "a") is None
    second = engine.reserve_range(Half.SERVED, most, "b")
    assert second is not None
    assert engine.reserve_range(Half.SERVED, 1, "c") is None
    engine.give(first)
    third = engine.reserve_range(Half.SERVED, most, "a")
    assert third is not None
    assert first.offset == third.offset
    assert {first.offset, second.offset} == {memory_half(pair), memory_half(pair) + most}
    for one in (second, third):
        engine.give(one)
    assert engine.part_bytes(most) == most
    assert engine.part_bytes(most + 1) == 0


def memory_half(pair: Pair) -> int:
    memory = pair.here.engine.process.memory
    assert memory is not None
    return memory.size // 2


async def test_what_cannot_be_is_refused(pair: Pair) -> None:
    answers: list[r.Staged | r.Refused] = []

    def ask(offer: int | None, stage: r.AnyStage) -> str:
        def answer(found: r.Staged | r.Refused) -> bool:
            answers.append(found)
            return True

        pair.owner.parts.serve(offer, stage, answer, puller=PULLER)
        found = answers.pop()
        assert isinstance(found, r.Refused)
        return found.code

    stage = pair.stage(1, 0, 2)
    assert ask(1, replace(stage, protocol="rdma")) == "transport"
    other_form = r.StageInto(7, 1, b"", 0, 2, "tcp", 100, b"here/9", 1, bytes(8))
    if pair.owner.engine.writes:
        assert ask(1, r.Stage(7, 1, b"", 0, 2, "nixl-tcp", 100)) == "transport"
    else:
        assert ask(1, other_form) == "transport"
        assert ask(None, replace(other_form, rows=0)) == "transport", "its library would not know what to read"
    for offer in (None, 2):
        assert ask(offer, stage) == "protocol", "its puller's range is in no doubt"
    assert ask(1, replace(stage, first=5 * EXTENTS - 1)) == "protocol"


async def test_a_part_has_one_range_and_an_offer_that_is_over_has_none(engines: Pair) -> None:
    """Also while the owner waits for the puller's rate, when the copy is made and the answer is not."""
    async with on_engines_of(engines, rate=1) as pair:
        parts, engine = pair.owner.parts, pair.owner.engine
        answers: list[r.Staged | r.Refused] = []

        def answer(found: r.Staged | r.Refused) -> bool:
            answers.append(found)
            return True

        parts.serve(1, pair.stage(1, 0, 2), answer, puller=PULLER)
        parts.serve(1, pair.stage(1, 0, 2), answer, puller=PULLER)
        (refused,) = answers
        assert isinstance(refused, r.Refused)
        assert refused.code == "protocol"
        await until(lambda: len(answers) == 2, "the first part is free of charge")
        parts.serve(1, pair.stage(2, 2, 2), answer, puller=PULLER)
        await until(lambda: engine.counts["served_bytes"] == 4 * EXTENT_BYTES, "it is copied, and waits for its time")
        assert len(answers) == 2
        held = [engine.reserve_range(Half.SERVED, engine.extent_bytes_max, name) for name in ("a", "b")]
        assert None in held
        for one in held:
            if one is not None:
                engine.give(one)
        parts.drop(1)
        await asyncio.sleep(0)
        held = [engine.reserve_range(Half.SERVED, engine.extent_bytes_max, name) for name in ("a", "b")]
        for one in held:
            assert one is not None
            engine.give(one)
        parts.serve(1, pair.stage(3, 0, 2), answer, puller=PULLER)
        assert isinstance(answers[-1], r.Refused)


@only_reads
async def test_a_part_that_was_given_up_before_it_was_served_takes_no_room(pair: Pair) -> None:
    """Several pulls of a node share its room: a part may still wait for it when its puller no longer does."""
    parts, engine = pair.owner.parts, pair.owner.engine
    rows = engine.part_bytes(EXTENT_BYTES) // EXTENT_BYTES
    fitting = engine.extent_bytes_max // (rows * EXTENT_BYTES)
    answers: dict[int, r.Staged | r.Refused] = {}

    def stage(part: int, *ended: int, count: int = rows) -> None:
        def answer(found: r.Staged | r.Refused) -> bool:
            answers[part] = found
            return True

        over = b"".join(one.to_bytes(4, "little") for one in ended)
        parts.serve(1, pair.stage(part, 0, count, over, wait_ms=20_000), answer, puller=PULLER)

    def served(part: int) -> bool:
        found = answers[part]
        return isinstance(found, r.Staged) and bool(found.gone)

    for part in range(fitting):
        stage(part)
    await until(lambda: len(answers) == fitting, "the room is full")
    given_up, last = fitting, fitting + 1
    stage(given_up)
    await asyncio.sleep(0)
    assert given_up not in answers
    stage(last, given_up, 0)
    await until(lambda: last in answers, "there is room again")
    assert not served(given_up)
    assert served(last)
    stage(last + 1, *range(1, fitting), last, count=0)
    held = [engine.reserve_range(Half.SERVED, engine.extent_bytes_max, name) for name in ("a", "b")]
    for one in held:
        assert one is not None
        engine.give(one)


async def test_nodes_without_the_protocol_are_not_asked_again_for_a_while(
    tmp_path: Path, library: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with engine_pair(tmp_path, library) as pair:
        order = pair.order()
        process = pair.owner.engine.process
        pair.owner.follow(Script(refusal="no device"))
        process.kill("a test")
        await until(lambda: not process.is_serving, "the owner's process has ended")
        assert not await pair.here.transport.accepts(order)
        assert len(pair.link.asked) == 1
        way = pair.here.engine.settings.way
        text = f"{LIBRARIES[library]} of this node uses none that runs, the puller's {way}"
        assert caplog.messages.count(f"chunks of owner come over the stream: transport: {text}") == 1
        assert not await pair.here.transport.accepts(order)
        assert len(pair.link.asked) == 1
        await until(lambda: process.error == "no device", "the reason is known")
        assert pair.owner.engine.problem() == f"{LIBRARIES[library]} does not serve: no device"


async def test_what_one_node_reads_has_a_rate(engines: Pair) -> None:
    size = 5 * EXTENTS * EXTENT_BYTES
    async with on_engines_of(engines, rate=4 * size) as pair:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        assert [one.ending for one in await pair.pull(pair.order())] == [Ending.DONE] * 5
        parts = len(pair.link.asked)
        assert loop.time() - begun_s >= 0.25 * (parts - 1) / parts - 0.1


@pytest.mark.parametrize("stall_s", [0.5, 2.0, 60.0])
async def test_a_rate_that_makes_parts_late_chooses_the_stream(engines: Pair, stall_s: float) -> None:
    """So many parts as are ahead share it, within the time that a puller waits for each, and a write has to begin."""
    size = PARTS_AHEAD * engines.owner.engine.part_bytes(EXTENT_BYTES)
    least = math.ceil(size / min(stall_s, r.INTO_BEGIN_S))
    for rate, is_accepted in ((least - 1, False), (least, True)):
        async with on_engines_of(engines, rate=rate, stall_s=stall_s) as pair:
            assert await pair.here.transport.accepts(pair.order()) is is_accepted
            if not is_accepted:
                with pytest.raises(Refused) as refusal:
                    await pair.link.request(pair.stage(1, 0, 2), 5.0)
                assert refusal.value.code == r.RefusalCode.TRANSPORT


async def test_extents_beyond_a_part_need_a_higher_rate(engines: Pair) -> None:
    engine = engines.owner.engine
    least = PARTS_AHEAD * engine.part_bytes(1)
    async with on_engines_of(engines, rate=least, stall_s=1.0) as pair:
        offered = pair.owner.parts._offers[1]
        assert pair.owner.parts._lack(offered, pair.stage(1, 0, 1), PULLER) == ""
        offered.chunks = replace(offered.chunks, extent_bytes=engine.extent_bytes_max)
        assert "peer.rate" in pair.owner.parts._lack(offered, pair.stage(1, 0, 1), PULLER)


async def test_the_slowest_rate_that_is_taken_brings_every_part(engines: Pair) -> None:
    engine = engines.owner.engine
    stall_s = 2.0
    rate = math.ceil(PARTS_AHEAD * engine.part_bytes(EXTENT_BYTES) / stall_s)
    async with on_engines_of(engines, rate=rate, stall_s=stall_s) as pair:
        assert await pair.here.transport.accepts(pair.order())
        assert [one.ending for one in await pair.pull(pair.order(stall_s=stall_s))] == [Ending.DONE] * 5


@only_writes
async def test_a_write_by_a_process_that_has_ended_is_none(tmp_path: Path, library: str) -> None:
    """Its owner waits for its own rate meanwhile; the puller need not wait for the bytes."""
    async with engine_pair(tmp_path, library) as pair:
        engine = pair.owner.engine
        taken = engine.reserve_range(Half.SERVED, 1000, "here")
        assert taken is not None
        engine.process.kill("a test")
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "it was started again")
        stage = pair.stage(1, 0, 1)
        assert isinstance(stage, r.StageInto)
        refusal = await pair.owner.parts._write(taken, stage, PULLER)
        assert refusal is not None
        assert refusal.code == r.RefusalCode.TRANSPORT
