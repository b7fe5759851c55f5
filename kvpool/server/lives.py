"""Lives of the daemon at one socket: how many before this one ended early, and the wait that follows from it.

The lock file beside the socket has their number for as long as a life lasts, and a clean end removes the file: a file that is
found is that of a life which was killed, crashed or could not serve. It was written when that life began.

    first early end ──► no wait ──► 1 s ──► 2 s ──► … ──► WAIT_S_MAX, until a life lasts LASTING_S or ends cleanly

A service manager restarts a daemon at once, and would give it up or restart it in a loop; here each restart waits longer, none
is the last, and a person who stops or restarts a daemon that waits ends the wait: that is a clean end. Control thread only.
"""

import os
from pathlib import Path

LASTING_S = 600.0
WAIT_S_MAX = 300.0
_RECORD_BYTES_MAX = 16
_WAITS_MAX = 32  # the power of two that is surely beyond WAIT_S_MAX


class Life:
    """The life of this process, in its lock file `fd`, which it holds locked. `early_ends`: lives in a row that ended early."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        left, began_s = os.pread(fd, _RECORD_BYTES_MAX, 0), os.fstat(fd).st_mtime
        os.ftruncate(fd, 0)
        os.utime(fd)
        has_lasted = not 0.0 <= os.fstat(fd).st_mtime - began_s < LASTING_S
        self.early_ends = 0 if not left.isdigit() else 1 if has_lasted else int(left) + 1
        os.pwrite(fd, str(self.early_ends).encode(), 0)

    @property
    def wait_s(self) -> float:
        """How long a daemon that a service manager restarts waits before it serves, in seconds."""
        if self.early_ends < 2:
            return 0.0
        return float(min(WAIT_S_MAX, 2.0 ** min(self.early_ends - 2, _WAITS_MAX)))

    def end_life(self, *, is_clean: bool) -> None:
        """Leave the file, or remove it where this end is clean, and release it. REQUIRES: this has not been done."""
        if is_clean:
            Path(self._path).unlink(missing_ok=True)
        os.close(self._fd)
