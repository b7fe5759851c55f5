"""Place of an open SSD tier: what its path names, compared with what was opened; and a probe of the disk that it is on.

A directory that is removed, replaced or mounted over stays open and takes writes that nobody finds again. Blocks: for the
catalogue's thread or an executor.
"""

import errno
import mmap
import os
import stat
from pathlib import Path

from kvpool.ids import PAGE_BYTES
from kvpool.tiers.ssd.plan import SsdPlan, segment_name

PROBE_NAME = "probe"
_LACKS_ROOM = (errno.ENOSPC, errno.EDQUOT)  # what is there already needs none


class SsdPlace:
    """See the module. Made when the files are open."""

    def __init__(self, plan: SsdPlan) -> None:
        self._plan = plan
        names = ["", *(segment_name(number) for number in range(plan.segments))]
        self._opened = {name: file_identity(plan.path / name) for name in names}

    def check(self) -> None:
        """Raises OSError where the path no longer names the directory and the files that are open."""
        for name, opened in self._opened.items():
            path = self._plan.path / name
            found = file_identity(path)
            if found is None:
                raise OSError(errno.ENOENT, f"{path} has been removed while it is in use: restart the daemon")
            if found != opened:
                raise OSError(errno.ESTALE, f"{path} is not what it was when it was opened: restart the daemon")


def file_identity(path: Path) -> tuple[int, int, int] | None:
    """Device, inode and, of a file, which is allocated whole, its size; None where there is nothing. Raises OSError."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size if stat.S_ISREG(found.st_mode) else 0


def probe_disk(plan: SsdPlan, offset: int | None) -> str:
    """Write a page to a file of the tier's own and sync it, and read the one at an offset over all segment files (None: none).

    The fault in one line; empty where the disk does both.
    """
    path = plan.path / PROBE_NAME
    try:
        _write_page(path)
    except OSError as error:
        return f"write of {path} failed: {error}"
    if offset is None:
        return ""
    segment, at = divmod(offset, plan.segment_bytes)
    path = plan.path / segment_name(segment)
    try:
        _read_page(path, at, is_direct=plan.config.direct)
    except OSError as error:
        return f"read of {path} at {at} failed: {error}"
    return ""


def _write_page(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.pwrite(fd, os.urandom(PAGE_BYTES), 0)
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _LACKS_ROOM:
            raise
    finally:
        os.close(fd)


def _read_page(path: Path, at: int, *, is_direct: bool) -> None:
    """Past the page cache, where the file system can do that."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if is_direct else 0))
    try:
        if not is_direct:
            os.posix_fadvise(fd, at, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(-1, PAGE_BYTES) as page:  # begins with a page, as direct I/O requires
            os.preadv(fd, [page], at)
    finally:
        os.close(fd)
