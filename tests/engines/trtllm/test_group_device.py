"""TensorRT-LLM's layer groups on a device: windows are copied out behind a step's work and before the next one's, with no wait.

The device is the emulated driver's, with long random delays before copies; the engine overwrites the pages of windows on its
own stream as soon as a step is queued.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.trtllm import Plan, SaveOrder, SchedulerHalf, Settings, WorkerHalf
from kvpool_client.trtllm.geometry import GroupGeometry
from kvpool_client.trtllm.pages import EnginePages
from kvpool_client.trtllm.saves.window_memory import WindowMemory
from tests.engines.conftest import TIMEOUT_S
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.device import emulated
from tests.rigs.device.engine import EngineArray, EngineStream, engine_stream, use_emulated_driver

BLOCK, BLOCKS, LAYER_BYTES = 4, 24, 128
LONG_S = 60.0
TOKENS = np.random.default_rng(3).integers(0, 900, 21).astype(np.int32)
CHUNKS = 5
CUDA_ERROR_UNKNOWN = 999
GROUPS = (
    GroupGeometry(2, 2, LAYER_BYTES // 2 // BLOCK, BLOCK, "full", is_replicated=False),
    GroupGeometry(3, 2, LAYER_BYTES // 2 // BLOCK, BLOCK, "window", is_replicated=False, window=8),
)
FULL, WINDOW = 0, 1


class Rank:
    """A worker with KV on the device, by layer group, and the scheduler's half beside it."""

    def __init__(self, daemon: Daemon, stream: EngineStream, weights: str) -> None:
        settings = Settings(
            "tiny",
            BLOCK,
            1,
            "w",
            socket=daemon.socket,
            revision=weights,
            timeout_s=TIMEOUT_S,
            claim_timeout_s=TIMEOUT_S,
            staging_bytes=1 << 20,
            window_bytes=1 << 16,
        )
        self.stream, self.handle = stream, SimpleNamespace(cuda_stream=stream.handle)
        zeros = np.zeros((BLOCKS, LAYER_BYTES), np.uint8)
        self.arrays = [[EngineArray(zeros, stream=stream.handle) for _ in range(group.layers)] for group in GROUPS]
        self.scheduler = SchedulerHalf(settings)
        self.half = WorkerHalf(settings, 0)
        self.half._serve([EnginePages(group, tuple(arrays)) for group, arrays in zip(GROUPS, self.arrays, strict=True)])
        assert self.half._pool is not None
        self.pool = self.half._pool

    def warm_up(self) -> None:
        """Steps until the halves serve."""

        def is_ready() -> bool:
            self.half.bind(self.scheduler.plan(SimpleNamespace(new_requests=[], cached_requests=[])))
            self.scheduler._look_at_board()
            pools = [*self.scheduler._claims._stager._pools, self.pool] if self.scheduler._claims is not None else []
            return self.scheduler.is_serving and bool(pools) and all(pool.connected for pool in pools)

        wait_until(is_ready, "the halves serve")

    def write(
        self, seed: int, groups: tuple[int, ...] = (FULL, WINDOW), stream: EngineStream | None = None
    ) -> list[list[Any]]:
        """The engine queues random bytes for every array of these groups."""
        dice, written = np.random.default_rng(seed), []
        for group in groups:
            written.append([dice.integers(0, 256, (BLOCKS, LAYER_BYTES), dtype=np.uint8) for _ in self.arrays[group]])
            for array, values in zip(self.arrays[group], written[-1], strict=True):
                (stream or self.stream).write(array, values)
        return written

    def step(
        self, seed: int, tokens: Any = TOKENS, *, forward: EngineStream | None = None, then: EngineStream | None = None
    ) -> list[list[Any]]:
        """A step that computes the prompt; its windows are overwritten at once. What it had written. `forward`: the stream of
        the layers' hooks, `then`: that of what comes after the step."""
        self.half.bind(Plan(self.scheduler._board.path, "", 0, saves=(_order(tokens),)))
        self.half.start_loads(self.handle)
        if forward is not None:
            self.half.wait_layer(0, SimpleNamespace(cuda_stream=forward.handle))
        written = self.write(seed)
        self.half.finish_step(self.handle)
        self.write(seed + 1000, (WINDOW,), then or self.stream)
        return written

    def close(self) -> None:
        self.stream.wait()
        self.half.close()
        self.scheduler.close()

    def stored(self, tokens: Any = TOKENS) -> list[list[bytes]]:
        """The chunks of each group that a hit of the prompt has, as the pool loads them into host memory."""
        keys = self.pool.keys(tokens)
        hit = self.pool.lookup(keys, chunks_max=len(keys))
        with self.pool.acquire(hit) as lease:
            ranges = [range(hit.chunks), range(max(0, hit.chunks - 2), hit.chunks)]
            into = [
                np.zeros((len(chunks), group.chunk_bytes), np.uint8)
                for chunks, group in zip(ranges, GROUPS, strict=True)
            ]
            assert self.pool.load(lease, into=into).wait().chunks == hit.chunks
        return [[row.tobytes() for row in rows] for rows in into]


def _order(tokens: Any) -> SaveOrder:
    """All chunks of a prompt, whose blocks are in another order in each group."""
    blocks = (tuple(range(3, 3 + CHUNKS)), (17, 9))
    windows: tuple[tuple[int, ...], ...] = ((), (CHUNKS - 2, CHUNKS - 1))
    return SaveOrder(7, tokens.tobytes(), b"", "", 0, CHUNKS, blocks, (35,) * CHUNKS, windows)


def _expected(written: list[list[Any]]) -> list[list[bytes]]:
    order = _order(TOKENS)
    return [
        [b"".join(array[block].tobytes() for array in arrays) for block in blocks]
        for arrays, blocks in zip(written, order.block_ids, strict=True)
    ]


@pytest.fixture
def rank(shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, weights: str) -> Iterator[Rank]:
    use_emulated_driver(monkeypatch)
    with engine_stream() as stream:
        made = Rank(shared_daemon, stream, weights)
        made.warm_up()
        emulated.order("delay_us 5000")
        yield made
        emulated.order("clear 1\ndelay_us 200")
        made.close()


def _wait_saved(rank: Rank) -> None:
    ended = [7]

    def is_saved() -> bool:
        answered = rank.half.finished(list(ended))
        ended.clear()
        return answered == [7]

    wait_until(is_saved, "the save has ended")


@pytest.mark.parametrize("seed", range(3))
def test_windows_are_stored_as_the_step_wrote_them_and_not_as_the_next_one_does(rank: Rank, seed: int) -> None:
    written = rank.step(seed, forward=rank.stream)
    _wait_saved(rank)
    assert rank.stored() == _expected(written)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_the_cache_manager_copies_between_steps_comes_after_them_too(rank: Rank, *, is_known: bool) -> None:
    """On the stream of forward passes, which has not waited for the loop's yet; where no hook has shown it, the host waits."""
    with engine_stream() as forward:
        for seed in range(4):
            tokens = TOKENS + seed
            written = rank.step(seed, tokens, forward=forward if is_known else None, then=forward)
            _wait_saved(rank)
            assert rank.stored(tokens) == _expected(written)
            forward.wait()


def test_without_the_engines_stream_waiting_it_would_be_the_next_steps(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above is for: with the order of the streams left out, its bytes are others."""
    copy_out = WindowMemory.copy_out
    with engine_stream() as other:
        elsewhere = SimpleNamespace(cuda_stream=other.handle)
        monkeypatch.setattr(
            WindowMemory, "copy_out", lambda self, pairs, *_: copy_out(self, pairs, elsewhere, elsewhere)
        )
        differ = 0
        for seed in range(5):
            tokens = TOKENS + seed
            written = rank.step(seed, tokens)
            _wait_saved(rank)
            stored = rank.stored(tokens)
            assert stored[FULL] == _expected(written)[FULL]
            differ += stored[WINDOW] != _expected(written)[WINDOW]
    assert differ


def test_a_step_does_not_wait_for_its_copies(rank: Rank) -> None:
    emulated.order("hang 1")
    written = rank.step(1, forward=rank.stream)  # a host that waited would stay here
    assert [rank.half.finished([7]), rank.half.finished([])] == [[], []]
    emulated.order("hang 0")
    wait_until(lambda: rank.half.finished([]) == [7], "the save has ended")
    assert rank.stored() == _expected(written)


def test_a_dropped_request_gives_its_slots_back_when_nothing_is_copied_into_them(rank: Rank) -> None:
    saves: Any = rank.half._saves
    free = saves._source.memory._windows[WINDOW].free
    before = len(free)
    emulated.order("hang 1")
    rank.step(1, forward=rank.stream)
    rank.half.bind(Plan(rank.scheduler._board.path, "", 0, dropped=(7,)))
    rank.half.start_loads(rank.handle)
    assert (rank.half.finished([7]), len(free)) == ([7], before - 2)
    emulated.order("hang 0")
    wait_until(lambda: rank.half.finished([]) == [] and len(free) == before, "the slots are back")
    assert rank.pool.lookup(rank.pool.keys(TOKENS)).chunks == 0


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuStreamWaitEvent", "cuEventRecord", "cuEventCreate"])
def test_a_device_that_refuses_a_copy_costs_the_window_alone(rank: Rank, call: str) -> None:
    rank.half.bind(Plan(rank.scheduler._board.path, "", 0, saves=(_order(TOKENS),)))
    rank.half.start_loads(rank.handle)
    rank.write(1)
    emulated.order(f"fail {call} 1 {CUDA_ERROR_UNKNOWN}")
    rank.half.finish_step(rank.handle)
    emulated.order("clear 1\ndelay_us 5000")
    rank.write(2, (WINDOW,))
    _wait_saved(rank)
    assert rank.half.stats()["failed_wait_for_save"] == 1
    hit: Any = rank.pool.lookup(rank.pool.keys(TOKENS))
    assert (hit.chunks, hit.full_chunks) == (0, CHUNKS)
    written = rank.step(3)
    _wait_saved(rank)
    assert rank.stored()[WINDOW] == _expected(written)[WINDOW]


def _slots_free(claims: Any) -> int:
    return sum(claims._free.free)


def _claimed(rank: Rank, request_id: int) -> Plan:
    """The plan of a step that loads the prompt's chunks: five of the full group, the last two of the window."""
    request = SimpleNamespace(
        request_id=request_id,
        get_tokens=lambda _: [*TOKENS.tolist(), 5],
        cache_salt=None,
        py_num_connector_matched_tokens=20,
    )
    assert rank.scheduler.match(request, 0) == 20
    data = SimpleNamespace(
        request_id=request_id,
        new_tokens=request.get_tokens(0),
        new_block_ids=[],
        new_block_ids_by_layer_group=[[2, 21, 4, 11, 8, 0], [-1, -1, -1, 6, 22, 1]],
        computed_position=0,
        num_scheduled_tokens=2,
        cache_salt=None,
    )
    return rank.scheduler.plan(SimpleNamespace(new_requests=[data], cached_requests=[]))


def test_claims_arrive_in_the_blocks_of_each_group_before_the_forward(rank: Rank) -> None:
    expected = _expected(rank.step(1))
    _wait_saved(rank)
    rank.half.bind(_claimed(rank, 9))
    claims: Any = rank.scheduler._claims
    emulated.order("hang 1")
    rank.half.start_loads(rank.handle)
    rank.half.finished([])
    rank.scheduler._look_at_board()
    slots: tuple[int, ...] = claims.slots
    assert _slots_free(claims) == sum(slots) - 7, "the device may still read the staged chunks"
    emulated.order("hang 0")
    rank.stream.wait()  # whatever the forward reads comes behind the loads
    for group, blocks in enumerate(([2, 21, 4, 11, 8], [6, 22])):
        found = [array.read() for array in rank.arrays[group]]
        assert [b"".join(array[block].tobytes() for array in found) for block in blocks] == expected[group]
    rank.half.finish_step(rank.handle)

    def are_reclaimed() -> bool:
        rank.half.finished([])
        rank.scheduler._look_at_board()
        return _slots_free(claims) == sum(slots)

    wait_until(are_reclaimed, "every staged slot is free")
    assert rank.half.stats()["loaded_blocks"] == 7


@pytest.mark.parametrize("seed", range(3))
def test_what_the_forward_writes_comes_after_the_loads_of_all_groups(rank: Rank, seed: int) -> None:
    rank.step(seed)
    _wait_saved(rank)
    rank.half.bind(_claimed(rank, 9))
    rank.half.start_loads(rank.handle)
    written = rank.write(seed + 50)
    rank.stream.wait()
    assert all(event is None or event.wait(LONG_S) for event in rank.half._arrivals)
    for arrays, values in zip(rank.arrays, written, strict=True):
        assert all(np.array_equal(array.read(), wanted) for array, wanted in zip(arrays, values, strict=True))


def test_levels_of_what_was_stored_are_dram(rank: Rank) -> None:
    rank.step(5)
    _wait_saved(rank)
    assert (rank.pool.lookup(rank.pool.keys(TOKENS)).tiers <= kv.Level.DRAM).all()
