"""Promise records: leases for other processes alone. Many go out in one Batch. Fields as in `messages`; any thread."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer with `tickets` tickets on those of `chunks` leading chunks that are there.

    `keys`: of a layout with groups as in AcquireGroups; else the key of each chunk as in Acquire, or only the last one on each
    rank as in AcquireLeaves. `owner`: as in AcquireFrom; empty: nobody. `claims`: of each ticket, as in IssueTicket.
    """

    KIND: ClassVar[int] = 93
    keys: bytes
    chunks: int
    owner: str
    tickets: int
    claims: int


@dataclass(frozen=True, slots=True)
class Promised:
    """How many chunks were leased, 0 for none, and the level of each (as in Leased to a scheduler). `tickets`: one after the
    other, each of equal length."""

    KIND: ClassVar[int] = 94
    chunks: int
    tiers: bytes
    tickets: bytes
