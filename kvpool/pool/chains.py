"""Chains: requests of engines about whole chains of chunks. Leases, reservations, commits, ends of reservations.

Joins readers and writers (`index`) with the tiers and the journal, part by part (`index.parts`): a chain may be so long that
all other connections would wait for it. The pool owns one. Control thread only.

Invariant: what a request holds while it is under way is in its `HoldTask` or `ReserveTask`, and ends with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import kvpool_native
from kvpool import failpoint
from kvpool.clock import Clock, Deadline
from kvpool.errors import InvalidArgument, ProtocolError
from kvpool.ids import ConnectionId
from kvpool.index.leases import Lease
from kvpool.index.parts import PART_CHUNKS, Parts, Step, save_chunks
from kvpool.index.sessions import EngineSession
from kvpool.index.usage import UsageTable
from kvpool.journal.journal import Journal
from kvpool.journal.token_columns import check_tokens, with_scope
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.pool.deadlines import HoldExpiry
from kvpool.pool.device_copies import DeviceCopies
from kvpool.pool.hint_handlers import HintHandlers
from kvpool.pool.pulled_names import PulledNames
from kvpool.pool.readers.hold_task import HoldTask
from kvpool.pool.readers.readers import NOTHING_TAKEN, Readers, Taken
from kvpool.pool.readers.runs import Run, runs_of_hit
from kvpool.pool.sharing.sharing import Sharing
from kvpool.pool.writers.commit_columns import CommitColumns, CommitPart
from kvpool.pool.writers.reserve_task import ReservedPart
from kvpool.pool.writers.retention import RetentionColumns
from kvpool.pool.writers.writers import AskedRun, Writers
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import peers as pm
from kvpool.protocol.records import promises as pr
from kvpool.protocol.reserve_runs import RunForm, unpack_runs
from kvpool.protocol.verbs import ENGINE, verb
from kvpool.states import RetainState, SaveState
from kvpool.tiering.tiering import Tiering
from kvpool.tiering.waiting_room import Room

Answer = TypeVar("Answer")
# What holds are taken for: makes an answer of them, or of NOTHING_TAKEN.
Give = Callable[[EngineSession, Taken], Answer]

# How long a request waits for memory that is being faulted in or written down; then it continues with what there is.
ROOM_WAIT_S = 0.5


@dataclass(slots=True, kw_only=True)
class Chains:
    """See the module. `is_stopping`, and `is_drained` by an operator's order: new reservations are declined."""

    readers: Readers
    writers: Writers
    tiering: Tiering
    journal: Journal
    hints: HintHandlers
    expiry: HoldExpiry
    usage: UsageTable
    sharing: Sharing
    device_copies: DeviceCopies
    pulled_names: PulledNames
    room: Room
    clock: Clock
    keeps_token_ids: bool
    note_declined: Callable[[ConnectionId, bytes], None]
    is_stopping: bool = False
    is_drained: bool = False

    @verb(m.Acquire, roles=ENGINE)
    def acquire(self, session: EngineSession, request: m.Acquire) -> Parts[m.Leased]:
        """Lease the longest prefix that is present, on every rank the session stands for; of a layout with groups all that the
        hit needs, or nothing. An owner is asked for what is neither here nor known elsewhere: one that is unknown, away or
        suspended has nothing.

        Of a set of chunks whatever is there. Waits where moves between the tiers leave no room for all of it now.
        """
        if request.set_of:
            return (yield from self._acquire_set(session, request))
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        _check_owner(request.owner)
        granted = None if request.owner else self.readers.lease_at_once(session, request, self.clock.now_ns())
        if granted is not None:
            lease, leased = granted
            self.note_use(session, lease)
            return leased
        return (yield from self._hold_parts(session, request, session.holder, give=self._lease_taken))

    def hold(
        self, session: EngineSession, request: pr.Promise, holder: ConnectionId, *, give: Give[Answer]
    ) -> Parts[Answer]:
        """Take holds on what `acquire` leases, which count for the holder, and give them."""
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        _check_owner(request.owner)
        if not request.owner:
            taken = self.readers.hold_at_once(session, request, self.clock.now_ns(), holder=holder)
            if taken is not None:
                return give(session, taken)
        return (yield from self._hold_parts(session, request, holder, give=give))

    def _hold_parts(
        self, session: EngineSession, request: m.Acquire | pr.Promise, holder: ConnectionId, *, give: Give[Answer]
    ) -> Parts[Answer]:
        """The same for what is not all in DRAM, or more than is held at once: as far as it is there, part by part."""
        runs = runs_of_hit(session, request.keys, request.chunks, allows_leaves=not request.owner)
        if sum([run.chunks * run.ranks for run in runs if run.is_leaf]) > m.LEAF_CHUNKS_MAX:
            return give(session, NOTHING_TAKEN)
        task = self.readers.begin_task(session, runs, chunks=request.chunks, holder=holder, owner=request.owner)
        return (yield from self._take(session, task, give))

    def _take(self, session: EngineSession, task: HoldTask, give: Give[Answer]) -> Parts[Answer]:
        try:
            yield from self._advance(lambda _: task.advance(self.clock.now_ns()), self.tiering.make_room)
            return give(session, self.readers.take_holds(session, task))
        finally:
            task.release_holds(self.clock.now_ns())

    def _acquire_set(self, session: EngineSession, request: m.Acquire) -> Parts[m.Leased]:
        group = session.of_group(request.set_of - 1)
        keys = columns.keys_of(request.keys, ranks=len(group.namespace_ids), keys_max=m.SET_KEYS_MAX)
        if request.chunks or request.owner:
            raise ProtocolError(f"a set has {request.chunks} chunks and an owner's name, expected neither")
        leased, _ = yield from self.lease_set(session, keys, request.set_of - 1)
        return leased

    def lease_set(
        self, session: EngineSession, keys: KeyColumn, group: int = 0
    ) -> Parts[tuple[m.Leased, Sequence[int]]]:
        """Lease what is there of chunks of a group that are each alone, for an engine or another node: a row for each key, and
        which of them were left out though they may be stored."""
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        task = self.readers.begin_set(session, group, keys)

        def advance(may_wait: bool) -> Step:
            return task.advance(self.clock.now_ns(), may_wait=may_wait)

        try:
            yield from self._advance(advance, self.tiering.make_room)
            leased = self.readers.grant_set(session, group, task, self.clock.now_ns())
        finally:
            task.release_holds(self.clock.now_ns())
        try:
            yield None  # what follows from a lease of thousands of chunks is another turn's work
        except GeneratorExit:
            self.readers.release(session, leased.lease, self.clock.now_ns())  # nobody has heard of it
            raise
        self.readers.note_set(session, leased.lease, self.clock.now_ns())
        return self.note_leased(session, leased), task.left_out

    def acquire_for_peer(self, session: EngineSession, keys: KeyColumn, first: int = 0) -> Parts[m.Leased]:
        """Lease for another node the longest prefix of `keys` that is present: of a chain, or of chunks without a parent.
        Of a chain from chunk `first` on, which has to be 0 where DRAM does not have the chunk before it."""
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        run = Run(session, keys, first=first if session.layout.is_chained else 0)
        task = self.readers.begin_task(session, [run], chunks=len(keys), holder=session.holder)
        return (yield from self._take(session, task, self._lease_taken))

    def _lease_taken(self, session: EngineSession, taken: Taken) -> m.Leased:
        return self.note_leased(session, self.readers.grant(session, taken, self.clock.now_ns()))

    def note_leased(self, session: EngineSession, leased: m.Leased) -> m.Leased:
        """The answer with a lease that was just granted, or without one."""
        lease = self.readers.find(session, leased.lease)
        if lease is not None:
            self.note_use(session, lease)
        return leased

    def note_use(self, session: EngineSession, lease: Lease | Taken) -> None:
        """A lease was granted, or tickets."""
        self.expiry.schedule()
        self.hints.note_lease(session, self.readers, lease)
        self.sharing.note_lease(session, lease)
        if session.connection in self.device_copies.on_device:
            self.device_copies.note_lease(session, lease)

    def has_watchers(self, session: EngineSession) -> bool:
        """Whether anything but the lease itself follows from each lease of a session."""
        is_watched = self.hints.has_announcements or self.sharing.publications
        return bool(is_watched) or session.connection in self.device_copies.on_device

    @verb(m.Reserve, roles=ENGINE)
    def reserve(self, session: EngineSession, request: m.Reserve) -> Parts[m.Reserved]:
        """Reserve slots for new chunks, run by run, evicting others where memory is short.

        Waits where only memory could serve that is still being faulted in, or holds what the lower tiers lack.
        """
        runs = _asked_runs(session, request)
        if self.is_stopping or self.is_drained:
            count = sum(len(run.keys) for run in runs)
            self.usage.count_declined(SaveState.STOPPING, count)
            return _declined(SaveState.STOPPING, count, request.priorities)
        task = self.writers.begin_task(session, runs, RetentionColumns(request.priorities, request.durations))

        def advance(may_wait: bool) -> Step:
            step = task.advance(self.clock.now_ns(), may_wait=may_wait)
            self._note_part(task.latest)
            return step

        try:
            yield from self._advance(advance, self._make_room)
            slots = self.writers.make(session, task, self.clock.now_ns())
        except BaseException:
            task.give_up(self.clock.now_ns())
            raise
        self.expiry.schedule()
        self.note_declined(session.connection, slots.states)
        return m.Reserved(*slots)

    @verb(m.Commit, roles=ENGINE)
    def commit(self, session: EngineSession, request: m.Commit) -> Parts[m.Committed]:
        """Publish the next chunks of a reservation."""
        tokens = request.tokens if self.keeps_token_ids else b""
        number = request.reservation
        parts = self.writers.divide_commit(session, number, CommitColumns(request.checksums, tokens, request.scope))
        states = b""
        for part in parts:
            run = self._commit_parts if part.run.is_part else self._commit_run
            states += yield from run(session, number, part)
        if self.writers.is_ending(number):
            yield from self._end(number)
        self.tiering.run()
        return m.Committed(states)

    @property
    def may_save_at_once(self) -> bool:
        """Whether plain saves may be served by the desk now: nobody follows them, none is declined."""
        return not (self.is_stopping or self.is_drained or self.writers.followed.is_listened)

    def note_saves(self, session: EngineSession, answered: Sequence[kvpool_native.SaveNote]) -> None:
        """Requests about plain saves were served by the desk."""
        has_committed = False
        for note in answered:
            of_group, states = session.parts[note.group], note.states
            if note.is_commit:
                has_committed = True
                self.usage.count_commit(of_group, states, self.clock.now_ns())
                continue
            if keys := note.keys:
                self.journal.note_refusals(KeyColumn(keys), states, of_group.own.id)
            self.note_declined(session.connection, states)
        if has_committed:
            self.tiering.run()

    def _commit_run(self, session: EngineSession, number: int, part: CommitPart) -> Parts[bytes]:
        """Publish the next chunks of a run: a state for each."""
        states = b""
        while len(states) < part.chunks:
            if states:
                yield None
            now_ns, rows = self.clock.now_ns(), range(len(states), min(len(states) + PART_CHUNKS, part.chunks))
            states += self.writers.commit(session, number, part, now_ns, rows=rows)
        self.usage.count_commit(part.run.session, states, self.clock.now_ns())
        return states

    def _commit_parts(self, session: EngineSession, number: int, part: CommitPart) -> Parts[bytes]:
        """Count the parts of the next chunks of a run as stored, and publish what is complete: a state for each."""
        joint_saves = self.writers.joint_saves
        most = save_chunks(is_part=True, is_chain=part.run.is_chain)
        states, carried = b"", 0
        try:
            while len(states) < part.chunks:
                if states:
                    yield None
                rows = range(len(states), min(len(states) + most, part.chunks))
                before = joint_saves.carried_chunks
                states += self.writers.commit(session, number, part, self.clock.now_ns(), rows=rows)
                carried += joint_saves.carried_chunks - before
            while joint_saves.are_unpublished:
                yield None
                if joint_saves.are_unpublished:
                    carried += joint_saves.publish_more(self.clock.now_ns())
        finally:
            joint_saves.publish_later()  # nothing, unless its connection ends now
        self.usage.count_commit(part.run.session, states, self.clock.now_ns(), carried=carried)
        return states

    @verb(one_way.LandSaved, roles=ENGINE)
    def land_saved(self, session: EngineSession, request: one_way.LandSaved) -> Parts[None]:
        """Extents of a save can be followed by other nodes."""
        yield from self.writers.land(session, request)

    @verb(one_way.NameTokens, roles=ENGINE)
    def name_tokens(self, session: EngineSession, request: one_way.NameTokens) -> m.Done:
        """Store the token ids of chunks that came without them."""
        session.check_plain()
        ranks, layout = len(session.namespaces), session.own.layout
        keys = columns.keys_of(request.keys, ranks=ranks, keys_max=one_way.NAMED_MAX * ranks).by_rank(ranks)
        check_tokens(request.tokens, request.scope, count=len(keys[0]), chunk_tokens=layout.chunk_tokens)
        if self.keeps_token_ids and request.tokens:
            tokens = with_scope(request.tokens, request.scope, layout.chunk_tokens)
            for namespace, column in zip(session.namespaces.values(), keys, strict=True):
                self.pulled_names.add_run(namespace.id, column, tokens)
        return m.Done()

    @verb(one_way.DropReservations, roles=ENGINE)
    def drop_reservations(self, session: EngineSession, request: one_way.DropReservations) -> Parts[None]:
        """End reservations, one in each part."""
        for reservation in columns.unpack_numbers(request.reservations, "reservations"):
            yield from self.end_reservation(session, reservation)
            yield None

    def end_reservation(self, session: EngineSession, reservation: int) -> Parts[None]:
        """Give up what was not committed; the writer has acknowledged that it no longer writes."""
        late = self.writers.end_reservation(session, reservation, self.clock.now_ns())
        self.usage.count_declined(SaveState.EXPIRED, late)
        yield from self._end(reservation)

    def _end(self, reservation: int) -> Parts[None]:
        """Wait until nothing of an ended reservation is in use."""
        while self.writers.is_ending(reservation):
            yield None
            self.writers.go_on_with(reservation, self.clock.now_ns())

    def _advance(self, advance: Callable[[bool], Step], make_room: Callable[[], bool]) -> Parts[None]:
        """Serve part after part until the last one, or until there is no more room."""
        deadline: Deadline | None = None
        may_wait = True
        while True:
            if self.journal.keep_up():
                yield None
                self.journal.keep_up()
            with self.tiering.protecting(may_wait):
                step = advance(may_wait)
            if step is Step.MORE:
                yield None
                continue
            if step is Step.DONE or not may_wait:
                return
            deadline = deadline or Deadline(ROOM_WAIT_S, self.clock)
            may_wait = make_room() and not deadline.has_passed()
            if may_wait:
                yield self.room.wait(deadline.remaining_s())

    def _make_room(self) -> bool:
        """Have chunks demoted; more memory may also come soon because it is being faulted in."""
        self.tiering.make_room()
        return True

    def _note_part(self, part: ReservedPart) -> None:
        states = part.states.translate(_KEPT) if part.run.is_part else part.states
        if states.strip(_NOT_DECLINED):
            self.journal.note_refusals(part.keys, states, part.run.session.own.id)


_NOT_DECLINED = bytes([SaveState.RESERVED, SaveState.PRESENT])
# States of parts, with PRESENT for every chunk that is not declined.
_KEPT = bytes([SaveState.PRESENT if state == SaveState.PART else state for state in range(256)])


def _check_owner(owner: str) -> None:
    """Raises InvalidArgument unless it is a node's name, or none."""
    if owner and not pm.is_node_name(owner):
        raise InvalidArgument(f"owner has {len(owner)} characters, expected a node's name")


def _asked_runs(session: EngineSession, request: m.Reserve) -> list[AskedRun]:
    """The runs that a request wants slots for. Raises ProtocolError unless its columns fit each other and the layout."""
    runs = unpack_runs(request.runs)
    count, behind, most = 0, 0, m.KEYS_MAX
    for run in runs:
        count += run.chunks
        behind += run.form is RunForm.BEHIND
        if run.share is not None:
            most = m.SHARE_KEYS_MAX
    if count > most:
        raise ProtocolError(f"{count} chunks are named, expected 1..{most}")
    if len(request.keys) != packed_bytes(count + behind):
        raise ProtocolError(
            f"keys column has {len(request.keys)} bytes, expected {packed_bytes(count + behind)} for {count} chunks "
            f"and {behind} parents"
        )
    if request.priorities or request.durations:
        columns.check_retention(request.priorities, request.durations, count)
    keys = KeyColumn(request.keys)
    found, at = [], 0
    for run in runs:
        of_group = session.of_group(run.group)
        if run.form is RunForm.ALONE and of_group.layout.is_chained and run.chunks > m.SET_KEYS_MAX:
            raise ProtocolError(f"a set has {run.chunks} chunks, expected at most {m.SET_KEYS_MAX}")
        if run.form is not RunForm.ALONE and not of_group.layout.is_chained:
            raise ProtocolError(f"run of group {run.group} is a chain, expected chunks alone: they have no parent")
        parent = b""
        if run.form is RunForm.BEHIND:
            parent, at = keys[at], at + 1
        end = at + run.chunks
        found.append(AskedRun(of_group, run.form, parent, keys[at:end], run.share))
        at = end
    return found


def _declined(state: SaveState, count: int, priorities: bytes) -> m.Reserved:
    """An answer that declines the first chunk with this state, and the following ones as `no-parent`."""
    states = bytes([state, *[SaveState.NO_PARENT] * (count - 1)])
    retained = bytes([RetainState.ABSENT]) * len(priorities)
    nothing = bytes(columns.NUMBER_BYTES * count)  # neither an offset nor a generation
    return m.Reserved(0, states, nothing, nothing, retained)
