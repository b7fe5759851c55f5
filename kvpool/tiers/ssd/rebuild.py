"""Rebuild: finds the chunks of a tier by the headers of their slots, when the catalogue is lost.

Each segment is walked from its start. A valid header has its slot's length, and so the start of the next slot; without one, the
next page that begins like a header is searched for. Ranges that were never written are skipped. Chunks that were evicted are
found too, which is harmless: their bytes are right, and the newest slot of a key counts. A page that the disk does not give is
skipped; many of them are a disk that fails, and the search is given up.

Reads the header of each chunk, several segments at a time. Blocks: for an executor.
"""

import logging
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.keys import namespace_fingerprint
from kvpool.layout import Layout, WireLayout
from kvpool.tiers.ssd.catalogue.identity import Identity
from kvpool.tiers.ssd.catalogue.rows import Row
from kvpool.tiers.ssd.flushed import ALL, floor_of, read_floors
from kvpool.tiers.ssd.plan import SsdPlan, segment_name

log = logging.getLogger(__name__)

PAGE_BYTES = kvpool_native.SSD_HEADER_BYTES
BLOCK_BYTES = 1 << 20
THREADS = 8
SAY_EVERY_S = 5.0
# Of a segment: more than bad sectors, a guess.
UNREADABLE_PAGES_MAX = 64
_MAGIC = np.frombuffer(b"KVPSLOT1", np.uint64)[0]


@dataclass(frozen=True, slots=True)
class _Slot:
    row: Row
    namespace: bytes
    end: int


class RebuildStopped(KVPoolError):
    """The search was given up because the daemon stops."""


def find_chunks(plan: SsdPlan, identity: Identity, is_stopping: threading.Event) -> bytes:
    """Packed rows of all chunks of this epoch and of known namespaces that were not flushed.

    Raises OSError and RebuildStopped.
    """
    numbers, floors = _numbers_by_fingerprint(identity), read_floors(plan.path)
    newest: dict[bytes, _Slot] = {}
    silence = Deadline(SAY_EVERY_S)
    with ThreadPoolExecutor(THREADS, "kvpool-rebuild") as executor:
        jobs = [
            executor.submit(
                _walk, plan.path / segment_name(number), number * plan.segment_bytes, identity.epoch, numbers
            )
            for number in range(plan.segments)
        ]
        for number, job in enumerate(jobs):
            if is_stopping.is_set():
                executor.shutdown(wait=True, cancel_futures=True)
                raise RebuildStopped("the daemon stops")
            slots, unreadable = job.result()
            if unreadable:
                log.error("%d pages of %s cannot be read: chunks there are misses", unreadable, segment_name(number))
            for slot in _without_overlaps(slots):
                if slot.row.generation <= floor_of(floors, slot.namespace):
                    continue
                known = newest.get(slot.row.key)
                if known is None or known.row.generation < slot.row.generation:
                    newest[slot.row.key] = slot
            if silence.has_passed():
                silence = Deadline(SAY_EVERY_S)
                log.info(
                    "rebuilding the catalogue: %d of %d segments, %d chunks", number + 1, plan.segments, len(newest)
                )
    log.warning("the catalogue was rebuilt from the headers of slots: %d chunks", len(newest))
    return b"".join(slot.row.encode() for slot in newest.values())


def are_flushed(rows: npt.NDArray[np.void], identity: Identity, floors: dict[bytes, int]) -> npt.NDArray[np.bool_]:
    """Which of a catalogue's rows are of chunks that an operator has dropped, or could not drop as they were held."""
    floor = np.full(len(rows), floor_of(floors, ALL), np.uint64)
    for fingerprint, number in _numbers_by_fingerprint(identity).items():
        floor[rows["namespace"] == number] = floor_of(floors, fingerprint)
    flushed: npt.NDArray[np.bool_] = rows["generation"] <= floor
    return flushed


def _numbers_by_fingerprint(identity: Identity) -> dict[bytes, int]:
    numbers = {}
    for number, (model, wire) in identity.namespaces.items():
        layout = _layout_of(model, wire)
        if layout is not None:
            numbers[namespace_fingerprint(model, layout)] = number
    return numbers


def _layout_of(model: str, wire: WireLayout) -> Layout | None:
    try:
        return Layout.from_wire(wire)
    except KVPoolError as error:
        log.warning("chunks of model %s are not looked for: %s", model, error)
        return None


def _without_overlaps(slots: list[_Slot]) -> Iterator[_Slot]:
    """Without overlapping slots but the one written last: it has overwritten the end of the others."""
    kept: list[_Slot] = []
    for slot in slots:
        if kept and kept[-1].end > slot.row.offset:
            if kept[-1].row.generation > slot.row.generation:
                continue
            kept.pop()
        kept.append(slot)
    yield from kept


class _Pages:
    """The pages of one segment file; those that the disk does not give are zeros, and counted. One thread."""

    def __init__(self, file: Path, fd: int, buffer: mmap.mmap) -> None:
        self._file = file
        self._fd = fd
        self._buffer = buffer
        self.size = os.fstat(fd).st_size
        self.unreadable = 0

    def read(self, at: int, length: int) -> bytes:
        """Up to `length` bytes, less at the end of the file. Raises OSError for the first unreadable page that is too many."""
        try:
            with memoryview(self._buffer)[:length] as view:
                return bytes(view[: os.preadv(self._fd, [view], at)])
        except OSError as error:
            if length > PAGE_BYTES:
                return b"".join(self.read(at + first, PAGE_BYTES) for first in range(0, length, PAGE_BYTES))
            self.unreadable += 1
            if self.unreadable > UNREADABLE_PAGES_MAX:
                text = os.strerror(error.errno or 0)
                raise OSError(error.errno, f"read of {self._file} at {at} failed: {text}") from error
            return bytes(length)

    def next_data(self, at: int) -> int | None:
        """The page at which the next written range begins; None: only holes follow."""
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA) // PAGE_BYTES * PAGE_BYTES
        except OSError:
            return None


def _walk(file: Path, base: int, epoch: bytes, numbers: dict[bytes, int]) -> tuple[list[_Slot], int]:
    """The slots of one segment file, in order, and how many of its pages cannot be read. `base`: the offset of its first byte
    over all files. Raises OSError."""
    found = []
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            pages = _Pages(file, fd, buffer)
            at = _next_header(pages, 0)
            while at is not None:
                header = _read_header(pages, at)
                slot = _slot_of(header, base + at, epoch, numbers) if header else None
                if slot is not None:
                    found.append(slot)
                at = _next_header(pages, at + PAGE_BYTES if slot is None else slot.end - base)
    finally:
        os.close(fd)
    return found, pages.unreadable


def _read_header(pages: _Pages, at: int) -> bytes:
    """The header that begins at a page; empty where the file ends before it does."""
    page = pages.read(at, PAGE_BYTES)
    size = kvpool_native.ssd_header_length(page) if len(page) == PAGE_BYTES else 0
    header = pages.read(at, size) if size > PAGE_BYTES else page
    return header if size and len(header) == size else b""


def _slot_of(page: bytes, offset: int, epoch: bytes, numbers: dict[bytes, int]) -> _Slot | None:
    header = kvpool_native.decode_ssd_header(page)
    if header is None or header.epoch != epoch or header.namespace not in numbers:
        return None
    if not 0 < header.generation < kvpool_native.GENERATION_END or not header.extent_bytes:
        return None
    row = Row(
        header.key,
        header.parent,
        offset,
        header.generation,
        recency=header.generation,
        extent_bytes=header.extent_bytes,
        extents=header.extents,
        namespace=numbers[header.namespace],
    )
    pages = -(-header.extent_bytes * header.extents // PAGE_BYTES)
    return _Slot(row, header.namespace, offset + len(page) + pages * PAGE_BYTES)


def _next_header(pages: _Pages, begin: int) -> int | None:
    """Offset of the next page that begins like a header; None at the end. Looks at one page first: slots follow slots."""
    length, at = PAGE_BYTES, begin
    while at < pages.size:
        found = pages.next_data(at)
        if found is None:
            return None
        at = found
        block = pages.read(at, min(length, pages.size - at))
        heads: npt.NDArray[np.uint64] = np.frombuffer(block[: len(block) // PAGE_BYTES * PAGE_BYTES], np.uint64)
        hits = np.flatnonzero(heads[:: PAGE_BYTES // 8] == _MAGIC)
        if len(hits):
            return at + int(hits[0]) * PAGE_BYTES
        if not block:
            return None
        at += length
        length = BLOCK_BYTES
    return None
