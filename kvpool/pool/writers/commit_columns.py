"""Commit columns: what a writer says of the chunks that it commits, and the columns of a part of them. Pure; any thread."""

from typing import NamedTuple

from kvpool.errors import ProtocolError
from kvpool.journal.token_columns import check_tokens, with_scope
from kvpool.layout import Layout

CHECKSUM_BYTES = 4


class CommitColumns(NamedTuple):
    """`checksums`: u32 [chunk][extent], of parts [chunk][extent of the part]; `tokens`: ids of all chunks, or none; `scope`: is
    stored after those of each."""

    checksums: bytes
    tokens: bytes = b""
    scope: bytes = b""

    def count(self, layout: Layout, extents: int | None = None) -> int:
        """How many chunks they are about. `extents`: checksums of each, if not one for each extent. Raises ProtocolError for
        columns that do not fit each other."""
        row = CHECKSUM_BYTES * (layout.extents if extents is None else extents)
        chunks, rest = divmod(len(self.checksums), row)
        if rest or not chunks:
            raise ProtocolError(f"checksums have {len(self.checksums)} bytes, expected a multiple of {row}")
        check_tokens(self.tokens, self.scope, count=chunks, chunk_tokens=layout.chunk_tokens)
        return chunks

    def part(self, first: int, end: int, *, chunks: int) -> "CommitColumns":
        """The columns of the chunks from `first` up to `end`, of all `chunks`."""
        sums, tokens = len(self.checksums) // chunks, len(self.tokens) // chunks
        return CommitColumns(
            self.checksums[first * sums : end * sums], self.tokens[first * tokens : end * tokens], self.scope
        )

    def with_scope(self, layout: Layout) -> "CommitColumns":
        """The same with the scope after each chunk's token ids, as the directory stores them."""
        return CommitColumns(self.checksums, with_scope(self.tokens, self.scope, layout.chunk_tokens))
