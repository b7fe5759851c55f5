"""Parts of requests about long chains: the work between two turns of other connections.

A request is served by a generator, which the connection's turns drive: it yields None where others may be served in between,
and an awaitable where it can continue only after that. It releases what it holds when it is closed. Control thread only.
"""

import enum
from collections.abc import Awaitable, Generator
from typing import TypeVar

T = TypeVar("T")
Parts = Generator[Awaitable[object] | None, None, T]

# Chunks of one part. The most expensive work, evicting another chunk for each and writing that into the journal, takes 1.5 µs
# (measured).
PART_CHUNKS = 256
# The same of a chain of which several connections fill each chunk: 6 µs for the first of them (measured).
SHARE_CHUNKS = 128
# The same of chunks without a parent that several connections fill: each has a chain of its own, which takes 30 µs (measured).
JOINT_CHUNKS = 16


def save_chunks(*, is_part: bool, is_chain: bool) -> int:
    """Chunks of one part of a save's run. `is_part`: of each chunk a share is written."""
    if not is_part:
        return PART_CHUNKS
    return SHARE_CHUNKS if is_chain else JOINT_CHUNKS


def part_chunks(ranks: int) -> int:
    """Chunks of one part on each rank of a request about several."""
    return max(1, PART_CHUNKS // ranks)


class Step(enum.Enum):
    """The next step after a part."""

    MORE = enum.auto()
    WAIT = enum.auto()  # for room; finished work stays done
    DONE = enum.auto()
