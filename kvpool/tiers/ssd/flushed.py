"""Flush floors: for each namespace, the generation up to which an operator has dropped all chunks on disk.

    file := slot slot       slot := "KVPFLSH1" sequence:u64 length:u32 crc:u32 body, of SLOT_BYTES
    body: msgpack {namespace fingerprint (empty: all): generation}; the CRC-32C is that of sequence and body

The header of a dropped chunk stays in its slot until the slot is written again. A rebuild of the catalogue from headers would
find it, so the rebuild skips the slots of a namespace up to its floor. It also skips chunks that were held during the flush and
therefore not dropped: these are misses. So does a start whose catalogue lacks removals of the last flush: it has the `sequence`
up to which it has them.

The file is allocated when the tier opens, and the older slot is written in place: a flush needs no room of a full disk. The
newer valid slot counts. A file that is removed or replaced by a link is made again by the next write, which each checkpoint is.
Blocks: for the catalogue's thread or an executor.
"""

import logging
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import msgpack

import kvpool_native
from kvpool.tiers.ssd.catalogue.identity import content_of, remove, sync_directory

log = logging.getLogger(__name__)

MAGIC = b"KVPFLSH1"
FILE_NAME = "flushed"
SLOT_BYTES = 16 << 10
# How long a flush waits for another one that is being written.
NOTE_TIMEOUT_S = 5.0
ALL = b""  # a floor of every namespace
_HEAD_BYTES = len(MAGIC) + 16
_FLOOR_BYTES_MAX = 2 + 32 + 9
FLOORS_MAX = (SLOT_BYTES - _HEAD_BYTES - 8) // _FLOOR_BYTES_MAX


class FlushFloors:
    """The floors of an open tier, and their file. What could not be written stays due. Any thread.

    `sequence` counts flushes. `is_ahead`: the catalogue may lack removals of the last ones before this process.
    """

    def __init__(self, directory: Path, sequence: int = 0) -> None:
        """Reads the file and gives it all its room. `sequence`: of the last flush whose removals the catalogue has. Raises
        OSError where it cannot be read."""
        self._directory = directory
        self._writing = threading.Lock()  # one writer at a time
        self._lock = threading.Lock()  # never held during I/O
        self._slot, found, self.floors = _read(directory)  # the slot is guarded by _writing, the floors by _lock
        self.is_ahead = found > sequence
        self.sequence = max(found, sequence)
        self._is_due = self._slot is None  # guarded by _lock
        self.failure = ""  # why the file lacks the last flush
        self.write()

    def __repr__(self) -> str:
        return f"<FlushFloors of {self._directory}, {len(self.floors)}, flush {self.sequence}>"

    def note_flush(self, fingerprints: Sequence[bytes] | None, generation: int) -> bool:
        """Record that the chunks of these namespaces (None: all) up to `generation` were dropped. Whether that is durable: not
        where another writer has waited for the disk for long."""
        with self._lock:
            floors = {} if fingerprints is None else dict(self.floors)
            for fingerprint in [ALL] if fingerprints is None else fingerprints:
                floors[fingerprint] = max(generation, floors.get(fingerprint, 0))
            self.floors = _bounded(floors)
            self.sequence += 1
            self._is_due = True
        return self.write(NOTE_TIMEOUT_S)

    def write(self, timeout_s: float = -1.0) -> bool:
        """Write what is due; whether nothing is left. A failure is logged, and tried again by the next call. `timeout_s`: the
        longest wait for another writer (negative: any)."""
        if not self._writing.acquire(timeout=timeout_s):
            return False
        try:
            with self._lock:
                is_due, sequence, floors = self._is_due, self.sequence, self.floors
            if not is_due and _is_own(self._directory / FILE_NAME):
                return True
            body: bytes = msgpack.packb(floors)
            self._write(_head_of(sequence, body) + body)
        except OSError as error:
            if str(error) != self.failure:
                log.error("%s: a restart may bring back what was flushed: %s", self._directory, error)
            self.failure = str(error)
            return False
        else:
            self.failure = ""
            with self._lock:
                self._is_due = self.sequence != sequence
                return not self._is_due
        finally:
            self._writing.release()

    def _write(self, content: bytes) -> None:
        if self._slot is None or not _is_own(self._directory / FILE_NAME):
            _make(self._directory, content)  # in the place of what somebody has put there
            self._slot = 0
            return
        fd = os.open(self._directory / FILE_NAME, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(fd, content, (1 - self._slot) * SLOT_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)
        self._slot = 1 - self._slot


def _is_own(file: Path) -> bool:
    """Whether this is a file, and no link to one."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except FileNotFoundError:
        return False


def read_floors(directory: Path) -> dict[bytes, int]:
    """The file's content; empty where nothing of it is valid. Raises OSError where it cannot be read: what was flushed would
    come back."""
    return _read(directory)[2]


def highest_floor(directory: Path) -> int:
    """The highest floor in a directory: new generations must be above it. Raises OSError."""
    return max(read_floors(directory).values(), default=0)


def floor_of(floors: dict[bytes, int], fingerprint: bytes) -> int:
    """The floor of a namespace: slots up to this generation are skipped."""
    return max(floors.get(ALL, 0), floors.get(fingerprint, 0))


def _bounded(floors: dict[bytes, int]) -> dict[bytes, int]:
    """The floors that a slot holds and that count: of more, the lowest ones become one floor of all namespaces."""
    heights = sorted(floors.values())
    everyones = max(floors.get(ALL, 0), heights[-FLOORS_MAX] if len(heights) >= FLOORS_MAX else 0)
    above = {fingerprint: floor for fingerprint, floor in floors.items() if floor > everyones}
    return {ALL: everyones, **above} if everyones else above


def _read(directory: Path) -> tuple[int | None, int, dict[bytes, int]]:
    """The newer valid slot, its sequence and floors. Without one None, 0 and no floors. Raises OSError."""
    content = content_of(directory / FILE_NAME, 2 * SLOT_BYTES)
    valid = []
    for slot in (0, 1):
        sequence, body = _parse_slot(content[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
        if body:
            valid.append((sequence, slot, body))
    if not valid:
        return None, 0, {}
    sequence, slot, body = max(valid)
    return slot, sequence, msgpack.unpackb(body)


def _parse_slot(content: bytes) -> tuple[int, bytes]:
    """Sequence and body; an empty body where the slot is not valid."""
    sequence = int.from_bytes(content[8:16], "little")
    body = content[_HEAD_BYTES : _HEAD_BYTES + int.from_bytes(content[16:20], "little")]
    return (sequence, body) if content[:_HEAD_BYTES] == _head_of(sequence, body) else (0, b"")


def _head_of(sequence: int, body: bytes) -> bytes:
    number = sequence.to_bytes(8, "little")
    crc = kvpool_native.crc32c(number + body)
    return MAGIC + number + len(body).to_bytes(4, "little") + crc.to_bytes(4, "little")


def _make(directory: Path, content: bytes) -> None:
    """Replace the file by one that has all its room, and this slot."""
    fresh = directory / f"{FILE_NAME}.new"
    remove(fresh)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, 2 * SLOT_BYTES)
        os.pwrite(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    fresh.rename(directory / FILE_NAME)
    sync_directory(directory)
