"""Hints of a Pool about chunks: retention, announcements, demote hints, and the envelopes of orchestrators.

Each request is one round trip; a call that takes several begins none after half of the Pool's time. Where the daemon fails, the
outcome is `absent`, never an exception. Any thread.
"""

from kvpool import failpoint
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.states import RetainState, TokenRange
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.promise_line import PromiseLine
from kvpool_client.connection.session import Session
from kvpool_client.hint_envelope import (
    ACCEPTED,
    CLIPPED,
    DEMOTE,
    PREFETCH,
    REJECTED,
    Action,
    HintReport,
    Hints,
    Outcome,
)
from kvpool_client.key_chain import KeyChain
from kvpool_client.retention import RetentionColumns, plan_retention
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.results import AnnounceResult, RetainResult

_AWAY = "the daemon is away"
_LATE = "the daemon did not answer in time"


class HintClient:
    """Sends the hints of one Pool to the daemon, for every rank that the Pool stands for."""

    def __init__(
        self,
        layout: Layout,
        link: Link,
        counters: Counters,
        timeout_s: float,
        *,
        finder: Finder,
    ) -> None:
        self.line: PromiseLine | None = None  # over which chunks are leased, where it is not the Pool's own connection
        self._finder = finder
        self._layout = layout
        self._link = link
        self._counters = counters
        self._timeout_s = timeout_s
        ranks = len(layout.ranks) * max(1, len(layout.groups))
        self._chunks_max = m.KEYS_MAX // ranks
        self._retain_keys_max = max(1, m.RETAIN_KEYS_MAX // ranks)

    def retain(
        self, keys: KeyChain, retention_columns: RetentionColumns, deadline: Deadline | None = None
    ) -> RetainResult:
        """Set the retention of the covered chunks; one round trip for each RETAIN_KEYS_MAX of them on all ranks."""
        deadline = deadline or Deadline(self._timeout_s)
        covered = retention_columns.covered
        columns = [KeyColumn(column) for column in keys.columns()]
        states = b""
        for first in range(0, len(covered), self._retain_keys_max):
            chosen = covered[first : first + self._retain_keys_max]
            request = m.Retain(
                b"".join(column.chosen(chosen).packed for column in columns),
                retention_columns.priorities[chosen].tobytes(),
                retention_columns.durations_ms[chosen].astype("<u4").tobytes(),
            )
            states += self._ask(request, len(chosen), deadline)
        result = RetainResult.of(len(keys), covered.tolist(), states)
        self._counters.count("retained_chunks", result.accepted)
        self._counters.count("clipped_chunks", result.clipped)
        return result

    def demote(
        self, keys: KeyChain, first_chunk: int = 0, end_chunk: int | None = None, deadline: Deadline | None = None
    ) -> RetainResult:
        """Demote hint: write the chunks before `end_chunk` to the lower tier, and evict those from `first_chunk` on first from
        DRAM."""
        deadline = deadline or Deadline(self._timeout_s)
        end = min(len(keys) if end_chunk is None else end_chunk, self._chunks_max)
        covered = range(min(first_chunk, end), end)
        states = b""
        for first in covered[:: self._retain_keys_max]:
            last = min(first + self._retain_keys_max, end)
            states += self._ask(m.Demote(keys.leading(last).packed, first), last - first, deadline)
        result = RetainResult.of(len(keys), covered, states)
        self._counters.count("demoted_chunks", result.accepted)
        return result

    def announce(
        self, keys: KeyChain, end_chunk: int | None = None, deadline: Deadline | None = None
    ) -> AnnounceResult:
        """Announce that the chunks before `end_chunk` will be requested soon; with windows and states, what the hit before it
        needs that this node has."""
        named = len(keys) if end_chunk is None else min(end_chunk, len(keys))
        asked = min(named, self._finder.chunks_max)
        session = self._link.session
        left_s = self._timeout_s if deadline is None else deadline.remaining_s()
        if session is None or not asked or left_s < self._timeout_s / 2:
            return AnnounceResult(0, 0, named)
        try:
            failpoint.reach("client.announce.before", failpoint.unreachable)
            request = self._announcement(session, keys, asked)
            line = self.line  # an older daemon, or one that has gone, gives no promises, and leases nothing over it
            call = session.call if line is None or not line.is_connected else line.call
            answer = call(request, m.Announced, left_s) if request is not None else m.Announced(0, 0)
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return AnnounceResult(0, 0, named)
        self._counters.count("announced_chunks", answer.chunks)
        return AnnounceResult(answer.chunks, answer.clipped, named - answer.chunks - answer.clipped)

    def hint(self, hints: Hints, keys: KeyChain, prompt_tokens: int | None) -> HintReport:
        """Carry each action out. Returns the outcomes, and the retention for saves of the same request."""
        deadline = Deadline(self._timeout_s)
        outcomes = [
            entry if isinstance(entry, Outcome) else self._act(entry, keys, prompt_tokens, deadline)
            for entry in hints.actions
        ]
        for outcome in outcomes:
            self._counters.count(f"hints_{outcome.status}", 1)
        output = hints.output
        return HintReport(
            hints.message_id,
            tuple(outcomes),
            hints.retention,
            output.priority if output is not None else None,
            output.duration_s if output is not None else None,
        )

    def _act(self, action: Action, keys: KeyChain, prompt_tokens: int | None, deadline: Deadline) -> Outcome:
        if self._link.session is None:
            return action.ended(REJECTED, _AWAY)
        if deadline.remaining_s() < self._timeout_s / 2:
            return action.ended(REJECTED, _LATE)
        if action.verb == PREFETCH:
            return self._prefetch(action, keys, deadline)
        if action.verb == DEMOTE:
            first, end = self._chunks_of(action.ranges[0], keys)
            return _outcome_of(action, self.demote(keys, first, end, deadline))
        retention_columns = plan_retention(
            action.ranges,
            chunks=len(keys),
            chunk_tokens=self._layout.chunk_tokens,
            prompt_tokens=prompt_tokens,
            decode_priority=action.output.priority if action.output and prompt_tokens is not None else None,
            decode_duration_s=action.output.duration_s if action.output and prompt_tokens is not None else None,
        )
        return _outcome_of(action, self.retain(keys, retention_columns, deadline))

    def _prefetch(self, action: Action, keys: KeyChain, deadline: Deadline) -> Outcome:
        _, end = self._chunks_of(action.ranges[0], keys)
        result = self.announce(keys, end, deadline)
        if result.clipped:
            return action.ended(CLIPPED, f"{result.clipped} chunks are beyond what may be announced")
        if not result.announced:
            return action.ended(REJECTED, "nothing of it is stored")
        return action.ended(ACCEPTED, f"{result.absent} chunks are not stored" if result.absent else "")

    def _chunks_of(self, span: TokenRange, keys: KeyChain) -> tuple[int, int]:
        """The first chunk that a range touches, and the first behind it."""
        size = self._layout.chunk_tokens
        end = len(keys) if span.end is None else min(len(keys), -(-span.end // size))
        return span.start // size, end

    def _announcement(self, session: Session, keys: KeyChain, chunks: int) -> m.Announce | None:
        if self._finder.has_windows:
            chunks = self._finder.find(session, keys, chunks, is_here=True).chunks
        return m.Announce(self._finder.keys_of(keys, chunks), chunks) if chunks else None

    def _ask(self, request: m.Retain | m.Demote, count: int, deadline: Deadline) -> bytes:
        absent = bytes([RetainState.ABSENT]) * count
        session = self._link.session
        left_s = deadline.remaining_s()
        if session is None or left_s < self._timeout_s / 2:
            return absent
        try:
            failpoint.reach("client.retain.before", failpoint.unreachable)
            states = session.call(request, m.Retained, left_s).states
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return absent
        return states


def _outcome_of(action: Action, result: RetainResult) -> Outcome:
    absent = f"{result.absent} chunks are not stored yet" if result.absent else ""
    if result.clipped:
        return action.ended(CLIPPED, f"{result.clipped} chunks stay at the default priority: its share is full")
    return action.ended(CLIPPED if action.note else ACCEPTED, absent)
