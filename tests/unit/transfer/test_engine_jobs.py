"""Pulls by TransferEngine with a scripted library: what arrives, what is refused, what ends by its deadline, and the bounds."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kvpool.clock import Deadline
from kvpool.peers.control import records as r
from kvpool.transfer.engine.engine import Half, ReadEnd
from kvpool.transfer.engine.job import EngineJob, PartFailed
from kvpool.transfer.transport import Ending
from tests.rigs.native_directory import EXTENTS
from tests.rigs.transfer.engine_pair import CHUNKS, Pair, engine_pair, on_engines_of, until
from tests.rigs.transfer.scripted_engine import Script
from tests.rigs.transfer.stream_node import EXTENT_BYTES, payload

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Engines that serve all tests which end none of their processes."""
    async with engine_pair(tmp_path_factory.mktemp("engines")) as serving:
        yield serving


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines: Pair) -> AsyncIterator[Pair]:
    async with on_engines_of(engines) as made:
        yield made


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
    memory = pair.owner.engine.process.memory
    assert memory is not None

    def strike(staged: r.Staged) -> r.Staged:
        if staged.part == 1:
            memory.view()[memory.size // 2 + 2 * EXTENT_BYTES] ^= 255
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


async def test_an_address_of_a_former_life_is_not_read(tmp_path: Path) -> None:
    async with engine_pair(tmp_path) as pair:
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


async def test_a_read_that_hangs_ends_in_time_and_its_range_stays_in_quarantine(tmp_path: Path) -> None:
    async with engine_pair(tmp_path) as pair:
        pair.here.follow(Script(is_stuck=True))
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
        pair.here.follow(Script())
        await until(lambda: engine.quarantined_bytes == 0, "the late reads have ended, and the ranges are back")
        await nothing_is_taken(pair)
        assert pair.here.engine.stats()["late_reads"] > 0


async def test_too_much_in_quarantine_ends_the_process(tmp_path: Path) -> None:
    async with engine_pair(tmp_path) as pair:
        engine = pair.here.engine
        pair.here.follow(Script(is_stuck=True))
        for name in ("a", "b"):
            into = engine.reserve_range(Half.READ, engine.extent_bytes_max, name)
            assert into is not None
            ended = engine.read(into, pair.owner.engine.server, 1 << 40, size=100, timeout_s=0.01)
            assert await ended is ReadEnd.LATE
            engine.give(into)
        pair.here.follow(Script())
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "another life has begun")
        await nothing_is_taken(pair)
        assert [one.ending for one in await pair.pull(pair.order())] == [Ending.DONE] * 5


@pytest.mark.parametrize("script", [Script(fails=True), Script(refuses=True)])
async def test_reads_that_fail_are_failures_and_the_stream_is_used_next(pair: Pair, script: Script) -> None:
    assert await pair.here.transport.accepts(pair.order())
    pair.here.follow(script)
    ends = await pair.pull(pair.order())
    assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "broken")}
    assert not await pair.here.transport.accepts(pair.order())


@pytest.mark.parametrize("side", ["owner", "here"])
async def test_an_end_of_either_process_fails_the_pull_and_is_survived(tmp_path: Path, side: str) -> None:
    async with engine_pair(tmp_path) as pair:
        ended = pair.owner if side == "owner" else pair.here

        def kill(staged: r.Staged) -> r.Staged:
            if staged.part == 1:
                process = ended.engine.process.process
                assert process is not None
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            return staged

        pair.link.change = kill
        ends = await pair.pull(pair.order())
        assert {one.ending for one in ends} == {Ending.FAILED}
        await until(lambda: ended.engine.process.lives == 2 and ended.engine.is_serving, "it was started again")
        pair.link.change = lambda staged: staged
        await nothing_is_taken(pair)


async def test_an_abort_inside_the_library_ends_nothing_but_its_process(tmp_path: Path) -> None:
    async with engine_pair(tmp_path) as pair:
        pair.here.follow(Script(aborts=True))
        ends = await pair.pull(pair.order())
        assert {one.ending for one in ends} == {Ending.FAILED}
        assert pair.here.engine.problem()
        assert not await pair.here.transport.accepts(pair.order())
        pair.here.follow(Script())
        await until(lambda: pair.here.engine.is_serving, "it was started again")


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


async def test_a_closed_transport_reports_what_it_drops(tmp_path: Path) -> None:
    async with engine_pair(tmp_path) as pair:
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

    def ask(offer: int | None, stage: r.Stage) -> str:
        def answer(found: r.Staged | r.Refused) -> bool:
            answers.append(found)
            return True

        pair.owner.parts.serve(offer, stage, answer)
        found = answers.pop()
        assert isinstance(found, r.Refused)
        return found.code

    stage = r.Stage(7, 1, b"", 0, 2, "tcp", 100)
    assert ask(1, replace(stage, protocol="rdma")) == "transport"
    assert ask(None, stage) == "failed"
    assert ask(2, stage) == "failed"
    assert ask(1, replace(stage, first=5 * EXTENTS - 1)) == "protocol"


async def test_a_part_has_one_range_and_an_offer_that_is_over_has_none(engines: Pair) -> None:
    """Also while the owner waits for the puller's rate, when the copy is made and the answer is not."""
    async with on_engines_of(engines, rate=1) as pair:
        parts, engine = pair.owner.parts, pair.owner.engine
        answers: list[r.Staged | r.Refused] = []

        def answer(found: r.Staged | r.Refused) -> bool:
            answers.append(found)
            return True

        parts.serve(1, r.Stage(7, 1, b"", 0, 2, "tcp", 100), answer)
        parts.serve(1, r.Stage(7, 1, b"", 0, 2, "tcp", 100), answer)
        (refused,) = answers
        assert isinstance(refused, r.Refused)
        assert refused.code == "protocol"
        await until(lambda: len(answers) == 2, "the first part is free of charge")
        parts.serve(1, r.Stage(7, 2, b"", 2, 2, "tcp", 100), answer)
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
        parts.serve(1, r.Stage(7, 3, b"", 0, 2, "tcp", 100), answer)
        assert isinstance(answers[-1], r.Refused)


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
        parts.serve(1, r.Stage(7, part, over, 0, count, "tcp", 20_000), answer)

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


async def test_nodes_without_the_protocol_are_not_asked_again_for_a_while(tmp_path: Path) -> None:
    async with engine_pair(tmp_path) as pair:
        order = pair.order()
        process = pair.owner.engine.process
        pair.owner.follow(Script(refusal="no device"))
        process.kill("a test")
        await until(lambda: not process.is_serving, "the owner's process has ended")
        assert not await pair.here.transport.accepts(order)
        assert len(pair.link.asked) == 1
        assert not await pair.here.transport.accepts(order)
        assert len(pair.link.asked) == 1
        await until(lambda: process.error == "no device", "the reason is known")
        assert pair.owner.engine.problem() == "TransferEngine does not serve: no device"


async def test_what_one_node_reads_has_a_rate(engines: Pair) -> None:
    size = 5 * EXTENTS * EXTENT_BYTES
    async with on_engines_of(engines, rate=4 * size) as pair:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        assert [one.ending for one in await pair.pull(pair.order())] == [Ending.DONE] * 5
        parts = len(pair.link.asked)
        assert loop.time() - begun_s >= 0.25 * (parts - 1) / parts - 0.1
