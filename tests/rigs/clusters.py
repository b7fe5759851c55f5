"""Cells of many nodes for tests of the simulator, with settings that do not matter to most of them."""

from dataclasses import replace
from typing import Any

from kvpool.config.config import load_config
from kvpool_tools.sim.workload import Workload
from studies.fleet.cell import ClusterCell, ClusterOutcome, ClusterSettings
from studies.fleet.cluster import run_cluster

SETTINGS = ClusterSettings(
    router="round-robin",
    seed=0,
    block_bytes=1 << 20,
    has_peers=True,
    index_entries=1 << 20,
    event_delay_s=0.0,
    store_blocks=0,
    published="all",
    network_bytes_per_s=10e9,
    network_latency_s=1e-3,
    disk_bytes_per_s=6e9,
    disk_latency_s=1e-4,
    block_compute_s=0.025,
)


def cluster_cell(nodes: int, dram: int, ssd: int = 0, policy: str = "lru", **settings: Any) -> ClusterCell:
    """A cell of so many nodes; `settings` are those that matter."""
    return ClusterCell(nodes, policy, dram, ssd, replace(SETTINGS, **settings))


def run(workload: Workload, cell: ClusterCell, *overrides: str) -> ClusterOutcome:
    """The outcome of a cell, in which every block asked for is counted once and nothing is broken."""
    outcome = run_cluster(workload, cell, load_config(None, overrides))
    assert outcome.holes == 0
    assert outcome.hits + outcome.missed == workload.references
    assert min(outcome.hits_dram, outcome.hits_ssd, outcome.hits_peer, outcome.hits_store, outcome.missed) >= 0
    return outcome
