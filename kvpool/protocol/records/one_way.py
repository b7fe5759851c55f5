"""One-way records: never answered, so that their sender does not wait.

Each is served in the order of its connection's requests: later requests see its effect. The daemon counts one that fails, and
logs unexpected failures. Fields as in `messages`. Any thread.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvpool.protocol.records import messages as m


@dataclass(slots=True, unsafe_hash=True)
class DropReservations:
    """End reservations, a column of u64, RENEWALS_MAX at most: what was not committed is given up, and their writer no longer
    writes. Later requests of the connection find nothing of them in use."""

    KIND: ClassVar[int] = 19
    reservations: bytes


@dataclass(slots=True, unsafe_hash=True)
class DropLeases:
    """End leases, a column of u64, RENEWALS_MAX at most; those that have ended before are passed over."""

    KIND: ClassVar[int] = 62
    leases: bytes


@dataclass(slots=True, unsafe_hash=True)
class LandSaved:
    """Extents of all chunks of a save's `run` have been copied, from `first_extent` on: other nodes may follow them before the
    commit.

    `checksums`: u32 [chunk][extent], of one extent or several. Each extent once, in order, and before any commit of the run.
    Others may have read these extents: a chunk whose commit has other checksums for them is declined (`checksum`).
    """

    KIND: ClassVar[int] = 63
    reservation: int
    first_extent: int
    checksums: bytes
    run: int = 0


@dataclass(slots=True, unsafe_hash=True)
class NameTokens:
    """Token ids of chunks that were taken from another node or a shared store, for events: i32 of each chunk, and the `scope`
    of all as in Commit. `keys`: of consecutive chunks, of one rank after those of another, NAMED_MAX at most. Chunks that have
    them are passed over; what is not here, and what follows it, gets none."""

    KIND: ClassVar[int] = 95
    keys: bytes
    tokens: bytes
    scope: bytes


# Chunks of one NameTokens on each rank.
NAMED_MAX = 128
UNANSWERED = frozenset(record.KIND for record in (m.Usage, DropLeases, DropReservations, LandSaved, NameTokens))
