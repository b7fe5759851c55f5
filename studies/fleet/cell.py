"""Cells of a simulation of many nodes: what is simulated, and what came of it. Plain values, which processes pass as JSON."""

from dataclasses import dataclass
from typing import Any

# What a node publishes to the shared store: each block that it stores, or those that it was asked for again.
PUBLISHED = ("used-again", "all")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What is equal for each number of nodes. `index_entries`: room of a node's remote index; `store_blocks` 0: no store."""

    router: str
    seed: int
    block_bytes: int
    has_peers: bool
    index_entries: int
    event_delay_s: float
    store_blocks: int
    published: str
    network_bytes_per_s: float
    network_latency_s: float
    disk_bytes_per_s: float
    disk_latency_s: float
    block_compute_s: float


@dataclass(frozen=True, slots=True)
class ClusterCell:
    """A number of nodes, each with a policy and room for so many blocks in each tier."""

    nodes: int
    policy: str
    dram_blocks: int
    ssd_blocks: int
    settings: ClusterSettings

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "ClusterCell":
        """The cell of `dataclasses.asdict`."""
        return cls(**{**values, "settings": ClusterSettings(**values["settings"])})


@dataclass(slots=True)
class ClusterOutcome:
    """Result of a cell, of all nodes together. Blocks asked for are hits of one of the four, or missed.

    `blocks_stale`: expected of a peer that had them no longer; `blocks_slow`: known elsewhere, and computed sooner than moved.
    `index_entries`: the most entries of a node's remote index; `index_forgotten`: entries that a full one had no room for.
    `changes`: blocks that came to a node or left it; `events`: messages' events about them; the peak is of a second.
    `busiest_share`: of the time in which the busiest link of a node was in use.
    """

    sessions: int = 0
    nodes_used: int = 0
    hits_dram: int = 0
    hits_ssd: int = 0
    hits_peer: int = 0
    hits_store: int = 0
    missed: int = 0
    blocks_stale: int = 0
    blocks_slow: int = 0
    pulls: int = 0
    blocks_to_store: int = 0
    ssd_blocks_written: int = 0
    index_entries: int = 0
    index_forgotten: int = 0
    changes: int = 0
    changes_peak: int = 0
    events: int = 0
    trace_s: float = 0.0
    busiest_share: float = 0.0
    saved_s: float = 0.0
    holes: int = 0
    seconds: float = 0.0

    @property
    def hits(self) -> int:
        """Blocks that were not computed."""
        return self.hits_dram + self.hits_ssd + self.hits_peer + self.hits_store
