"""Simulated node: a daemon's own classes without bytes, for one client's requests, on a clock that the trace sets.

The native directory without an arena, `Readers` and `Writers`, for two tiers `tiering` with its promotions, demotions and
admission over a `MetadataTier`, and above them a `DeviceTier` where one is wanted. No decision is made here: requests are
made as the client library makes them (look up, lease by the last key, release, reserve the rest, commit), and moves that a
daemon would wait for are completed first. So nothing is under way between two requests, in which a simulated node differs
from a busy one.

One thread. Invariant: between two calls of `serve` nothing is leased, reserved or under way.
"""

from dataclasses import dataclass, replace

import numpy as np

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.config.config import Config
from kvpool.errors import KVPoolError
from kvpool.ids import CHECKSUM_BYTES, EPOCH_BYTES, ConnectionId
from kvpool.index.namespaces import Namespaces
from kvpool.index.parts import Step
from kvpool.index.sessions import EngineSession
from kvpool.journal.event_log import EVENT_PAYLOAD_BYTES_MAX
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.packed_rows import CHANGE_ROW
from kvpool.pool.readers.readers import Grant, Readers
from kvpool.pool.readers.runs import Run
from kvpool.pool.writers.commit_columns import CommitColumns
from kvpool.pool.writers.reserve_task import ReservedSlots
from kvpool.pool.writers.retention import Retention
from kvpool.pool.writers.writers import Writers
from kvpool.states import Level, SaveState
from kvpool.tiering.admission import Admission
from kvpool.tiering.copies.promotion_budget import PromotionBudget
from kvpool.tiering.link import ArenaSide
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.dram.tier import plan_geometry
from kvpool_tools.sim.device_tier import DeviceTier, plan_device
from kvpool_tools.sim.metadata_tier import MetadataTier

# A simulated chunk is as small as a slot can be: sizes are counts of blocks.
LAYOUT = Layout(layers=1, planes=1, kv_heads=1, head_dim=8, dtype="uint8", chunk_tokens=512)
CHUNK_BYTES = LAYOUT.stored_bytes
MODEL = "simulated"
# The eviction policies that the native directory has, its default first.
POLICIES = ("class-queues", "lru")
# A daemon lets a request wait for room for some seconds; here each wait is a round of writes.
WAITS_MAX = 1000
ROUNDS_MAX = 100_000


class VirtualClock:
    """A clock that stays where it is set. Invariant: it never goes backwards."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since the trace's start."""
        return self._now_ns

    def set(self, now_ns: int) -> None:
        """Go on to a later time."""
        assert now_ns >= self._now_ns
        self._now_ns = now_ns


@dataclass(frozen=True, slots=True)
class Hits:
    """Leading blocks of a request that were there, by the uppermost tier that had each."""

    dram: int
    ssd: int
    hbm: int = 0

    @property
    def all(self) -> int:
        """Blocks of all tiers."""
        return self.hbm + self.dram + self.ssd


@dataclass(frozen=True, slots=True)
class SimulatedArena:
    """An arena without memory; see `ArenaTier`."""

    directory: kvpool_native.Directory
    capacity_bytes: int
    max_chunks: int


# Seed of the policy's sample: a simulation gives the same result each time.
SEED = bytes(range(16))


class SimulatedNode:
    """A node with room for `dram_blocks`, and `ssd_blocks` in a lower tier and `hbm_blocks` in device memory (0: none).

    `ssd_blocks_read`: moved up from the lower tier.
    """

    def __init__(self, *, dram_blocks: int, ssd_blocks: int, policy: str, config: Config, hbm_blocks: int = 0) -> None:
        assert policy in POLICIES
        assert dram_blocks > 0
        assert ssd_blocks >= 0
        assert hbm_blocks >= 0
        capacity = dram_blocks * CHUNK_BYTES
        ssd_capacity = ssd_blocks * (CHUNK_BYTES + kvpool_native.SSD_HEADER_BYTES)
        dram, ssd = replace(config.dram, capacity=capacity), replace(config.ssd, capacity=ssd_capacity)
        config = replace(config, dram=dram, ssd=ssd)
        device = plan_device(hbm_blocks, LAYOUT) if hbm_blocks else None
        geometry = plan_geometry(replace(dram, max_chunks=dram_blocks), ssd_blocks, device)
        index = kvpool_native.Mapping.create("kvpool-simulated-index", geometry.index_bytes)
        self._clock = VirtualClock()
        self._directory = kvpool_native.Directory(None, index, geometry, bytes(EPOCH_BYTES), policy, SEED)
        self._directory.cap_retained(config.dram.retained_quota)
        for segment in range(geometry.segments):
            self._directory.mark_segment_ready(segment)
        self._index = kvpool_native.IndexView(index)
        namespaces = Namespaces(self._directory)
        arena = SimulatedArena(self._directory, capacity, dram_blocks)
        self._tiers = [MetadataTier(config, blocks=ssd_blocks, chunk_bytes=CHUNK_BYTES)] if ssd_blocks else []
        self._links = [LowerLink(ArenaSide(arena, namespaces, self._clock), tier) for tier in self._tiers]
        self._tiering = Tiering(arena, self._links, self._clock)
        server = config.server
        self._readers = Readers(
            self._directory,
            self._tiering,
            ttl_ns=int(server.lease_ttl * NS_PER_S),
            leases_max=server.max_leases,
        )
        self._writers = Writers(
            self._directory,
            Retention(self._directory, self._tiering),
            ttl_ns=int(server.reservation_ttl * NS_PER_S),
            reservations_max=server.max_reservations,
        )
        self._devices: list[DeviceTier] = []
        if device is not None:
            made = DeviceTier(
                self._directory,
                device,
                namespaces,
                policy=policy,
                seed=SEED,
                config=config,
                budget=PromotionBudget(hbm_blocks * CHUNK_BYTES, capacity),
            )
            self._devices.append(made)
        self.ssd_blocks_read = 0
        self._session = EngineSession(ConnectionId(1), LAYOUT, MODEL, namespaces.open_ranks(MODEL, LAYOUT))

    def __repr__(self) -> str:
        return f"<SimulatedNode {self._directory.stats()['chunks']} blocks in DRAM, {self._tiers}>"

    @property
    def admission(self) -> Admission | None:
        """Blocks written to the lower tier, where there is one."""
        return self._links[0].admission if self._links else None

    @property
    def ssd_blocks_written(self) -> int:
        """Blocks written to the lower tier so far."""
        return sum(link.demotions.demoted_chunks for link in self._links)

    @property
    def hbm_blocks_promoted(self) -> int:
        """Blocks moved up into device memory so far."""
        return sum(device.promoted for device in self._devices)

    def serve(self, keys: KeyColumn, now_ns: int) -> Hits:
        """Serve one request: lease the hit, then store the rest. `keys`: the root first."""
        hits = self.load(keys, now_ns)
        self.store(keys, hits.all, now_ns)
        return hits

    def load(self, keys: KeyColumn, now_ns: int) -> Hits:
        """Lease and release the stored prefix, as an engine does, or a peer that pulls it."""
        self._clock.set(now_ns)
        found = self._index.lookup(keys.packed)[0]
        grant = self._lease(keys[:found]) if found else None
        if grant is None or not grant.lease:
            return Hits(0, 0)
        tiers = grant.tiers
        self._settle()
        lease = self._readers.find(self._session, grant.lease)
        assert lease is not None
        ((hold,),) = lease.holds.values()
        above = sum(device.load(self._session.own, hold, now_ns) for device in self._devices)
        self._readers.release(self._session, grant.lease, now_ns)
        ssd = tiers.count(Level.SSD)
        self.ssd_blocks_read += ssd
        return Hits(grant.chunks - above - ssd, ssd, above)

    def store(self, keys: KeyColumn, first: int, now_ns: int) -> int:
        """Store the blocks from `first` on; those before them are stored. Returns how many are stored now."""
        self._clock.set(now_ns)
        return self._store(keys.before(first), keys[first:]) if first < len(keys) else 0

    def report_to(self, feed: kvpool_native.ChangeFeed) -> None:
        """Report every change of the stored blocks to the feed from now on."""
        for directory in (self._directory, *self._tiering.directories):
            directory.report_to(feed)

    def runs_of(self, rows: bytes) -> list[kvpool_native.ChangeRun]:
        """Rows of the feed as runs that one event reports each."""
        sizes = {int(number): LAYOUT.chunk_tokens for number in set(np.frombuffer(rows, CHANGE_ROW)["namespace"])}
        return self._directory.runs_of(rows, sizes, EVENT_PAYLOAD_BYTES_MAX)

    def verify(self) -> list[str]:
        """Broken invariants of every class, one line each: holes would be among them."""
        problems = self._directory.verify() + self._readers.verify() + self._writers.verify()
        problems += [problem for device in self._devices for problem in device.verify()]
        return problems + self._tiering.verify()

    def _lease(self, keys: KeyColumn) -> Grant | None:
        for _ in range(WAITS_MAX):
            granted = self._acquire(keys, may_wait=True)
            if granted is not None or not self._make_room():
                break
        return granted if granted is not None else self._acquire(keys, may_wait=False)

    def _acquire(self, keys: KeyColumn, *, may_wait: bool) -> Grant | None:
        now_ns, runs = self._clock.now_ns(), [Run(self._session, keys)]
        taken = self._readers.take_at_once(self._session, runs, now_ns)
        if taken is not None:
            return self._readers.grant(self._session, taken, now_ns)
        task = self._readers.begin_task(self._session, runs, chunks=len(keys))
        with self._tiering.protecting(may_wait):
            while (step := task.advance(now_ns)) is Step.MORE:
                pass
        is_late = step is Step.WAIT and may_wait
        grant = (
            None
            if is_late
            else self._readers.grant(self._session, self._readers.take_holds(self._session, task), now_ns)
        )
        task.release_holds(now_ns)
        return grant

    def _store(self, parent: bytes, keys: KeyColumn) -> int:
        for _ in range(WAITS_MAX):
            reserved_slots = self._reserve(parent, keys, may_wait=True)
            if reserved_slots is not None or not self._make_room():
                break
        reserved_slots = reserved_slots if reserved_slots is not None else self._reserve(parent, keys, may_wait=False)
        assert reserved_slots is not None
        reserved = reserved_slots.states.count(SaveState.RESERVED)
        if reserved:
            checksums = bytes(reserved * LAYOUT.extents * CHECKSUM_BYTES)
            columns, now_ns = CommitColumns(checksums), self._clock.now_ns()
            self._writers.commit_all(self._session, reserved_slots.reservation, columns, now_ns)
        self._tiering.run()
        self._settle()
        return reserved + reserved_slots.states.count(SaveState.PRESENT)

    def _reserve(self, parent: bytes, keys: KeyColumn, *, may_wait: bool) -> ReservedSlots | None:
        with self._tiering.protecting(may_wait):
            return self._writers.reserve(self._session, parent, keys, self._clock.now_ns(), may_wait=may_wait)

    def _make_room(self) -> bool:
        """Have the coldest blocks demoted. False when nothing moves: then the request continues with the present room."""
        is_moving = self._tiering.make_room()
        self._settle()
        return is_moving

    def _settle(self) -> None:
        """Run until nothing is under way. Ends, because no block is written twice without a use in between."""
        for _ in range(ROUNDS_MAX):
            if not any(tier.has_finished for tier in self._tiers):
                return
            for link in self._links:
                link.on_completed()
        raise KVPoolError(f"blocks are still moving between the tiers after {ROUNDS_MAX} rounds")
