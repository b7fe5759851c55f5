"""SSD watch: suspends an SSD tier whose disk does not respond, and schedules its retries.

    I/O begins ──► checked every LOOK_S while any is under way ──unanswered for ssd.stall_timeout──► OFFLINE
    READONLY, OFFLINE ──a pause, longer each time──► retried, if the disk answers at all

Reads, writes and the catalogue have a pause each, which begins again at FIRST_PAUSE_S when they succeed after a time in use
that is longer than the next one would be: one good read between bad ones shows no healthy disk.

It changes states only: a job under way stays so until the disk has answered. Control thread only; does nothing before `start`.
"""

import asyncio
from typing import TYPE_CHECKING

from kvpool.tiers.base import TierState
from kvpool.tiers.ssd.corruption import REASON, REST_S
from kvpool.tiers.ssd.status import SsdStatus

if TYPE_CHECKING:
    from kvpool.tiers.ssd.tier import SsdTier

READS, WRITES, CATALOGUE, OTHER = "reads", "writes", "catalogue", "other"
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 300.0
LOOK_S = 1.0


class SsdWatch:
    """See the module."""

    def __init__(self, tier: "SsdTier") -> None:
        self._tier = tier
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pauses_s: dict[str, float] = {}  # by what is suspended; without an entry FIRST_PAUSE_S
        self._tried_at_s = 0.0  # when the tier was last tried again
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
        """Seconds for which the tier is suspended now; doubles with each call for what has failed."""
        failed = self._tier.suspended or (OTHER,)
        pauses_s = [self._pauses_s.get(what, FIRST_PAUSE_S) for what in failed]
        self._pauses_s.update(
            {what: min(2 * pause_s, LAST_PAUSE_S) for what, pause_s in zip(failed, pauses_s, strict=True)}
        )
        return max(pauses_s)

    def note_success(self, what: str) -> None:
        """Note that reads, writes or the catalogue have done what they should."""
        if not self._pauses_s or self._loop is None:
            return
        well_s = self._loop.time() - self._tried_at_s
        for one in (what, OTHER):
            if well_s > self._pauses_s.get(one, 0.0):
                self._pauses_s.pop(one, None)

    def note_result(self, status: SsdStatus, generation: int, now_ns: int) -> None:
        """Note the result of a chunk's I/O. Corruption suspends the tier for longer than errors do."""
        if self._tier.corruption.note_result(status, generation, now_ns):
            self._tier.become(TierState.READONLY, f"because {REASON}")
            self._pauses_s[WRITES] = self._pauses_s[READS] = self._pauses_s[OTHER] = REST_S
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
            self._pauses_s.clear()  # nothing was retried: another check soon costs nothing
        elif self._tier.can_be_tried_again:
            self._tried_at_s = self._loop.time() if self._loop is not None else 0.0
            self._tier.try_again()
        self.see_to_it()
