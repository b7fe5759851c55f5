"""Beginning of a save: reserves slots and hands the copies to the native threads.

The Pool has checked the arguments. Every failure of the daemon gives a save that stores nothing. Any thread.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.errors import DaemonUnreachable, KVPoolError, Refused
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.protocol.records import groups as gm
from kvpool.protocol.records import messages as m
from kvpool.types import SaveState
from kvpool_client.connection.batching import call_each
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.copying.copies import Copies, EngineBlocks, ReservedSlots
from kvpool_client.key_chain import KeyChain
from kvpool_client.pending import PendingChunks
from kvpool_client.results import save_state_of
from kvpool_client.retention import RetentionColumns
from kvpool_client.save import Save

ReserveRequest = m.Reserve | gm.ReserveGroup | gm.ReserveShare | gm.ReserveGroupShare


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Plan of a save: `count` chunks of `keys` from `first_chunk` on, out of `blocks`; `retention` is of all `keys`.

    `group`: the group of the layout whose chunks they are, if it has groups; `has_parents`: whether they form a chain. `share`:
    the part of each that is saved, if not all of it.
    """

    keys: KeyChain
    blocks: EngineBlocks
    retention: RetentionColumns
    first_chunk: int
    count: int
    group: int | None = None
    has_parents: bool = True
    share: Share | None = None

    def request(self) -> ReserveRequest:
        """The request for its chunks, or for as many of them as one request may name."""
        column = KeyColumn(self.keys.columns()[self.group or 0])
        asked = min(self.count, m.KEYS_MAX if self.share is None else m.SHARE_KEYS_MAX)
        wanted = column[self.first_chunk : self.first_chunk + asked]
        parent = column.before(self.first_chunk) if self.has_parents else b""
        retention = self.retention.columns(self.first_chunk, asked)
        if (share := self.share) is not None:
            part = (share.first_layer, share.layers, share.first_group, share.groups)
            if self.group is not None:
                return gm.ReserveGroupShare(self.group, *part, parent, wanted.packed, *retention)
            return gm.ReserveShare(*part, parent, wanted.packed, *retention)
        if self.group is None:
            return m.Reserve(parent, wanted.packed, *retention)
        return gm.ReserveGroup(self.group, parent, wanted.packed, *retention)


@dataclass(frozen=True, slots=True)
class _Reserved:
    """The daemon's answer with a state for each planned chunk. `tokens`: ids of the reserved ones, where they are kept."""

    answer: m.Reserved
    states: list[SaveState]
    tokens: bytes
    pending: PendingChunks


class SaveStarter:
    """Starts the saves of one Pool."""

    def __init__(self, layout: Layout, link: Link, copies: Copies, counters: Counters, *, timeout_s: float) -> None:
        self._layout = layout
        self._link = link
        self._copies = copies
        self._counters = counters
        self._timeout_s = timeout_s
        self._part = None if copies.is_whole else copies.share
        self._own = copies.share.of_layout(layout)

    def begin(self, plan: SavePlan) -> Save:
        """The planned save. One round trip."""
        session = self._link.session
        if session is None or not plan.count:
            return self._saved_nothing(plan, [SaveState.DISCONNECTED] * plan.count)
        plan = self.of_part(plan)
        request = plan.request()
        try:
            failpoint.reach("client.save.before_reserve", failpoint.unreachable)
            answer = session.call(request, m.Reserved)
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return self._saved_nothing(plan, [SaveState.DISCONNECTED] * plan.count)
        return self._start(session, plan, self._reserved(session, plan, request, answer))

    def of_part(self, plan: SavePlan) -> SavePlan:
        """The plan for what this Pool has of each chunk."""
        return plan if self._part is None else replace(plan, share=self._part)

    def begin_each(self, plans: Sequence[SavePlan]) -> list[Save]:
        """All planned saves. One round trip."""
        return begin_each([(self, plan) for plan in plans], self._link)

    def begin_reserved(
        self, session: Session | None, plan: SavePlan, request: ReserveRequest, answer: m.Reserved | None
    ) -> Save:
        """The planned save of chunks that were asked for; one that stores nothing where there is no answer."""
        if session is None or answer is None:
            return self._saved_nothing(plan, [SaveState.DISCONNECTED] * plan.count)
        return self._start(session, plan, self._reserved(session, plan, request, answer))

    def _reserved(self, session: Session, plan: SavePlan, request: ReserveRequest, answer: m.Reserved) -> _Reserved:
        states = [save_state_of(state) for state in answer.states]
        states += [SaveState.TOO_LONG] * (plan.count - len(states))
        chosen = [plan.first_chunk + number for number, state in enumerate(states) if state == SaveState.RESERVED]
        pending = PendingChunks(session, _chosen(request.keys, answer.states, SaveState.PENDING))
        # Events of chunks without a parent have no token ids: nobody would know what comes before them.
        tokens = self._token_ids(session, plan.keys, chosen) if plan.has_parents else b""
        return _Reserved(answer, states, tokens, pending)

    def _token_ids(self, session: Session, keys: KeyChain, chunks: list[int]) -> bytes:
        words = self._layout.chunk_tokens + len(keys.scope) // 4
        is_wanted = session.welcome.keeps_tokens and words <= kvpool_native.TOKEN_IDS_MAX
        return keys.token_ids(chunks) if is_wanted and chunks else b""

    def _start(self, session: Session, plan: SavePlan, reserved: _Reserved) -> Save:
        answer, states = reserved.answer, reserved.states
        failpoint.reach("client.save.after_reserve")
        chosen = [number for number, state in enumerate(states) if state == SaveState.RESERVED]
        if not chosen:
            return self._saved_nothing(plan, states, answer.retained, reserved.pending)
        offsets = np.frombuffer(answer.offsets, dtype="<u8")[chosen]
        try:
            ids = plan.blocks.of_chunks(chosen, len(states))
            run = self._copies.save(session, plan.blocks, ReservedSlots(answer.reservation, offsets, ids))
        except (DaemonUnreachable, Refused) as error:
            self._link.note_failure(session, error)
            with contextlib.suppress(KVPoolError):  # the reservation ends with its connection or its time
                session.drop_reservation(answer.reservation)
            return self._saved_nothing(plan, _disconnected(states))
        if not session.adopt_save(run):
            run.cancel()
            return self._saved_nothing(plan, _disconnected(states))
        save = Save(
            session,
            answer.reservation,
            states,
            run,
            tokens=reserved.tokens,
            scope=plan.keys.scope if reserved.tokens else b"",
            retained=answer.retained,
            pending=reserved.pending,
            end_token=(plan.first_chunk + plan.count) * self._layout.chunk_tokens,
            layers=self._own.layers,
            groups=self._own.head_groups,
            extents=self._own.extents,
            timeout_s=self._timeout_s,
            on_end=self._counters.count_save,
            group=plan.group,
            is_part=plan.share is not None,
        )
        session.note_reserved(save)
        return save

    def _saved_nothing(
        self, plan: SavePlan, states: list[SaveState], retained: bytes = b"", pending: PendingChunks | None = None
    ) -> Save:
        return Save(
            None,
            0,
            states,
            None,
            tokens=b"",
            scope=b"",
            retained=retained,
            pending=pending or PendingChunks(None, KeyColumn(b"")),
            end_token=(plan.first_chunk + plan.count) * self._layout.chunk_tokens,
            layers=self._own.layers,
            groups=self._own.head_groups,
            extents=self._own.extents,
            timeout_s=self._timeout_s,
            on_end=self._counters.count_save,
        )


def begin_each(planned: Sequence[tuple[SaveStarter, SavePlan]], link: Link) -> list[Save]:
    """Planned saves, each with its starter, over one connection. One round trip."""
    session = link.session
    planned = [(starter, starter.of_part(plan)) for starter, plan in planned]
    requests = [plan.request() for _, plan in planned]
    answers: list[m.Reserved | None] = [None] * len(planned)
    if session is not None and planned:
        try:
            failpoint.reach("client.save.before_reserve", failpoint.unreachable)
            answers = call_each(session, requests, m.Reserved)
        except KVPoolError as error:
            link.note_failure(session, error)
    return [
        starter.begin_reserved(session, plan, request, answer)
        for (starter, plan), request, answer in zip(planned, requests, answers, strict=True)
    ]


def _disconnected(states: list[SaveState]) -> list[SaveState]:
    return [SaveState.DISCONNECTED if state == SaveState.RESERVED else state for state in states]


def _chosen(keys: bytes, states: bytes, wanted: SaveState) -> KeyColumn:
    """The keys with this state: the answer may be about fewer of them."""
    return KeyColumn(keys).chosen([number for number, state in enumerate(states) if state == wanted])
