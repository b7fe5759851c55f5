"""Pages of a snapshot of the stored chunks. Values; any thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.events import StoredChunk
from kvpool.ids import TOKEN_BYTES
from kvpool.key_column import KeyColumn
from kvpool.keys import split_scope

# The cursor of the last page.
SNAPSHOT_END = -1


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """Some chunks that the pool has at event `as_of`; `cursor` asks for more, SNAPSHOT_END when there are none.

    `words`: the pending read from disk for the chunks at `lacking`, whose token ids are not in memory. A chunk's token ids
    never change, so that it does not matter when they come.
    """

    chunks: tuple[StoredChunk, ...]
    as_of: int
    cursor: int
    lacking: tuple[int, ...] = ()
    words: "Future[list[bytes]] | None" = None

    def with_words(self, words: Sequence[bytes], chunk_tokens: Callable[[int], int]) -> "SnapshotPage":
        """The page with the token ids that were read. `chunk_tokens`: of a namespace."""
        chunks = list(self.chunks)
        for at, packed in zip(self.lacking, words, strict=True):
            chunk = chunks[at]
            tokens, scope = split_scope(packed, TOKEN_BYTES * chunk_tokens(chunk.namespace))
            chunks[at] = chunk._replace(tokens=tokens, adapter=scope.adapter, salt_tag=scope.salt_tag)
        return SnapshotPage(tuple(chunks), self.as_of, self.cursor)


class KeyPage(NamedTuple):
    """A page that has the keys alone. `as_of`, `cursor`: as of a `SnapshotPage`."""

    keys: KeyColumn
    as_of: int
    cursor: int
