"""Ending reservations: removed from the directory in bounded parts, because those of a long save take longer than a turn.

A save has one for each chain, and one for each chunk without a parent. They end together, one behind the other, and are named
by the first of them.

Control thread only. Invariant: nothing can commit or write a reservation in `_expiring` or `_ending`.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable

import kvpool_native
from kvpool.ids import ReservationId

# Chunks ended in one call: half a millisecond (a chunk that was not stored takes 1 us). A reservation itself costs as much as
# some chunks.
ENDED_AT_ONCE = 512
ENDED_COST = 8

# A reservation, and its chunks.
Sized = tuple[ReservationId, int]


class _Rest:
    """What is left of reservations that end together: `next`, of which a part may have ended, and those behind it."""

    __slots__ = ("_behind", "next")

    def __init__(self, reservations: Iterable[Sized]) -> None:
        self._behind = iter(reservations)
        self.next = next(self._behind, None)

    def end_some(self, end_part: Callable[[ReservationId, int, int], bool], most: int, now_ns: int) -> int:
        """End some, at the cost of `most` chunks: what is left of that, 0 or less where it is used up."""
        while self.next is not None and most > 0:
            reservation, chunks = self.next
            if not end_part(reservation, most, now_ns):
                return 0
            most -= ENDED_COST + chunks
            self.next = next(self._behind, None)
        return most


class EndingReservations:
    """See the module. `on_backlog` has `end_more` called soon; without it everything is ended at once."""

    def __init__(self, directory: kvpool_native.Directory, on_backlog: Callable[[], None] | None) -> None:
        self._directory = directory
        self._on_backlog = on_backlog
        # By the first of those that end together, in the order in which they are to be ended.
        self._expiring: OrderedDict[ReservationId, _Rest] = OrderedDict()
        self._ending: OrderedDict[ReservationId, _Rest] = OrderedDict()
        self._left = ENDED_AT_ONCE  # chunks that may be ended before `end_more` is called again

    def __repr__(self) -> str:
        return f"<EndingReservations {len(self._expiring)} expiring, {len(self._ending)} ending>"

    @property
    def are_left(self) -> bool:
        """Whether `end_more` has more to do."""
        return bool(self._expiring or self._ending)

    def is_ending(self, first: ReservationId) -> bool:
        """Whether reservations have ended, and not all of them are out of the directory."""
        return first in self._ending

    def expire(self, first: ReservationId, reservations: Iterable[Sized], now_ns: int) -> None:
        """Expire reservations together; their slots stay reserved."""
        self._expiring[first] = _Rest(reservations)
        self._begin(now_ns)

    def end_reservation(self, reservation: ReservationId, chunks: int, now_ns: int) -> None:
        """End a requested reservation of so many chunks."""
        self.end_reservations(reservation, [(reservation, chunks)], now_ns, chunks=chunks)

    def end_reservations(
        self, first: ReservationId, reservations: Iterable[Sized], now_ns: int, *, chunks: int, is_asked: bool = True
    ) -> bool:
        """End reservations of so many chunks together: few requested ones at once, before all that wait. Whether they have
        ended."""
        if (is_asked and chunks <= ENDED_AT_ONCE) or self._on_backlog is None:
            for reservation, _ in reservations:
                self._directory.end_reservation(reservation, now_ns)
        else:
            self._ending[first] = _Rest(reservations)
        if self.are_left:
            self._begin(now_ns)
        return first not in self._ending

    def go_on_with(self, first: ReservationId, now_ns: int) -> None:
        """End some of these, whose requester then waits for no others."""
        rest = self._ending.get(first)
        if rest is not None:
            rest.end_some(self._directory.end_part, ENDED_AT_ONCE, now_ns)
            if rest.next is None:
                del self._ending[first]

    def end_more(self, now_ns: int) -> None:
        """End a bounded number of chunks."""
        self._left = ENDED_AT_ONCE if self._on_backlog else sys.maxsize
        self._run(now_ns)

    def _begin(self, now_ns: int) -> None:
        """End as much as this turn allows; the next one continues."""
        if self._on_backlog is None:
            self.end_more(now_ns)
            return
        self._run(now_ns)
        if self.are_left:
            self._on_backlog()

    def _run(self, now_ns: int) -> None:
        for waiting, end_part in (
            (self._expiring, self._directory.expire_part),
            (self._ending, self._directory.end_part),
        ):
            while self._left > 0 and waiting:
                first, rest = next(iter(waiting.items()))
                self._left = rest.end_some(end_part, self._left, now_ns)
                if rest.next is None:
                    del waiting[first]
