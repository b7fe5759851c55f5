"""SSD watch: suspends an SSD tier whose disk does not respond, and schedules its retries.

    I/O begins ──► looked at every LOOK_S while there is any ──unanswered for ssd.stall_timeout──► OFFLINE
    READONLY, OFFLINE ──a pause, longer each time until something succeeds──► tried again, if the disk answers at all

It decides on states only: what is under way stays so until the disk has answered. Control thread only; before `start` it
does nothing.
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
    """The tier, as the watch knows it."""

    corruption: CorruptionGuard

    @property
    def stall_s(self) -> float:
        """For how long a disk may leave I/O unanswered."""
        ...

    @property
    def has_jobs(self) -> bool:
        """Whether I/O is under way or waits."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether there is a point in trying."""
        ...

    @property
    def has_stalled(self) -> bool:
        """Whether the disk of a tier in use has left I/O unanswered for `stall_s`."""
        ...

    @property
    def can_be_tried_again(self) -> bool:
        """Whether the tier is open and rests because of errors."""
        ...

    def become(self, state: TierState, reason: str = "") -> None:
        """Change the state."""
        ...

    def rest_stalled(self) -> None:
        """Stop using a disk that does not answer."""
        ...

    def try_again(self) -> None:
        """Take the tier as usable, as if nothing had been."""
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
        """The tier is open."""
        self._loop = loop

    def stop(self) -> None:
        """Look no more."""
        self._loop = None
        for timer in (self._retry, self._look):
            if timer is not None:
                timer.cancel()

    def next_pause_s(self) -> float:
        """Seconds to suspend the tier now; twice as long the next time."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LAST_PAUSE_S)
        return pause_s

    def note(self, status: SsdStatus, generation: int, now_ns: int) -> None:
        """Note the result of a chunk's I/O. Too many wrong bytes suspend the tier for longer than errors do."""
        if status == SsdStatus.OK:
            self._pause_s = FIRST_PAUSE_S
        elif self._tier.corruption.note(status, generation, now_ns):
            self._tier.become(TierState.READONLY, f"because {REASON}")
            self._pause_s = REST_S
            self.see_to_it()

    def note_begun(self) -> None:
        """I/O has been asked for."""
        if self._loop is not None and self._look is None:
            self._look = self._loop.call_later(min(LOOK_S, self._tier.stall_s / 2), self._look_at_it)

    def see_to_it(self) -> None:
        """Have a tier that rests tried again later."""
        if self._loop is not None and self._retry is None and self._tier.can_be_tried_again:
            self._retry = self._loop.call_later(self.next_pause_s(), self._end_rest)

    def _look_at_it(self) -> None:
        self._look = None
        # Twice in a row: after the daemon itself stood still the disk has answered, and nobody has looked yet.
        was_stalled, self._was_stalled = self._was_stalled, self._tier.has_stalled
        if was_stalled and self._was_stalled:
            self._tier.rest_stalled()
        self.see_to_it()
        if self._tier.has_jobs:
            self.note_begun()

    def _end_rest(self) -> None:
        self._retry = None
        if not self._tier.is_answering:
            self._pause_s = FIRST_PAUSE_S  # nothing was tried: it costs nothing to look again soon
        elif self._tier.can_be_tried_again:
            self._tier.try_again()
        self.see_to_it()
