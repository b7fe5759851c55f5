"""Cells of a simulation: one capacity with one policy, or the bounds at that capacity. Pure but for the time it takes."""

from dataclasses import dataclass, replace

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import Config
from kvpool.key_column import KeyColumn
from kvpool_tools.sim.node import SimulatedNode
from kvpool_tools.sim.oracles import belady_hits, lru_hits
from kvpool_tools.sim.pool import CHUNK_BYTES
from kvpool_tools.sim.workload import Workload

# How often in a run every invariant is recounted.
VERIFICATIONS = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Block hits of the offline optimum, and those of leaf-first LRU, with room for `blocks`."""

    blocks: int
    belady_hits: int
    lru_hits: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy, and the capacity of each tier in blocks."""

    policy: str
    dram_blocks: int
    ssd_blocks: int
    hbm_blocks: int = 0

    @property
    def blocks(self) -> int:
        """Room in all tiers. Device memory has copies alone, and adds none."""
        return self.dram_blocks + self.ssd_blocks


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a cell. `holes`: broken invariants of the index, cached blocks without their parent among them."""

    hits_dram: int
    hits_ssd: int
    ssd_blocks_written: int
    holes: int
    seconds: float
    hits_hbm: int = 0
    hbm_blocks_promoted: int = 0
    ssd_blocks_read: int = 0

    @property
    def hits(self) -> int:
        """Block hits in all tiers."""
        return self.hits_hbm + self.hits_dram + self.hits_ssd

    @property
    def blocks_moved(self) -> int:
        """Blocks that were copied from one tier to another."""
        return self.hbm_blocks_promoted + self.ssd_blocks_read + self.ssd_blocks_written


def simulated_config(config: Config, block_bytes: int) -> Config:
    """A daemon's configuration for simulated blocks: budgets count bytes, and a simulated block has fewer than a real one."""
    budget = config.ssd.write_budget
    # An unlimited budget stays unlimited; one in drive writes follows the simulated tier.
    scaled = max(1, budget.size * _slot_bytes(CHUNK_BYTES) // _slot_bytes(block_bytes)) if budget.size else 0
    return replace(config, ssd=replace(config.ssd, write_budget=replace(budget, size=scaled)))


def _slot_bytes(chunk_bytes: int) -> int:
    """Bytes that the disk writes for a chunk."""
    return chunk_bytes + kvpool_native.SSD_HEADER_BYTES


def run_bounds(workload: Workload, blocks: int) -> Bounds:
    """The bounds with room for `blocks`."""
    return Bounds(blocks, belady_hits(workload, blocks), lru_hits(workload, blocks))


def run_cell(workload: Workload, cell: Cell, config: Config) -> Outcome:
    """Serve every request by a node of the daemon's own classes."""
    node = SimulatedNode(
        dram_blocks=cell.dram_blocks,
        ssd_blocks=cell.ssd_blocks,
        hbm_blocks=cell.hbm_blocks,
        policy=cell.policy,
        config=config,
    )
    keys, clock = workload.keys(), MonotonicClock()
    first, storable, at_ns = workload.first.tolist(), workload.storable.tolist(), workload.at_ns.tolist()
    hbm = dram = ssd = holes = spent_ns = 0
    for part in range(VERIFICATIONS):
        start_ns = clock.now_ns()
        for request in range(
            part * workload.requests // VERIFICATIONS, (part + 1) * workload.requests // VERIFICATIONS
        ):
            start, end = first[request], first[request] + storable[request]
            if start < end:
                hits = node.serve(KeyColumn(keys[workload.blocks[start:end]].tobytes()), at_ns[request])
                hbm += hits.hbm
                dram += hits.dram
                ssd += hits.ssd
        spent_ns += clock.now_ns() - start_ns
        holes += len(node.verify())
    return Outcome(
        hits_dram=dram,
        hits_ssd=ssd,
        ssd_blocks_written=node.ssd_blocks_written,
        holes=holes,
        seconds=spent_ns / 1e9,
        hits_hbm=hbm,
        hbm_blocks_promoted=node.hbm_blocks_promoted,
        ssd_blocks_read=node.ssd_blocks_read,
    )
