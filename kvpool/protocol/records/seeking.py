"""Seeking records: questions for chunks of the store that nodes share. Fields as in `messages`. Any thread."""

from dataclasses import dataclass
from typing import ClassVar

SEEK_KEYS_MAX = 4096  # of all ranks


@dataclass(frozen=True, slots=True)
class Seek:
    """How many leading ones of these chunks the shared store has, on every rank; rank-major. They follow chunks that are known.
    SEEK_KEYS_MAX keys at most.

    For daemons with `has_store` in the Welcome. Answered by Sought, after `timeout_s` or `store.answer_timeout` at the latest.
    """

    KIND: ClassVar[int] = 76
    keys: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sought:
    """`chunks`: how many; a hint, as a lookup's. `remember_s`: how long it is worth nothing to ask for the next one again."""

    KIND: ClassVar[int] = 77
    chunks: int
    remember_s: float


@dataclass(frozen=True, slots=True)
class SeekEach:
    """Which of these chunks the shared store has, each by itself: of every group and rank so many, one after the other.

    `counts`: u32, how many keys of each namespace of the connection, by group and rank; SEEK_KEYS_MAX in all at most.

    For daemons with `has_store` in the Welcome. Answered by SoughtEach, after `timeout_s` or `store.answer_timeout` at the
    latest.
    """

    KIND: ClassVar[int] = 90
    counts: bytes
    keys: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SoughtEach:
    """`there`: 1 for each chunk that it has, else 0; a hint. `remember_s`: as in Sought."""

    KIND: ClassVar[int] = 91
    there: bytes
    remember_s: float
