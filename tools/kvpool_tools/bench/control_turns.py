"""`bench turns`: time on the control thread of work that could block it, by the daemon's own classes without bytes.

Three kinds. A commit: one chunk reserved and committed, and the check for demotions, in a pool of a given capacity with 64
chunk sizes and 101 priorities, half full, below the watermark and above it with everything saved. And `demote_all`, as a
planned stop does it: the turns in which DRAM is demoted, chunk by chunk, to a tier whose jobs are done at once. And requests
about the longest chain, part by part (`turn_requests.py`).

CPU time of this thread, so that a busy neighbour does not count; garbage collection is switched off, because its time is not
fixed.
"""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

from kvpool.errors import KVPoolError
from kvpool.layout import Layout
from kvpool_tools.bench.measure import latencies
from kvpool_tools.bench.turn_requests import CHAIN, request_parts
from kvpool_tools.sim.many_sizes import ManySizes

CAPACITY = 4 << 40
QUICK_CAPACITY = 64 << 30
# As many as a daemon takes.
SIZES = 64
# The sizes lie between 24 and 56 MiB: runs of several segments, the hardest to find room for.
SMALLEST_BYTES = 24 << 20
SIZE_STEP_BYTES = 512 << 10
PRIORITIES = 101
# More than half of the capacity has, and the commits.
CHUNKS_PER_SIZE = 950
CHAIN_CHUNKS = 8
COMMITS = 2000
QUICK_COMMITS = 200
COMMIT_BAR_US = 50
DEMOTED_CHUNKS = 500_000
QUICK_DEMOTED_CHUNKS = 20_000
DEMOTED_BYTES = 4096
TURN_BAR_US = 1000

T = TypeVar("T")


def timed(turns: list[float], work: Callable[[], T]) -> T:
    """The work's result; its CPU seconds on this thread are added to `turns`."""
    begin_s = time.thread_time()
    answer = work()
    turns.append(time.thread_time() - begin_s)
    return answer


def bench_turns(is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """Rows: a commit below and above the watermark, `demote_all`, and the parts of requests."""
    gc.collect()
    gc.disable()
    try:
        capacity = QUICK_CAPACITY if is_quick else CAPACITY
        rows = [_commits(capacity, is_quick=is_quick, watermark=watermark) for watermark in (0.999, 0.01)]
        advance(2)
        rows.append(_demote_all(QUICK_DEMOTED_CHUNKS if is_quick else DEMOTED_CHUNKS))
        advance(1)
        parts = request_parts(timed)
        rows += [_row(f"{name}, {CHAIN} chunks", turns, CHAIN, TURN_BAR_US) for name, turns in parts.items()]
        advance(1)
        return rows
    finally:
        gc.enable()


def _commits(capacity: int, *, is_quick: bool, watermark: float) -> dict[str, object]:
    layouts = [_layout(SMALLEST_BYTES + number * SIZE_STEP_BYTES) for number in range(SIZES)]
    rig = ManySizes(layouts, capacity=capacity, max_chunks=CHUNKS_PER_SIZE * len(layouts), watermark=watermark)
    saved = 0
    while rig.directory.used_bytes < capacity / 2:
        rig.save(saved % len(layouts), CHAIN_CHUNKS, saved % PRIORITIES)
        saved += 1
    rig.demote_all(lambda work: work())
    turns: list[float] = []
    for number in range(QUICK_COMMITS if is_quick else COMMITS):

        def commit(model: int = number % len(layouts)) -> None:
            rig.save(model, 1)
            rig.look_for_demotions()

        timed(turns, commit)
        rig.wait_written()
    name = (
        f"commit, {capacity >> 30} GiB, {len(layouts)} sizes, {'above' if watermark < 0.5 else 'below'} the watermark"
    )
    return _row(name, turns, rig.directory.stats()["chunks"], COMMIT_BAR_US)


def _demote_all(chunks: int) -> dict[str, object]:
    rig = ManySizes([_layout(DEMOTED_BYTES)], capacity=chunks * DEMOTED_BYTES, max_chunks=chunks, watermark=1.0)
    for _ in range(chunks // CHAIN_CHUNKS):
        rig.save(0, CHAIN_CHUNKS)
    turns: list[float] = []
    rig.demote_all(lambda work: timed(turns, work))
    if rig.directory.count_unsaved():
        raise KVPoolError(f"{rig.directory.count_unsaved()} chunks are left: the measured turns prove nothing")
    return _row(f"demote_all, {chunks} chunks", turns, chunks, TURN_BAR_US)


def _row(name: str, turns: list[float], chunks: int, bar_us: int) -> dict[str, object]:
    longest_us, cpu_s = round(max(turns) * 1e6, 1), round(sum(turns), 3)
    return latencies(name, turns, max_us=longest_us, bar_us=bar_us, chunks=chunks, cpu_seconds=cpu_s)


def _layout(chunk_bytes: int) -> Layout:
    return Layout(layers=2, kv_heads=1, head_dim=16, dtype="uint8", chunk_tokens=chunk_bytes // 64)
