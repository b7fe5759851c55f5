"""Beginning of a save: reserves slots and hands the copies to the native threads.

The Pool has checked the arguments. Every failure of the daemon gives a save that stores nothing. Any thread.
"""

import contextlib
from collections.abc import Sequence

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.errors import DaemonUnreachable, KVPoolError, Refused
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.types import SaveState
from kvpool_client.connection.batching import call_each
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.copying.copies import Copies, EngineBlocks
from kvpool_client.key_chain import KeyChain
from kvpool_client.pending import PendingChunks
from kvpool_client.results import save_state_of
from kvpool_client.retention import RetentionColumns
from kvpool_client.save import Save, SaveRun


class SaveStarter:
    """Starts the saves of one Pool."""

    def __init__(self, layout: Layout, link: Link, copies: Copies, counters: Counters, timeout_s: float) -> None:
        self._layout = layout
        self._link = link
        self._copies = copies
        self._counters = counters
        self._timeout_s = timeout_s

    def begin(
        self, keys: KeyChain, blocks: EngineBlocks, first_chunk: int, count: int, retention_columns: RetentionColumns
    ) -> Save:
        """A save of `count` chunks from `first_chunk` on, out of `blocks`. One round trip."""
        session = self._link.session
        if session is None or not count:
            return self._saved_nothing([SaveState.DISCONNECTED] * count)
        request = _reserve(keys, first_chunk, count, retention_columns)
        try:
            failpoint.reach("client.save.before_reserve", failpoint.unreachable)
            answer = session.call(request, m.Reserved)
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return self._saved_nothing([SaveState.DISCONNECTED] * count)
        return self._reserved(session, request, answer, keys, blocks, first_chunk, count)

    def begin_each(self, planned: Sequence[tuple[KeyChain, EngineBlocks, RetentionColumns]]) -> list[Save]:
        """A save of every chunk of each chain, out of its blocks. One round trip for all."""
        session = self._link.session
        requests = [_reserve(keys, 0, len(keys), retention_columns) for keys, _, retention_columns in planned]
        answers: list[m.Reserved | None] = [None] * len(planned)
        if session is not None and planned:
            try:
                failpoint.reach("client.save.before_reserve", failpoint.unreachable)
                answers = call_each(session, requests, m.Reserved)
            except KVPoolError as error:
                self._link.note_failure(session, error)
        saves = []
        for (keys, blocks, _), request, answer in zip(planned, requests, answers, strict=True):
            if session is None or answer is None:
                saves.append(self._saved_nothing([SaveState.DISCONNECTED] * len(keys)))
            else:
                saves.append(self._reserved(session, request, answer, keys, blocks, 0, len(keys)))
        return saves

    def _reserved(
        self,
        session: Session,
        request: m.Reserve,
        answer: m.Reserved,
        keys: KeyChain,
        blocks: EngineBlocks,
        first_chunk: int,
        count: int,
    ) -> Save:
        states = [save_state_of(state) for state in answer.states]
        states += [SaveState.TOO_LONG] * (count - len(states))
        reserved = [first_chunk + number for number, state in enumerate(states) if state == SaveState.RESERVED]
        tokens = self._token_ids(session, keys, reserved)
        pending = PendingChunks(session, _chosen(request.keys, answer.states, SaveState.PENDING))
        return self._start(session, answer, states, blocks, (tokens, keys.scope if tokens else b""), pending)

    def _token_ids(self, session: Session, keys: KeyChain, chunks: list[int]) -> bytes:
        words = self._layout.chunk_tokens + len(keys.scope) // 4
        is_wanted = session.welcome.keeps_tokens and words <= kvpool_native.TOKEN_IDS_MAX
        return keys.token_ids(chunks) if is_wanted and chunks else b""

    def _start(
        self,
        session: Session,
        answer: m.Reserved,
        states: list[SaveState],
        blocks: EngineBlocks,
        named: tuple[bytes, bytes],
        pending: PendingChunks,
    ) -> Save:
        failpoint.reach("client.save.after_reserve")
        chosen = [number for number, state in enumerate(states) if state == SaveState.RESERVED]
        if not chosen:
            return self._saved_nothing(states, answer.retained, pending)
        offsets = np.frombuffer(answer.offsets, dtype="<u8")[chosen]
        try:
            ids = blocks.of_chunks(chosen, len(states))
            run = self._copies.save(session, answer.reservation, offsets, ids, blocks)
        except (DaemonUnreachable, Refused) as error:
            self._link.note_failure(session, error)
            with contextlib.suppress(KVPoolError):  # the reservation ends with its connection or its time
                session.drop_reservation(answer.reservation)
            return self._saved_nothing(_disconnected(states))
        if not session.adopt_save(run):
            run.cancel()
            return self._saved_nothing(_disconnected(states))
        return self._new(session, answer.reservation, states, run, named, answer.retained, pending)

    def _saved_nothing(
        self, states: list[SaveState], retained: bytes = b"", pending: PendingChunks | None = None
    ) -> Save:
        return self._new(None, 0, states, None, (b"", b""), retained, pending or PendingChunks(None, KeyColumn(b"")))

    def _new(
        self,
        session: Session | None,
        reservation: int,
        states: list[SaveState],
        run: SaveRun | None,
        named: tuple[bytes, bytes],
        retained: bytes,
        pending: PendingChunks,
    ) -> Save:
        return Save(
            session,
            reservation,
            states,
            run,
            tokens=named[0],
            scope=named[1],
            retained=retained,
            pending=pending,
            layers=self._layout.layers,
            timeout_s=self._timeout_s,
            on_end=self._counters.count_save,
        )


def _reserve(keys: KeyChain, first_chunk: int, count: int, retention_columns: RetentionColumns) -> m.Reserve:
    """The request for `count` chunks from `first_chunk` on, or as many of them as one request may name."""
    column = KeyColumn(keys.columns()[0])
    asked = min(count, m.KEYS_MAX)
    wanted = column[first_chunk : first_chunk + asked]
    return m.Reserve(column.before(first_chunk), wanted.packed, *retention_columns.columns(first_chunk, asked))


def _disconnected(states: list[SaveState]) -> list[SaveState]:
    return [SaveState.DISCONNECTED if state == SaveState.RESERVED else state for state in states]


def _chosen(keys: bytes, states: bytes, wanted: SaveState) -> KeyColumn:
    """The keys with this state: the answer may be about fewer of them."""
    return KeyColumn(keys).chosen([number for number, state in enumerate(states) if state == wanted])
