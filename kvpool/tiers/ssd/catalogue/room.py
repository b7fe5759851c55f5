"""Room of the catalogue: its file is allocated whole, so that it never asks a disk for more that others have filled.

A new one is made and allocated under another name before it gets its own, so that no catalogue is half made. LMDB's lock file
is not used: it is a sparse file in a memory map, and a write to a page that finds no room kills the process. The tier's own
lock keeps other daemons away. A file system that copies on each write (btrfs, ZFS) reserves nothing.
A file that is larger than its map, because `ssd.capacity` was lowered, is cut.

Blocks: for the catalogue's thread or an executor.
"""

import errno
import logging
import os
import shutil
from pathlib import Path

import lmdb

import kvpool_native
from kvpool.tiers.ssd.catalogue.check import METAS_BYTES
from kvpool.tiers.ssd.catalogue.identity import remove, sync_directory

log = logging.getLogger(__name__)

FILE_NAME = "data.mdb"
_BLOCK_BYTES = 512
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def lacks_room(error: BaseException) -> bool:
    """Whether an error means that the disk, or a quota, has no room."""
    return isinstance(error, lmdb.DiskError) or (isinstance(error, OSError) and error.errno in _NO_ROOM)


def provide(path: Path, map_bytes: int) -> None:
    """Make the catalogue's directory and file if there are none, and allocate all of its map.

    Without room the catalogue that was set aside is removed for it. Raises OSError and lmdb.Error.
    """
    try:
        _provide(path, map_bytes)
    except (OSError, lmdb.Error) as error:
        aside = aside_of(path)
        if not lacks_room(error) or not aside.is_dir() or aside.is_symlink():
            raise
        log.warning("%s is removed: its room is needed for the catalogue", aside)
        shutil.rmtree(aside)
        _provide(path, map_bytes)


def aside_of(path: Path) -> Path:
    """The place to which a catalogue is moved for examination."""
    return path.with_name(f"{path.name}.bad")


def fits(path: Path, map_bytes: int) -> bool:
    """Whether all pages of a catalogue are within a map of this size. Raises lmdb.Error."""
    with lmdb.open(str(path), readonly=True, lock=False) as environment:
        return _used_bytes(environment) <= map_bytes


def load_pages(environment: lmdb.Environment, pages: kvpool_native.FilePages) -> None:
    """Bring all pages of an open catalogue into memory. Raises OSError where the disk does not give them: LMDB reads through a
    map, where such a page would end the process."""
    pages.load(METAS_BYTES)
    pages.load(_used_bytes(environment))


def _used_bytes(environment: lmdb.Environment) -> int:
    return (int(environment.info()["last_pgno"]) + 1) * int(environment.stat()["psize"])


def _provide(path: Path, map_bytes: int) -> None:
    if (path / FILE_NAME).exists():
        if (path / FILE_NAME).stat().st_size > map_bytes and fits(path, map_bytes):
            os.truncate(path / FILE_NAME, map_bytes)
        _allocate(path / FILE_NAME, map_bytes)
        return
    fresh = path.with_name(f"{path.name}.new")
    remove(fresh)
    try:
        fresh.mkdir(mode=0o700)
        _write_empty(fresh / FILE_NAME, map_bytes)
        _allocate(fresh / FILE_NAME, map_bytes)
        fresh.rename(path)
        sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _write_empty(file: Path, map_bytes: int) -> None:
    """A new catalogue without tables. LMDB makes it in memory: from a file it would read through a map what it has just
    written, and a disk that does not give that would end the process."""
    fd = os.memfd_create("kvpool-catalogue", os.MFD_CLOEXEC)
    try:
        lmdb.open(f"/proc/self/fd/{fd}", subdir=False, map_size=map_bytes, lock=False).close()
        content = os.pread(fd, METAS_BYTES, 0)
    finally:
        os.close(fd)
    made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(made, "wb") as target:
        target.write(content)


def _allocate(file: Path, size: int) -> None:
    fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_blocks * _BLOCK_BYTES < size:
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
    except OSError as error:
        raise OSError(
            error.errno, f"the catalogue cannot be given its {size} bytes: {os.strerror(error.errno or 0)}"
        ) from error
    finally:
        os.close(fd)
