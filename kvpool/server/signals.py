"""Signals of the daemon: SIGTERM and SIGINT stop it, SIGHUP has it read its configuration again. Main thread only."""

import asyncio
import ctypes
import signal
from collections.abc import Callable

STOP = (signal.SIGTERM, signal.SIGINT)
_LIBC = ctypes.CDLL(None)
_LIBC.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_LIBC.signal.restype = ctypes.c_void_p


def catch_signals(loop: asyncio.AbstractEventLoop, *, stop: Callable[[], object], reload: Callable[[], object]) -> None:
    """Call these on the loop from now on."""
    # Not the loop's handlers: closing the loop would restore the defaults, which end the process while it still has work.
    for number in STOP:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(reload))


def ignore_signals() -> None:
    """Ignore them until the process has ended.

    The kernel ignores each first: a signal that comes while Python takes its handler away is reported as an error of whatever
    code runs then. Python has to know, too: otherwise the interpreter's end restores the default, which ends the process.
    """
    for number in (signal.SIGHUP, *STOP):
        _LIBC.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_IGN)  # before that, it handles what has come
