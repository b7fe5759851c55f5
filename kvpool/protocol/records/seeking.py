"""Seeking records: questions for chunks of the store that nodes share. Fields as in `messages`. Any thread."""

from dataclasses import dataclass
from typing import ClassVar

SEEK_KEYS_MAX = 4096  # of all groups and ranks


@dataclass(slots=True, unsafe_hash=True)
class Seek:
    """Which of these chunks the shared store has: of every group and rank so many, one after the other. Of a chain they follow
    chunks that are known, and it is not asked for those behind one that it is known to lack; of a set, where the keys
    `are_alone`, it is asked for each.

    `counts`: u32, how many keys of each namespace of the connection, by group and rank; SEEK_KEYS_MAX in all at most.

    For daemons with `has_store` in the Welcome. Answered by Sought, after `timeout_s` or `store.answer_timeout` at the latest.
    """

    KIND: ClassVar[int] = 76
    counts: bytes
    keys: bytes
    timeout_s: float
    are_alone: bool = False


@dataclass(slots=True, unsafe_hash=True)
class Sought:
    """`there`: 1 for each chunk that it has, else 0; a hint, as a lookup's. `remember_s`: how long it is worth nothing to ask
    for the others again."""

    KIND: ClassVar[int] = 77
    there: bytes
    remember_s: float
