"""Writers: reserve, commit, end, over the slots of the native directory.

Joins the directory, which makes room and publishes, with the records of writers and deadlines. A connection's reservations
count for it there, until it acknowledges that it no longer writes, or ends. It schedules nothing and handles no protocol;
`now_ns` is an argument. Control thread only.

Invariant: every reservation in the directory is in `Reservations`, with the same number, or just being made or ended.
"""

from collections.abc import Callable

import kvpool_native
from kvpool import failpoint
from kvpool.config.config import DramConfig
from kvpool.errors import InvalidArgument, ProtocolError, Refused
from kvpool.index.miss_ratio_curve import MissRatioCurve
from kvpool.index.parts import Step
from kvpool.index.reservations import Reservation, Reservations
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import Extents, StagedSlots
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.pool.writers.commit_columns import CHECKSUM_BYTES, CommitColumns
from kvpool.pool.writers.ending_reservations import EndingReservations
from kvpool.pool.writers.followed_saves import FollowedSaves, extents_of
from kvpool.pool.writers.joint_saves import JointSaves
from kvpool.pool.writers.part_task import PartTask
from kvpool.pool.writers.reserve_task import ReservedSlots, ReserveTask
from kvpool.pool.writers.retention import NO_RETENTION, Retention, RetentionColumns
from kvpool.types import ConnectionId, ReservationId, SaveState

# A save of a layout with groups has one for each chunk of its windows: so many of them count as one.
RESERVATIONS_OF_A_SAVE = 64


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
        dram: DramConfig | None = None,
        on_backlog: Callable[[], None] | None = None,
    ) -> None:
        """`retention`: sets that of the chunks that a save names. `dram`: of which joint saves may have a part.
        `on_backlog`: see `EndingReservations`.

        `is_staged`: clients write staging memory, the daemon copies from there.
        """
        self._directory = directory
        self._retention = retention
        self._hit_curve = hit_curve
        self._reservations = Reservations(ttl_ns)
        self._reservations_max = reservations_max
        self._ending_reservations = EndingReservations(directory, on_backlog)
        self.joint_saves = JointSaves(
            directory, self._ending_reservations, ttl_ns=ttl_ns, dram=dram, on_backlog=on_backlog
        )
        self._is_staged = is_staged
        self.followed = FollowedSaves(directory)
        self.on_overdue: Callable[[ConnectionId], None] = lambda _connection: (
            None
        )  # its slots would stay unusable for long
        self.expired_reservations = 0

    def __repr__(self) -> str:
        return f"<Writers {self.reservations} reservations>"

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
        """Whether `go_on` has more to end than it ends at once."""
        return self._ending_reservations.are_left or self.joint_saves.has_backlog

    def begin(
        self, session: EngineSession, parent: bytes, keys: KeyColumn, wanted: RetentionColumns = NO_RETENTION
    ) -> ReserveTask:
        """Slots for new chunks, to be reserved in parts, and with what they are retained. Raises Refused."""
        self._check_room(session)
        return ReserveTask(self._directory, self._retention, session, keys, parent=parent, wanted=wanted)

    def begin_part(
        self,
        session: EngineSession,
        share: Share,
        parent: bytes,
        keys: KeyColumn,
        *,
        wanted: RetentionColumns = NO_RETENTION,
    ) -> PartTask:
        """Extents of a share of new chunks, to be reserved in parts. Raises InvalidArgument for a share that chunks of the
        layout do not have, Refused."""
        layout = session.own.layout
        share.check(layout)
        if layout.summaries:
            raise InvalidArgument(
                "a part of chunks with summaries is saved, expected all of each: summaries are of all layers"
            )
        self._check_room(session)
        part = self.joint_saves.begin(session, share)
        return PartTask(self.joint_saves, self._retention, session, keys, part=part, parent=parent, wanted=wanted)

    def _check_room(self, session: EngineSession) -> None:
        most = self._reservations_max * (RESERVATIONS_OF_A_SAVE if session.layout.group is not None else 1)
        if self._reservations.count_of(session.connection) >= most:
            limit = self._reservations_max
            raise Refused("full", f"this connection has server.max_reservations = {limit} saves under way")
        failpoint.reach("daemon.reserve.before", failpoint.refused)

    def make_part(self, session: EngineSession, task: PartTask, now_ns: int) -> ReservedSlots:
        """A reservation of the extents that have been reserved."""
        layout = session.own.layout
        states, offsets = bytes(task.states), bytes(task.offsets)
        reserved = states.count(SaveState.RESERVED)
        number = ReservationId(0)
        if not reserved:
            self.give_up_part(task, now_ns)
        elif (part := task.take()) is not None:
            number, extents = part.id, len(part.numbers)
            staged = StagedSlots(states=states, offsets=offsets, extents=extents) if self._is_staged else None
            self._reservations.add(
                number,
                session.connection,
                chunks=reserved,
                extents=extents,
                kv_extents=extents,
                now_ns=now_ns,
                staged=staged,
                layout=layout if layout.group is not None else None,
                is_part=True,
            )
        return ReservedSlots(number, states, offsets, bytes(task.generations), bytes(task.retained))

    def give_up_part(self, task: PartTask, now_ns: int) -> None:
        """End a part task whose requester is gone."""
        part = task.take()
        if part is not None:
            self.joint_saves.end(part.id, now_ns)

    def make(self, session: EngineSession, reserve_task: ReserveTask, now_ns: int) -> ReservedSlots:
        """A reservation of what has been reserved."""
        layout = session.own.layout
        reserved = reserve_task.states.count(SaveState.RESERVED)
        states, offsets = bytes(reserve_task.states), bytes(reserve_task.offsets)
        if self._hit_curve is not None:
            self._hit_curve.note_save(reserve_task.keys, layout.stored_bytes, now_ns)
        if not reserved:
            self.give_up(reserve_task, now_ns)  # present chunks were only touched
        reservation = reserve_task.take()
        if reserved and self.followed.is_listened:
            chosen = [number for number, state in enumerate(states) if state == SaveState.RESERVED]
            self.followed.begin(reservation, reserve_task.keys.chosen(chosen))
        if reserved:
            self._reservations.add(
                reservation,
                session.connection,
                chunks=reserved,
                extents=layout.extents,
                kv_extents=layout.kv_extents,
                now_ns=now_ns,
                staged=StagedSlots(states=states, offsets=offsets, extents=layout.extents) if self._is_staged else None,
                layout=layout if layout.group is not None else None,
            )
        return ReservedSlots(
            reservation, states, offsets, bytes(reserve_task.generations), bytes(reserve_task.retained)
        )

    def give_up(self, reserve_task: ReserveTask, now_ns: int) -> None:
        """End a reserve task whose requester is gone."""
        reservation = reserve_task.take()
        if reservation:
            self._ending_reservations.end(reservation, reserve_task.chunks, now_ns)

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
        """All parts at once; None where only memory that is being faulted in or demoted could serve. Raises Refused."""
        reserve_task = self.begin(session, parent, keys, wanted)
        while (step := reserve_task.advance(now_ns, may_wait=may_wait)) is Step.MORE:
            pass
        if step is Step.WAIT:
            self.give_up(reserve_task, now_ns)
            return None
        return self.make(session, reserve_task, now_ns)

    def check_commit(self, session: EngineSession, reservation_id: int, columns: CommitColumns) -> int:
        """How many chunks a commit is about. Raises ProtocolError for columns that do not fit, or fit no reservation."""
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        layout = session.own.layout
        is_part = reservation is not None and reservation.is_part
        count = columns.count(layout, reservation.extents if is_part and reservation is not None else layout.extents)
        if reservation is not None and reservation.layout not in (None, session.own.layout):
            raise ProtocolError("commit of a reservation that is of another group")
        if reservation is not None and reservation.committed + count > reservation.chunks:
            raise ProtocolError(f"commit of {reservation.committed + count} chunks, {reservation.chunks} are reserved")
        return count

    def commit(self, session: EngineSession, reservation_id: int, columns: CommitColumns, now_ns: int) -> bytes:
        """Publish the next chunks of a reservation; a state for each. Raises ProtocolError, see `check_commit`."""
        count = self.check_commit(session, reservation_id, columns)
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is None:
            return bytes([SaveState.EXPIRED]) * count
        if reservation.deadline_ns <= now_ns:
            self.expire(now_ns)
        if reservation.is_expired:
            reservation.is_reported = True
            return bytes([SaveState.EXPIRED]) * count
        if reservation.copies:
            raise ProtocolError("commit while a copy into the reservation's slots is under way")
        failpoint.reach("daemon.commit.before_publish", failpoint.refused)
        states = self._publish(reservation, columns.with_scope(session.own.layout), now_ns)
        self.followed.commit(reservation, states)
        reservation.committed += count
        if reservation.committed == reservation.chunks:
            self._end(reservation, now_ns)
        failpoint.reach("daemon.commit.after_publish", failpoint.refused)
        return states

    def land(self, session: EngineSession, reservation_id: int, first_extent: int, checksums: bytes) -> None:
        """Extents of all chunks of a save have been copied by its client, for who follows it. Raises ProtocolError."""
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is None or reservation.is_part:
            return  # of a part nothing can be followed
        if not reservation.is_expired and reservation.staged is None:
            self.followed.land(reservation, extents_of(reservation, first_extent, checksums), checksums)

    def layout_of(self, session: EngineSession, reservation_id: int) -> Layout | None:
        """The layout of a reservation's chunks; None where it has ended and the session saves chunks of several groups."""
        if not session.groups:
            return session.own.layout
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        return reservation.layout if reservation is not None else None

    def begin_copy(
        self, session: EngineSession, reservation_id: int, extents: Extents, now_ns: int
    ) -> tuple[Reservation, tuple[int, ...]] | None:
        """Arena offsets at which the daemon may write these extents of these reserved chunks; None where the reservation has
        ended.

        The slots are not reused until `end_copy`, even if the reservation or its connection ends. Raises ProtocolError for
        chunks that are not reserved or are published already.
        """
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is not None and reservation.deadline_ns <= now_ns:
            self.expire(now_ns)
        if reservation is None or reservation.is_expired:
            return None
        assert reservation.staged is not None
        chunks, numbers = extents.chunks, extents.numbers
        if not reservation.committed <= chunks.start < chunks.stop <= reservation.chunks:
            raise ProtocolError(
                f"copy of chunks {chunks.start}..{chunks.stop - 1}, "
                f"{reservation.committed} to {reservation.chunks - 1} are reserved and not published"
            )
        if not 0 <= numbers.start < numbers.stop <= reservation.extents:
            raise ProtocolError(
                f"copy of extents {numbers.start}..{numbers.stop - 1}, a chunk has {reservation.extents}"
            )
        reservation.copies += 1
        reservation.staged.clear(extents)
        return reservation, reservation.staged.offsets(chunks)

    def part_targets(
        self, reservation: Reservation, slots: tuple[int, ...], numbers: range, extent_bytes: int
    ) -> bytes:
        """Where extents of a part lie in these slots, counted among its own: u64 [slot][extent]."""
        return self.joint_saves.offsets(reservation.id, slots, numbers, extent_bytes)

    def end_copy(self, reservation: Reservation, extents: Extents, checksums: bytes, now_ns: int) -> None:
        """A copy is over; `checksums` of what it stored, u32 [chunk][extent], or none where it failed."""
        assert reservation.copies > 0
        assert reservation.staged is not None
        reservation.copies -= 1
        reservation.staged.note(extents, checksums)
        if not reservation.is_expired:
            self.followed.land(reservation, extents, checksums)
        if reservation.is_ending and not reservation.copies:
            self._end(reservation, now_ns)

    def end(self, session: EngineSession, reservation_id: int, now_ns: int) -> int:
        """Give up what was not committed; its writer has acknowledged that it no longer writes. Returns how many chunks its
        time was too short for, of which no commit was answered that."""
        failpoint.reach("daemon.end.before", failpoint.refused)
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is None:
            return 0
        if reservation.deadline_ns <= now_ns:
            self.expire(now_ns)
        is_late = reservation.is_expired and not reservation.is_reported
        self._end(reservation, now_ns)
        return (reservation.chunks - reservation.committed) * is_late

    def drop_owner(self, connection: ConnectionId, now_ns: int) -> None:
        """End every reservation of a connection; where they are long (`has_backlog`), `go_on` ends the others."""
        for reservation in self._reservations.of_owner(connection):
            self._end(reservation, now_ns, is_asked=False)

    def expire(self, now_ns: int) -> None:
        """Expire reservations beyond their deadline, a bounded part at once; their slots wait for the writer's
        acknowledgement."""
        for reservation in self._reservations.expire(now_ns):
            self.followed.end(reservation)
            if not reservation.is_part:
                self._ending_reservations.expire(reservation.id, reservation.chunks, now_ns)
            self.expired_reservations += 1
        self.joint_saves.expire(now_ns)

    def end_overdue(self, now_ns: int) -> None:
        """End the connections whose writers have not acknowledged long after the deadline. Not from within a request of
        theirs."""
        for connection in self._reservations.overdue(now_ns):
            self.on_overdue(connection)

    def is_ending(self, reservation_id: int) -> bool:
        """Whether a reservation has ended, and its slots are not free yet."""
        number = ReservationId(reservation_id)
        return self._ending_reservations.is_ending(number) or self.joint_saves.is_ending(number)

    def go_on_with(self, reservation_id: int, now_ns: int) -> None:
        """End more of one that has ended."""
        self._ending_reservations.go_on_with(ReservationId(reservation_id), now_ns)
        self.joint_saves.go_on_with(ReservationId(reservation_id), now_ns)

    def go_on(self, now_ns: int) -> None:
        """End more of what has ended or expired."""
        if self.joint_saves.has_backlog:
            self.joint_saves.go_on(now_ns)
        self._ending_reservations.go_on(now_ns)

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Counts of each connection, by name."""
        return self._reservations.count_by_owner()

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        ids = self._reservations.ids()
        return self._reservations.verify() + self.followed.verify(ids) + self.joint_saves.verify(ids)

    def _publish(self, reservation: Reservation, columns: CommitColumns, now_ns: int) -> bytes:
        """Publish the next chunks; of slots that the daemon fills, those that were copied whole, with its own checksums."""
        first, staged = reservation.committed, reservation.staged
        checksums = columns.checksums
        if staged is None:
            return self._store(reservation, columns, now_ns)
        count = len(checksums) // (CHECKSUM_BYTES * reservation.extents)
        # Behind a chunk that is not whole nothing can be found: it would have no parent.
        whole = staged.count_whole(first, checksums)
        states = b""
        if whole:
            states = self._store(reservation, columns.part(0, whole, chunks=count), now_ns)
        if whole < count and reservation.is_part:
            self.joint_saves.skip(reservation.id, count - whole, now_ns)
        behind = count - whole - 1
        return states + bytes([SaveState.CHECKSUM] * (whole < count) + [SaveState.NO_PARENT] * max(0, behind))

    def _store(self, reservation: Reservation, columns: CommitColumns, now_ns: int) -> bytes:
        """Publish the next chunks, or count parts of them as stored."""
        if reservation.is_part:
            return self.joint_saves.commit(reservation.id, columns, now_ns)
        first = reservation.committed
        return self._directory.commit(reservation.id, first, columns.checksums, now_ns, columns.tokens)

    def _end(self, reservation: Reservation, now_ns: int, *, is_asked: bool = True) -> None:
        self.followed.end(reservation)
        if reservation.copies:
            reservation.is_ending = reservation.is_expired = True
            if not reservation.is_part:
                self._ending_reservations.expire(reservation.id, reservation.chunks, now_ns)
            return
        self._reservations.end(reservation)
        if reservation.is_part:
            self.joint_saves.end(reservation.id, now_ns, is_asked=is_asked)
            return
        self._ending_reservations.end(reservation.id, reservation.chunks, now_ns, is_asked=is_asked)
