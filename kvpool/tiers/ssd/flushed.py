"""Flush floors: for each namespace, the generation up to which an operator has dropped all chunks on disk.

    file := "KVPFLUSH" length:u32 crc:u32 body     body: msgpack {namespace fingerprint (empty: all): generation}

The header of a dropped chunk stays in its slot until the slot is written again. A rebuild of the catalogue from headers would
find it, so the rebuild skips the slots of a namespace up to its floor. It also skips chunks that were held during the flush and
therefore not dropped: these are misses. The file is written whole and renamed. Blocks: for an executor.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgpack

import kvpool_native
from kvpool.tiers.ssd.catalogue.identity import sync_directory

log = logging.getLogger(__name__)

MAGIC = b"KVPFLUSH"
FILE_NAME = "flushed"
FILE_BYTES_MAX = 1 << 20
ALL = b""  # a floor of every namespace
_HEAD_BYTES = len(MAGIC) + 8


_writing = threading.Lock()  # one writer of a file at a time


async def remember_flushed(directory: Path, fingerprints: Sequence[bytes] | None, generation: int) -> None:
    """Record that the chunks of these namespaces (None: all) up to `generation` were dropped. A failure is logged."""
    try:
        await asyncio.get_running_loop().run_in_executor(None, note_flushed, directory, fingerprints, generation)
    except OSError as error:
        log.error("%s: a rebuild of the catalogue may bring back what was flushed: %s", directory, error)


def note_flushed(directory: Path, fingerprints: Sequence[bytes] | None, generation: int) -> None:
    """The same, on this thread. Any thread. Raises OSError."""
    with _writing:
        floors = {} if fingerprints is None else read_floors(directory)
        for fingerprint in [ALL] if fingerprints is None else fingerprints:
            floors[fingerprint] = max(generation, floors.get(fingerprint, 0))
        _write(directory, floors)


def read_floors(directory: Path) -> dict[bytes, int]:
    """The file's content; empty where there is no complete file."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with open(
            directory / FILE_NAME, "rb", opener=lambda name, _: os.open(name, flags)
        ) as file:  # closes a directory too
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError:
        return {}
    body = content[_HEAD_BYTES:]
    if len(content) > FILE_BYTES_MAX or content[:_HEAD_BYTES] != _head_of(body):
        return {}
    floors: dict[bytes, int] = msgpack.unpackb(body, strict_map_key=False)
    return floors


def highest_floor(directory: Path) -> int:
    """The highest floor in a directory: new generations must be above it."""
    return max(read_floors(directory).values(), default=0)


def floor_of(floors: dict[bytes, int], fingerprint: bytes) -> int:
    """The floor of a namespace: slots up to this generation are skipped."""
    return max(floors.get(ALL, 0), floors.get(fingerprint, 0))


def _head_of(body: bytes) -> bytes:
    return MAGIC + len(body).to_bytes(4, "little") + kvpool_native.crc32c(body).to_bytes(4, "little")


def _write(directory: Path, floors: dict[bytes, int]) -> None:
    body: bytes = msgpack.packb(floors)
    if _HEAD_BYTES + len(body) > FILE_BYTES_MAX:  # more namespaces than a daemon has in many lives: one floor for all
        body = msgpack.packb({ALL: max(floors.values())})
    fresh = directory / f"{FILE_NAME}.new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(_head_of(body) + body)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(directory / FILE_NAME)
    sync_directory(directory)
