"""Handler of an engine's reports about chunks in its own block pools, which are level 0 of the event stream.

Keys are computed here, from a chunk's parent and token ids: a client cannot report a key whose tokens it does not know, nor
give a known one other tokens. A report is taken when the journal has every change of the tiers: its events depend on them.

A connection has an allowance of reports, so that one that reports and drops without end does not crowd everybody else's events
out of the log. Control thread only.
"""

from dataclasses import dataclass
from typing import Any

import kvpool_native
from kvpool.clock import Clock, Deadline
from kvpool.errors import InvalidArgument, ProtocolError, Refused
from kvpool.ids import TOKEN_BYTES
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.journal.engine_chunks import EngineChunk, Source
from kvpool.journal.event_log import EVENT_BYTES
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.keys import Scope, is_scope, split_scope
from kvpool.peers.token_bucket import TokenBucket
from kvpool.pool.pool import Pool
from kvpool.protocol.records import engine_chunks as ec
from kvpool.protocol.verbs import ENGINE, verb
from kvpool.units import format_size

# A flood of changes keeps a report waiting; the engine repeats one that was refused as busy (guess).
CATCH_UP_S = 0.25
# A connection's reports in the event log: BURST_BYTES at once, RATE_BYTES in each second after it. That is 9,000 chunks of 16
# tokens a second, more than an engine computes, and at once half of the log's default size (guesses).
BURST_BYTES = 8 << 20
RATE_BYTES = 4 << 20
REMOVAL_BYTES = 100
_INDEX_BYTES = 2


@dataclass(frozen=True, slots=True)
class _Report:
    removed: KeyColumn
    stored: tuple[EngineChunk, ...]


class EngineReportVerbs:
    """The reports of one engine's connection. `user`: whose share counts them, if anybody's."""

    def __init__(self, pool: Pool, session: EngineSession, *, user: int | None, clock: Clock) -> None:
        self._pool = pool
        self._session = session
        self._user = user
        self._clock = clock
        self._allowance = TokenBucket(RATE_BYTES, BURST_BYTES, clock)

    @verb(ec.ReportChunks, roles=ENGINE)
    def report(self, request: ec.ReportChunks) -> Parts[ec.ChunksTaken]:
        """Chunks of a block pool that have come and gone."""
        namespace = self._session.own
        report = _report_of(request, namespace.layout.chunk_tokens, keeps_ids=self._pool.chains.keeps_token_ids)
        source = Source(self._session.connection, request.source, self._user)
        size = sum(EVENT_BYTES + len(chunk.tokens) for chunk in report.stored) + REMOVAL_BYTES * len(report.removed)
        if not self._allowance.take_tokens(size):
            raise Refused("busy", f"reports are more than {format_size(RATE_BYTES)} a second: report again")
        journal, deadline = self._pool.journal, Deadline(CATCH_UP_S, self._clock)
        if request.is_anew:
            journal.end_source(source)
        while journal.is_behind:
            if deadline.has_passed():
                raise Refused("busy", f"changes of the tiers have waited for {CATCH_UP_S:g} s: report again")
            journal.take_changes()
            yield None
        return ec.ChunksTaken(journal.take_report(source, namespace.id, report))


def _report_of(request: ec.ReportChunks, chunk_tokens: int, *, keeps_ids: bool) -> _Report:
    """The report in a request. Raises ProtocolError or InvalidArgument."""
    count = _check_columns(request, chunk_tokens)
    removed = KeyColumn(request.removed)
    if request.is_anew and removed:
        raise InvalidArgument(f"source {request.source} begins anew and removes {len(removed)} chunks, expected none")
    if not count:
        return _Report(removed, ())
    size = TOKEN_BYTES * chunk_tokens
    scopes = [_scope_of(scope) for scope in request.scopes]
    chosen = memoryview(request.scope_of).cast("H")
    is_kept = keeps_ids and chunk_tokens <= kvpool_native.TOKEN_IDS_MAX
    ids: Any = memoryview(request.tokens).cast("i")  # a buffer serves as well as an array
    leaves = KeyColumn(kvpool_native.hash_leaves(ids, chunk_tokens))
    stored = []
    for number, (parent, leaf) in enumerate(zip(KeyColumn(request.parents), leaves, strict=True)):
        tokens = request.tokens[number * size : (number + 1) * size] if is_kept else b""
        scope = scopes[chosen[number]] if is_kept else Scope()
        key = kvpool_native.chain_keys(parent, leaf)
        stored.append(EngineChunk(key, b"" if request.firsts[number] else parent, tokens, scope))
    return _Report(removed, tuple(stored))


def _check_columns(request: ec.ReportChunks, chunk_tokens: int) -> int:
    """How many chunks are stored. Raises ProtocolError unless the columns fit each other and the limits."""
    count = len(request.firsts)
    removed, rest = divmod(len(request.removed), packed_bytes(1))
    if rest or removed + count > ec.REPORT_CHUNKS_MAX:
        raise ProtocolError(
            f"report has {len(request.removed)} bytes of removed keys and {count} stored chunks, expected whole keys, "
            f"at most {ec.REPORT_CHUNKS_MAX} of both"
        )
    if not 0 <= request.source < ec.SOURCES_MAX:
        raise ProtocolError(f"source is {request.source}, expected 0..{ec.SOURCES_MAX - 1}")
    sizes = len(request.parents), len(request.tokens), len(request.scope_of)
    expected = packed_bytes(count), TOKEN_BYTES * chunk_tokens * count, _INDEX_BYTES * count
    if sizes != expected or not set(request.firsts) <= {0, 1}:
        raise ProtocolError(
            f"report of {count} chunks has columns of {', '.join(map(str, sizes))} bytes for parents, tokens and scopes, "
            f"expected {', '.join(map(str, expected))}, and firsts of 0 and 1"
        )
    if not all(isinstance(scope, bytes) and is_scope(scope) for scope in request.scopes):
        raise ProtocolError(f"report has {len(request.scopes)} scopes, expected each to be none or whole words")
    if count and max(memoryview(request.scope_of).cast("H")) >= len(request.scopes):
        raise ProtocolError(f"report names a scope that is not among its {len(request.scopes)}")
    return count


def _scope_of(packed: bytes) -> Scope:
    return split_scope(packed, 0)[1] if packed else Scope()
