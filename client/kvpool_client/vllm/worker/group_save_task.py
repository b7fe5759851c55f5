"""Group save task: a save task of an engine whose layout has groups: the chunks of each part that its order names.

What another save was just writing is asked for again, alone. Invariant: each chunk of each part is counted once, by its final
outcome. One thread at a time.
"""

from kvpool.clock import Clock
from kvpool_client.verbs.results import SaveResult
from kvpool_client.verbs.save import Save
from kvpool_client.vllm.identity.geometry import LayerPlace
from kvpool_client.vllm.identity.parts import Part
from kvpool_client.vllm.plan import SaveOrder
from kvpool_client.vllm.worker.engine_memory import EngineMemory
from kvpool_client.vllm.worker.save_task import NO_RETENTION, WAITS_FOR_ANOTHER, SaveTask, keys_of


class GroupSaveTask(SaveTask):
    """See the module and `SaveTask`."""

    def __init__(self, order: SaveOrder, memory: EngineMemory, *, wait_budget_s: float, clock: Clock) -> None:
        super().__init__(order, memory, wait_budget_s=wait_budget_s, clock=clock)
        self._group_save: Save | None = None
        every = range(order.first_chunk, len(order.hashes))
        # By part, the block ids of each chunk that has no outcome yet.
        self._left = [
            _blocks_by_chunk(part, list(every) if part.is_full else list(windows), blocks, memory) if is_writer else {}
            for part, windows, blocks, is_writer in zip(
                memory.geometry.parts, order.windows, order.block_ids, memory.is_writer_of, strict=True
            )
        ]
        self._stored: list[set[int]] = [
            set() for _ in self._left
        ]  # behind a pending chunk: found present the next time

    @property
    def next_chunk(self) -> int:
        """The first chunk of a full part, from the root on, without an outcome."""
        of_full = [
            min(left)
            for part, left in zip(self._memory.geometry.parts, self._left, strict=True)
            if part.is_full and left
        ]
        return min(of_full, default=len(self.order.hashes))

    def open(self) -> None:
        """Reserve slots for what is not settled. One round trip."""
        memory = self._memory
        retention = self.order.retention or NO_RETENTION
        self._group_save = memory.pool.save(
            keys_of(self.order, memory, self.order.first_chunk),
            memory.caches,
            [[block for blocks in left.values() for block in blocks] for left in self._left],
            chosen=[tuple(left) for left in self._left],
            retention=retention.ranges,
            prompt_tokens=retention.prompt_tokens,
            decode_priority=retention.decode_priority,
            decode_duration_s=retention.decode_duration_s,
        )

    def layer(self, place: LayerPlace) -> None:
        """The engine has written a layer of an order that is open: its bytes may be read."""
        assert self._group_save is not None
        group, layer = place
        self._group_save.layer(layer, group)

    def commit(self) -> bool:
        """Copy what is not copied, and publish. False where another writer has to end before the rest can be stored."""
        assert self._group_save is not None
        result = self._group_save.commit()
        self._declined = dict(result.reasons)
        for part, left, stored, of_part in zip(
            self._memory.geometry.parts, self._left, self._stored, result.groups, strict=True
        ):
            self._settle(part, left, stored, of_part)
        if "pending" in self._declined and self._declined.keys() <= WAITS_FOR_ANOTHER:
            return False
        self._end()
        return True

    def waits_for_another(self) -> bool:
        """Whether the chunks that another save was writing are still being written."""
        return self._group_save is not None and self._group_save.has_pending()

    def abort(self) -> None:
        """Give the order up; after it has returned, nothing reads its blocks."""
        if self._group_save is not None:
            self._group_save.abort()
        self._end()

    def _settle(self, part: Part, left: dict[int, tuple[int, ...]], stored: set[int], result: SaveResult) -> None:
        """Count what has an outcome, and leave the rest: of a full part all from the first declined chunk on."""
        states = dict(zip(list(left), result.states, strict=True))
        self._count("clipped_chunks", result.clipped)
        for chunk, state in states.items():
            if state == "declined":
                if part.is_full:
                    break
                continue
            self._count("present_chunks" if state == "present" and chunk not in stored else "saved_chunks", 1)
            del left[chunk]
        stored |= {chunk for chunk, state in states.items() if state in ("stored", "part")}


def _blocks_by_chunk(
    part: Part, chunks: list[int], blocks: tuple[int, ...], memory: EngineMemory
) -> dict[int, tuple[int, ...]]:
    count = memory.geometry.blocks_of(part)
    return {chunk: blocks[place * count : (place + 1) * count] for place, chunk in enumerate(chunks)}
