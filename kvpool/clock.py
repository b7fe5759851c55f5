"""Clock: monotonic time as an object, so that tests control it.

This is the only module that reads a clock. It is not a scheduler and never sleeps.
Wall-clock time decides nothing in the daemon: a jump of the system clock only changes a number in outgoing messages. Engine
adapters compare it with the times of files.
Any thread may call it.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Protocol


class Clock(Protocol):
    """A source of time. `now_ns` never goes backwards."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC of this machine."""

    now_ns = staticmethod(time.monotonic_ns)  # itself: requests ask for the time again and again


class ThreadClock:
    """The processor time of a thread of this process, which stands while the thread waits."""

    def __init__(self, thread: threading.Thread) -> None:
        """REQUIRES: the thread has been started and runs."""
        assert thread.ident is not None
        self._id = time.pthread_getcpuclockid(thread.ident)

    def now_ns(self) -> int:
        """Nanoseconds of processor time; 0 after the thread has ended."""
        try:
            return time.clock_gettime_ns(self._id)
        except OSError:
            return 0


class Deadline:
    """A point in monotonic time by which something must have ended.

    A component that has a clock passes it. The default is the machine's clock, which is right where a thread waits for
    something in real time: a socket, a disk, a child process, another thread.

    Invariant: `remaining_s()` never rises and never falls below 0.
    """

    __slots__ = ("_at_ns", "_now_ns")

    def __init__(self, timeout_s: float, clock: Clock | None = None, *, since_ns: int | None = None) -> None:
        """`timeout_s` from now on, or since this time of the clock."""
        self._now_ns = time.monotonic_ns if clock is None else clock.now_ns
        begun_ns = self._now_ns() if since_ns is None else since_ns
        self._at_ns = begun_ns + int((timeout_s if timeout_s < LONGEST_S else LONGEST_S) * 1e9)

    def remaining_s(self) -> float:
        """Seconds left, 0.0 when the deadline has passed."""
        return max(0, self._at_ns - self._now_ns()) / 1e9

    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self._now_ns() >= self._at_ns


class Stopwatch:
    """How long a piece of work has been under way; of several at once the one that was begun first. Any thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._begun_ns: list[int] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The work is what runs inside."""
        begun_ns = self._clock.now_ns()
        self._begun_ns.append(begun_ns)
        try:
            yield
        finally:
            self._begun_ns.remove(begun_ns)

    @property
    def elapsed_s(self) -> float:
        """Seconds so far; 0.0 while none is under way."""
        return max((self._clock.now_ns() - begun_ns for begun_ns in tuple(self._begun_ns)), default=0) / NS_PER_S


def wall_time_s() -> float:
    """Seconds since 1970, for outgoing messages that carry a time, and for the age of files."""
    return time.time()


def process_began_ns() -> int:
    """When this process began, nanoseconds since 1970: by the system's clock as it is now, at most a tick (10 ms) too early."""
    with open("/proc/self/stat", "rb") as file:
        after_name = file.read().rpartition(b")")[2].split()
    ticks = int(after_name[_START_TICKS])
    since_boot_ns = ticks * NS_PER_S // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


NS_PER_S = 1_000_000_000
LONGEST_S = 1e9  # thirty years: of a wait without an end
# The place of a process's start among the fields behind its name (proc(5): field 22, the name is the second).
_START_TICKS = 19
