"""Slot table of a staging area: which block of which layer and KV head each slot has, and the order in which slots are
used again.

    EMPTY ──publish──► IN USE, touched by each step that wants it ──take──► EMPTY

Slots that were not touched for the longest time are taken first. Only where every slot was touched in the step under
way, the newest ones are: the step has attended to them already, and what it touched before stays for the next step.

Numpy alone: knows no device and no bytes. One thread at a time.
Invariant: `_slots[layer][block, head]` is s exactly when `_owners[s]` is (layer, block, head); else it is NONE.
"""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
NONE = -1
_LAYER, _BLOCK, _HEAD = range(3)


class SlotTable:
    """See the module. `slots`: how many there are."""

    def __init__(self, slots: int, layers: int, kv_heads: int) -> None:
        assert slots > 0
        self.slots = slots
        self._kv_heads = kv_heads
        self._slots = [np.empty((0, kv_heads), np.int32) for _ in range(layers)]
        self._owners = np.full((slots, 3), NONE, np.int32)
        self._touched = np.zeros(slots, np.int64)  # ascending; 0: empty
        self._is_prefetched = np.zeros(slots, np.bool_)
        self._now = 0
        self._step_began = 0

    def __repr__(self) -> str:
        return f"<SlotTable {self.used}/{self.slots} slots>"

    @property
    def used(self) -> int:
        """Slots that have a block."""
        return int(np.count_nonzero(self._owners[:, _LAYER] != NONE))

    def begin_step(self) -> None:
        """Begin a step: what it touches is taken last."""
        self._step_began = self._now

    def find(self, layer: int, blocks: Numbers, heads: Numbers) -> Numbers:
        """The slot of each block and KV head, NONE where there is none."""
        table = self._slots[layer]
        found = np.full(len(blocks), NONE, np.int64)
        is_known = blocks < len(table)
        found[is_known] = table[blocks[is_known], heads[is_known]]
        return found

    def refresh(self, slots: Numbers) -> None:
        """Have these slots taken last, each named once."""
        self._touched[slots] = self._now + 1 + np.arange(len(slots))
        self._now += len(slots)

    def touch(self, slots: Numbers) -> int:
        """Note that a step wants these slots, each named once. How many of them a prefetch has brought for it."""
        self.refresh(slots)
        prefetched = int(np.count_nonzero(self._is_prefetched[slots]))
        self._is_prefetched[slots] = False
        return prefetched

    def take_slots(self, count: int) -> Numbers:
        """Empty so many slots, which are the caller's to fill and to publish. Requires: there are so many."""
        assert 0 < count <= self.slots
        is_old = self._touched <= self._step_began
        old = min(count, int(np.count_nonzero(is_old)))
        taken = np.argpartition(self._touched, old - 1)[:old] if old else np.empty(0, np.int64)
        if old < count:  # the newest of this step
            taken = np.concatenate([taken, np.argpartition(-self._touched, count - old - 1)[: count - old]])
        self._forget(taken)
        return taken.astype(np.int64)

    def publish(
        self, layer: int, blocks: Numbers, heads: Numbers, slots: Numbers, *, is_prefetched: bool = False
    ) -> None:
        """Enter blocks whose bytes these slots have from now on. Requires: the slots were taken, the blocks have
        none."""
        assert (self._owners[slots, _LAYER] == NONE).all(), "a slot is in use"
        table = self._grown(layer, int(blocks.max()) + 1)
        assert (table[blocks, heads] == NONE).all(), "a block has a slot"
        table[blocks, heads] = slots
        self._owners[slots, _LAYER] = layer
        self._owners[slots, _BLOCK] = blocks
        self._owners[slots, _HEAD] = heads
        self._is_prefetched[slots] = is_prefetched
        self.refresh(slots)

    def clear(self) -> None:
        """Empty all slots."""
        self._forget(np.arange(self.slots))

    def verify(self) -> None:
        """Recount the owners from the slots. Raises AssertionError."""
        entered = 0
        for layer, table in enumerate(self._slots):
            blocks, heads = np.nonzero(table != NONE)
            expected = np.stack([np.full(len(blocks), layer), blocks, heads], axis=1)
            assert np.array_equal(self._owners[table[blocks, heads]], expected)
            entered += len(blocks)
        assert entered == self.used
        in_use = self._touched[self._owners[:, _LAYER] != NONE]
        assert len(np.unique(in_use)) == len(in_use)
        assert (in_use > 0).all()

    def _forget(self, slots: Numbers) -> None:
        layers, blocks, heads = self._owners[slots].T
        for layer in np.unique(layers[layers != NONE]):
            of_layer = layers == layer
            self._slots[layer][blocks[of_layer], heads[of_layer]] = NONE
        self._owners[slots] = NONE
        self._touched[slots] = 0
        self._is_prefetched[slots] = False

    def _grown(self, layer: int, blocks: int) -> npt.NDArray[np.int32]:
        table = self._slots[layer]
        if blocks > len(table):
            grown = np.full((max(blocks, 2 * len(table)), self._kv_heads), NONE, np.int32)
            grown[: len(table)] = table
            self._slots[layer] = table = grown
        return table
