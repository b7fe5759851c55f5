"""`bench ssd`, waits: how long a demand read of 1 MiB waits behind long chunks that are being written, in pieces of a write.

A wait is how much longer a read takes beside writers than idle, quantile by quantile: the effect of a busy machine on both is
not a wait. A piece is the disk's time for SSD_WRITE_BYTES at the rate at which it was written meanwhile. One row with the
threads that the tier has by default, of which half never write, and one with a single thread, which reads between two pieces.
Main thread of a command only.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpool_native
from kvpool_tools.bench.measure import percentile, quantiles_us, timed_s
from kvpool_tools.bench.ssd.rig import SEGMENTS, THREADS, QueueRig

CHUNK_BYTES, CHUNKS = 1 << 20, 32
BESIDE_BYTES = 32 << 20
PIECE_BYTES = kvpool_native.SSD_WRITE_BYTES
WAIT_BAR_PIECES = 2.0
ROUNDS, SINGLES = 10, 30
QUICK_ROUNDS, QUICK_SINGLES = 2, 10
US_PER_S = 1e6


def wait_disk_bytes() -> int:
    """Bytes of this benchmark on the disk."""
    return CHUNKS * 2 * CHUNK_BYTES + 2 * SEGMENTS * BESIDE_BYTES


def bench_wait(folder: Path, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """One row for each number of threads."""
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    counts = (THREADS, 1)
    return [_row(folder, count, is_quick, lambda: advance(len(counts) * rounds)) for count in counts]


def _row(folder: Path, threads: int, is_quick: bool, advance: Callable[[], None]) -> dict[str, Any]:
    rounds, singles = (QUICK_ROUNDS, QUICK_SINGLES) if is_quick else (ROUNDS, SINGLES)
    rig = QueueRig(folder / f"tier-{threads}", CHUNK_BYTES, CHUNKS, threads=threads, beside_bytes=BESIDE_BYTES)
    idle: list[float] = []
    busy: list[float] = []
    written_bytes, busy_s = 0, 0.0
    try:
        rig.write(range(CHUNKS))
        for number in range(rounds):
            ones = [(number * singles + sample) % CHUNKS for sample in range(singles)]
            idle += [timed_s(lambda: rig.read([one])) for one in ones]  # noqa: B023 - called at once
            before, start = rig.written_bytes, time.perf_counter()
            with rig.writing(()) as keep_busy:
                for one in ones:
                    keep_busy()
                    busy.append(timed_s(lambda: rig.read([one])))  # noqa: B023 - called at once
            # All queued chunks were written when the writers ended.
            written_bytes += rig.written_bytes - before
            busy_s += time.perf_counter() - start
            advance()
        wrong_bytes = rig.wrong_bytes(range(min(CHUNKS, rounds * singles)))
    finally:
        rig.close()
    piece_us = PIECE_BYTES / (written_bytes / busy_s) * US_PER_S
    waits = {
        f"wait_{name}_pieces": round((percentile(busy, share) - percentile(idle, share)) * US_PER_S / piece_us, 2)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        "threads": threads,
        "samples": len(busy),
        **quantiles_us("idle_", idle),
        **quantiles_us("busy_", busy),
        "written_gb_per_s": round(written_bytes / busy_s / 1e9, 2),
        "piece_us": round(piece_us, 1),
        **waits,
        "wait_bar_pieces": WAIT_BAR_PIECES,
        "wrong_bytes": wrong_bytes,
    }
