"""Beginning of a save: reserves slots for its chunks, run by run, and hands the copies to the native threads.

The Pool has checked the arguments. Every failure of the daemon gives a save that stores nothing. Any thread.
"""

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.errors import DaemonUnreachable, KVPoolError, Refused
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import ReserveRun, RunForm, pack_runs
from kvpool.states import KEEP_PRIORITY, SaveState
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.copying.copies import Copies, EngineBlocks, ReservedSlots
from kvpool_client.key_chain import KeyChain
from kvpool_client.named_keys import NamedKeys
from kvpool_client.retention import NO_RETENTION, RetentionColumns
from kvpool_client.verbs.pending import PendingChunks
from kvpool_client.verbs.results import known_states
from kvpool_client.verbs.save import ReservedSave, Save, SavedRun

_KEEP = bytes([KEEP_PRIORITY])
_RESERVED, _TOO_LONG = bytes([SaveState.RESERVED]), bytes([SaveState.TOO_LONG])
_PENDING = int(SaveState.PENDING)


@dataclass(slots=True, eq=False)
class RunPlan:
    """Chunks of one group that are to be saved out of `blocks`. `chunks`: their numbers, in a row where they form a chain."""

    group: int
    chunks: Sequence[int]
    blocks: EngineBlocks
    is_chain: bool


@dataclass(slots=True, eq=False)
class SavePlan:
    """Plan of a save of chunks of `keys`; `retention` is of all `keys`, and `end_chunk` is behind the last one of the save.
    `runs`: in the order in which they are to be stored, at most one of each group. `is_set`, `places`: see `plan_set`."""

    keys: KeyChain | NamedKeys
    retention: RetentionColumns
    runs: Sequence[RunPlan]
    end_chunk: int
    is_set: bool = False
    places: Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class _Asked:
    """The request for a plan. `keys`: of the chunks of each run that one request may name, the leading ones."""

    request: m.Reserve
    keys: list[KeyColumn]


class SaveStarter:
    """Starts the saves of one Pool."""

    def __init__(
        self, layouts: Sequence[Layout], link: Link, copies: Sequence[Copies], counters: Counters, *, timeout_s: float
    ) -> None:
        """`layouts`, `copies`: of each group; a layout without groups is one."""
        self._link = link
        self._copies = copies
        self._counters = counters
        self._timeout_s = timeout_s
        self._layouts = layouts
        self._chunk_tokens = layouts[0].chunk_tokens
        self._has_groups = layouts[0].group is not None
        self._has_part = not all(own.is_whole for own in copies)
        parts = [own.share.of_layout(layout) for own, layout in zip(copies, layouts, strict=True)]
        # Of a chunk as this engine has it, by group: layers, head groups and extents.
        self._sizes = [(part.layers, part.head_groups, part.extents) for part in parts]

    def plan(
        self,
        keys: KeyChain,
        retention: RetentionColumns,
        chosen: Sequence[Sequence[int]],
        blocks: Sequence[EngineBlocks],
    ) -> SavePlan:
        """Plan of a save of the chosen chunks of each group. Windows and states come first: they are few, and without them the
        others are no hit."""
        runs = [
            RunPlan(group, chunks, of_group, is_chain=layout.is_chained)
            for group, (layout, chunks, of_group) in enumerate(zip(self._layouts, chosen, blocks, strict=True))
        ]
        if len(runs) > 1:
            runs.sort(key=lambda run: run.is_chain)
        return SavePlan(keys, retention, runs, max([run.chunks[-1] + 1 for run in runs if run.chunks], default=0))

    def plan_set(
        self, keys: NamedKeys, retention: RetentionColumns, blocks: EngineBlocks, places: Sequence[int] | None
    ) -> SavePlan:
        """Plan of a save of a set's chunks, each alone, and each key once. `places`: of each key that the caller named its
        place among them; None: as they stand."""
        run = RunPlan(keys.group, range(len(keys)), blocks, is_chain=False)
        return SavePlan(keys, retention, [run], len(keys), is_set=True, places=places)

    def begin_save(self, plan: SavePlan) -> Save:
        """The planned save. One round trip."""
        session = self._link.session
        if session is not None and _has_chunks(plan):
            asked = self._asked(plan)
            try:
                failpoint.reach("client.save.before_reserve", failpoint.unreachable)
                answer = session.call(asked.request, m.Reserved)
            except KVPoolError as error:
                self._link.note_failure(session, error)
            else:
                return self._start(session, plan, asked, answer)
        return self._saved_nothing(plan, SaveState.DISCONNECTED)

    def _asked(self, plan: SavePlan) -> _Asked:
        """The request for the chunks of a plan, or for as many of them as one request may name."""
        end = _end_within(plan, m.SHARE_KEYS_MAX if self._has_part else m.KEYS_MAX)
        columns = plan.keys.columns()
        runs, packed, keys, priorities, durations = [], [], [], [], []
        for run in plan.runs:
            chosen, column = run.chunks, KeyColumn(columns[run.group])
            if end < plan.end_chunk:
                chosen = chosen[: bisect_left(chosen, end)]
            if not chosen:
                keys.append(KeyColumn(b""))
                continue
            copies = self._copies[run.group]
            share = None if copies.is_whole else copies.share
            parent = column.before(chosen[0]) if run.is_chain else b""
            form = RunForm.ALONE if not run.is_chain else RunForm.BEHIND if parent else RunForm.ROOT
            are_in_a_row = run.is_chain or isinstance(chosen, range)
            of_run = column[chosen[0] : chosen[-1] + 1] if are_in_a_row else column.chosen(chosen)
            runs.append(ReserveRun(run.group, form, len(chosen), share))
            packed += [parent, of_run.packed]
            keys.append(of_run)
            if plan.retention is not NO_RETENTION:
                of_chunks = plan.retention.columns_of(chosen)
                priorities.append(of_chunks[0])
                durations.append(of_chunks[1])
        wanted = b"".join(priorities)
        retention = (wanted, b"".join(durations)) if wanted.replace(_KEEP, b"") else (b"", b"")
        return _Asked(m.Reserve(pack_runs(runs), b"".join(packed), *retention), keys)

    def _start(self, session: Session, plan: SavePlan, asked: _Asked, answer: m.Reserved) -> Save:
        failpoint.reach("client.save.after_reserve")
        states = self._states_of(plan, asked, answer)
        pending = PendingChunks(session, _pending_of(asked, answer))
        offsets = np.frombuffer(answer.offsets, dtype="<u8")
        saved: list[SavedRun] = []
        number = at = 0
        try:
            for run, of_run, keys in zip(plan.runs, states, asked.keys, strict=True):
                rows = slice(at, at + len(keys))
                retained = answer.retained[rows]
                made = self._saved_run(run, of_run, retained=retained)
                saved.append(made)
                chosen = made.reserved
                if chosen:
                    made.tokens = self._token_ids(session, plan.keys, run, chosen)
                    slots = ReservedSlots(
                        answer.reservation,
                        number,
                        offsets[rows] if len(chosen) == len(keys) else offsets[rows][chosen],
                        run.blocks.of_chunks(chosen, len(of_run)),
                    )
                    made.run = self._copies[run.group].save(session, run.blocks, slots)
                    made.number = number
                at, number = rows.stop, number + bool(len(keys))
        except (DaemonUnreachable, Refused) as error:
            self._link.note_failure(session, error)
            self._give_up(session, answer.reservation, saved)
            return self._saved_nothing(plan, SaveState.DISCONNECTED, states, pending)
        runs = [each.run for each in saved if each.run is not None]
        if not all(map(session.adopt_save, runs)):
            self._give_up(session, 0, saved)
            return self._saved_nothing(plan, SaveState.DISCONNECTED, states, pending)
        has_reserved = bool(runs)
        save = Save(
            ReservedSave(
                session if has_reserved else None,
                answer.reservation if has_reserved else 0,
                tuple(saved),
                scope=plan.keys.scope if any(each.tokens for each in saved) else b"",
                pending=pending,
                end_token=plan.end_chunk * self._chunk_tokens,
                has_groups=self._has_groups and not plan.is_set,
                places=plan.places,
                timeout_s=self._timeout_s,
                on_end=self._counters.count_save,
            )
        )
        if has_reserved:
            session.reserved_saves.add_save(save, session.welcome.reservation_ttl_s)
        return save

    def _states_of(self, plan: SavePlan, asked: _Asked, answer: m.Reserved) -> list[bytearray]:
        """The state of each chunk of each run."""
        known, found, at = known_states(answer.states), [], 0
        for run, keys in zip(plan.runs, asked.keys, strict=True):
            states = bytearray(known[at : at + len(keys)])
            states += _TOO_LONG * (len(run.chunks) - len(states))
            found.append(states)
            at += len(keys)
        return found

    def _saved_run(self, run: RunPlan, states: bytearray, *, retained: bytes) -> SavedRun:
        """What is reserved of a run, without its copies and its token ids."""
        layers, head_groups, extents = self._sizes[run.group]
        return SavedRun(
            run.group,
            states,
            retained=retained,
            layers=layers,
            head_groups=head_groups,
            extents=extents,
            is_part=not self._copies[run.group].is_whole,
        )

    def _token_ids(self, session: Session, keys: KeyChain | NamedKeys, run: RunPlan, chosen: Sequence[int]) -> bytes:
        """The token ids of the chosen chunks of a run; none of chunks without a parent, before which nobody would know what
        comes."""
        words = self._chunk_tokens + len(keys.scope) // 4
        if (
            not run.is_chain
            or isinstance(keys, NamedKeys)
            or not session.welcome.keeps_tokens
            or words > kvpool_native.TOKEN_IDS_MAX
        ):
            return b""
        if isinstance(chosen, range):
            return keys.token_ids(run.chunks[chosen.start : chosen.stop])
        return keys.token_ids([run.chunks[number] for number in chosen])

    def _saved_nothing(
        self,
        plan: SavePlan,
        state: SaveState,
        states: Sequence[bytearray] | None = None,
        pending: PendingChunks | None = None,
    ) -> Save:
        """The save of a plan of which nothing is written: what was `RESERVED`, or everything, has this state. `pending`: the
        chunks that are `PENDING` in `states`."""
        if states is None:
            states = [bytearray(_RESERVED * len(run.chunks)) for run in plan.runs]
        ended = [of_run.replace(_RESERVED, bytes([state])) for of_run in states]
        return Save(
            ReservedSave(
                None,
                0,
                tuple(self._saved_run(run, of_run, retained=b"") for run, of_run in zip(plan.runs, ended, strict=True)),
                scope=b"",
                pending=pending if pending is not None else PendingChunks(None, KeyColumn(b"")),
                end_token=plan.end_chunk * self._chunk_tokens,
                has_groups=self._has_groups and not plan.is_set,
                places=plan.places,
                timeout_s=self._timeout_s,
                on_end=self._counters.count_save,
            )
        )

    @staticmethod
    def _give_up(session: Session, reservation: int, saved: Sequence[SavedRun]) -> None:
        """End copies that have begun, and the reservation, or have it end with its connection or its time."""
        for each in saved:
            if each.run is not None:
                each.run.cancel()
                session.drop_save(each.run)
        if reservation:
            with contextlib.suppress(KVPoolError):
                session.drop_reservation(reservation)


def _end_within(plan: SavePlan, keys_max: int) -> int:
    """Behind which chunk a request that names so many ends: at the same one in each group, or what it stores of the others is
    no hit."""

    if sum([len(run.chunks) for run in plan.runs]) <= keys_max:
        return plan.end_chunk

    def count(end: int) -> int:
        return sum([bisect_left(run.chunks, end) for run in plan.runs])

    return bisect_right(range(plan.end_chunk + 1), keys_max, key=count) - 1


def _has_chunks(plan: SavePlan) -> bool:
    return any(run.chunks for run in plan.runs)


def _pending_of(asked: _Asked, answer: m.Reserved) -> KeyColumn:
    """The keys of the chunks that others are writing: the answer may be about fewer of them."""
    if _PENDING not in answer.states:
        return KeyColumn(b"")
    keys = KeyColumn(b"".join(column.packed for column in asked.keys))
    return keys.chosen([number for number, state in enumerate(answer.states) if state == SaveState.PENDING])
