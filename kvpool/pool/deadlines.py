"""Deadlines on the control thread: of leases, tickets, reservations and announcements, and of priorities with a duration.

Wakes the control thread for pending deadlines and for nothing else: an idle daemon without any is never woken. Decides nothing:
the owner of an entry ends it. Control thread only.

Invariants: while anything lives that can expire, a check is scheduled, within a second; while a priority can expire, and after
`look` was called, a tick is scheduled for that time.
"""

import asyncio
from collections.abc import Callable

import kvpool_native
from kvpool import failpoint
from kvpool.clock import NS_PER_S, Clock
from kvpool.pool.readers.readers import Readers
from kvpool.pool.writers.writers import Writers
from kvpool.tiering.tiering import Tiering

EXPIRY_FRACTION = 0.25
EXPIRY_S_MAX = 1.0
# Expired priorities are reported at most this late: a wake-up for each of many priorities would cost too much.
PRIORITY_EXPIRY_INTERVAL_NS = 100_000_000
# One tick expires a bounded number; the next one continues after this pause, so that waiting requests come first.
BACKLOG_NS = 1_000_000


class HoldExpiry:
    """Checks deadlines of leases and reservations, and has the lower tiers take what leases kept from them. `expire_further`:
    ends other expired entries; whether any are left there."""

    def __init__(
        self,
        readers: Readers,
        writers: Writers,
        clock: Clock,
        *,
        tiering: Tiering,
        shortest_s: float,
        expire_further: Callable[[], bool],
    ) -> None:
        self.change_shortest(shortest_s)
        self._readers = readers
        self._writers = writers
        self._clock = clock
        self._tiering = tiering
        self._expire_further = expire_further
        self._next: asyncio.TimerHandle | None = None
        self._more: asyncio.Handle | None = None

    def change_shortest(self, shortest_s: float) -> None:
        """Check as often as this shortest time to live needs, from the next check on."""
        self._interval_s = min(EXPIRY_S_MAX, shortest_s * EXPIRY_FRACTION)

    def schedule(self) -> None:
        """Schedule the next check; none is scheduled while nothing can expire."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._interval_s, self._look)

    def cancel(self) -> None:
        """Stop checking."""
        for handle in (self._next, self._more):
            if handle is not None:
                handle.cancel()

    def end_more(self) -> None:
        """End more leases and reservations after waiting requests, where too many had expired to end them at once."""
        if self._more is None and (self._readers.has_backlog or self._writers.has_backlog):
            self._more = asyncio.get_running_loop().call_soon(self._end_more)

    def _end_more(self) -> None:
        self._more = None
        now_ns = self._clock.now_ns()
        if self._readers.has_backlog:
            self._readers.expire(now_ns)
        self._writers.end_more(now_ns)
        self.end_more()

    def _look(self) -> None:
        self._next = None
        failpoint.reach("daemon.expire.before")
        now_ns, are_left = self._clock.now_ns(), True
        try:
            self._readers.expire(now_ns)
            self._writers.expire(now_ns)
            self._writers.end_overdue(now_ns)
            self.end_more()
            self._tiering.run()
            are_left = self._expire_further()
        finally:  # the next check comes even if this one fails
            if are_left or self._readers.leases or self._readers.tickets or self._writers.have_deadlines:
                self.schedule()


class PriorityExpiry:
    """Returns expired priorities to the default, in every tier."""

    def __init__(self, directory: kvpool_native.Directory, tiering: Tiering, clock: Clock) -> None:
        self._directories = [directory, *tiering.directories]
        self._tiering = tiering
        self._clock = clock
        self._next: asyncio.TimerHandle | None = None
        self._due_ns = 0  # of `_next`
        self._last_ns = 0

    def look(self) -> None:
        """Schedule a tick for the next priority that may expire: to be called when any was set."""
        due = [at_ns for each in self._directories if (at_ns := each.next_expiry_ns()) is not None]
        if not due:
            return
        now_ns = self._clock.now_ns()
        is_backlog = min(due) <= self._last_ns
        due_ns = max(min(due), now_ns + BACKLOG_NS, 0 if is_backlog else self._last_ns + PRIORITY_EXPIRY_INTERVAL_NS)
        if self._next is not None:
            if self._due_ns <= due_ns:
                return
            self._next.cancel()
        self._due_ns = due_ns
        self._next = asyncio.get_running_loop().call_later((due_ns - now_ns) / NS_PER_S, self._tick)

    def cancel(self) -> None:
        """Stop the ticks."""
        if self._next is not None:
            self._next.cancel()

    def _tick(self) -> None:
        self._next = None
        self._last_ns = self._clock.now_ns()
        for directory in self._directories:
            directory.expire_retention(self._last_ns)
        self._tiering.keep_up()
        self.look()
