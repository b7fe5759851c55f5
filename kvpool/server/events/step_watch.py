"""Watch of a thread's steps: notices one that computes without an end.

ZMQ takes all subscriptions that wait in one call, and one that comes meanwhile belongs to it: a subscriber that sends without
a pause keeps the publisher's thread in that call, while what it takes into memory has no bound. Only another thread can end
that. A thread that waits uses no processor, and one that the machine gives none takes nothing in. Loop thread only.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from kvpool.clock import NS_PER_S

LOOK_S = 0.25
# Of the processor, within one step between two looks: a step takes a millisecond.
STEP_S_MAX = 0.1


class StepWatch:
    """See the module. `steps`: how many the thread has begun. `on_endless`: called with each look at an endless step."""

    def __init__(
        self,
        thread: threading.Thread,
        steps: Callable[[], int],
        on_endless: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """REQUIRES: the thread has been started."""
        self._schedule = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        self._steps = steps
        self._on_endless = on_endless
        self._loop = loop
        self._former = steps(), self._ran_ns()
        self._next = loop.call_later(LOOK_S, self._look)

    def __repr__(self) -> str:
        return f"<StepWatch of {self._schedule.parent.name}>"

    def close(self) -> None:
        """Watch no more."""
        self._next.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(LOOK_S, self._look)
        steps, ran_ns = self._steps(), self._ran_ns()
        if steps == self._former[0] and ran_ns - self._former[1] > STEP_S_MAX * NS_PER_S:
            self._on_endless()
        self._former = steps, ran_ns

    def _ran_ns(self) -> int:
        """Processor time of the thread; 0 where it has ended."""
        try:
            return int(self._schedule.read_text().split()[0])
        except OSError:
            return 0
