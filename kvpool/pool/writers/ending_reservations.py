"""Reservations that end or expire: out of the directory in bounded parts, since a long one takes longer than a turn.

Control thread only. Invariant: what is in `_expiring` or `_ending` is nobody's to commit or to write any more.
"""

import sys
from collections.abc import Callable

import kvpool_native
from kvpool.types import ReservationId

# What is ended in one call, in chunks: half a millisecond (a chunk that was not stored takes 1 us). A reservation itself
# costs as much as some chunks.
ENDED_AT_ONCE = 512
ENDED_COST = 8


class EndingReservations:
    """See the module. `on_backlog` has `go_on` called soon; without it everything is ended at once."""

    def __init__(self, directory: kvpool_native.Directory, on_backlog: Callable[[], None] | None = None) -> None:
        self._directory = directory
        self._on_backlog = on_backlog
        # With how many chunks each has, the first to be ended first.
        self._expiring: dict[ReservationId, int] = {}
        self._ending: dict[ReservationId, int] = {}
        self._left = ENDED_AT_ONCE  # what may be ended before `go_on` is called again

    def __repr__(self) -> str:
        return f"<EndingReservations {len(self._expiring)} expiring, {len(self._ending)} ending>"

    @property
    def are_left(self) -> bool:
        """Whether `go_on` has more to do."""
        return bool(self._expiring or self._ending)

    def is_ending(self, reservation: ReservationId) -> bool:
        """Whether a reservation has ended and is not out of the directory."""
        return reservation in self._ending

    def expire(self, reservation: ReservationId, chunks: int, now_ns: int) -> None:
        """Take a reservation of so many chunks out of sight; its slots stay."""
        self._expiring[reservation] = chunks
        self._begin(now_ns)

    def end(self, reservation: ReservationId, chunks: int, now_ns: int, *, is_asked: bool = True) -> None:
        """End a reservation of so many chunks: a short one that somebody asks for at once, whatever waits."""
        self._ending[reservation] = chunks
        if (is_asked and chunks <= ENDED_AT_ONCE) or self._on_backlog is None:
            self._directory.end_reservation(reservation, now_ns)
            del self._ending[reservation]
        self._begin(now_ns)

    def go_on_with(self, reservation: ReservationId, now_ns: int) -> None:
        """End a part of one that ends: whoever asked for it waits for no other."""
        if reservation in self._ending and self._directory.end_part(reservation, ENDED_AT_ONCE, now_ns):
            del self._ending[reservation]

    def go_on(self, now_ns: int) -> None:
        """End a bounded number of chunks."""
        self._left = ENDED_AT_ONCE if self._on_backlog else sys.maxsize
        self._run(now_ns)

    def _begin(self, now_ns: int) -> None:
        """At once what this turn has left for it; the next one goes on."""
        if self._on_backlog is None:
            self.go_on(now_ns)
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
