"""Signals of the daemon: SIGTERM and SIGINT stop it, SIGHUP has it read its configuration again. Main thread only.

    caught ──ignore──► ignored by the kernel; what has come by then is taken, and dropped ──forget──► Python ignores them, too

Two steps, because Python reports a signal whose handler it has just begun to ignore as an error of whatever code runs,
and a thread may be in its part of the handling while another one changes it. Without the second the interpreter's end would
restore the defaults, which end the process while it still has work.
"""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType

ALL = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
_LIBC = ctypes.CDLL(None)
_LIBC.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_LIBC.signal.restype = ctypes.c_void_p


class Signals:
    """Handlers of the process's signals; see the module."""

    def __init__(self) -> None:
        self._are_ignored = False
        self.stopped_by = 0  # the signal that has asked for the stop
        self._held: list[signal.Signals] = []

    def catch(
        self, loop: asyncio.AbstractEventLoop, *, stop: Callable[[], object], reload: Callable[[], object]
    ) -> None:
        """Call these on the loop from now on."""

        def take(number: int, _frame: FrameType | None) -> None:
            if not self._are_ignored:
                self.stopped_by = self.stopped_by if number == signal.SIGHUP else number
                loop.call_soon_threadsafe(reload if number == signal.SIGHUP else stop)

        # Not the loop's handlers: closing the loop would restore the defaults.
        for number in ALL:
            signal.signal(number, take)

    def hold(self) -> None:
        """Let SIGTERM and SIGINT wait for `end_at_once`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._held.append(signal.Signals(number)))

    def end_at_once(self, leave: Callable[[], object]) -> None:
        """Let SIGTERM and SIGINT, also held ones, end the process at once, after a call of `leave`, and SIGHUP nothing, until
        `catch`."""

        def end(number: int, _frame: FrameType | None) -> None:
            leave()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        for number in self._held:
            os.kill(os.getpid(), number)

    def ignore(self) -> None:
        """Ignore them until the process has ended."""
        self._are_ignored = True
        for number in ALL:
            _LIBC.signal(number, signal.SIG_IGN)

    def forget(self) -> None:
        """Let Python know. REQUIRES: they are ignored, and threads that were there have ended since or had time to."""
        for number in ALL:
            signal.signal(number, signal.SIG_IGN)
