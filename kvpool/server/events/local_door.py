"""Local door: the path of a ZMQ socket in the file system, taken away from new connections while more has come than is read.

The kernel counts no bytes that have come over a unix socket. A flooding connection is shut down within milliseconds, but what
it has sent by then waits in memory, and who connects again each time would fill that. So the socket's file has another name,
beside its own, until what waits is read. Any thread. Invariant, under the lock: the file has its own name while `is_open`.
"""

import contextlib
import logging
import os
import threading

from kvpool.clock import Clock
from kvpool.log_pace import LogPace
from kvpool.ownership import is_served

log = logging.getLogger(__name__)

# Turns one after another that have read all they may, until the door closes.
FULL_TURNS_MAX = 8


class LocalDoor:
    """See the module. `note_turn`: one thread."""

    def __init__(self, path: str, clock: Clock) -> None:
        """REQUIRES: a socket is bound at the path."""
        self._path = path
        self._aside = f"{path}.closed"
        self._pace = LogPace(clock)
        self._lock = threading.Lock()
        self._full_turns = 0
        self.is_open = True

    def __repr__(self) -> str:
        return f"<LocalDoor {self._path} {'open' if self.is_open else 'closed'}>"

    def close(self) -> None:
        """Nobody connects any more, until a turn finds nothing that waits."""
        with self._lock:
            if not self.is_open:
                return
            if (end := self._pace.take_line()) is not None:
                log.warning("%s: more comes than is read: nobody connects until that is read%s", self._path, end)
            self.is_open = not _is_renamed(self._path, self._aside)

    def open(self) -> None:
        """Who connects is accepted."""
        with self._lock:
            if not self.is_open:
                self.is_open = _is_renamed(self._aside, self._path)

    def remove(self) -> None:
        """Remove the socket's file, unless another process serves there. REQUIRES: the socket is closed."""
        with contextlib.suppress(OSError):
            if not is_served(self._path):
                os.unlink(self._path)

    def note_turn(self, *, is_full: bool) -> None:
        """A turn has read all it may, or all that waited."""
        self._full_turns = self._full_turns + 1 if is_full else 0
        if self._full_turns >= FULL_TURNS_MAX:
            self.close()
        elif not is_full and not self.is_open:
            self.open()


def _is_renamed(former: str, path: str) -> bool:
    try:
        os.rename(former, path)
    except OSError as error:
        log.warning("%s cannot be renamed to %s: %s", former, path, error.strerror)
        return False
    return True
