"""Cells of a simulation with groups: a capacity, a policy and a model with windows. Pure but for the time it takes."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import Config
from kvpool.ids import KEY_BYTES
from kvpool.key_column import KeyColumn
from kvpool_tools.sim.cells import VERIFICATIONS, Outcome
from kvpool_tools.sim.grouped_node import GroupedNode, Request
from kvpool_tools.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class GroupedCell:
    """A policy, and room for `blocks` blocks of all `layers` layers, of which `full_layers` are full."""

    policy: str
    blocks: int
    window_blocks: int
    full_layers: int
    layers: int

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> "GroupedCell":
        """The cell of a line that another process wrote."""
        return cls(**fields)  # type: ignore[arg-type]  # written by asdict


def run_grouped(workload: Workload, cell: GroupedCell, config: Config) -> Outcome:
    """Serve every request by a node of the daemon's own classes."""
    node = GroupedNode(
        blocks=cell.blocks,
        window_blocks=cell.window_blocks,
        full_layers=cell.full_layers,
        layers=cell.layers,
        policy=cell.policy,
        config=config,
    )
    full, window, clock = workload.keys(), _window_keys(workload.unique), MonotonicClock()
    first, storable, at_ns = workload.first.tolist(), workload.storable.tolist(), workload.at_ns.tolist()
    hits = holes = spent_ns = 0
    for part in range(VERIFICATIONS):
        start_ns = clock.now_ns()
        for number in range(part * workload.requests // VERIFICATIONS, (part + 1) * workload.requests // VERIFICATIONS):
            blocks = workload.blocks[first[number] : first[number] + storable[number]]
            if len(blocks):
                request = Request(KeyColumn(full[blocks].tobytes()), KeyColumn(window[blocks].tobytes()))
                hits += node.serve(request, at_ns[number])
        spent_ns += clock.now_ns() - start_ns
        holes += len(node.verify())
    return Outcome(hits_dram=hits, hits_ssd=0, ssd_blocks_written=0, holes=holes, seconds=spent_ns / 1e9)


def _window_keys(unique: int) -> npt.NDArray[np.uint8]:
    """The key of each block's chunk in the window group, one a row: other ones than the full group's."""
    hashes = b"".join(kvpool_native.blake3(b"window" + block.to_bytes(8, "little")) for block in range(unique))
    return np.frombuffer(hashes, np.uint8).reshape(unique, KEY_BYTES)
