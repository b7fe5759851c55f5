"""SSD watch: suspends an SSD tier whose disk does not respond, and schedules its retries.

    I/O begins ──► checked every LOOK_S while any is under way ──unanswered for ssd.stall_timeout──► OFFLINE
    READONLY, OFFLINE ──a pause, longer each time until something succeeds──► retried, if the disk answers at all

It changes states only: a job under way stays so until the disk has answered. Control thread only; does nothing before `start`.
"""

import asyncio
from typing import Protocol

from kvpool.tiers.base import TierState
from kvpool.tiers.ssd.corruption import REASON, REST_S, CorruptionGuard
from kvpool.tiers.ssd.status import SsdStatus

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 300.0
LOOK_S = 1.0


class Watched(Protocol):
    """The tier, as the watch sees it."""

    corruption: CorruptionGuard

    @property
    def stall_s(self) -> float:
        """How long the disk may take for I/O before the tier is OFFLINE."""
        ...

    @property
    def has_jobs(self) -> bool:
        """Whether I/O is under way or waits."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether the disk responds, so that a retry makes sense."""
        ...

    @property
    def has_stalled(self) -> bool:
        """Whether the tier is in use and its disk has not answered I/O for `stall_s`."""
        ...

    @property
    def can_be_tried_again(self) -> bool:
        """Whether the tier is open and suspended because of errors."""
        ...

    def become(self, state: TierState, reason: str = "") -> None:
        """Change the state."""
        ...

    def rest_stalled(self) -> None:
        """Stop using a disk that does not answer."""
        ...

    def try_again(self) -> None:
        """Use the tier again."""
        ...


class SsdWatch:
    """See the module."""

    def __init__(self, tier: Watched) -> None:
        self._tier = tier
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pause_s = FIRST_PAUSE_S
        self._retry: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._was_stalled = False

    def __repr__(self) -> str:
        return f"<SsdWatch of {self._tier!r}>"

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch an open tier."""
        self._loop = loop

    def stop(self) -> None:
        """End the watch."""
        self._loop = None
        for timer in (self._retry, self._look):
            if timer is not None:
                timer.cancel()

    def next_pause_s(self) -> float:
        """Seconds for which the tier is suspended now; doubles with each call."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LAST_PAUSE_S)
        return pause_s

    def note(self, status: SsdStatus, generation: int, now_ns: int) -> None:
        """Note the result of a chunk's I/O. Corruption suspends the tier for longer than errors do."""
        if status == SsdStatus.OK:
            self._pause_s = FIRST_PAUSE_S
        elif self._tier.corruption.note(status, generation, now_ns):
            self._tier.become(TierState.READONLY, f"because {REASON}")
            self._pause_s = REST_S
            self.see_to_it()

    def note_begun(self) -> None:
        """Note that I/O has begun."""
        if self._loop is not None and self._look is None:
            self._look = self._loop.call_later(min(LOOK_S, self._tier.stall_s / 2), self._look_at_it)

    def see_to_it(self) -> None:
        """Schedule the retry of a suspended tier."""
        if self._loop is not None and self._retry is None and self._tier.can_be_tried_again:
            self._retry = self._loop.call_later(self.next_pause_s(), self._end_rest)

    def _look_at_it(self) -> None:
        self._look = None
        # Twice in a row: if the daemon itself was stopped, the disk has answered and the answer was not read yet.
        was_stalled, self._was_stalled = self._was_stalled, self._tier.has_stalled
        if was_stalled and self._was_stalled:
            self._tier.rest_stalled()
        self.see_to_it()
        if self._tier.has_jobs:
            self.note_begun()

    def _end_rest(self) -> None:
        self._retry = None
        if not self._tier.is_answering:
            self._pause_s = FIRST_PAUSE_S  # nothing was retried: another check soon costs nothing
        elif self._tier.can_be_tried_again:
            self._tier.try_again()
        self.see_to_it()
