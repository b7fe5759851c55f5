"""`bench ssd`, the tier's queue alone: chunks between an arena and segment files, against raw I/O of as many bytes.

One job of all chunks for a rate, jobs of one chunk for a latency. A round takes raw, queue and raw again in each direction.
The first round writes blocks that were never written and is not counted. After each round the bytes read are compared with
those written, untimed. Main thread of a command only.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool_tools.bench.disk import Bytes, RawFile, fio_gb_per_s
from kvpool_tools.bench.measure import timed_s, timed_with_cpu_s
from kvpool_tools.bench.ssd.rig import THREADS, WRITERS, QueueRig, arena_bytes, measured_queue, sizes_within
from kvpool_tools.bench.ssd.rounds import Rounds, timed_raw

ROUNDS, QUICK_ROUNDS = 7, 1
SINGLES, QUICK_SINGLES = 5, 2

Row = dict[str, Any]


def bench_queue(folder: Path, total: int, is_quick: bool, advance: Callable[[int], None]) -> list[Row]:
    """One row for each chunk size: rates of `total` bytes and latencies of one chunk, both ways."""
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    sizes = sizes_within(total)
    steps = len(sizes) * (rounds + 1)
    rows = []
    for name, chunk_bytes in sizes.items():
        with measured_queue(folder, chunk_bytes, total) as measured:
            comparison = _Comparison(*measured)
            for number in range(rounds + 1):
                comparison.run(number, singles=QUICK_SINGLES if is_quick else SINGLES)
                advance(steps)
            fio = (None, None) if is_quick else comparison.fio()
            rows.append(comparison.row(name, *fio))
    return rows


class _Comparison:
    """One chunk size. Invariant: both raw files and all slots have been written before a round counts."""

    def __init__(self, rig: QueueRig, written: RawFile, read: RawFile) -> None:
        self._rig, self._written, self._read = rig, written, read
        self._buffer: Bytes = arena_bytes(rig.chunks, rig.chunk_bytes)
        self._demoted, self._promoted = Rounds(), Rounds()
        self._wrong_bytes = 0
        read.write(self._buffer)

    def run(self, number: int, *, singles: int) -> None:
        """Round `number`; round 0 is not counted."""
        rig, everything = self._rig, range(self._rig.chunks)
        moved = rig.chunks * rig.chunk_bytes
        rig.forget()
        floors = [timed_raw(lambda: self._written.write(self._buffer))]
        demoted = timed_with_cpu_s(lambda: rig.write(everything))
        floors.append(timed_raw(lambda: self._written.write(self._buffer)))
        read_floors = [timed_raw(lambda: self._read.read(self._buffer))]
        promoted = timed_with_cpu_s(lambda: rig.read(everything))
        read_floors.append(timed_raw(lambda: self._read.read(self._buffer)))
        self._wrong_bytes += rig.wrong_bytes(everything)
        if number:
            self._demoted.add_round(moved, floors, demoted)
            self._promoted.add_round(moved, read_floors, promoted)
            for single in range(singles):
                self._run_one((single + number * singles) % rig.chunks)

    def _run_one(self, chunk: int) -> None:
        rig, buffer = self._rig, self._buffer
        self._demoted.add_one(
            timed_s(lambda: self._written.write_one(buffer, chunk)), timed_s(lambda: rig.write([chunk]))
        )
        self._promoted.add_one(timed_s(lambda: self._read.read_one(buffer, chunk)), timed_s(lambda: rig.read([chunk])))

    def fio(self) -> tuple[float | None, float | None]:
        """fio's result for the raw files: GB/s written and read."""
        chunk_bytes, chunks = self._rig.chunk_bytes, self._rig.chunks
        return (
            fio_gb_per_s(self._written.path, is_write=True, chunk_bytes=chunk_bytes, chunks=chunks, depth=WRITERS),
            fio_gb_per_s(self._read.path, is_write=False, chunk_bytes=chunk_bytes, chunks=chunks, depth=THREADS),
        )

    def row(self, name: str, fio_written: float | None, fio_read: float | None) -> Row:
        """The row with all measurements."""
        chunk_bytes = self._rig.chunk_bytes
        return {
            "chunk": name,
            "chunks": self._rig.chunks,
            "rounds": len(self._demoted.ratios),
            "is_direct": self._rig.is_direct,
            "demote_depth": WRITERS,
            **self._demoted.columns("demote", chunk_bytes),
            "fio_demote_gb_per_s": fio_written,
            "promote_depth": THREADS,
            **self._promoted.columns("promote", chunk_bytes),
            "fio_promote_gb_per_s": fio_read,
            "ratio": round(min(self._demoted.ratio, self._promoted.ratio), 3),
            "cpu_seconds": round(self._demoted.cpu_s + self._promoted.cpu_s, 3),
            "wrong_bytes": self._wrong_bytes,
        }
