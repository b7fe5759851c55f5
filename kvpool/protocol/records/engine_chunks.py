"""Records about engine chunks: those that an engine has in a block pool of its own. Fields as in `messages`. Any thread."""

from dataclasses import dataclass
from typing import Any, ClassVar

# In one report, removed and stored ones together: a turn of less than a millisecond (measured: 6 µs for each).
REPORT_CHUNKS_MAX = 128
SOURCES_MAX = 1 << 16


@dataclass(slots=True, unsafe_hash=True)
class ReportChunks:
    """What one of an engine's block pools has dropped, and what it has from now on. Answered by ChunksTaken.

    `source`: the block pool's number on this connection. `is_anew`: what it has reported before is void, `removed` is empty.
    `removed`: keys, children before their parents; this source has reported each, and it was taken. Stored chunks, parents
    before their children, in columns: `parents` keys (for the first chunk of a prompt the chain's root), `firsts` u8 (1: the
    first of a prompt), `tokens` i32 [chunk][token]; their keys follow from these. `scopes`: each scope that occurs (see
    `kvpool.keys`), and `scope_of` u16 the index of each chunk's.
    """

    KIND: ClassVar[int] = 78
    source: int
    is_anew: bool
    removed: bytes
    parents: bytes
    firsts: bytes
    tokens: bytes
    scopes: list[Any]
    scope_of: bytes


@dataclass(slots=True, unsafe_hash=True)
class ChunksTaken:
    """A `ReportState` for each stored chunk of the report."""

    KIND: ClassVar[int] = 79
    states: bytes
