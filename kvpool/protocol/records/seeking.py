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
