"""Promise records: leases for other processes alone. Many go out in one Batch. Fields as in `messages`; any thread."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, unsafe_hash=True)
class Promise:
    """Answer with `tickets` tickets on those of `chunks` leading chunks that are there.

    `keys`, `chunks` and `owner`: as in Acquire. `claims`: of each ticket, as in IssueTicket.
    """

    KIND: ClassVar[int] = 93
    keys: bytes
    chunks: int
    owner: str
    tickets: int
    claims: int


@dataclass(slots=True, unsafe_hash=True)
class Promised:
    """How many chunks were leased, 0 for none, and the level of each (as in Leased to a scheduler). `tickets`: one after the
    other, each of equal length."""

    KIND: ClassVar[int] = 94
    chunks: int
    tiers: bytes
    tickets: bytes
