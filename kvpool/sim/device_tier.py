"""A device tier without bytes: copies of blocks that the tiers below have, in device memory.

A block that goes up stays below, and one that is evicted here moves no bytes. So the tiers below decide what a node has as
they do alone, and whatever they alone would hit is a hit. A block that they have evicted may still be here: then it is a hit
too, and its bytes are copied down again.

One thread. Invariant: between two calls nothing is held or reserved.
"""

import kvpool_native
from kvpool.config.config import Config
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.pool.writers.commit_columns import CHECKSUM_BYTES
from kvpool.tiering.promotion_budget import PromotionBudget
from kvpool.types import Level, SaveState


class DeviceTier:
    """See the module. `promoted`: blocks that were moved up."""

    def __init__(self, blocks: int, layout: Layout, *, policy: str, config: Config) -> None:
        capacity = blocks * layout.chunk_bytes
        geometry = kvpool_native.DirectoryGeometry.plan_files(capacity, 1, blocks)
        self._directory = kvpool_native.Directory.of_files(geometry, policy, Level.HBM)
        self._directory.mark_segment_ready(0)
        self._directory.bound_chains(config.server.max_chain_chunks)
        self._namespace = self._directory.add_namespace()
        self._size_class = self._directory.add_class(layout.chunk_bytes, layout.layers)
        self._layout = layout
        self._budget = PromotionBudget(capacity)
        self.promoted = 0

    def __repr__(self) -> str:
        return f"<DeviceTier {self._directory.stats()['chunks']} blocks>"

    def load(self, keys: KeyColumn, now_ns: int) -> int:
        """Use the longest prefix that is here: how many blocks."""
        held = self._directory.acquire(self._namespace, keys.packed, now_ns)
        if held.id:
            self._directory.release(held.id, now_ns)
        self._budget.earn(held.chunks * self._layout.chunk_bytes)
        return held.chunks

    def promote(self, keys: KeyColumn, first: int, now_ns: int) -> None:
        """Move the blocks from number `first` on up, as many as are worth it; those before are here."""
        chosen = keys[first : first + self._budget.affordable(self._layout.chunk_bytes)]
        if not chosen:
            return
        made = self._directory.reserve(self._namespace, self._size_class, keys.before(first), chosen.packed, now_ns)
        count = made.states.count(SaveState.RESERVED)
        if count:
            checksums = bytes(count * self._layout.layers * CHECKSUM_BYTES)
            self._directory.commit(made.id, 0, checksums, now_ns)
            self._budget.spend(count * self._layout.chunk_bytes)
            self.promoted += count
        if made.id:
            self._directory.end_reservation(made.id, now_ns)

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        counted = self._directory.stats()
        held = [f"{counted['holds']} holds are left"] if counted["holds"] else []
        return [f"device: {problem}" for problem in self._directory.verify() + held]
