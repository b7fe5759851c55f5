"""The pool: composes index, tiers and transfer into the verbs that a connection may ask.

Decides on the native directory, which is also what clients read; moves no payload itself. Control thread only, but
for the jobs it hands to the pre-fault and transfer threads, which come back through the event loop.

Invariants:
- every hold in the directory is in exactly one lease or ticket, or being used by a check under way;
- every reservation in the directory is in `Reservations`, with the same number.
"""

import asyncio
import logging
import os
from functools import partial
from typing import Any

import numpy as np

import kvpool_native
from kvpool.clock import NS_PER_S, Clock
from kvpool.config import Config
from kvpool.errors import LayoutMismatch, ProtocolError, Refused
from kvpool.index.integrity import Integrity
from kvpool.index.leases import Leases
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.index.reservations import Reservation, Reservations
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout
from kvpool.protocol import messages as m
from kvpool.report import Sections, render_info, render_stats
from kvpool.tiers.dram import DramTier, PageUse, plan_geometry
from kvpool.tiers.prefault import Prefault
from kvpool.transfer.verify import find_corrupt
from kvpool.transfer.workers import Urgency, Workers, call_later
from kvpool.types import (
    EPOCH_BYTES,
    KEY_BYTES,
    ChunkExtent,
    ConnectionId,
    HoldId,
    LeaseId,
    NamespaceId,
    ReservationId,
    SaveState,
    SizeClassId,
)

log = logging.getLogger(__name__)

TRANSFER_THREADS = 2
TRANSFER_QUEUE_SIZE = 1024
EXPIRY_FRACTION = 0.25
_NOTHING_LEASED = m.Leased(lease=0, chunks=0, offsets=b"", generations=b"", tiers=b"")


class Pool:
    """Everything one daemon stores, and for whom."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._clock = clock
        self._config = config
        self._started_ns = clock.now_ns()
        self.epoch = os.urandom(EPOCH_BYTES)
        self.geometry = plan_geometry(config.dram.capacity, config.dram.segment, config.dram.max_chunks)
        self._dram = DramTier(self.geometry, huge_pages=config.dram.huge_pages)
        self._directory = kvpool_native.Directory(self._dram.arena, self._dram.index, self.geometry, self.epoch)
        self._dram.seal()
        self._namespaces = Namespaces()
        self._size_classes: dict[tuple[int, int], SizeClassId] = {}
        self._leases = Leases(int(config.server.lease_ttl * NS_PER_S))
        self._reservations = Reservations(int(config.server.reservation_ttl * NS_PER_S))
        self._workers = Workers(TRANSFER_THREADS, queue_size=TRANSFER_QUEUE_SIZE)
        self._prefault: Prefault | None = None
        self._segment_ready = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._integrity = Integrity(self._directory, self._find_corrupt)
        self._index_view = kvpool_native.IndexView(self._dram.index)
        self._expired_leases = 0
        self._expired_reservations = 0

    async def start(self) -> None:
        """Give the first segment its pages, so that a save can be served at once; the rest follow in the background."""
        if not self._config.dram.prefault:
            for segment in range(self.geometry.segments):
                self._directory.mark_segment_ready(segment)
            return
        loop = asyncio.get_running_loop()
        first = await loop.run_in_executor(None, self._dram.prefault_next)
        assert first == 0
        self._directory.mark_segment_ready(first)
        self._prefault = Prefault(
            self._dram,
            self._config.dram.prefault_threads,
            lambda segment: call_later(loop, self._mark_ready, segment),
        )

    async def stop(self) -> None:
        """End the threads. Chunks in DRAM are gone with the process."""
        if self._expiry is not None:
            self._expiry.cancel()
        loop = asyncio.get_running_loop()
        if self._prefault is not None:
            await loop.run_in_executor(None, self._prefault.stop)
        await loop.run_in_executor(None, self._workers.stop)

    def fds(self) -> tuple[int, int]:
        """The descriptors an engine gets: arena, index."""
        return self._dram.arena.fd, self._dram.index.fd

    def page_use(self) -> PageUse:
        """What backs the arena."""
        is_settling = self._prefault is not None and self._prefault.is_working
        return self._dram.page_use(is_settling=is_settling)

    @property
    def chunks(self) -> int:
        """Chunks that can be loaded."""
        return int(self._directory.stats()["chunks"])

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way that a stop should wait for."""
        return len(self._reservations) > 0

    async def wait_for_segment(self, timeout_s: float) -> None:
        """Until another segment has its pages, or the time is over."""
        self._segment_ready.clear()
        try:
            await asyncio.wait_for(self._segment_ready.wait(), timeout_s)
        except asyncio.TimeoutError:
            return

    def open_namespaces(self, model: str, layout: Layout) -> dict[int, Namespace]:
        """The namespaces of a model and layout, by rank; made where they are new. Raises LayoutMismatch or Refused."""
        if layout.chunk_bytes > self._config.dram.capacity:
            raise LayoutMismatch(
                f"a chunk of this layout has {layout.chunk_bytes} bytes, "
                f"dram.capacity is {self._config.dram.capacity}: no chunk can be stored"
            )
        return {rank: self._namespace(model, layout.for_rank(rank)) for rank in layout.ranks}

    def open_session(self, connection: ConnectionId, model: str, layout: Layout) -> EngineSession:
        """What an engine's requests carry along."""
        return EngineSession(connection, layout, model, self.open_namespaces(model, layout))

    def acquire(self, session: EngineSession, keys: bytes) -> m.Leased:
        """Lease the longest prefix that is present, on every rank the session stands for."""
        m.check_keys(keys, ranks=len(session.namespaces))
        self._check_room_for_lease(session)
        namespaces = [namespace.id for namespace in session.namespaces.values()]
        now_ns = self._clock.now_ns()
        chunks, holds = self._directory.acquire_ranks(namespaces, keys)
        if not chunks:
            return _NOTHING_LEASED
        by_rank = {rank: HoldId(hold) for rank, hold in zip(session.namespaces, holds, strict=True)}
        return self._grant(session, chunks, by_rank, now_ns)

    def release(self, session: EngineSession, lease: int) -> m.Done:
        """End a lease."""
        self._release_holds(self._leases.release(LeaseId(lease), session.connection))
        return m.Done()

    def renew(self, session: EngineSession, leases: bytes) -> m.Done:
        """Count leases as used now."""
        if len(leases) % 8:
            raise ProtocolError(f"leases column has {len(leases)} bytes, expected a multiple of 8")
        now_ns = self._clock.now_ns()
        for lease in np.frombuffer(leases, dtype="<u8").tolist():
            self._leases.renew(LeaseId(lease), session.connection, now_ns)
        return m.Done()

    def issue_ticket(self, session: EngineSession, lease_id: int) -> m.Ticket:
        """A ticket on a lease: a hold of its own for each rank."""
        now_ns = self._clock.now_ns()
        lease = self._leases.find(LeaseId(lease_id), session.connection)
        if lease is None or not self._leases.has_room_for_ticket:
            return m.Ticket(b"")
        self._leases.renew(lease.id, session.connection, now_ns)
        holds = {rank: HoldId(self._directory.duplicate(hold)) for rank, hold in lease.holds.items()}
        self._schedule_expiry()
        return m.Ticket(self._leases.issue_ticket(session.identity, lease.chunks, holds, now_ns))

    def claim(self, session: EngineSession, ticket: bytes) -> m.Leased:
        """A lease from a ticket, for the session's rank, once."""
        entry = self._leases.find_ticket(ticket)
        rank = session.layout.rank
        if entry is None or rank is None or entry.identity != session.identity or rank not in entry.holds:
            return _NOTHING_LEASED
        self._check_room_for_lease(session)
        chunks = entry.chunks
        hold = self._leases.take_from_ticket(ticket, rank)
        return self._grant(session, chunks, {rank: hold}, self._clock.now_ns())

    def reserve(
        self, session: EngineSession, parent: bytes, keys: bytes, *, may_wait: bool = True
    ) -> m.Reserved | None:
        """Reserve slots for new chunks, evicting others where memory is short.

        None when only memory still being faulted in could serve: ask again after `wait_for_segment`, or with
        `may_wait=False` to have those chunks declined.
        """
        m.check_keys(keys, ranks=1)
        if len(parent) not in (0, KEY_BYTES):
            raise ProtocolError(f"parent key has {len(parent)} bytes, expected none or {KEY_BYTES}")
        limit = self._config.server.max_reservations
        if self._reservations.count_of(session.connection) >= limit:
            raise Refused("full", f"this connection has server.max_reservations = {limit} saves under way")
        own = session.own
        now_ns = self._clock.now_ns()
        reservation_id, states, offsets, generations = self._directory.reserve(
            own.id, own.size_class, parent, keys, now_ns
        )
        reserved = states.count(SaveState.RESERVED)
        if may_wait and SaveState.NOT_READY in states and self._directory.is_behind():
            self._directory.end_reservation(reservation_id, now_ns)
            return None
        if reserved:
            layers = own.layout.layers
            self._reservations.add(
                ReservationId(reservation_id), session.connection, chunks=reserved, layers=layers, now_ns=now_ns
            )
            self._schedule_expiry()
        else:
            assert not reservation_id
        return m.Reserved(reservation_id, states, offsets, generations)

    def commit(self, session: EngineSession, reservation_id: int, checksums: bytes) -> m.Committed:
        """Publish the next chunks of a reservation."""
        layers = session.own.layout.layers
        chunk_checksum_bytes = 4 * layers
        count, rest = divmod(len(checksums), chunk_checksum_bytes)
        if rest or not count:
            raise ProtocolError(f"checksums have {len(checksums)} bytes, expected a multiple of {chunk_checksum_bytes}")
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is None:
            return m.Committed(bytes([SaveState.EXPIRED]) * count)
        if reservation.committed + count > reservation.chunks:
            raise ProtocolError(f"commit of {reservation.committed + count} chunks, {reservation.chunks} are reserved")
        now_ns = self._clock.now_ns()
        self._expire(now_ns)
        if reservation.is_expired:
            return m.Committed(bytes([SaveState.EXPIRED]) * count)
        states = self._directory.commit(reservation_id, reservation.committed, checksums)
        reservation.committed += count
        if reservation.committed == reservation.chunks:
            self._end(reservation, now_ns)
        return m.Committed(states)

    def end_reservation(self, session: EngineSession, reservation_id: int) -> m.Done:
        """Give up what was not committed; the writer has said that it writes no more."""
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is not None:
            self._end(reservation, self._clock.now_ns())
        return m.Done()

    async def check_reported(self, session: EngineSession, lease_id: int, chunk: int) -> None:
        """Recompute the checksums of a leased chunk that a client found bad; drop it if it is."""
        lease = self._leases.find(LeaseId(lease_id), session.connection)
        rank = session.layout.rank
        if lease is None or rank is None or not 0 <= chunk < lease.chunks:
            return
        layout = session.own.layout
        await self._integrity.check_reported(
            lease.holds[rank], chunk, layout.chunk_bytes, layout.layers, self._clock.now_ns()
        )

    def drop_connection(self, connection: ConnectionId) -> None:
        """A connection has ended: its leases and reservations end with it."""
        now_ns = self._clock.now_ns()
        self._release_holds(self._leases.drop_owner(connection))
        for reservation in self._reservations.of_owner(connection):
            self._end(reservation, now_ns)

    def info(self) -> dict[str, Any]:
        """What the daemon is and uses."""
        return render_info(self._config, self.geometry, self.page_use(), epoch=self.epoch, uptime_s=self._uptime_s())

    def stats(self, connections: dict[str, int]) -> Sections:
        """Counters by section; names never change their meaning."""
        server = {
            **connections,
            "uptime_s": int(self._uptime_s()),
            "transfer_waiting": self._workers.waiting,
        }
        index = {
            "leases": len(self._leases),
            "tickets": self._leases.tickets,
            "reservations": len(self._reservations),
            "namespaces": len(self._namespaces),
            "expired_leases": self._expired_leases,
            "expired_reservations": self._expired_reservations,
            "checksum_failures": self._integrity.checksum_failures,
            "corrupt_reports": self._integrity.corrupt_reports,
        }
        return render_stats(self._config, self._directory.stats(), self.page_use(), server=server, index=index)

    def flush(self, model: str | None, older_than_s: float | None) -> dict[str, int]:
        """Drop what nobody holds, of one model or all, unused for a time or at any age."""
        now_ns = self._clock.now_ns()
        before_ns = now_ns + 1 if older_than_s is None else now_ns - min(now_ns, int(older_than_s * NS_PER_S))
        owners: list[int | None] = [None] if model is None else [entry.id for entry in self._namespaces.of_model(model)]
        total = {"chunks": 0, "bytes": 0, "skipped": 0}
        for owner in owners:
            chunks, size, skipped = self._directory.flush(owner, before_ns)
            total = {
                "chunks": total["chunks"] + chunks,
                "bytes": total["bytes"] + size,
                "skipped": total["skipped"] + skipped,
            }
        return total

    def verify(self) -> dict[str, Any]:
        """Recount every invariant: `problems` (one line each) and the number of `chunks` looked at."""
        problems = self._directory.verify() + self._leases.verify() + self._reservations.verify()
        if not self._workers.is_healthy:
            problems.append("transfer: a thread has died")
        expected_holds = self._leases.hold_count() + self._integrity.holds_in_use
        found_holds = self._directory.stats()["holds"]
        if found_holds != expected_holds:
            problems.append(f"index: {found_holds} holds, {expected_holds} are in leases, tickets and checks")
        return {"problems": problems, "chunks": self.chunks, "verified": 0}

    async def verify_bytes(self) -> tuple[list[bytes], int]:
        """Read every chunk and compare its checksums: the keys of corrupt ones, and how many were read."""
        return await self._integrity.check_all(self._clock.now_ns())

    def _uptime_s(self) -> float:
        return (self._clock.now_ns() - self._started_ns) / NS_PER_S

    def _namespace(self, model: str, layout: Layout) -> Namespace:
        found = self._namespaces.find(model, layout)
        if found is not None:
            return found
        if self._namespaces.is_full:
            raise Refused("full", "this daemon knows as many models and layouts as it can: restart it to forget them")
        geometry = (layout.chunk_bytes, layout.layers)
        if geometry not in self._size_classes:
            try:
                self._size_classes[geometry] = SizeClassId(self._directory.add_class(*geometry))
            except ValueError as error:
                raise LayoutMismatch(f"chunks of {layout.chunk_bytes} bytes cannot be stored: {error}") from error
        namespace = Namespace(NamespaceId(self._directory.add_namespace()), self._size_classes[geometry], model, layout)
        self._namespaces.add(namespace)
        return namespace

    def _grant(self, session: EngineSession, chunks: int, holds: dict[int, HoldId], now_ns: int) -> m.Leased:
        lease = self._leases.grant(session.connection, chunks, holds, now_ns)
        self._schedule_expiry()
        rank = session.layout.rank
        if rank is None:
            levels = [np.frombuffer(self._directory.columns(hold)[2], np.uint8) for hold in holds.values()]
            return m.Leased(lease.id, chunks, b"", b"", np.maximum.reduce(levels).tobytes())
        offsets, generations, tiers = self._directory.columns(holds[rank])
        return m.Leased(lease.id, chunks, offsets, generations, tiers)

    def _release_holds(self, holds: list[HoldId]) -> None:
        now_ns = self._clock.now_ns()
        for hold in holds:
            self._directory.release(hold, now_ns)

    def _end(self, reservation: Reservation, now_ns: int) -> None:
        self._directory.end_reservation(reservation.id, now_ns)
        self._reservations.end(reservation)

    def _mark_ready(self, segment: int) -> None:
        self._directory.mark_segment_ready(segment)
        self._segment_ready.set()

    def _schedule_expiry(self) -> None:
        """Look at deadlines again later; nothing is scheduled while nothing can expire."""
        if self._expiry is None:
            shortest_s = min(self._config.server.lease_ttl, self._config.server.reservation_ttl)
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(min(1.0, shortest_s * EXPIRY_FRACTION), self._expire_and_reschedule)

    def _expire_and_reschedule(self) -> None:
        self._expiry = None
        self._expire(self._clock.now_ns())
        if len(self._leases) or self._leases.tickets or len(self._reservations):
            self._schedule_expiry()

    def _expire(self, now_ns: int) -> None:
        leases_before = len(self._leases)
        self._release_holds(self._leases.expire(now_ns))
        self._expired_leases += leases_before - len(self._leases)
        for reservation in self._reservations.expire(now_ns):
            self._directory.expire_reservation(reservation.id, now_ns)
            self._expired_reservations += 1

    async def _find_corrupt(self, extents: tuple[ChunkExtent, ...]) -> tuple[bytes, ...]:
        """Read the extents on a transfer thread. Raises Refused when too many checks are waiting."""
        job = partial(find_corrupt, self._dram.arena, self._index_view, extents)
        return await self._workers.run(job, Urgency.HOUSEKEEPING)

    def _check_room_for_lease(self, session: EngineSession) -> None:
        limit = self._config.server.max_leases
        if self._leases.count_of(session.connection) >= limit:
            raise Refused("full", f"this connection has server.max_leases = {limit} leases")
