"""Save source: what the saves of one rank are made of: its Pool, the engine's caches, the memory of windows, counters, room for
saves, and how an order becomes a save.

The executor's thread of one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.states import TokenRange
from kvpool_client.copying.cache import Cache
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.pool import Pool
from kvpool_client.retention import ranges_of_blocks
from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.plan import ByGroup, SaveOrder
from kvpool_client.trtllm.saves.save_room import SaveRoom
from kvpool_client.trtllm.saves.window_memory import WindowMemory
from kvpool_client.trtllm.settings import Settings
from kvpool_client.verbs.results import SaveResult
from kvpool_client.verbs.save import Save


def _no_counts() -> dict[str, int]:
    return dict.fromkeys(("saved_blocks", "present_blocks", "declined_blocks", "clipped_blocks", "deferred_saves"), 0)


@dataclass(frozen=True, slots=True)
class SaveSource:
    """See the module. `caches`: of each layer group."""

    pool: Pool
    geometry: Geometry
    caches: Sequence[Cache]
    memory: WindowMemory
    settings: Settings
    guard: FailureGuard
    counts: dict[str, int] = field(default_factory=_no_counts)
    room: SaveRoom = field(default_factory=SaveRoom)

    @property
    def no_slots(self) -> ByGroup:
        """Slots of an order without windows."""
        return ((),) * len(self.caches)

    def is_served(self, order: SaveOrder) -> bool:
        """Whether the order is of these layer groups; not if it was made before their ranks had posted what they have."""
        groups = zip(self.geometry.groups, order.windows, order.block_ids, strict=True)
        return len(order.windows) == len(self.caches) and all(
            group.is_full or len(chunks) == len(blocks) for group, chunks, blocks in groups
        )

    def take_room(self, order: SaveOrder) -> bool:
        """Room for the order's save; False where there is none."""
        ids = zip(self.caches, order.block_ids, strict=True)
        return self.room.take_bytes(
            order.request_id, sum(cache.layout.chunk_bytes * len(blocks) for cache, blocks in ids)
        )

    def defer_order(self, order: SaveOrder) -> None:
        """Count a save that waits for room, once."""
        self.room.defer_save(order.request_id)
        self.counts["deferred_saves"] = self.room.deferred_saves

    def begin_save(self, order: SaveOrder, slots: ByGroup) -> Save | None:
        """The save of an order that has room, its windows out of these slots; None, and both are given back, where it cannot
        begin."""
        every = range(order.first_chunk, order.end)
        groups = list(enumerate(self.geometry.groups))
        tokens = np.frombuffer(order.tokens, dtype=np.int32)
        try:
            return self.pool.save(
                self.pool.keys(tokens, salt=order.salt or None, adapter=order.adapter),
                [self.caches[number] if group.is_full else self.memory.cache(number) for number, group in groups],
                [order.block_ids[number] if group.is_full else slots[number] for number, group in groups],
                chosen=[every if group.is_full else order.windows[number] for number, group in groups],
                retention=self._retention(order),
            )
        except ENGINE_FAILURES as error:
            self.guard.miss("save", error)
            self.decline_order(order)
            self.room.give_back_bytes(order.request_id)
            self.memory.give_back_slots(slots)
            return None

    def decline_blocks(self, blocks: int) -> None:
        """Count blocks that are not stored."""
        self.counts["declined_blocks"] += blocks

    def decline_order(self, order: SaveOrder) -> None:
        """Count the blocks of an order that is not carried out."""
        self.decline_blocks(sum(len(blocks) for blocks in order.block_ids))

    def count_result(self, result: SaveResult) -> None:
        """Count an ended save."""
        self.counts["saved_blocks"] += result.stored
        self.counts["present_blocks"] += result.present
        self.counts["declined_blocks"] += result.declined
        self.counts["clipped_blocks"] += result.clipped

    def _retention(self, order: SaveOrder) -> tuple[TokenRange, ...]:
        """The engine's priorities of the order's chunks."""
        return ranges_of_blocks(
            order.priorities,
            self.settings.tokens_per_block,
            first_block=order.first_chunk,
            duration_s=self.settings.retention_s,
        )
