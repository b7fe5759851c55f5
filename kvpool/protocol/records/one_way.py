"""One-way records: never answered, so that their sender does not wait.

Each is served in the order of its connection's requests: later requests see its effect. The daemon counts one that fails, and
logs unexpected failures. Fields as in `messages`. Any thread.
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
