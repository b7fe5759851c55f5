"""Device records: which leased chunks have a copy in the memory of the daemon's device tier. Fields as in `messages`.

A client maps the memory read-only and copies from it inside the device, without a hold: a copy may go at any time. It reads the
generation of the copy's slot in the shared index again after its own copy has completed; where that has changed, what it has
read is not the chunk, and it loads the chunk from the arena, where its lease holds it. Any thread."""

from dataclasses import dataclass
from typing import ClassVar

# Rows of one answer: a third of a millisecond, 96 KiB.
COPIES_MAX = 4096


@dataclass(slots=True, unsafe_hash=True)
class FindCopies:
    """Ask which chunks of a lease have copies. `first` counts the rows of Leased. Answered by Copies. For a session that has
    opened the device."""

    KIND: ClassVar[int] = 82
    lease: int
    first: int


@dataclass(slots=True, unsafe_hash=True)
class Copies:
    """The copies of the chunks from row `first` on, a row each up to the last one that has a copy, COPIES_MAX at most: columns
    of u64 offsets in the device tier's memory, u64 slots (as in Leased), and u64 generations of these slots (0: no copy)."""

    KIND: ClassVar[int] = 83
    offsets: bytes
    slots: bytes
    generations: bytes
