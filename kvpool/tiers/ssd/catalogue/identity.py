"""Identity of segment files: their epoch, and the namespaces that their slots may name.

    file := "KVPTIER1" length:u32 crc:u32 body     body: msgpack [epoch, {number: [model, layout in wire form]}]

A second copy of records that the catalogue has too. A slot's header has the fingerprint of its namespace, not the name; with
this file a lost catalogue can be rebuilt from headers. Written whole and renamed, never changed in place. Blocks: for the
catalogue's thread or an executor.
"""

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgpack

import kvpool_native
from kvpool import failpoint
from kvpool.ids import EPOCH_BYTES
from kvpool.layout import WireLayout

MAGIC = b"KVPTIER1"
FILE_NAME = "identity"
FILE_BYTES_MAX = 128 << 10
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO)  # the last: a socket
_HEAD_BYTES = len(MAGIC) + 8
_BODY_HEAD_BYTES = 32
_NUMBER_BYTES_MAX = 9

# A stored namespace: model and layout in wire form.
NamespaceRecord = tuple[str, WireLayout]


@dataclass(frozen=True, slots=True)
class Identity:
    """The epoch of a set of segment files, and its namespaces by number."""

    epoch: bytes
    namespaces: dict[int, NamespaceRecord]


def new_epoch() -> bytes:
    """A random epoch for a new set of segment files."""
    return os.urandom(EPOCH_BYTES)


def write_identity(directory: Path, identity: Identity) -> None:
    """Replace the file durably, if it has another identity. Of too many namespaces the newest are kept. Raises OSError."""
    body = _pack_body(identity)
    crc = kvpool_native.crc32c(body)
    content = MAGIC + len(body).to_bytes(4, "little") + crc.to_bytes(4, "little") + body
    target = directory / FILE_NAME
    with contextlib.suppress(OSError):  # then it is written again
        if content_of(target, FILE_BYTES_MAX) == content:
            return  # it needs no room of a full disk
    fresh = directory / f"{FILE_NAME}.new"
    remove(fresh)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    failpoint.reach("daemon.ssd.identity")
    fresh.rename(target)
    sync_directory(directory)


def read_identity(directory: Path) -> Identity | None:
    """The file's identity; None where there is no complete file. Raises OSError where it cannot be read: it may be there."""
    content = content_of(directory / FILE_NAME, FILE_BYTES_MAX)
    body = content[_HEAD_BYTES:]
    head = MAGIC + len(body).to_bytes(4, "little") + kvpool_native.crc32c(body).to_bytes(4, "little")
    if len(content) > FILE_BYTES_MAX or content[:_HEAD_BYTES] != head:
        return None
    try:
        epoch, entries = msgpack.unpackb(body, strict_map_key=False)
        namespaces = {int(number): (str(model), list(wire)) for number, (model, wire) in entries.items()}
    except (ValueError, TypeError, AttributeError):
        return None
    return Identity(epoch, namespaces) if isinstance(epoch, bytes) and len(epoch) == EPOCH_BYTES else None


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove what has this name, if anything: a file, a link itself, or a directory with its content. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def content_of(path: Path, bytes_max: int) -> bytes:
    """The file's bytes, up to one more than it may have; empty where there is none, but a link, a directory or nothing.

    Raises OSError where the disk does not give them.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:  # closes a directory too
            return file.read(bytes_max + 1)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise OSError(error.errno, f"read of {path} failed: {os.strerror(error.errno or 0)}") from error
        return b""


def _pack_body(identity: Identity) -> bytes:
    kept: dict[int, NamespaceRecord] = {}
    room = FILE_BYTES_MAX - _HEAD_BYTES - _BODY_HEAD_BYTES
    for number in sorted(identity.namespaces, reverse=True):
        room -= len(msgpack.packb(identity.namespaces[number])) + _NUMBER_BYTES_MAX
        if room < 0:
            break
        kept[number] = identity.namespaces[number]
    body: bytes = msgpack.packb([identity.epoch, kept])
    return body


def pack_namespace(record: NamespaceRecord) -> bytes:
    """A namespace with its checksum, as the catalogue keeps it."""
    packed: bytes = msgpack.packb(record)
    return kvpool_native.crc32c(packed).to_bytes(4, "little") + packed


def unpack_namespace(value: bytes) -> NamespaceRecord | None:
    """The namespace; None where its checksum is wrong."""
    packed = value[4:]
    if kvpool_native.crc32c(packed).to_bytes(4, "little") != value[:4]:
        return None
    model, wire = msgpack.unpackb(packed)
    return model, wire
