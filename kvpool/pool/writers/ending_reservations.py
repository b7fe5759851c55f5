"""Ending reservations: removed from the directory in bounded parts, because a long one takes longer than a turn.

Control thread only. Invariant: nothing can commit or write a reservation in `_expiring` or `_ending`.
"""

import sys
from collections.abc import Callable

import kvpool_native
from kvpool.ids import ReservationId

# Chunks ended in one call: half a millisecond (a chunk that was not stored takes 1 us). A reservation itself costs as much as
# some chunks.
ENDED_AT_ONCE = 512
ENDED_COST = 8


class EndingReservations:
    """See the module. `on_backlog` has `end_more` called soon; without it everything is ended at once."""

    def __init__(self, directory: kvpool_native.Directory, on_backlog: Callable[[], None] | None = None) -> None:
        self._directory = directory
        self._on_backlog = on_backlog
        # Chunks of each, in the order in which they are to be ended.
        self._expiring: dict[ReservationId, int] = {}
        self._ending: dict[ReservationId, int] = {}
        self._left = ENDED_AT_ONCE  # chunks that may be ended before `end_more` is called again

    def __repr__(self) -> str:
        return f"<EndingReservations {len(self._expiring)} expiring, {len(self._ending)} ending>"

    @property
    def are_left(self) -> bool:
        """Whether `end_more` has more to do."""
        return bool(self._expiring or self._ending)

    def is_ending(self, reservation: ReservationId) -> bool:
        """Whether a reservation has ended and is not out of the directory."""
        return reservation in self._ending

    def expire(self, reservation: ReservationId, chunks: int, now_ns: int) -> None:
        """Expire a reservation of so many chunks; its slots stay reserved."""
        self._expiring[reservation] = chunks
        self._begin(now_ns)

    def end_reservation(self, reservation: ReservationId, chunks: int, now_ns: int, *, is_asked: bool = True) -> None:
        """End a reservation of so many chunks: a short requested one at once, before all that wait."""
        self._ending[reservation] = chunks
        if (is_asked and chunks <= ENDED_AT_ONCE) or self._on_backlog is None:
            self._directory.end_reservation(reservation, now_ns)
            del self._ending[reservation]
        self._begin(now_ns)

    def go_on_with(self, reservation: ReservationId, now_ns: int) -> None:
        """End a part of this reservation, whose requester then waits for no other."""
        if reservation in self._ending and self._directory.end_part(reservation, ENDED_AT_ONCE, now_ns):
            del self._ending[reservation]

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
        for reservations, end_part in (
            (self._expiring, self._directory.expire_part),
            (self._ending, self._directory.end_part),
        ):
            while self._left > 0 and reservations:
                reservation, chunks = next(iter(reservations.items()))
                if not end_part(reservation, self._left, now_ns):
                    self._left = 0
                    return
                del reservations[reservation]
                self._left -= ENDED_COST + chunks
