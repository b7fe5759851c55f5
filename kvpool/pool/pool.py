"""Pool: composes index, tiers and transfer into the verbs of a connection.

Decides on the native directory, which is also what clients read; moves no payload itself. Control thread only, but for the jobs
of the pre-fault and transfer threads, whose results come back through the event loop.

Invariant: every hold in the directory is in exactly one lease, ticket, announcement or promotion; every pin is of a demotion
or a check under way.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import kvpool_native
from kvpool import failpoint
from kvpool.checks.checksums import find_corrupt_on
from kvpool.checks.dram_check import DramCheck
from kvpool.checks.recount import compare_counts, compare_shared
from kvpool.checks.scrub import Scrub
from kvpool.clock import NS_PER_S, Clock
from kvpool.config.config import Config
from kvpool.ids import EPOCH_BYTES, PROBE_MODEL, ConnectionId, NamespaceId
from kvpool.index.holders import Holder, process_of
from kvpool.index.miss_ratio_curve import MissRatioCurve
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.index.usage import UsageTable
from kvpool.journal.journal import Journal
from kvpool.layout import Layout
from kvpool.pool.announcements import Announcements
from kvpool.pool.chains import Chains
from kvpool.pool.deadlines import HoldExpiry, PriorityExpiry
from kvpool.pool.declined_saves import DeclinedSaves
from kvpool.pool.demote_all import DemoteOrder, demote_all
from kvpool.pool.device_copies import DeviceCopies
from kvpool.pool.flush import FlushOrder, flush
from kvpool.pool.former_writers import FormerWriters
from kvpool.pool.hint_handlers import HintHandlers
from kvpool.pool.lease_verbs import LeaseVerbs
from kvpool.pool.lower_tiers import KINDS, Planner, Site, capacities_of, make_tiering, plan_tiers
from kvpool.pool.models import list_models
from kvpool.pool.pulled_names import PulledNames
from kvpool.pool.readers.hold_bounds import bound, count_held, held_by_connection, held_by_model, held_by_user
from kvpool.pool.readers.readers import Readers
from kvpool.pool.report import Sections, render_info, render_stats
from kvpool.pool.sharing.sharing import Sharing
from kvpool.pool.takeover import take_over
from kvpool.pool.writers.retention import Retention
from kvpool.pool.writers.staged_saves import StagedSaves
from kvpool.pool.writers.writers import Writers
from kvpool.protocol import usage, verify_walk
from kvpool.states import Level
from kvpool.tiering.link import ArenaSide
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiering.waiting_room import Room
from kvpool.tiers.bad_chunk_log import BadChunkLog
from kvpool.tiers.base import ArenaMemory
from kvpool.tiers.dram.kept.kept_memory import KeptMemory, LifeFiles
from kvpool.tiers.dram.kept.life_page import LifePage
from kvpool.tiers.dram.prefault import Prefault
from kvpool.tiers.dram.tier import DramTier, PageUse, check_chunk_fits, check_memory_fits, plan_geometry
from kvpool.transfer.workers import Workers, call_later
from kvpool.usage import Measurements

log = logging.getLogger(__name__)

TRANSFER_THREADS = 2
TRANSFER_QUEUE_SIZE = 1024
HOLDERS_FOR_EACH = 2  # connection that may be open: one that this side has closed counts until its slots are given back
_Joined = tuple[dict[int, Namespace], int | None]  # a connection's namespaces, and the user whose share counts them


class Pool:
    """The pool of one daemon: its chunks, and for whom they are stored."""

    def __init__(
        self, config: Config, clock: Clock, kinds: Sequence[Planner] = KINDS, kept: KeptMemory | None = None
    ) -> None:
        """`kept`: what outlives this process, and what it has of a former one; None: nothing."""
        self._clock = clock
        self._config = config
        self._started_ns = clock.now_ns()
        self.epoch = os.urandom(EPOCH_BYTES)
        plans = plan_tiers(config, kinds)
        self.geometry = plan_geometry(config.dram, plans.further_entries, plans.region)
        self.kept = KeptMemory(None, b"", clock) if kept is None else kept
        former = self.kept.find_memory(config, self.geometry)
        check_fits = partial(
            check_memory_fits,
            config.dram,
            plans.further_entries,
            upper=plans.region,
            resident_bytes=0 if former is None else former.resident_bytes,
        )
        check_fits(freed_bytes=self.kept.bytes_to_drop)  # or a start that is refused would cost what is kept
        self.kept.drop_unused()
        check_fits()  # what was dropped is free now
        self._dram = DramTier(
            self.geometry,
            config.dram,
            self.epoch,
            is_kept=self.kept.is_wanted,
            former_arena=None if former is None else former.arena,
        )
        self.life_page: LifePage | None = None
        if self.kept.is_wanted:
            self.life_page = LifePage.create() if former is None else former.life_page
        self._directory = self._dram.directory
        self.former_writers = self._make_former_writers(())
        server = config.server
        bound(self._directory, config)
        self._dram.seal(is_arena_read_only=server.staging_bytes > 0)
        self.remote_table: kvpool_native.Mapping | None = None  # given before engines connect
        self.namespaces = Namespaces(self._directory, server.user_quota)
        self.namespaces.on_made, self.namespaces.on_given_back = self.kept.note_namespace, self.kept.forget_namespace
        self._joined: dict[ConnectionId, _Joined] = {}
        self._room = Room()
        side = ArenaSide(self._dram, self.namespaces, clock, self._note_room)
        site = Site(side, self._dram.memory, config, PeerAllowance(config.peer.promoted))
        self._tiering = make_tiering(plans, site)
        self.hit_curve = MissRatioCurve(self._directory, capacities_of(config))
        self._priority_expiry = PriorityExpiry(self._directory, self._tiering, clock)
        retention = Retention(self._directory, self._tiering, self._priority_expiry.look)
        self._readers = self._make_readers()
        self._writers = self._make_writers(retention)
        self.device_copies = DeviceCopies(self._tiering.copies, self._readers)
        self._usage = UsageTable()
        self._workers = Workers(TRANSFER_THREADS, queue_size=TRANSFER_QUEUE_SIZE)
        self.staged = StagedSaves(
            self._writers, self._dram.arena, self._workers, clock, staging_bytes=server.staging_bytes
        )
        self._prefault: Prefault | None = None
        self._index_view = kvpool_native.IndexView(self._dram.index)
        self._bad_in_dram = BadChunkLog(Level.DRAM.name.lower(), clock)
        self._dram_check = DramCheck(
            self._directory,
            partial(find_corrupt_on, self._workers, self._dram.arena, self._index_view),
            self._bad_in_dram,
        )
        self._scrub = Scrub(self._directory, self._dram_check, self.namespaces, self._tiering.checksum_jobs)
        self.journal = self._make_journal()
        self._pulled_names = PulledNames(self._directory, self.journal, clock)
        self.sharing = Sharing(
            config.store, self._dram, self._tiering, namespaces=self.namespaces, journal=self.journal, clock=clock
        )
        self._expiry = HoldExpiry(
            self._readers,
            self._writers,
            clock,
            tiering=self._tiering,
            shortest_s=config.shortest_ttl,
            expire_further=lambda: self.hints.expire(),
        )
        self.hints = HintHandlers(
            retention,
            Announcements(self._directory, self._index_view, self._tiering, config.dram, ending=self._readers.ending),
            self.namespaces,
            tiering=self._tiering,
            journal=self.journal,
            clock=clock,
            on_due=self._expiry.schedule,
        )
        self._declined_saves = DeclinedSaves(clock)
        self.chains = Chains(
            readers=self._readers,
            writers=self._writers,
            tiering=self._tiering,
            journal=self.journal,
            hints=self.hints,
            expiry=self._expiry,
            usage=self._usage,
            sharing=self.sharing,
            device_copies=self.device_copies,
            pulled_names=self._pulled_names,
            room=self._room,
            clock=clock,
            keeps_token_ids=server.keep_token_ids,
            note_declined=lambda connection, states: self._declined_saves.note_answer(
                self._user_of(connection), states
            ),
        )
        self.leases = LeaseVerbs(self._readers, self.chains, self._expiry, dram_check=self._dram_check, clock=clock)

    def reconfigure(self, config: Config) -> None:
        """Continue with another configuration, which differs only in options that can change at run time."""
        self._config = config
        self._readers.change_ttl(int(config.server.lease_ttl * NS_PER_S))
        self._writers.change_ttl(int(config.server.reservation_ttl * NS_PER_S))
        self.hints.change_ttl(int(config.dram.announced_ttl * NS_PER_S))
        self._expiry.change_shortest(config.shortest_ttl)
        self._tiering.reconfigure(config)

    async def start(self) -> None:
        """Give the first segment its pages, so that a save can be served at once; the rest follow in the background. The arena
        of a former life is used as it is: to wait for its pages would evict chunks beside room.

        The tiers begin to open when the caller next waits: reading a catalogue must not delay the socket.
        """
        self.journal.watch(asyncio.get_running_loop())
        is_former = self._begin_life()
        if is_former or not self._config.dram.prefault:
            for segment in range(self.geometry.segments):
                self._directory.mark_segment_ready(segment)
        if self._config.dram.prefault:
            await self._begin_prefault()
        self._tiering.start()

    def _begin_life(self) -> bool:
        """Take over what a former life has left, and have this one's memory kept; whether there was one. Nothing of the arena
        changes before."""
        former, records = self.kept.former, self._dram.records
        if self.life_page is None or records is None:
            return False
        files = LifeFiles(self._dram.arena, self.life_page, self._dram.index, records)
        known = 0 if former is None else len(former.book.writers)
        self.kept.begin_life(self.epoch, files, HOLDERS_FOR_EACH * self._config.server.max_connections + known)
        for namespace in self.namespaces.all():
            self.kept.note_namespace(namespace)
        if former is not None:
            self.kept.begin_takeover()
            taken = take_over(former, self._directory, self.namespaces, self._clock)
            self.kept.note_taken(f"life {former.number}: {taken.describe()}")
            self.former_writers = self._make_former_writers(former.book.writers)
            for holder in self.former_writers.holders:
                self.kept.note_holder(holder)
            self.former_writers.start()
            self._priority_expiry.look()
        self.kept.hand_over()
        self.life_page.begin_life(self.kept.life)
        return former is not None

    def _make_former_writers(self, holders: Iterable[Holder]) -> FormerWriters:
        return FormerWriters(self._directory, holders, forget=self.forget_holder, on_room=self._note_room)

    async def _begin_prefault(self) -> None:
        loop = asyncio.get_running_loop()
        first = await loop.run_in_executor(None, self._dram.prefault_next)
        assert first == 0
        self._directory.mark_segment_ready(first)
        self._prefault = Prefault(
            self._dram,
            self._config.dram.prefault_threads,
            lambda segment: call_later(loop, self._mark_ready, segment),
        )

    async def stop(self) -> bool:
        """End the threads; False where one is left waiting for a disk. Chunks that only DRAM has end with the process."""
        self._expiry.cancel()
        self._priority_expiry.cancel()
        self.former_writers.cancel()
        self.journal.close()
        loop = asyncio.get_running_loop()
        has_ended = await self._tiering.close()
        self._bad_in_dram.close()
        if self._prefault is not None:
            await loop.run_in_executor(None, self._prefault.stop)
        await loop.run_in_executor(None, self._workers.stop)
        return has_ended

    async def demote_all(
        self, timeout_s: float, is_more_coming: Callable[[], bool] | None = None, *, is_forced: bool = True
    ) -> dict[str, int]:
        """Have the lower tiers keep what DRAM alone has, as far as the time goes: `chunks` written, and those `left`.

        `is_more_coming`: for a stop, while saves are still ending. `is_forced`: beyond the write budget. `durable`: a power cut
        now would lose none of the pool's chunks: none is left, and those on disk are synced.
        """
        order = DemoteOrder(timeout_s, is_more_coming, is_forced, self._directory.count_unsaved)
        count, is_synced = await demote_all(self._tiering, self._clock, order)
        left = self._directory.count_unsaved()
        return {"chunks": count, "left": left, "durable": is_synced and not left}

    @property
    def has_lower_tier(self) -> bool:
        """Whether there is a tier that chunks can be demoted to."""
        return bool(self._tiering)

    def fds(self) -> tuple[int, ...]:
        """The descriptors an engine gets: arena, index, and, where there are such, the table of other nodes' chunks and the
        life page."""
        mapped = tuple(one.fd for one in (self._dram.arena, self._dram.index, self.remote_table) if one is not None)
        return mapped if self.life_page is None else (*mapped, self.life_page.client_fd)

    @property
    def memory(self) -> ArenaMemory:
        """The shared memory that clients map."""
        return self._dram.memory

    @property
    def life(self) -> int:
        """The number of this life, among those of one arena; 0 where it can have no next one."""
        return 0 if self.life_page is None else self.kept.life

    @property
    def is_kept(self) -> bool:
        """Whether somebody keeps the memory for a next life."""
        return self.kept.is_kept

    @property
    def first_connection(self) -> int:
        """The lowest number of a connection that names nobody of a former life."""
        return self.kept.first_holder

    def note_holder(self, connection: ConnectionId, proof: bytes, *, pid: int, user: int) -> None:
        """An engine's connection may write from now on, by this process, whose welcome had the proof."""
        self.kept.note_holder(Holder(connection, process_of(pid), proof, user))

    def forget_holder(self, connection: int) -> None:
        """A connection, of this life or a former one, can write no more."""
        self.kept.forget_holder(connection)

    def page_use(self) -> PageUse:
        """The pages that back the arena."""
        return self._dram.page_use(is_settling=self._prefault is not None and self._prefault.is_working)

    def on_overdue(self, end: Callable[[ConnectionId], None]) -> None:
        """Have `end` called for connections that hold slots of a reservation which expired a whole time to live ago."""
        self._writers.on_overdue = end

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way that a stop should wait for."""
        return self._writers.reservations > 0

    @property
    def is_ending(self) -> bool:
        """Whether holds of ended connections are still being released."""
        return self._readers.has_backlog or self._writers.has_backlog

    def _user_of(self, connection: ConnectionId) -> int | None:
        """The user whose share counts a connection's holds."""
        joined = self._joined.get(connection)
        return None if joined is None else joined[1]

    def open_namespaces(self, model: str, layout: Layout, user: int | None = None) -> list[dict[int, Namespace]]:
        """The namespaces of a model and each group of a layout, by rank; made where new; `user`: as for a session. Raises
        LayoutMismatch or Refused."""
        for part in layout.group_layouts:
            check_chunk_fits(part.stored_bytes, capacity=self._config.dram.capacity)
            self.staged.check_layout(part)
        return self.namespaces.open_groups(model, layout, user)

    def open_session(
        self, connection: ConnectionId, model: str, layout: Layout, user: int | None = None
    ) -> EngineSession:
        """The session of an engine's requests. `user`: the user whose share counts its holds; None: no user's."""
        opened = self.open_namespaces(model, layout, user)
        ttl_ns = int(self._config.server.lease_ttl * NS_PER_S)
        session = EngineSession.over(connection, model, layout, opened=opened, lease_ttl_ns=ttl_ns)
        if user is not None:
            self._directory.join_user(connection, user)
        self._joined[connection] = session.namespaces, user
        self.namespaces.join(session.namespaces.values(), user)
        return session

    def count_usage(self, session: EngineSession, column: bytes) -> None:
        """Add a client's usage report. Raises ProtocolError."""
        self._usage.count_report(session, usage.unpack(column), self._clock.now_ns())

    def drop_connection(self, connection: ConnectionId) -> None:
        """A connection has ended: its leases and reservations end with it."""
        failpoint.reach("daemon.connection.ended")
        now_ns = self._clock.now_ns()
        self.end_reading(connection)
        self._writers.drop_owner(connection, now_ns)
        self.staged.drop_owner(connection)
        self.device_copies.drop_owner(connection)
        self._directory.leave_user(connection)
        namespaces, user = self._joined.pop(connection, ({}, None))
        self.namespaces.leave(namespaces.values(), user)

    def end_reading(self, connection: ConnectionId) -> None:
        """End a connection's leases, announcements and reports before it has ended: they write nothing."""
        self._readers.drop_owner(connection, self._clock.now_ns())
        self._expiry.end_more()
        self.hints.drop_owner(connection)
        self.journal.end_reports(connection)

    def held_by_connection(self) -> dict[int, dict[str, int]]:
        """Holds of each connection, by name: leases, reservations, and the bytes of slots that they protect from eviction."""
        return held_by_connection(self._directory, self._readers, self._writers, self.hints)

    def info(self) -> dict[str, Any]:
        """The daemon's identity and resources."""
        info = render_info(self._config, self.geometry, self.page_use(), epoch=self.epoch, uptime_s=self._uptime_s())
        tiers = sorted({**self._tiering.names, Level.DRAM: Level.DRAM.name.lower()}.items())
        own = {"tiers": [name for _, name in tiers], **self.kept.report(), **self.former_writers.report()}
        return info | own | self._tiering.info() | self.journal.info()

    def stats(self, connections: dict[str, int]) -> Sections:
        """Counters by section; names never change their meaning."""
        return render_stats(self._config, self.measure(connections))

    def measure(self, connections: dict[str, int]) -> Measurements:
        """All counters, at one moment; the result does not change afterwards."""
        server = {**connections, "uptime_s": int(self._uptime_s()), "transfer_waiting_jobs": self._workers.waiting}
        found_bad = self._dram_check.stats()
        index = {
            **self._readers.stats(self._probing()),
            **self._writers.stats(),
            **self.staged.stats(),
            **found_bad,
            "checksum_failures": found_bad["checksum_failures"] + self._tiering.corrupt_in_arena,
            "namespaces": len(self.namespaces),
            "verified_chunks": self._scrub.verified_chunks,
            **self.hints.stats(),
        }
        pages, directory = self.page_use(), self._directory.stats()
        return Measurements(
            server=server,
            index=index,
            directory=directory | {"held": directory["held"] - self._held_by_probe()},
            capacity_bytes=self._config.dram.capacity,
            resident_bytes=pages.resident_bytes,
            huge_bytes=pages.huge_bytes,
            is_settling=pages.is_settling,
            models=self._usage.models(),
            failures=self._usage.failures(),
            chunks=self._tiering.count_chunks(),
            evicted_chunks=sum(each.evicted_chunks for each in (self._directory, *self._tiering.directories)),
            held_by_model=held_by_model(self._directory, self.namespaces),
            held_by_user=held_by_user(
                self._directory, {connection: user for connection, (_, user) in self._joined.items()}
            ),
            events=self.journal.stats(),
            tiers=self._tiering.stats(),
            classes={link.tier.name: link.slots.classes() for link in self._tiering.lower},
            held=count_held(self._directory, self.namespaces),
        )

    def _probing(self) -> list[ConnectionId]:
        """Connections of the daemon's own probe."""
        return [
            connection
            for connection, (namespaces, _) in self._joined.items()
            if any(namespace.model == PROBE_MODEL for namespace in namespaces.values())
        ]

    def _held_by_probe(self) -> int:
        return sum(
            kept.held
            for kept in self._directory.held_namespaces()
            if self.namespaces.by_id(NamespaceId(kept.namespace)).model == PROBE_MODEL
        )

    def flush(self, model: str | None, older_than_s: float | None, tier: str = "") -> Parts[dict[str, int]]:
        """Drop chunks without holds, of one model or all, unused for a time or at any age; see `flush`. Raises Refused."""
        failpoint.reach("daemon.flush.before", failpoint.refused)
        order = FlushOrder(model, older_than_s, tier, self._clock.now_ns())
        return flush(
            self._directory,
            self._tiering,
            order,
            view=self._index_view,
            namespaces=self.namespaces,
            on_part=self._note_flushed,
        )

    def models(self) -> Parts[dict[str, Any]]:
        """Each model and layout, and what of it is stored and used; see `list_models`."""
        tiers = [(Level.DRAM, "dram", self._directory)]
        tiers += [(slots.level, slots.name, slots.directory) for slots in self._tiering.slots]
        return list_models(
            {name: directory for _, name, directory in sorted(tiers, key=lambda tier: tier[0])},
            self.namespaces.all(),
            [joined.values() for joined, _ in self._joined.values()],
            uses=self._usage.by_layout,
            now_ns=self._clock.now_ns(),
        )

    def discard(self, key: bytes) -> None:
        """Drop a chunk that its only user no longer needs, held or not; nothing where it was evicted."""
        self._directory.discard(key)

    def problems(self) -> list[str]:
        """Background threads that have ended before their work, one line each. Any thread."""
        problems = [] if self._workers.is_healthy else ["transfer: the outcome of a job was lost"]
        if self._prefault is not None and self._prefault.failure:
            problems.append(f"dram: pre-faulting ended early: {self._prefault.failure}")
        return problems + self.journal.problems() + self._tiering.problems()

    def shortcomings(self) -> list[str]:
        """Configured parts that are missing and that a restart would not bring back, one line each. Any thread."""
        return self._tiering.shortcomings() + self._declined_saves.problems()

    def verify(self, *, with_shared: bool = True) -> dict[str, Any]:
        """Recount every invariant: `problems` (one line each), the number of `chunks` that there are, each counted once, and
        that of each tier.

        Takes a second for a million chunks: a daemon has a child process do it, which cannot see the memory that clients map,
        and checks that itself (`verify_shared`).
        """
        problems = self._directory.verify(with_shared) + self._tiering.verify(with_shared=with_shared)
        owners = (self._readers, self._writers, self.hints, self.namespaces, self.journal, self.former_writers)
        for owner in owners:
            problems += owner.verify()
        holds = self._readers.holds + self.hints.holds + self._tiering.holds
        pins = self._dram_check.pins + self._tiering.pins + self.sharing.pins
        problems += compare_counts(self._directory, holds=holds, pins=pins)
        return {"problems": problems, "chunks": self._tiering.count_chunks(), "tiers": self._scrub.tiers()}

    async def make_copy_room(self) -> kvpool_native.Directory.CopyRoom | None:
        """Room for `copied_for_child`; None where no records are kept. Raises MemoryError."""
        if self._dram.records is None:
            return None
        sizes = self.geometry.max_chunks, self._directory.stats()["entries"]
        return await asyncio.get_running_loop().run_in_executor(None, kvpool_native.Directory.CopyRoom, *sizes)

    @contextmanager
    def copied_for_child(self, room: kvpool_native.Directory.CopyRoom | None) -> Iterator[None]:
        """A child that is forked meanwhile has a copy of records that are kept for a later life: 7 ms for a million."""
        self._directory.copy_for_child(room)
        try:
            yield
        finally:
            self._directory.forget_copy()

    def verify_shared(self) -> Parts[list[str]]:
        """Compare records and the memory that clients map, part by part: broken invariants, one line each."""
        return compare_shared(self._directories())

    async def verify_bytes(self, column: bytes, chunks: int) -> dict[str, Any]:
        """Verify a slice of the chunks at these records; see `m.VerifyBytes`. Raises ProtocolError or Refused."""
        return (await self._scrub.read(verify_walk.unpack(column), chunks)).to_report()

    def _directories(self) -> list[kvpool_native.Directory]:
        return [self._directory, *(slots.directory for slots in self._tiering.slots)]

    def _note_flushed(self) -> None:
        self.journal.keep_up()
        self._tiering.keep_up()

    def _uptime_s(self) -> float:
        return (self._clock.now_ns() - self._started_ns) / NS_PER_S

    def _make_readers(self) -> Readers:
        server = self._config.server
        return Readers(
            self._directory,
            self._tiering,
            self.hit_curve,
            ttl_ns=int(server.lease_ttl * NS_PER_S),
            leases_max=server.max_leases,
            on_backlog=self._end_more,
        )

    def _make_writers(self, retention: Retention) -> Writers:
        server = self._config.server
        return Writers(
            self._directory,
            retention,
            self.hit_curve,
            ttl_ns=int(server.reservation_ttl * NS_PER_S),
            reservations_max=server.max_reservations,
            is_staged=server.staging_bytes > 0,
            keeps_token_ids=server.keep_token_ids,
            dram=self._config.dram,
            on_backlog=self._end_more,
        )

    def _make_journal(self) -> Journal:
        server = self._config.server
        tiers = {slots.level: (slots.directory, slots.sizes.max_chunks) for slots in self._tiering.slots}
        tiers[Level.DRAM] = (self._directory, self.geometry.max_chunks)
        journal = Journal(
            self.epoch,
            dict(sorted(tiers.items())),
            self.namespaces,
            headers=self._tiering.headers if server.keep_token_ids else {},
            names=self._tiering.names,
            clock=self._clock,
            config=self._config.events,
            user_quota=server.user_quota,
        )
        self.namespaces.on_numbers_reused = journal.forget_namespaces
        return journal

    def _end_more(self) -> None:
        self._expiry.end_more()

    def _mark_ready(self, segment: int) -> None:
        self._directory.mark_segment_ready(segment)
        self._note_room()

    def _note_room(self) -> None:
        """Chunks or segments have moved: wake requests that wait for room."""
        self._pulled_names.name_arrived()
        self._room.wake_requests()
        self.hints.note_room()
        self._priority_expiry.look()
