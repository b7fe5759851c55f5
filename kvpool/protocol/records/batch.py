"""Batch records: many requests at once, for engines whose chunks do not form one chain. Each has its own answer.

Requests and answers are as in `messages`; a refused one does not affect the others. Any thread.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr

BATCH_MAX = 256  # requests in one Batch
BATCH_LEAF_CHUNKS_MAX = 20_000  # chunks that are leased by leaves in one Batch: the answers fit a frame
BATCH_PROMISE_BYTES_MAX = (
    400_000  # of levels and tickets in the answers of one Batch: with those leases they fit a frame
)
BATCH_BYTES_MAX = 900_000  # of all requests in one Batch: it fits a frame


@dataclass(slots=True, unsafe_hash=True)
class Batch:
    """Requests of the kinds in BATCHED, each the body of a frame. Served in order; answered by Batched."""

    KIND: ClassVar[int] = 60
    requests: list[Any]


@dataclass(slots=True, unsafe_hash=True)
class Batched:
    """An answer for each request of a Batch, the body of a frame: its own, or a Failure."""

    KIND: ClassVar[int] = 61
    answers: list[Any]


BATCHED = frozenset(
    record.KIND
    for record in (
        m.Acquire,
        m.Reserve,
        m.Commit,
        pr.Promise,
    )
)
