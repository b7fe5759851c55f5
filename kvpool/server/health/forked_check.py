"""Forked check: a recount of every invariant in a forked child. An exact view of one moment, while the daemon serves on.

The child has the daemon's own memory as it was at the fork, recounts it, writes one report into a pipe and ends; it touches no
socket, no file and no other thread's work, and has nothing of what clients map. The daemon pays for the fork alone and for the
pages that it changes meanwhile. A child that ends before its report is itself a problem in the report, and does not harm the
daemon.

Control thread only.
"""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgpack

TIMEOUT_S = 120.0
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 20

Report = dict[str, Any]


async def check_in_child(
    verify: Callable[[], Report], *, copied: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Report:
    """The report of `verify`, made in another process. Raises OSError or MemoryError where there is no memory for one.

    `copied`: while it is entered there is a copy of what a child would not have.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    parent = os.getpid()
    try:
        with copied():
            pid = _fork()
            if pid == 0:
                _report_and_end(verify, writer=writer, parent=parent)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    loop = asyncio.get_running_loop()
    packed = b""
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            packed = await asyncio.wait_for(_read_all(loop, reader), TIMEOUT_S)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = await loop.run_in_executor(None, os.waitpid, pid, 0)
    if not packed:
        return {
            "problems": [f"check: its process ended before it was done (wait status {status})"],
            "chunks": 0,
            "tiers": {},
        }
    return dict(msgpack.unpackb(packed))


def _fork() -> int:
    with warnings.catch_warnings():
        # The child runs on the forking thread alone and takes no lock that another one may have held.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _report_and_end(verify: Callable[[], Report], *, writer: int, parent: int) -> None:
    status = 1
    try:
        _let_go_of_the_daemon(writer=writer, parent=parent)
        os.set_blocking(writer, True)
        left = memoryview(msgpack.packb(verify()))
        while left:
            left = left[os.write(writer, left) :]
        status = 0
    finally:
        os._exit(status)


def _let_go_of_the_daemon(*, writer: int, parent: int) -> None:
    """End with the daemon, and hold none of its sockets and locks, so that waiting processes see the daemon's end at once."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it had ended before
    os.closerange(3, writer)
    os.closerange(writer + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


async def _read_all(loop: asyncio.AbstractEventLoop, fd: int) -> bytes:
    packed = b""
    while True:
        readable = loop.create_future()
        loop.add_reader(fd, readable.set_result, None)
        try:
            await readable
        finally:
            loop.remove_reader(fd)
        piece = os.read(fd, READ_BYTES)
        if not piece:
            return packed
        packed += piece
