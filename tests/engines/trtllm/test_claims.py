"""Claims over a stand-in for a Pool, by a made clock: what the executor waits for, and what becomes of what comes too late."""

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_client as kv
from kvpool_client.trtllm import Settings, scheduler_half
from kvpool_client.trtllm.claims import stager
from kvpool_client.trtllm.claims.claims import Claims
from kvpool_client.trtllm.geometry import Geometry, GroupGeometry
from kvpool_client.trtllm.scheduler_half import SchedulerHalf
from kvpool_client.trtllm.shared import Board
from tests.rigs.clock import HandClock
from tests.rigs.daemon import LOOK_S, wait_until

BLOCK, CHUNKS, SLOTS = 4, 8, 40
GROUP = GroupGeometry(2, 2, 4096, BLOCK, "f", is_replicated=False)
MS = 1_000_000
Waiting = Callable[[float], bool]
Start = Callable[..., tuple[SchedulerHalf, Any]]


class StandInPool:
    """A Pool that has the first CHUNKS chunks of every prompt. `waiting`: waits for a load; whether all of it is there."""

    def __init__(self, layout: kv.Layout, waiting: Waiting) -> None:
        self.layout, self.waiting = layout, waiting
        self.leased: list[int] = []
        self.leases = self.loads = 0

    def keys(self, tokens: Any, **_: Any) -> range:
        return range(len(tokens) // BLOCK)

    def register(self, *_: Any) -> None: ...

    def lookup(self, keys: Any, *, chunks_max: int, is_counted: bool) -> kv.Hit:
        chunks = min(CHUNKS, chunks_max)
        return kv.Hit(chunks, chunks * BLOCK, bytes([1]) * chunks, keys, full_chunks=chunks)

    def acquire(self, hit: kv.Hit) -> Any:
        self.leases += 1
        self.leased.append(hit.chunks)
        return SimpleNamespace(chunks=hit.chunks, ranges=(range(hit.chunks),), release=self._release)

    def load(self, lease: Any, _: Any, slots: Any, first_chunk: int) -> Any:
        assert [len(of_group) for of_group in slots] == [lease.chunks - first_chunk]
        self.loads += 1

        def wait(timeout_s: float) -> Any:
            return SimpleNamespace(chunks=lease.chunks if self.waiting(timeout_s) else first_chunk)

        return SimpleNamespace(wait=wait, cancel=self._cancel)

    def close(self) -> None: ...

    def _release(self) -> None:
        self.leases -= 1

    def _cancel(self) -> None:
        self.loads -= 1


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A scheduler's half that serves, of one rank, and its Pool. `is_busy`: a request runs."""
    halves = []

    def make(
        clock: HandClock, waiting: Waiting, *, is_serving: bool = True, is_busy: bool = True
    ) -> tuple[SchedulerHalf, Any]:
        pools: list[StandInPool] = []

        def connect(_: Settings, layout: kv.Layout) -> StandInPool:
            pools.append(StandInPool(layout, waiting))
            return pools[-1]

        monkeypatch.setattr(stager, "connect", connect)
        settings = Settings("tiny", BLOCK, 1, "f", revision="1", staging_bytes=SLOTS * GROUP.chunk_bytes)
        halves.append(half := SchedulerHalf(settings, clock))
        board = Board.attach(half._board.path, 1)
        board.post(0, Geometry((GROUP,)))
        board.set_mapped(0)
        _step(half)
        if is_serving:
            wait_until(lambda: _step(half).staging != "", "the staging has its memory")
        if is_busy:
            _run(half)
        return half, pools[0]

    yield make
    for half in halves:
        half.close()


def _step(half: SchedulerHalf) -> Any:
    return half.plan(SimpleNamespace(new_requests=[], cached_requests=[]))


def _run(half: SchedulerHalf) -> Any:
    """Begin a request that is neither loaded nor saved; the request."""
    request = SimpleNamespace(request_id=99, get_tokens=lambda _: [1, 2])
    assert half.match(request, 0) == 0
    data = SimpleNamespace(
        request_id=99, new_tokens=[1, 2], new_block_ids=[0], computed_position=0, num_scheduled_tokens=2
    )
    half.plan(SimpleNamespace(new_requests=[data], cached_requests=[]))
    return request


def _asked(half: SchedulerHalf, request_id: int) -> int:
    tokens = list(range(CHUNKS * BLOCK + 1))
    return half.match(SimpleNamespace(request_id=request_id, get_tokens=lambda _: tokens, cache_salt=None), 0)


def _has_given_back(half: SchedulerHalf, pool: Any, slots: int) -> bool:
    return half.stats()["staging_slots_free"] == slots and pool.leases == 0 and pool.loads == 0


def test_all_lookups_of_an_iteration_wait_for_one_deadline(start: Start) -> None:
    clock = HandClock(0)

    def never_ends(timeout_s: float) -> bool:
        clock.advance(timeout_s)
        return False

    half, pool = start(clock, never_ends)
    for iteration in range(1, 3):
        assert [_asked(half, number) for number in range(16)] == [0] * 16
        assert clock.ns == iteration * 5 * MS
        assert half.stats()["late_requests"] == iteration * 16
        wait_until(lambda: _has_given_back(half, pool, SLOTS), "nothing is held for them")
        _step(half)
    assert len(pool.leased) == 2, "a prompt is not looked up when no time is left"


def test_lookups_that_keep_no_request_wait_for_one_deadline_of_a_round_trip(start: Start) -> None:
    clock = HandClock(0)

    def never_ends(timeout_s: float) -> bool:
        clock.advance(timeout_s)
        return False

    half, _ = start(clock, never_ends, is_busy=False)
    assert [_asked(half, number) for number in range(16)] == [0] * 16
    assert clock.ns == 500 * MS
    request = _run(half)
    assert _asked(half, 1) == 0
    assert clock.ns == 505 * MS, "a request runs now"
    half.finish(request)
    _step(half)
    assert _asked(half, 2) == 0
    assert clock.ns == 1005 * MS, "and has ended"


def test_what_arrives_when_nobody_waits_is_given_back_and_may_be_asked_for_again(start: Start) -> None:
    clock, is_stuck, is_released = HandClock(0), threading.Event(), threading.Event()

    def waiting(_: float) -> bool:
        is_stuck.set()
        while not is_released.wait(LOOK_S):
            clock.advance(0.001)
        return True

    half, pool = start(clock, waiting)
    assert [_asked(half, number) for number in range(16)] == [0] * 16
    assert is_stuck.is_set(), "the executor has not waited for the load's end"
    assert (pool.leases, pool.loads) == (1, 1)
    is_released.set()
    wait_until(lambda: _has_given_back(half, pool, SLOTS), "the late chunks are given back")
    _step(half)
    assert _asked(half, 1) == CHUNKS * BLOCK
    assert half.stats()["late_requests"] == 16
    wait_until(lambda: _has_given_back(half, pool, SLOTS - CHUNKS), "the claim alone has slots")


def test_what_is_verified_at_the_deadline_is_claimed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager, "PIECE_BYTES", 2 * GROUP.chunk_bytes)
    clock = HandClock(0)

    def two_ms(timeout_s: float) -> bool:
        clock.advance(min(timeout_s, 0.002))
        return timeout_s >= 0.002

    half, pool = start(clock, two_ms)
    assert _asked(half, 1) == 4 * BLOCK, "two pieces of two chunks take 4 of 5 ms"
    assert clock.ns == 5 * MS
    assert half.stats()["late_requests"] == 1
    wait_until(lambda: _has_given_back(half, pool, SLOTS - 4), "the rest is given back")
    assert pool.leased[:3] == [2, 4, 6]


def test_a_prompt_that_is_staged_in_time_is_claimed_whole_and_not_late(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager, "PIECE_BYTES", 3 * GROUP.chunk_bytes)
    half, pool = start(HandClock(0), lambda _: True)
    assert _asked(half, 1) == CHUNKS * BLOCK
    assert pool.leased == [3, 6, 8]
    assert [half.stats()[name] for name in ("late_requests", "unstaged_requests")] == [0, 0]


def test_a_prompt_for_which_slots_are_missing_is_counted(start: Start) -> None:
    half, _ = start(HandClock(0), lambda _: True)
    assert [_asked(half, number) for number in range(6)] == [CHUNKS * BLOCK] * 5 + [0]
    assert [half.stats()[name] for name in ("late_requests", "unstaged_requests")] == [0, 1]


def test_requests_that_are_forgotten_are_counted_and_keep_no_slot(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_half, "REQUESTS_MAX", 2)
    half, pool = start(HandClock(0), lambda _: True, is_busy=False)
    assert [_asked(half, number) for number in range(3)] == [CHUNKS * BLOCK] * 3
    assert half.stats()["forgotten_requests"] == 1
    wait_until(lambda: _has_given_back(half, pool, SLOTS - 2 * CHUNKS), "the first one's slots are free")


def test_a_load_that_ends_early_is_no_late_one(start: Start) -> None:
    half, pool = start(HandClock(0), lambda _: False)
    assert _asked(half, 1) == 0
    assert half.stats()["late_requests"] == 0
    assert _has_given_back(half, pool, SLOTS)


def test_the_staging_has_its_memory_before_anything_is_claimed(start: Start) -> None:
    half, pool = start(HandClock(0), lambda _: True)
    assert half._claims is not None
    memory = half._claims.memory
    assert os.stat(memory.path).st_blocks * 512 == memory.view.size == SLOTS * GROUP.chunk_bytes
    assert not pool.leased


def test_the_executor_does_not_wait_for_the_stagings_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    is_touched = threading.Event()

    def touch(_: Claims) -> None:
        is_touched.wait()

    monkeypatch.setattr(Claims, "_touch", touch)
    half, pool = start(HandClock(0), lambda _: True, is_serving=False)
    assert _step(half).staging == "", "no rank maps it yet"
    is_touched.set()
    wait_until(lambda: _step(half).staging != "", "the staging has its memory")
    assert _asked(half, 1) == CHUNKS * BLOCK
    assert pool.leased


def test_without_memory_for_the_staging_nothing_is_claimed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(_: Claims) -> None:
        raise OSError("cannot pre-fault shared memory")

    monkeypatch.setattr(Claims, "_touch", touch)
    half, pool = start(HandClock(0), lambda _: True, is_serving=False)

    def has_failed() -> bool:
        _step(half)
        return half.stats().get("failed_claims") == 1

    wait_until(has_failed, "the failure is counted")
    assert (_step(half).staging, _asked(half, 1), pool.leased) == ("", 0, [])
