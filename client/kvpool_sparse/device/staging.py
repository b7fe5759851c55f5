"""Staging of one sequence: its middle blocks on a device, brought when a step wants them or before.

A step's blocks come in pieces: first those that are staged, then the others, each piece copied to slots that earlier
ones no longer need. So a step may want more blocks than there are slots. Bytes enter a slot only after the chunks that
they were read from proved to be those that were verified, and a slot is found only after its bytes were queued for it.

One thread at a time: the sequence's, or that of a prefetch while one is under way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvpool.layout import Layout
from kvpool_sparse.device.block_reader import BlockReader, Mask
from kvpool_sparse.device.slot_table import NONE, Numbers, SlotTable
from kvpool_sparse.device.staging_area import StagingArea
from kvpool_sparse.results import Floats
from kvpool_sparse.tally import Tally


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one KV head each that are staged until the next piece is asked for. `places`: their places in what was
    asked for."""

    places: Numbers
    slots: Numbers


class Staging:
    """See the module."""

    def __init__(self, reader: BlockReader, area: StagingArea, layout: Layout, tally: Tally) -> None:
        self.area = area
        self.table = SlotTable(area.slots, layout.layers, layout.kv_heads)
        self._reader = reader
        self._tally = tally
        self._reattached = tally.reattached
        self._last_wanted: dict[int, Mask] = {}

    def note_step(self, layer: int, wanted: Mask) -> None:
        """Count how many of the blocks that a step wants the layer's step before wanted as well."""
        last = self._last_wanted.get(layer)
        self._last_wanted[layer] = wanted
        if last is not None:
            common = min(len(last), len(wanted))
            self._tally.compared_blocks += int(np.count_nonzero(wanted))
            self._tally.repeated_blocks += int(np.count_nonzero(wanted[:common] & last[:common]))

    def pieces(self, layer: int, blocks: Numbers, heads: Numbers) -> Iterator[Piece]:
        """Stage these blocks, each named once: every one of them is in one piece. Raises SequenceLost."""
        self._forget_former_places()
        self.table.begin_step()
        slots = self.table.find(layer, blocks, heads)
        found, missing = np.flatnonzero(slots != NONE), np.flatnonzero(slots == NONE)
        self._tally.staging_wanted += len(blocks)
        self._tally.staging_hits += len(found)
        self._tally.staging_prefetch_hits += self.table.touch(slots[found])
        for places in self._split(found):
            yield Piece(places, slots[places])
        for places in self._split(missing):
            yield Piece(places, self._bring(layer, blocks[places], heads[places]))

    def foresee(self, layer: int, query: Floats, is_stopping: Callable[[], bool]) -> None:
        """Stage what a query would want that is like the next one: nothing where it does not fit, or where chunks
        are no longer those that were verified, which the next step finds out by itself."""
        wanted = self._reader.foreseen(layer, query)
        if np.count_nonzero(wanted) > self.table.slots or not self._reader.is_current:
            return
        self.table.begin_step()
        blocks, heads = np.nonzero(wanted)
        slots = self.table.find(layer, blocks, heads)
        self.table.refresh(slots[slots != NONE])
        for places in self._split(np.flatnonzero(slots == NONE)):
            self._reader.read(layer, blocks[places], heads[places], self.area.host_items())
            if is_stopping() or not self._reader.is_current:
                return
            self._publish(layer, blocks[places], heads[places], is_prefetched=True)

    def close(self) -> None:
        """Serve nothing any more, and give the memory back. Idempotent."""
        self.table.clear()
        self.area.close()

    def _bring(self, layer: int, blocks: Numbers, heads: Numbers) -> Numbers:
        items = self.area.host_items()
        self._reader.steadily(lambda: self._reader.read(layer, blocks, heads, items))
        return self._publish(layer, blocks, heads, is_prefetched=False)

    def _publish(self, layer: int, blocks: Numbers, heads: Numbers, *, is_prefetched: bool) -> Numbers:
        """Copy what the host buffer has, and enter it."""
        slots = self.table.take_slots(len(blocks))
        self.area.fill(slots)
        self.table.publish(layer, blocks, heads, slots, is_prefetched=is_prefetched)
        self._tally.staging_copies += len(blocks)
        return slots

    def _forget_former_places(self) -> None:
        """Chunks that were leased again may have been saved by somebody else, whose KV of the same tokens differs in
        its last bits: what was read before is read again."""
        if self._tally.reattached != self._reattached:
            self._reattached = self._tally.reattached
            self.table.clear()

    def _split(self, places: Numbers) -> list[Numbers]:
        return [places[first : first + self.area.piece] for first in range(0, len(places), self.area.piece)]
