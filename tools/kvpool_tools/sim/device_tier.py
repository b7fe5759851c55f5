"""A device tier without bytes: copies of blocks that DRAM has, in device memory.

The directory of copies and the decisions are the daemon's (`Placement`). A block that is copied up stays below, and one that is
evicted here moves no bytes; one that leaves DRAM leaves here too. So the tiers below decide as they do alone, and a node has
exactly the hits that it has without device memory.

One thread. Invariant: between two calls nothing is reserved.
"""

import kvpool_native
from kvpool.config.config import Config
from kvpool.ids import CHECKSUM_BYTES, HoldId
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.states import Level, SaveState
from kvpool.tiering.copies.placement import LeasedPrefix, Placement
from kvpool.tiering.copies.promotion_budget import PromotionBudget
from kvpool.tiers.hbm.plan import DEVICE_PAGE_BYTES, NAME
from kvpool.tiers.slots import Slots, SlotSizes


def plan_device(blocks: int, layout: Layout) -> kvpool_native.DirectoryGeometry:
    """Whole pages of a device, in which `blocks` of this layout have records."""
    pages = -(-blocks * layout.stored_bytes // DEVICE_PAGE_BYTES)
    return kvpool_native.DirectoryGeometry.plan_device(pages * DEVICE_PAGE_BYTES, DEVICE_PAGE_BYTES, blocks)


class DeviceTier:
    """See the module. `promoted`: blocks that were copied up."""

    def __init__(
        self,
        arena: kvpool_native.Directory,
        geometry: kvpool_native.DirectoryGeometry,
        namespaces: Namespaces,
        *,
        policy: str,
        seed: bytes,
        config: Config,
        budget: PromotionBudget,
    ) -> None:
        directory = kvpool_native.Directory.of_copies(arena, geometry, policy, seed)
        directory.cap_retained(config.dram.retained_quota)
        directory.bound_chains(config.server.max_chain_chunks)
        sizes = SlotSizes(geometry.segment_bytes, geometry.segments, geometry.max_chunks)
        self._slots = Slots(NAME, Level.HBM, sizes, directory)
        self._directory = directory
        self._placement = Placement(arena, directory, budget)
        self.promoted = 0
        namespaces.add_upper(self._slots)

    def __repr__(self) -> str:
        return f"<DeviceTier {self._directory.stats()['chunks']} blocks>"

    def load(self, namespace: Namespace, hold: HoldId, now_ns: int) -> int:
        """Load the blocks of a hold: how many leading ones were here. The others are copied up, as many as are worth it."""
        before = self._placement.served_chunks
        for prefix in self._placement.note_lease(namespace, hold, is_set=False):
            self._promote(prefix, now_ns)
        return self._placement.served_chunks - before

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return self._slots.verify(with_shared=True, holds=0, pins=0)

    def _promote(self, prefix: LeasedPrefix, now_ns: int) -> None:
        layout = prefix.namespace.layout
        size_class = self._slots.size_class_of(layout)
        assert size_class is not None
        made = self._placement.reserve(prefix, size_class, prefix.left, now_ns)
        if made is None:
            return
        count = made.states.count(SaveState.RESERVED)
        if count:
            self._directory.commit(made.id, 0, bytes(count * layout.extents * CHECKSUM_BYTES), now_ns)
            self._placement.spend(count, layout.stored_bytes)
            self.promoted += count
        if made.id:
            self._directory.end_reservation(made.id, now_ns)
