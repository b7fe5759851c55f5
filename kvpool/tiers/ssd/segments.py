"""Segment files as names in a directory: which belong to the tier, have the wrong size, or are not needed.

Their content does not matter here, and only regular files of this user are ever removed. Blocks: for an executor.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import kvpool_native
from kvpool.tiers.ssd.plan import SEGMENT_PREFIX, SEGMENT_SUFFIX, SsdPlan
from kvpool.units import format_size

log = logging.getLogger(__name__)

SIX_DIGITS = 6 * "[0-9]"
# What new files leave free of a file system: a 64th of it, and no more than this. A guess: room for what others write there
# and for the file system itself, which is slow when it is full.
SPARED_PART = 64
SPARED_BYTES_MAX = 1 << 30
STAT_BLOCK_BYTES = 512


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """While nobody else may use the directory. Raises OSError where another daemon does. Ends before the files are opened,
    which lock it for as long as they are."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise OSError(error.errno, "another daemon uses this directory") from error
    finally:
        os.close(fd)


def check_room(plan: SsdPlan) -> None:
    """Check that the disk has room for the files that are still to be made. Raises OSError, and nothing is made or removed.

    Files that are there with all their bytes need none, however full the disk has become.
    """
    disk = os.statvfs(plan.path)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    taken = sum(file.lstat().st_blocks * STAT_BLOCK_BYTES for file in _ours(plan.path))
    if taken >= plan.segments * plan.segment_bytes or not size:
        return  # where the file system reports no size, the bytes themselves are allocated
    spared = min(size // SPARED_PART, SPARED_BYTES_MAX)
    missing = plan.capacity - (taken + free - spared)
    if missing > 0:
        raise OSError(
            errno.ENOSPC,
            f"ssd.capacity is {format_size(plan.capacity)}, of which the disk has {format_size(taken)} already; "
            f"it has {format_size(free)} free and {format_size(spared)} are to stay so: "
            f"set ssd.capacity to {max(plan.capacity - missing, 0) >> 20}MiB at most, or free {format_size(missing)}",
        )


def open_segments(plan: SsdPlan) -> kvpool_native.SsdFiles:
    """Open or make every segment file. Raises OSError; what was made by then is removed, so that the disk has it back."""
    before = set(_ours(plan.path))
    place = str(plan.path.resolve())  # no link is followed below; whether this may be one was checked before
    try:
        return kvpool_native.SsdFiles.open(place, plan.segment_bytes, plan.segments, plan.is_direct)
    except OSError:
        for file in set(_ours(plan.path)) - before:
            file.unlink(missing_ok=True)
        raise


def have_other_sizes(plan: SsdPlan) -> bool:
    """Whether there are segment files, and none of them has the size that is configured: another configuration's."""
    sizes = {file.lstat().st_size for file in _ours(plan.path)}
    return bool(sizes) and plan.segment_bytes not in sizes


def remove_misfits(plan: SsdPlan) -> None:
    """Remove files of a wrong size, which were cut or not finished, and those that the capacity has no room for."""
    for file in _ours(plan.path):
        size = file.lstat().st_size
        if size != plan.segment_bytes:
            log.warning("%s has %d bytes, expected %d: it begins empty", file, size, plan.segment_bytes)
            file.unlink()
        elif _number_of(file) >= plan.segments:
            file.unlink()


def remove_segments(path: Path) -> None:
    """Remove all of them."""
    for file in _ours(path):
        file.unlink()


def _ours(path: Path) -> list[Path]:
    found = []
    for file in path.glob(f"{SEGMENT_PREFIX}{SIX_DIGITS}{SEGMENT_SUFFIX}*"):
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            found.append(file)
    return found


def _number_of(file: Path) -> int:
    return int(file.name.removeprefix(SEGMENT_PREFIX).partition(".")[0])
