"""Commit columns: what a writer says of the chunks that it commits, and the parts of them run by run. Pure; any thread."""

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.errors import ProtocolError
from kvpool.ids import CHECKSUM_BYTES, TOKEN_BYTES
from kvpool.index.reservations import ReservedRun
from kvpool.journal.token_columns import check_tokens, with_scope
from kvpool.layout import Layout


class CommitColumns(NamedTuple):
    """`checksums`: u32 [chunk][extent], of parts [chunk][extent of the part]; `tokens`: ids of all chunks, or none; `scope`: is
    stored after those of each."""

    checksums: bytes
    tokens: bytes = b""
    scope: bytes = b""

    def part(self, first: int, end: int, *, chunks: int) -> "CommitColumns":
        """The columns of the chunks from `first` up to `end`, of all `chunks`."""
        if first == 0 and end == chunks:
            return self
        sums, tokens = len(self.checksums) // chunks, len(self.tokens) // chunks
        return CommitColumns(
            self.checksums[first * sums : end * sums], self.tokens[first * tokens : end * tokens], self.scope
        )

    def with_scope(self, layout: Layout) -> "CommitColumns":
        """The same with the scope after each chunk's token ids, as the directory stores them."""
        if not self.tokens or not self.scope:
            return self
        return CommitColumns(self.checksums, with_scope(self.tokens, self.scope, layout.chunk_tokens))


class CommitPart(NamedTuple):
    """The next `chunks` of a run that are committed."""

    run: ReservedRun
    chunks: int
    columns: CommitColumns


def check_whole(columns: CommitColumns) -> None:
    """Raises ProtocolError for columns that are of no reservation whatever."""
    check_tokens(b"", columns.scope, count=0, chunk_tokens=1)
    if not columns.checksums or len(columns.checksums) % CHECKSUM_BYTES:
        raise ProtocolError(
            f"checksums have {len(columns.checksums)} bytes, expected {CHECKSUM_BYTES} for each extent of a chunk or more"
        )


def divide(columns: CommitColumns, runs: Sequence[ReservedRun]) -> list[CommitPart]:
    """The next chunks of a reservation that these columns are about, run by run. `columns`: of tokens those of runs that have
    any. Raises ProtocolError for columns that do not fit."""
    found: list[CommitPart] = []
    sums, tokens = columns.checksums, columns.tokens
    for run in runs:
        row = CHECKSUM_BYTES * run.extents
        chunks = min(run.chunks - run.committed, len(sums) // row)
        if not chunks:
            if sums and run.committed < run.chunks:
                break
            continue
        of_run = chunks * run.layout.chunk_tokens * TOKEN_BYTES if columns.tokens and run.is_chain else 0
        part = CommitColumns(sums[: chunks * row], tokens[:of_run], columns.scope if of_run else b"")
        check_tokens(part.tokens, part.scope, count=chunks, chunk_tokens=run.layout.chunk_tokens)
        found.append(CommitPart(run, chunks, part))
        sums, tokens = sums[chunks * row :], tokens[of_run:]
        if run.committed + chunks < run.chunks:
            break
    if sums or tokens or not found:
        left = sum(run.chunks - run.committed for run in runs)
        raise ProtocolError(
            f"checksums have {len(columns.checksums)} bytes and tokens {len(columns.tokens)}, expected whole rows of "
            f"the next of {left} chunks that are reserved"
        )
    return found
