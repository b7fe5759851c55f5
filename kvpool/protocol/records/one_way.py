"""The records that are never answered, so that whoever sends one waits for nothing.

Each takes its place among the requests of its connection: what is asked behind it sees what it did. One that fails is counted
by the daemon, and said in its log where nobody expected it. Fields as in `messages`. Any thread.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvpool.protocol.records import messages as m


@dataclass(frozen=True, slots=True)
class DropLease:
    """End a lease, as Release does."""

    KIND: ClassVar[int] = 18
    lease: int


@dataclass(frozen=True, slots=True)
class DropReservation:
    """End a reservation, as End does."""

    KIND: ClassVar[int] = 19
    reservation: int


@dataclass(frozen=True, slots=True)
class DropLeases:
    """End leases, a column of u64, RENEWALS_MAX at most."""

    KIND: ClassVar[int] = 62
    leases: bytes


UNANSWERED = frozenset(record.KIND for record in (m.Usage, DropLease, DropLeases, DropReservation))
