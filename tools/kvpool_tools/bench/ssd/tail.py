"""`bench ssd`, mixed reads and writes: how long one chunk of demand takes, idle and while the tier writes at full speed.

Samples are taken in turn, in rounds: raw reads and the queue's, idle and beside writers. The written chunks are not the read
ones. The raw rows show the disk's own part of the tail. Main thread of a command only.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpool_tools.bench.measure import percentile, quantiles_us, timed_s
from kvpool_tools.bench.ssd.rig import QueueRig, arena_bytes, measured_queue

TAIL_BAR = 3.0
TAIL_SIZES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20}
# Enough that what is written is not read: a few chunks of each.
TOTAL_BYTES_MAX = 64 << 20
ROUNDS, SINGLES = 10, 50
QUICK_ROUNDS, QUICK_SINGLES = 2, 10


def bench_tail(folder: Path, total: int, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """One row for each chunk size."""
    steps = len(TAIL_SIZES) * (QUICK_ROUNDS if is_quick else ROUNDS)
    return [
        _size(folder, name, lambda: advance(steps), chunk_bytes=size, total=total, is_quick=is_quick)
        for name, size in TAIL_SIZES.items()
    ]


def _size(
    folder: Path, name: str, advance: Callable[[], None], *, chunk_bytes: int, total: int, is_quick: bool
) -> dict[str, Any]:
    rounds, singles = (QUICK_ROUNDS, QUICK_SINGLES) if is_quick else (ROUNDS, SINGLES)
    raw_idle: list[float] = []
    raw_busy: list[float] = []
    idle: list[float] = []
    busy: list[float] = []
    written_bytes, busy_s = 0, 0.0
    with measured_queue(folder, chunk_bytes, min(total, TOTAL_BYTES_MAX)) as (rig, raw, _):
        half = rig.chunks // 2
        buffer, into = arena_bytes(rig.chunks, chunk_bytes), arena_bytes(rig.chunks, chunk_bytes)
        raw.write(buffer)
        rig.write(range(rig.chunks))
        rig.forget()
        for number in range(rounds):
            ones = [(number * singles + sample) % half for sample in range(singles)]
            raw_idle += [timed_s(lambda: raw.read_one(into, one)) for one in ones]  # noqa: B023 - called at once
            idle += [timed_s(lambda: rig.read([one])) for one in ones]  # noqa: B023 - called at once
            with raw.writing(buffer, range(half, rig.chunks)):
                raw_busy += [timed_s(lambda: raw.read_one(into, one)) for one in ones]  # noqa: B023 - called at once
            before, start = rig.written_bytes, time.perf_counter()
            busy += _busy_reads(rig, ones, range(half, rig.chunks))
            written_bytes += rig.written_bytes - before
            busy_s += time.perf_counter() - start
            advance()
        wrong_bytes = rig.wrong_bytes(range(min(half, rounds * singles)))
    return {
        "chunk": name,
        "samples": len(busy),
        **quantiles_us("idle_", idle),
        **quantiles_us("busy_", busy),
        "p99_ratio": round(percentile(busy, 0.99) / percentile(idle, 0.99), 2),
        "p99_bar": TAIL_BAR,
        **quantiles_us("raw_idle_", raw_idle),
        **quantiles_us("raw_busy_", raw_busy),
        "raw_p99_ratio": round(percentile(raw_busy, 0.99) / percentile(raw_idle, 0.99), 2),
        "written_gb_per_s": round(written_bytes / busy_s / 1e9, 2),
        "wrong_bytes": wrong_bytes,
    }


def _busy_reads(rig: QueueRig, ones: Sequence[int], written: Sequence[int]) -> list[float]:
    """Seconds of each read while the queue always has chunks to write."""
    seconds = []
    with rig.writing(written) as keep_busy:
        for one in ones:
            keep_busy()
            seconds.append(timed_s(lambda: rig.read([one])))  # noqa: B023 - called at once
    return seconds
