"""Divided time: what loads of a tier cost that are under way on a rank at the same time.

They are copied by the same threads and read from the same medium, so that each takes longer than it would alone. Every moment
in which at least one of them is waited for is divided among all that are under way: together they cost the time that has
passed, whatever their number, as prompts do that are computed in the same step. Any thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.clock import NS_PER_S, Clock


class DividedTime:
    """See the module. Invariant: `_passed_s` is what a load has cost that has been under way since the beginning; no more are
    waited for than are under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0  # guarded by _lock
        self._waited_for = 0  # guarded by _lock
        self._passed_s = 0.0  # guarded by _lock
        self._last_ns = clock.now_ns()  # guarded by _lock

    def __repr__(self) -> str:
        return f"<DividedTime {self._under_way} under way, {self._waited_for} waited for>"

    def begin_load(self) -> float:
        """A load is under way from now on. Returns what `end_load` gives the difference to."""
        with self._lock:
            self._pass()
            self._under_way += 1
            return self._passed_s

    def end_load(self, begun_s: float) -> float:
        """A load has ended. Returns what it has cost, in seconds; `begun_s`: from its `begin_load`."""
        with self._lock:
            self._pass()
            self._under_way -= 1
            assert self._under_way >= self._waited_for >= 0
            return self._passed_s - begun_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A load that is under way is waited for."""
        with self._lock:
            self._pass()
            self._waited_for += 1
        try:
            yield
        finally:
            with self._lock:
                self._pass()
                self._waited_for -= 1

    def _pass(self) -> None:
        now_ns = self._clock.now_ns()
        if self._waited_for:
            self._passed_s += (now_ns - self._last_ns) / NS_PER_S / self._under_way
        self._last_ns = now_ns
