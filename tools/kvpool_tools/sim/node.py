"""Simulated node: a daemon's own classes without bytes, for one client's requests, on a clock that the trace sets.

A `SimulatedPool`, for two tiers with promotions, demotions and admission over a `MetadataTier`, and above them a `DeviceTier`
where one is wanted. No decision is made here: requests are made as the client library makes them (look up, lease by the last
key, release, reserve the rest, commit), and moves that a daemon would wait for are completed first. So nothing is under way
between two requests, in which a simulated node differs from a busy one.

One thread. Invariant: between two calls of `serve` nothing is leased, reserved or under way.
"""

from dataclasses import dataclass, replace

import kvpool_native
from kvpool.config.config import Config
from kvpool.errors import KVPoolError
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.sessions import EngineSession
from kvpool.journal.event_log import EVENT_PAYLOAD_BYTES_MAX
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.runs import Run
from kvpool.protocol.records.messages import Leased
from kvpool.states import Level, SaveState
from kvpool.tiering.admission import Admission
from kvpool.tiering.copies.promotion_budget import PromotionBudget
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiers.dram.tier import plan_geometry
from kvpool_tools.sim.device_tier import DeviceTier, plan_device
from kvpool_tools.sim.metadata_tier import MetadataTier
from kvpool_tools.sim.pool import CHUNK_BYTES, LAYOUT, MODEL, POLICIES, SEED, SimulatedPool

# A daemon lets a request wait for room for some seconds; here each wait is a round of writes.
WAITS_MAX = 1000
ROUNDS_MAX = 100_000


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
        self._tiers = [MetadataTier(config, blocks=ssd_blocks, chunk_bytes=CHUNK_BYTES)] if ssd_blocks else []
        self._pool = pool = SimulatedPool(
            config,
            geometry,
            policy=policy,
            make_links=lambda side: [LowerLink(side, tier) for tier in self._tiers],
        )
        self._devices: list[DeviceTier] = []
        if device is not None:
            made = DeviceTier(
                pool.directory,
                device,
                pool.namespaces,
                policy=policy,
                seed=SEED,
                config=config,
                budget=PromotionBudget(hbm_blocks * CHUNK_BYTES, capacity),
            )
            self._devices.append(made)
        self.ssd_blocks_read = 0
        self._session = EngineSession(ConnectionId(1), LAYOUT, MODEL, pool.namespaces.open_ranks(MODEL, LAYOUT))

    def __repr__(self) -> str:
        return f"<SimulatedNode {self._pool.directory.stats()['chunks']} blocks in DRAM, {self._tiers}>"

    @property
    def admission(self) -> Admission | None:
        """Blocks written to the lower tier, where there is one."""
        return self._pool.links[0].admission if self._pool.links else None

    @property
    def ssd_blocks_written(self) -> int:
        """Blocks written to the lower tier so far."""
        return sum(link.demotions.demoted_chunks for link in self._pool.links)

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
        self._pool.clock.set(now_ns)
        found = len(self._pool.index.lookup(keys.packed))
        grant = self._lease(keys[:found]) if found else None
        if grant is None or not grant.lease:
            return Hits(0, 0)
        tiers = grant.tiers
        self._settle()
        lease = self._pool.readers.find(self._session, grant.lease)
        assert lease is not None
        ((hold,),) = lease.holds.values()
        above = sum(device.load(self._session.own, HoldId(hold), now_ns) for device in self._devices)
        self._pool.readers.release(self._session, grant.lease, now_ns)
        ssd = tiers.count(Level.SSD)
        self.ssd_blocks_read += ssd
        return Hits(grant.chunks - above - ssd, ssd, above)

    def store(self, keys: KeyColumn, first: int, now_ns: int) -> int:
        """Store the blocks from `first` on; those before them are stored. Returns how many are stored now."""
        self._pool.clock.set(now_ns)
        return self._store(keys.before(first), keys[first:]) if first < len(keys) else 0

    def report_to(self, feed: kvpool_native.ChangeFeed) -> None:
        """Report every change of the stored blocks to the feed from now on."""
        for directory in (self._pool.directory, *self._pool.tiering.directories):
            directory.report_to(feed)

    def runs_of(self, rows: bytes) -> list[kvpool_native.ChangeRun]:
        """Rows of the feed as runs that one event reports each."""
        return self._pool.directory.runs_of(rows, EVENT_PAYLOAD_BYTES_MAX)

    def verify(self) -> list[str]:
        """Broken invariants of every class, one line each: holes would be among them."""
        return self._pool.verify() + [problem for device in self._devices for problem in device.verify()]

    def _lease(self, keys: KeyColumn) -> Leased | None:
        runs = [Run(self._session, keys)]
        for _ in range(WAITS_MAX):
            granted = self._pool.lease(self._session, runs, len(keys), may_wait=True)
            if granted is not None or not self._make_room():
                break
        return granted if granted is not None else self._pool.lease(self._session, runs, len(keys), may_wait=False)

    def _store(self, parent: bytes, keys: KeyColumn) -> int:
        for _ in range(WAITS_MAX):
            slots = self._pool.save(self._session, parent, keys, may_wait=True)
            if slots is not None or not self._make_room():
                break
        slots = slots if slots is not None else self._pool.save(self._session, parent, keys)
        assert slots is not None
        self._pool.tiering.run()
        self._settle()
        return slots.states.count(SaveState.RESERVED) + slots.states.count(SaveState.PRESENT)

    def _make_room(self) -> bool:
        """Have the coldest blocks demoted. False when nothing moves: then the request continues with the present room."""
        is_moving = self._pool.tiering.make_room()
        self._settle()
        return is_moving

    def _settle(self) -> None:
        """Run until nothing is under way. Ends, because no block is written twice without a use in between."""
        for _ in range(ROUNDS_MAX):
            if not any(tier.has_finished for tier in self._tiers):
                return
            for link in self._pool.links:
                link.on_completed()
        raise KVPoolError(f"blocks are still moving between the tiers after {ROUNDS_MAX} rounds")
