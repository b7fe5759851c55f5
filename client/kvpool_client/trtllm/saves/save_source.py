"""Save source: what both kinds of saves of one rank share: its Pool, the engine's caches, counters, room for saves, and how an
order is read.

The executor's thread of one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.types import TokenRange
from kvpool_client.copying.cache import Cache
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.key_chain import KeyChain
from kvpool_client.pool import Pool
from kvpool_client.retention import ranges_of_blocks
from kvpool_client.trtllm.plan import SaveOrder
from kvpool_client.trtllm.saves.save_room import SaveRoom
from kvpool_client.trtllm.settings import Settings
from kvpool_client.verbs.results import SaveResult


def _no_counts() -> dict[str, int]:
    return dict.fromkeys(("saved_blocks", "present_blocks", "declined_blocks", "clipped_blocks", "deferred_saves"), 0)


@dataclass(frozen=True, slots=True)
class SaveSource:
    """See the module. `caches`: of each layer group."""

    pool: Pool
    caches: Sequence[Cache]
    settings: Settings
    guard: FailureGuard
    counts: dict[str, int] = field(default_factory=_no_counts)
    room: SaveRoom = field(default_factory=SaveRoom)

    def take_room(self, order: SaveOrder) -> bool:
        """Room for the order's save; False, and counted, where it waits."""
        ids = zip(self.caches, order.block_ids, strict=True)
        has_room = self.room.take(
            order.request_id, sum(cache.layout.chunk_bytes * len(blocks) for cache, blocks in ids)
        )
        if not has_room:
            self.defer(order)
        return has_room

    def defer(self, order: SaveOrder) -> None:
        """Count a save that waits for room, once."""
        self.room.defer(order.request_id)
        self.counts["deferred_saves"] = self.room.deferred_saves

    def keys(self, order: SaveOrder) -> KeyChain:
        """The keys of the order's prompt."""
        tokens = np.frombuffer(order.tokens, dtype=np.int32)
        return self.pool.keys(tokens, salt=order.salt or None, adapter=order.adapter)

    def retention(self, order: SaveOrder) -> tuple[TokenRange, ...]:
        """The engine's priorities of the order's chunks."""
        return ranges_of_blocks(
            order.priorities,
            self.settings.tokens_per_block,
            first_block=order.first_chunk,
            duration_s=self.settings.retention_s,
        )

    def decline(self, blocks: int) -> None:
        """Count blocks that are not stored."""
        self.counts["declined_blocks"] += blocks

    def decline_order(self, order: SaveOrder) -> None:
        """Count the blocks of an order that is not carried out."""
        self.decline(sum(len(blocks) for blocks in order.block_ids))

    def count(self, result: SaveResult) -> None:
        """Count an ended save."""
        results = result.groups or (result,)
        for of_group in results:
            self.counts["saved_blocks"] += of_group.stored
            self.counts["present_blocks"] += of_group.present
            self.counts["declined_blocks"] += of_group.declined
            self.counts["clipped_blocks"] += of_group.clipped
