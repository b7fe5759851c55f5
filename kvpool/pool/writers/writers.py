"""Writers: reserve, commit, end, over the slots of the native directory.

Joins the directory, which makes room and publishes, with the records of writers and deadlines. A connection's reservations
count for it there, until it acknowledges that it no longer writes, or ends. It schedules nothing and handles no protocol;
`now_ns` is an argument. Control thread only.

Invariant: every reservation in the directory is a holder of one in `Reservations`, or just being made or ended.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import kvpool_native
from kvpool import failpoint
from kvpool.config.config import DramConfig
from kvpool.errors import InvalidArgument, ProtocolError, Refused
from kvpool.ids import CHECKSUM_BYTES, ConnectionId, ReservationId, SaveId
from kvpool.index.miss_ratio_curve import MissRatioCurve
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import PART_CHUNKS, Parts, Step
from kvpool.index.reservations import Reservation, Reservations, ReservedRun
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import Extents, Offsets, StagedSlots
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.pool.writers.commit_columns import CommitColumns, CommitPart, check_whole, divide
from kvpool.pool.writers.ending_reservations import EndingReservations
from kvpool.pool.writers.followed_saves import FollowedSaves, extents_of
from kvpool.pool.writers.joint_saves import JointSaves
from kvpool.pool.writers.places import ChainPlace, PartPlace, Place, SinglesPlace
from kvpool.pool.writers.reserve_task import ReservedSlots, ReserveTask, TaskRun
from kvpool.pool.writers.retention import NO_RETENTION, Retention, RetentionColumns
from kvpool.protocol.columns import NUMBER_BYTES
from kvpool.protocol.records import one_way
from kvpool.protocol.reserve_runs import RunForm
from kvpool.states import SaveState

# Chunks of a plain save that are reserved or committed in one call: less than half a millisecond, with an eviction for each
# (measured: 0.7 µs each).
SAVED_AT_ONCE = 512


class AskedRun(NamedTuple):
    """Chunks of one group that a save wants slots for. `session`: the group's. `share`: of the part of each that is written;
    None: all of it."""

    session: EngineSession
    form: RunForm
    parent: bytes
    keys: KeyColumn
    share: Share | None = None


class Writers:
    """All writers of the daemon. `reservations_max` bounds the reservations of one connection."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        retention: Retention,
        hit_curve: MissRatioCurve | None = None,
        *,
        ttl_ns: int,
        reservations_max: int,
        is_staged: bool = False,
        keeps_token_ids: bool = True,
        dram: DramConfig | None = None,
        on_backlog: Callable[[], None] | None = None,
    ) -> None:
        """`retention`: sets that of the chunks that a save names. `dram`: of which joint saves may have a part.
        `on_backlog`: see `EndingReservations`.

        `is_staged`: clients write staging memory, the daemon copies from there. `keeps_token_ids`: those of chunks are
        stored with them.
        """
        self._directory = directory
        self._retention = retention
        self._hit_curve = hit_curve
        self._reservations = Reservations(ttl_ns)
        self._reservations_max = reservations_max
        self._ending_reservations = EndingReservations(directory, on_backlog)
        # Requested ends that are not over: the parts of joint saves, and the first of all other reservations.
        self._ended: dict[SaveId, list[ReservationId]] = {}
        self.joint_saves = JointSaves(
            directory, self._ending_reservations, ttl_ns=ttl_ns, dram=dram, on_backlog=on_backlog
        )
        self._is_staged = is_staged
        self.desk = kvpool_native.SaveDesk(
            directory,
            self._reservations.plain,
            None if hit_curve is None else hit_curve.distances,
            reservations_max,
            SAVED_AT_ONCE,
            keeps_token_ids,
        )
        self.followed = FollowedSaves(directory, on_backlog)
        # Called with a connection whose slots would stay unusable for long.
        self.on_overdue: Callable[[ConnectionId], None] = lambda _connection: None
        self.expired_reservations = 0

    def __repr__(self) -> str:
        return f"<Writers {self.reservations} reservations>"

    def writer_of(self, session: EngineSession) -> kvpool_native.SaveWriter | None:
        """The session as the save desk knows it; None where it has no plain saves: of a scheduler, or a daemon that copies."""
        if session.layout.rank is None or self._is_staged:
            return None
        self._reservations.join(session)
        return kvpool_native.SaveWriter(self._directory, session.connection, [part.written for part in session.parts])

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of reservations made from now on."""
        self._reservations.change_ttl(ttl_ns)
        self.joint_saves.change_ttl(ttl_ns)

    @property
    def reservations(self) -> int:
        """Reservations under way, with expired ones whose writer has not acknowledged the loss."""
        return len(self._reservations)

    @property
    def have_deadlines(self) -> bool:
        """Whether something may expire."""
        return len(self._reservations) > 0 or len(self.joint_saves) > 0

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        counts = {"reservations": self.reservations, "expired_reservations": self.expired_reservations}
        return counts | self.joint_saves.stats()

    @property
    def has_backlog(self) -> bool:
        """Whether there is more to end, to expire or to publish than was done at once: `end_more` does."""
        return self._ending_reservations.are_left or self.joint_saves.has_backlog or self.followed.has_backlog

    def begin_task(
        self, session: EngineSession, runs: Sequence[AskedRun], wanted: RetentionColumns = NO_RETENTION
    ) -> ReserveTask:
        """Slots for the chunks of these runs, to be reserved in parts, and with what they are retained. Raises InvalidArgument
        for a share that chunks of their layout do not have, Refused."""
        for run in runs:
            if run.share is not None:
                _check_share(run, run.share)
        if self._reservations.count_of(session.connection) >= self._reservations_max:
            limit = self._reservations_max
            raise Refused("full", f"this connection has server.max_reservations = {limit} saves under way")
        failpoint.reach("daemon.reserve.before", failpoint.refused)
        return ReserveTask(self._directory, self._retention, [self._task_run(run) for run in runs], wanted)

    def _task_run(self, run: AskedRun) -> TaskRun:
        own = run.session.own
        return TaskRun(run.session, own, run.form, run.keys, self._place_of(run, own), run.share is not None)

    def _place_of(self, run: AskedRun, own: Namespace) -> Place:
        holder = run.session.connection
        is_chain = run.form is not RunForm.ALONE
        if run.share is not None:
            part = self.joint_saves.begin_part(run.session, run.share)
            return PartPlace(
                self._directory, self.joint_saves, own, run.keys, parent=run.parent, is_chain=is_chain, part=part
            )
        if not is_chain:
            return SinglesPlace(self._directory, self._ending_reservations, own, run.keys, holder=holder)
        return ChainPlace(
            self._directory, self._ending_reservations, own, parent=run.parent, keys=run.keys, holder=holder
        )

    def make(self, session: EngineSession, task: ReserveTask, now_ns: int) -> ReservedSlots:
        """A reservation of what has been reserved."""
        states, offsets, generations, retained = task.columns()
        made, at, reserved = [], 0, 0
        for run in task.runs:
            end = at + len(run.keys)
            own = states[at:end]
            if self._hit_curve is not None and not run.is_part:
                self._hit_curve.note_save(run.keys, run.session.chunk_sizes[0], now_ns)
            made.append(self._reserved_run(run, own, offsets[NUMBER_BYTES * at : NUMBER_BYTES * end], now_ns))
            reserved += made[-1].chunks
            at = end
        number = self._reservations.add_reservation(session.connection, made, now_ns) if reserved else 0
        return ReservedSlots(number, states, offsets, generations, retained)

    def _reserved_run(self, run: TaskRun, states: bytes, offsets: bytes, now_ns: int) -> ReservedRun:
        extents = run.place.extents
        reserved = states.count(SaveState.RESERVED)
        if not reserved:
            run.place.give_up(now_ns)  # present chunks were only touched
        made = ReservedRun(
            run.session,
            reserved,
            extents,
            extents if run.is_part else run.own.layout.kv_extents,
            run.place.take_holders() if reserved else [],
            is_part=run.is_part,
            is_chain=run.form is not RunForm.ALONE,
        )
        if reserved and self._is_staged:
            made.staged = StagedSlots(states=states, offsets=offsets, extents=extents)
        if reserved and self.followed.is_listened and not run.is_part:
            chosen = [number for number, state in enumerate(states) if state == SaveState.RESERVED]
            self.followed.begin_save(made, run.keys.chosen(chosen))
        return made

    def reserve(
        self,
        session: EngineSession,
        parent: bytes,
        keys: KeyColumn,
        now_ns: int,
        *,
        may_wait: bool,
        wanted: RetentionColumns = NO_RETENTION,
    ) -> ReservedSlots | None:
        """All parts at once, of a chain or of chunks without a parent; None where only memory that is being faulted in or
        demoted could serve. Raises Refused."""
        form = RunForm.BEHIND if parent else RunForm.ROOT if session.layout.is_chained else RunForm.ALONE
        task = self.begin_task(session, [AskedRun(session, form, parent, keys)], wanted)
        while (step := task.advance(now_ns, may_wait=may_wait)) is Step.MORE:
            pass
        if step is Step.WAIT:
            task.give_up(now_ns)
            return None
        return self.make(session, task, now_ns)

    def commit_all(self, session: EngineSession, reservation_id: int, columns: CommitColumns, now_ns: int) -> bytes:
        """All that these columns are about, at once; a state for each chunk. Raises ProtocolError."""
        parts = self.divide_commit(session, reservation_id, columns)
        return b"".join(self.commit(session, reservation_id, part, now_ns, rows=range(part.chunks)) for part in parts)

    def divide_commit(self, session: EngineSession, reservation_id: int, columns: CommitColumns) -> list[CommitPart]:
        """The next chunks that a commit is about, run by run; none where the reservation has ended. Raises ProtocolError for
        columns that do not fit what is reserved."""
        session.check_rank()
        check_whole(columns)
        reservation = self._reservations.find(SaveId(reservation_id), session.connection)
        return [] if reservation is None else divide(columns, reservation.runs)

    def commit(
        self, session: EngineSession, reservation_id: int, part: CommitPart, now_ns: int, *, rows: range
    ) -> bytes:
        """Publish the next chunks of a run, which have these rows of the part's columns; a state for each. Raises
        ProtocolError."""
        reservation = self._find(session, reservation_id, now_ns)
        if reservation is None or reservation.is_expired:
            if reservation is not None:
                reservation.is_reported = True
            return bytes([SaveState.EXPIRED]) * len(rows)
        if reservation.copies:
            raise ProtocolError("commit while a copy into the reservation's slots is under way")
        failpoint.reach("daemon.commit.before_publish", failpoint.refused)
        run = part.run
        states = self._publish(run, part, rows, now_ns)
        if self.followed.is_listened:
            self.followed.commit(run, states)
        run.committed += len(rows)
        if run.committed == run.chunks and reservation.committed == reservation.chunks:
            self._end(reservation, now_ns)
        failpoint.reach("daemon.commit.after_publish", failpoint.refused)
        return states

    def land(self, session: EngineSession, request: one_way.LandSaved) -> Parts[None]:
        """Extents of all chunks of a run have been copied by its client, for who follows it. Raises ProtocolError."""
        reservation = self._reservations.find(SaveId(request.reservation), session.connection)
        if reservation is None:
            return
        run = _run_of(reservation, request.run)
        if not run.chunks or run.is_part or run.staged is not None:
            return
        numbers, row = extents_of(run, request.first_extent, request.checksums), len(request.checksums) // run.chunks
        for first in range(0, run.chunks, PART_CHUNKS):
            if reservation.is_expired:
                return
            end = min(first + PART_CHUNKS, run.chunks)
            self.followed.land(run, Extents(range(first, end), numbers), request.checksums[first * row : end * row])
            yield None

    def layout_of(self, session: EngineSession, reservation_id: int, run: int) -> Layout | None:
        """The layout of the chunks of a reservation's run; None where it has ended. Raises ProtocolError."""
        reservation = self._reservations.find(SaveId(reservation_id), session.connection)
        return None if reservation is None else _run_of(reservation, run).layout

    def begin_copy(
        self, session: EngineSession, reservation_id: int, number: int, extents: Extents, *, now_ns: int
    ) -> tuple[Reservation, ReservedRun, Offsets] | None:
        """Arena offsets at which the daemon may write these extents of reserved chunks of a run; None where the reservation has
        ended.

        The slots are not reused until `end_copy`, even if the reservation or its connection ends. Raises ProtocolError for
        chunks that are not reserved or are published already.
        """
        reservation = self._find(session, reservation_id, now_ns)
        if reservation is None or reservation.is_expired:
            return None
        run = _run_of(reservation, number)
        chunks, numbers = extents.chunks, extents.numbers
        if not run.committed <= chunks.start < chunks.stop <= run.chunks:
            raise ProtocolError(
                f"copy of chunks {chunks.start}..{chunks.stop - 1}, "
                f"{run.committed} to {run.chunks - 1} are reserved and not published"
            )
        if not 0 <= numbers.start < numbers.stop <= run.extents:
            raise ProtocolError(f"copy of extents {numbers.start}..{numbers.stop - 1}, a chunk has {run.extents}")
        assert run.staged is not None
        reservation.copies += 1
        run.staged.clear(extents)
        return reservation, run, run.staged.offsets(chunks)

    def part_targets(self, run: ReservedRun, slots: Offsets, numbers: range, extent_bytes: int) -> bytes:
        """Where extents of a part lie in these slots, counted among its own: u64 [slot][extent]."""
        return self.joint_saves.offsets(run.holders[0], slots, numbers, extent_bytes)

    def end_copy(
        self, reservation: Reservation, run: ReservedRun, extents: Extents, checksums: bytes, *, now_ns: int
    ) -> None:
        """A copy is over; `checksums` of what it stored, u32 [chunk][extent], or none where it failed."""
        assert reservation.copies > 0
        assert run.staged is not None
        reservation.copies -= 1
        run.staged.note_copy(extents, checksums)
        if not reservation.is_expired:
            self.followed.land(run, extents, checksums)
        if reservation.is_ending and not reservation.copies:
            self._end(reservation, now_ns)

    def end_reservation(self, session: EngineSession, reservation_id: int, now_ns: int) -> int:
        """Give up what was not committed; its writer has acknowledged that it no longer writes. Returns how many chunks its
        time was too short for, of which no commit was answered that."""
        failpoint.reach("daemon.end.before", failpoint.refused)
        reservation = self._find(session, reservation_id, now_ns)
        if reservation is None:
            return 0
        is_late = reservation.is_expired and not reservation.is_reported
        self._end(reservation, now_ns)
        return (reservation.chunks - reservation.committed) * is_late

    def drop_owner(self, connection: ConnectionId, now_ns: int) -> None:
        """End every reservation of a connection; where they are long (`has_backlog`), `end_more` ends the others."""
        for reservation in self._reservations.of_owner(connection):
            self._end(reservation, now_ns, is_asked=False)

    def expire(self, now_ns: int) -> None:
        """Expire reservations beyond their deadline, a bounded part at once; their slots wait for the writer's
        acknowledgement."""
        for reservation in self._reservations.expire(now_ns):
            self._expire_slots(reservation, now_ns)
            self.expired_reservations += 1
        self.joint_saves.expire(now_ns)

    def end_overdue(self, now_ns: int) -> None:
        """End the connections whose writers have not acknowledged long after the deadline. Not from within a request of
        theirs."""
        for connection in self._reservations.overdue(now_ns):
            self.on_overdue(connection)

    def is_ending(self, reservation_id: int) -> bool:
        """Whether a reservation that was asked to end has slots that are not free yet."""
        return bool(self._ended) and self._first_held(SaveId(reservation_id)) is not None

    def go_on_with(self, reservation_id: int, now_ns: int) -> None:
        """End more of one that has ended."""
        holder = self._first_held(SaveId(reservation_id))
        if holder is not None:
            self._ending_reservations.go_on_with(holder, now_ns)
            self.joint_saves.go_on_with(holder, now_ns)
        self._forget_free(SaveId(reservation_id))

    def end_more(self, now_ns: int) -> None:
        """End more of what has ended or expired."""
        if self.joint_saves.has_backlog:
            self.joint_saves.end_more(now_ns)
        self._ending_reservations.end_more(now_ns)
        self.followed.end_more()
        for reservation in list(self._ended):
            self._forget_free(reservation)

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Counts of each connection, by name."""
        return self._reservations.count_by_owner()

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        holders = self._reservations.holders()
        return self._reservations.verify() + self.followed.verify(holders) + self.joint_saves.verify(holders)

    def _find(self, session: EngineSession, reservation_id: int, now_ns: int) -> Reservation | None:
        """A reservation of the connection; it has expired where its time is over."""
        reservation = self._reservations.find(SaveId(reservation_id), session.connection)
        if reservation is not None and reservation.deadline_ns <= now_ns:
            self.expire(now_ns)
        return reservation

    def _publish(self, run: ReservedRun, part: CommitPart, rows: range, now_ns: int) -> bytes:
        """Publish the next chunks; of slots that the daemon fills, those that were copied whole, with its own checksums."""
        if run.staged is None:
            return self._store(part, rows, run.committed, now_ns)
        row = CHECKSUM_BYTES * run.extents
        are_whole = run.staged.are_whole(run.committed, part.columns.checksums[row * rows.start : row * rows.stop])
        lost = SaveState.CHECKSUM
        if run.is_chain and not all(are_whole):
            # Behind a chunk that is not whole nothing of a chain can be found: it would have no parent.
            at = are_whole.index(False)
            are_whole[at:], lost = [False] * (len(rows) - at), SaveState.NO_PARENT
        states, first = b"", run.committed
        for is_whole, alike in groupby(are_whole):
            at = len(states)
            count = len(list(alike))
            if is_whole:
                states += self._store(part, rows[at : at + count], first + at, now_ns)
                continue
            if run.is_part:
                self.joint_saves.skip(run.holders[0], count, now_ns)
            states += bytes([SaveState.CHECKSUM] + [lost] * (count - 1))
        return states

    def _store(self, part: CommitPart, rows: range, first: int, now_ns: int) -> bytes:
        """Publish the chunks of a run from its `first` on, or count parts of them as stored."""
        run, columns = part.run, part.columns
        if run.is_part:
            own = columns.part(rows.start, rows.stop, chunks=part.chunks).with_scope(run.layout)
            return self.joint_saves.commit(run.holders[0], own, now_ns)
        sums, tokens, scope = columns
        states, row = b"", rows.start
        for holder, of, count in run.slices(first, first + len(rows)):
            states += self._directory.commit(
                holder, of, sums, now_ns, tokens, scope=scope if tokens else b"", row=row, rows=count
            )
            row += count
        return states

    def _expire_slots(self, reservation: Reservation, now_ns: int) -> None:
        """Nothing of a reservation can be published any more; its slots stay reserved."""
        self._end_following(reservation)
        first = reservation.first_slots
        if first is not None:
            self._ending_reservations.expire(first, reservation.slots(), now_ns)

    def _end(self, reservation: Reservation, now_ns: int, *, is_asked: bool = True) -> None:
        if reservation.copies:
            reservation.is_ending = reservation.is_expired = True
            self._expire_slots(reservation, now_ns)
            return
        self._reservations.remove_reservation(reservation)
        self._end_following(reservation)
        ended: list[ReservationId] = []
        for run in reservation.runs:
            if run.is_part and run.chunks:
                self.joint_saves.end_part(run.holders[0], now_ns, is_asked=is_asked)
                ended.append(run.holders[0])
        first = reservation.first_slots
        if first is not None and not self._ending_reservations.end_reservations(
            first, reservation.slots(), now_ns, chunks=reservation.chunks, is_asked=is_asked
        ):
            ended.append(first)
        if is_asked and ended:
            self._ended[reservation.id] = ended
            self._forget_free(reservation.id)

    def _end_following(self, reservation: Reservation) -> None:
        for run in reservation.runs if self.followed.is_listened else ():
            self.followed.end_save(run)

    def _first_held(self, reservation: SaveId) -> ReservationId | None:
        """The first of those of a reservation that was asked to end whose slots are not free yet."""
        for holder in self._ended.get(reservation, ()):
            if self._ending_reservations.is_ending(holder) or self.joint_saves.is_ending(holder):
                return holder
        return None

    def _forget_free(self, reservation: SaveId) -> None:
        """Forget a reservation that has ended, where all its slots are free."""
        if self._first_held(reservation) is None:
            self._ended.pop(reservation, None)


def _check_share(run: AskedRun, share: Share) -> None:
    layout = run.session.own.layout
    share.check(layout)
    if layout.summaries:
        raise InvalidArgument(
            "a part of chunks with summaries is saved, expected all of each: summaries are of all layers"
        )


def _run_of(reservation: Reservation, number: int) -> ReservedRun:
    if not 0 <= number < len(reservation.runs):
        raise ProtocolError(f"run is {number}, the reservation has {len(reservation.runs)}")
    return reservation.runs[number]
