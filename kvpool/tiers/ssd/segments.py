"""Segment files as names in a directory: those that belong to the tier, have a wrong size, or are not needed.

Their content does not matter here, and only regular files of this user are ever removed. Blocks: for an executor.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import kvpool_native
from kvpool.tiers.ssd.plan import CATALOGUE_NAME, SEGMENT_PREFIX, SEGMENT_SUFFIX, SsdPlan
from kvpool.units import format_size

log = logging.getLogger(__name__)

SIX_DIGITS = 6 * "[0-9]"
# New files leave a 64th of a file system free, and no more than this. A guess: room for other programs' files and for the file
# system itself, which is slow when it is full.
SPARED_PART = 64
SPARED_BYTES_MAX = 1 << 30
STAT_BLOCK_BYTES = 512


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock on the directory, for `with`. Raises OSError where another daemon uses it. Ends before the files are opened: these
    lock it for as long as they are open."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise OSError(error.errno, "another daemon uses this directory") from error
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def check_room(plan: SsdPlan) -> None:
    """Check that the disk has room for the missing files. Raises OSError; makes and removes nothing.

    Complete files need no more room, however full the disk is.
    """
    disk = os.statvfs(plan.path)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    taken = _allocated(_ours(plan.path))
    if taken >= plan.segments * plan.segment_bytes or not size:
        return  # where the file system reports no size, allocating the files shows it
    taken += _allocated((plan.path / CATALOGUE_NAME).glob("*"))
    spared = min(size // SPARED_PART, SPARED_BYTES_MAX)
    missing = plan.config.capacity - (taken + free - spared)
    if missing > 0:
        raise OSError(
            errno.ENOSPC,
            f"ssd.capacity is {format_size(plan.config.capacity)}, of which the disk has {format_size(taken)} already; "
            f"it has {format_size(free)} free and {format_size(spared)} are to stay so: "
            f"set ssd.capacity to {max(plan.config.capacity - missing, 0) >> 20}MiB at most, or free {format_size(missing)}",
        )


def open_segments(plan: SsdPlan) -> kvpool_native.SsdFiles:
    """Open or make every segment file. Raises OSError; then new files are removed, so that the disk has the room back."""
    before = set(_ours(plan.path))
    place = str(
        plan.path.resolve()
    )  # inside it no link is followed; `check_directory` has checked the directory itself
    try:
        return kvpool_native.SsdFiles.open(place, plan.segment_bytes, plan.segments, plan.config.direct)
    except OSError:
        for file in set(_ours(plan.path)) - before:
            file.unlink(missing_ok=True)
        raise


def has_segments(path: Path) -> bool:
    """Whether there are segment files."""
    return bool(_ours(path))


def have_other_sizes(plan: SsdPlan) -> bool:
    """Whether there are segment files and none has the configured size: they are of another configuration."""
    sizes = {file.lstat().st_size for file in _ours(plan.path)}
    return bool(sizes) and plan.segment_bytes not in sizes


def remove_misfits(plan: SsdPlan) -> None:
    """Remove files of a wrong size, which were cut or not finished, and those beyond the capacity."""
    for file in _ours(plan.path):
        size = file.lstat().st_size
        if size != plan.segment_bytes:
            log.warning("%s has %d bytes, expected %d: it begins empty", file, size, plan.segment_bytes)
            file.unlink()
        elif _number_of(file) >= plan.segments:
            file.unlink()


def remove_segments(path: Path) -> None:
    """Remove all segment files."""
    for file in _ours(path):
        file.unlink()


def _allocated(files: Iterable[Path]) -> int:
    return sum(file.lstat().st_blocks * STAT_BLOCK_BYTES for file in files)


def _ours(path: Path) -> list[Path]:
    found = []
    for file in path.glob(f"{SEGMENT_PREFIX}{SIX_DIGITS}{SEGMENT_SUFFIX}*"):
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            found.append(file)
    return found


def _number_of(file: Path) -> int:
    return int(file.name.removeprefix(SEGMENT_PREFIX).partition(".")[0])
