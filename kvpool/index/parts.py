"""Parts of requests about long chains: what is done between two looks at everybody else.

A request is served by a generator, which the connection's turns drive: it yields None where others may come in between, and
something to be awaited where it can go on only after that. What it holds meanwhile it gives back when it is closed. Control
thread only.
"""

import enum
from collections.abc import Awaitable, Generator
from typing import TypeVar

T = TypeVar("T")
Parts = Generator[Awaitable[object] | None, None, T]

# Chunks of one part. What costs most, evicting another for each and writing that into the journal, takes 2 µs (measured).
PART_CHUNKS = 128


def part_chunks(ranks: int) -> int:
    """Chunks of one part on each rank of a request about several."""
    return max(1, PART_CHUNKS // ranks)


class Step(enum.Enum):
    """What is to be done after a part."""

    MORE = enum.auto()
    WAIT = enum.auto()  # for room; what was done stays done
    DONE = enum.auto()
