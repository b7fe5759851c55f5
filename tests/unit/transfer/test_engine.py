"""TransferEngine and NIXL themselves, between two engines of one process: bytes, strangers, ends of processes, and memory that
is not there.

KVPOOL_RDMA_PROTOCOL and KVPOOL_RDMA_DEVICE choose what it uses (tcp, over loopback).
"""

import asyncio
import os
import random
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.peers.control import records as r
from kvpool.transfer.engine import engine as engine_module
from kvpool.transfer.engine.child import SUBMIT_S
from kvpool.transfer.engine.engine import Engine, EngineSettings, Half, MoveEnd
from kvpool.transfer.transport import Ending
from kvpool_tools.bench.measure import cpu_seconds
from tests.rigs.native_directory import EXTENTS
from tests.rigs.transfer.engine_daemons import HOST, LIBRARY, PATIENCE, PROTOCOL, needs_engine, needs_nixl
from tests.rigs.transfer.engine_pair import CHUNKS, engine_pair, until
from tests.rigs.transfer.stranger import stranger
from tests.rigs.transfer.stream_node import EXTENT_BYTES, payload

pytestmark = pytest.mark.asyncio
TIME_S = 20.0 * PATIENCE


@pytest.fixture
def brief_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner was asked to write, and has not, is waited for so long."""
    monkeypatch.setattr(engine_module, "EXPECTED_S", 3.0 * PATIENCE)


@LIBRARY
async def test_chunks_arrive_with_their_bytes_extent_by_extent(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library, is_real=True) as pair:
        assert await pair.here.transport.accepts(pair.order())
        assert {(one.ending, one.fault) for one in await pair.pull(pair.order())} == {(Ending.DONE, "")}
        for name in range(CHUNKS):
            assert pair.here.node.chunk(name) == payload(name)
        rows = [row for stage in pair.link.asked for row in range(stage.first, stage.first + stage.rows)]
        assert rows == list(range(CHUNKS * EXTENTS))
        assert pair.here.engine.stats()["read_bytes"] == CHUNKS * EXTENTS * EXTENT_BYTES


@needs_engine
async def test_what_a_stranger_writes_into_the_owners_buffer_never_lands(tmp_path: Path) -> None:
    async with engine_pair(tmp_path, is_real=True) as pair:
        memory = pair.owner.engine.process.memory
        assert memory is not None
        half = memory.size // 2
        with stranger() as another:

            def strike(staged: r.Staged) -> r.Staged:
                another.write(staged.server, half, half)
                return staged

            pair.link.change = strike
            ends = await pair.pull(pair.order())
        assert bytes(memory.view()[half : half + 4]) == b"\x5a" * 4, "it has written there"
        assert {(one.ending, one.fault) for one in ends} == {(Ending.WRONG, "checksum")}


@needs_engine
@pytest.mark.parametrize("beyond", [0, -100, 1 << 40])
async def test_memory_that_is_not_registered_cannot_be_read(tmp_path: Path, beyond: int) -> None:
    async with engine_pair(tmp_path, is_real=True) as pair:
        memory = pair.owner.engine.process.memory
        assert memory is not None
        pair.link.change = lambda staged: replace(
            staged, address=int(pair.owner.engine.process.facts["base"]) + memory.size + beyond
        )
        ends = await pair.pull(pair.order(timeout_s=TIME_S))
        assert {one.ending for one in ends} == {Ending.FAILED}
        assert {one.fault for one in ends} <= {"broken", "late"}


@needs_engine
async def test_an_owners_process_that_is_killed_in_mid_transfer_fails_the_pull(tmp_path: Path) -> None:
    async with engine_pair(tmp_path, is_real=True) as pair:
        engine = pair.owner.engine
        former = dict(engine.process.facts)

        def kill(staged: r.Staged) -> r.Staged:
            process = engine.process.process
            if staged.part == 2 and process is not None:
                process.kill()
                process.wait()
            return staged

        pair.link.change = kill
        ends = await pair.pull(pair.order(stall_s=2.0, timeout_s=TIME_S))
        assert {one.ending for one in ends} == {Ending.FAILED}
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "it was started again")
        assert engine.process.facts["port"] != former["port"]
        # Its former region is stale: nothing is read there, and nobody is kept by the attempt.
        into = pair.here.engine.reserve_range(Half.READ, 4096, "owner")
        assert into is not None
        end = await pair.here.engine.read(into, former["server"], former["base"], size=4096, timeout_s=2.0)
        assert end is not MoveEnd.DONE
        pair.here.engine.give(into)


@LIBRARY
async def test_an_owners_process_that_hangs_ends_the_pull_in_time_and_its_ranges_come_back(
    tmp_path: Path, library: str
) -> None:
    async with engine_pair(tmp_path, library, is_real=True) as pair:
        owner, here = pair.owner.engine, pair.here.engine
        assert owner.process.process is not None
        pid = owner.process.process.pid

        def hang(message: r.AnyStage | r.Staged) -> Any:
            os.kill(pid, signal.SIGSTOP)
            return message

        if here.writes:
            pair.link.ask = hang  # before it writes
        else:
            pair.link.change = hang  # before it is read
        try:
            ends = await pair.pull(pair.order(stall_s=0.3, timeout_s=2.0))
            assert {one.ending for one in ends} == {Ending.FAILED}
            assert here.quarantined_bytes > 0
            assert all(
                pair.here.node.chunk(name)[:EXTENT_BYTES] != payload(name)[:EXTENT_BYTES] for name in range(CHUNKS)
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: here.quarantined_bytes == 0, "the late reads have ended")


@needs_engine
async def test_a_server_that_never_answers_keeps_the_others_waiting_for_a_bounded_time(tmp_path: Path) -> None:
    """The library waits for its handshake, a minute long, with everything else behind it."""
    async with engine_pair(tmp_path, is_real=True) as pair:
        engine, base = pair.here.engine, int(pair.owner.engine.process.facts["base"])
        with socket.socket(socket.AF_INET6 if ":" in HOST else socket.AF_INET) as silent:
            silent.bind((HOST, 0))
            silent.listen()
            ranges = [engine.reserve_range(Half.READ, 4096, peer) for peer in ("silent", "owner")]
            servers = (f"{HOST}:{silent.getsockname()[1]}", pair.owner.engine.server)
            reads = []
            for into, server in zip(ranges, servers, strict=True):
                assert into is not None
                reads.append(engine.read(into, server, base, size=4096, timeout_s=60.0))
            ends = await asyncio.wait_for(asyncio.gather(*reads), SUBMIT_S + 10.0)
            assert ends == [MoveEnd.FAILED, MoveEnd.FAILED]
            for into in ranges:
                assert into is not None
                engine.give(into)
        assert engine.blames("silent")
        assert not engine.blames("owner")
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "it was started again")
        assert {one.ending for one in await pair.pull(pair.order())} == {Ending.DONE}


@LIBRARY
async def test_another_protocol_than_the_machine_has_is_refused_in_words(tmp_path: Path, library: str) -> None:
    if PROTOCOL == "rdma":
        pytest.skip("this machine has RDMA")
    settings = EngineSettings(HOST, "rdma", "", (15000, 15999), 128 << 10, library)
    engine = Engine(settings, random.Random(1))
    engine.process.start()
    try:
        await until(lambda: engine.process.error, "it has failed")
        assert "peer.rdma_protocol is 'rdma' and /sys/class/infiniband has no device" in engine.problem()
        assert not engine.is_serving
        assert engine.reserve_range(Half.READ, 4096, "owner") is None
    finally:
        assert await engine.process.close()


@LIBRARY
async def test_a_process_that_is_killed_while_it_moves_fails_the_moves_and_begins_again(
    tmp_path: Path, library: str
) -> None:
    async with engine_pair(tmp_path, library, is_real=True) as pair:
        assert {one.ending for one in await pair.pull(pair.order())} == {Ending.DONE}
        engine = pair.here.engine
        into = engine.reserve_range(Half.READ, 4096, "owner")
        assert into is not None
        engine.process.kill("a test")
        if engine.writes:
            ended = engine.expect(into, timeout_s=5.0).ended
        else:
            base = int(pair.owner.engine.process.facts["base"])
            ended = engine.read(into, pair.owner.engine.server, base, size=4096, timeout_s=5.0)
        assert await asyncio.wait_for(ended, TIME_S) in (MoveEnd.DONE, MoveEnd.FAILED)
        engine.give(into)
        await until(lambda: engine.process.lives == 2 and engine.is_serving, "it was started again")
        assert engine.quarantined_bytes == 0


@needs_nixl
@pytest.mark.usefixtures("brief_quarantine")
@pytest.mark.parametrize("side", ["owner", "here"])
async def test_an_end_of_either_process_while_nixl_writes_fails_the_pull_and_the_next_one_succeeds(
    tmp_path: Path, side: str
) -> None:
    async with engine_pair(tmp_path, "nixl", is_real=True) as pair:
        struck = pair.owner.engine if side == "owner" else pair.here.engine

        def kill(stage: r.AnyStage) -> r.AnyStage:
            if stage.part == 2:
                assert struck.process.process is not None
                struck.process.process.kill()
                struck.process.process.wait()
            return stage

        pair.link.ask = kill
        ends = await pair.pull(pair.order(stall_s=2.0, timeout_s=TIME_S))
        assert {one.ending for one in ends} == {Ending.FAILED}
        await until(lambda: struck.process.lives == 2 and struck.is_serving, "it was started again")
        await until(lambda: pair.here.engine.quarantined_bytes == 0, "nothing of it is waited for")
        pair.link.ask = lambda stage: stage
        assert {one.ending for one in await pair.pull(pair.order())} == {Ending.DONE}
        for name in range(CHUNKS):
            assert pair.here.node.chunk(name) == payload(name)


def _cut(agent: bytes) -> bytes:
    return agent[: len(agent) // 2]


def _renamed(agent: bytes) -> bytes:
    return agent.replace(b"here/", b"they/")


@needs_nixl
@pytest.mark.parametrize("change", [_cut, _renamed, lambda _: b"x", lambda agent: bytes(len(agent))])
async def test_a_description_that_is_none_or_of_another_node_is_not_written_to(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    async with engine_pair(tmp_path, "nixl", is_real=True) as pair:
        pair.link.ask = lambda stage: (
            replace(stage, agent=change(stage.agent)) if isinstance(stage, r.StageInto) else stage
        )
        ends = await pair.pull(pair.order(stall_s=1.0, timeout_s=TIME_S))
        assert {one.ending for one in ends} == {Ending.FAILED}
        assert {one.fault for one in ends} == {"other_transport"}
        pair.link.ask = lambda stage: stage
        assert pair.owner.engine.process.lives == 1
        await until(lambda: pair.here.engine.quarantined_bytes == 0, "nothing of it is waited for")
        assert {one.ending for one in await pair.pull(pair.order())} == {Ending.DONE}


@needs_nixl
@pytest.mark.parametrize("beyond", [0, -100, 1 << 40])
async def test_memory_that_is_not_registered_is_not_written(tmp_path: Path, beyond: int) -> None:
    async with engine_pair(tmp_path, "nixl", is_real=True) as pair:
        process = pair.here.engine.process
        assert process.memory is not None
        end = int(process.facts["base"]) + process.memory.size
        pair.link.ask = lambda stage: replace(stage, address=end + beyond) if isinstance(stage, r.StageInto) else stage
        ends = await pair.pull(pair.order(timeout_s=TIME_S))
        assert {(one.ending, one.fault) for one in ends} == {(Ending.FAILED, "other_transport")}
        await until(lambda: pair.here.engine.quarantined_bytes == 0, "it is known that nothing was written")


@needs_nixl
async def test_nixl_uses_no_processor_while_nothing_moves(tmp_path: Path) -> None:
    """Its own progress thread would keep a core busy: what both processes use at rest is far from that."""
    async with engine_pair(tmp_path, "nixl", is_real=True) as pair:
        assert {one.ending for one in await pair.pull(pair.order())} == {Ending.DONE}
        processes = [side.engine.process.process for side in (pair.owner, pair.here)]
        pids = [one.pid for one in processes if one is not None]
        before_s, begun_s = sum(map(cpu_seconds, pids)), asyncio.get_running_loop().time()
        await asyncio.sleep(2.0)
        used_s = sum(map(cpu_seconds, pids)) - before_s
        assert used_s < 0.2 * (asyncio.get_running_loop().time() - begun_s)


@needs_nixl
async def test_nixl_listens_on_the_ports_that_a_firewall_knows(tmp_path: Path) -> None:
    async with engine_pair(tmp_path, "nixl", is_real=True) as pair:
        for side in (pair.owner, pair.here):
            if PROTOCOL == "tcp":
                assert 15000 <= side.engine.process.facts["port"] <= 15999
        assert pair.owner.engine.agent != pair.here.engine.agent
