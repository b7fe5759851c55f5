"""Watch of a thread's steps: notices one that computes without an end.

ZMQ takes all subscriptions that wait in one call, and one that comes meanwhile belongs to it: a subscriber that sends without
a pause keeps the publisher's thread in that call, while what it takes into memory has no bound. Only another thread can end
that. A thread that waits uses no processor, and one that the machine gives none takes nothing in. Loop thread only.
"""

import asyncio
import threading
from collections.abc import Callable

from kvpool.clock import NS_PER_S, ThreadClock

# A flood takes 1.2 GB/s into memory (measured): each look costs some microseconds.
LOOK_S = 0.05
# Of the processor, within one step: a step takes a millisecond.
STEP_S_MAX = 0.05
# Who has used less between two looks has waited, and a new count begins.
WAITED_S = 0.005


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
        self._name = thread.name
        self._clock = ThreadClock(thread)
        self._steps = steps
        self._on_endless = on_endless
        self._loop = loop
        self._step = steps()
        self._begun_ns = self._looked_ns = self._clock.now_ns()
        self._next = loop.call_later(LOOK_S, self._look)

    def __repr__(self) -> str:
        return f"<StepWatch of {self._name}>"

    def close(self) -> None:
        """Watch no more."""
        self._next.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(LOOK_S, self._look)
        ran_ns, step = self._clock.now_ns(), self._steps()
        if step != self._step or ran_ns - self._looked_ns < WAITED_S * NS_PER_S:
            self._step, self._begun_ns = step, ran_ns
        elif ran_ns - self._begun_ns > STEP_S_MAX * NS_PER_S:
            self._on_endless()
        self._looked_ns = ran_ns
