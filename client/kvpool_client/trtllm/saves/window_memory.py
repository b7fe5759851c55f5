"""Window memory: host memory of one rank in which blocks of windows wait to be stored.

The engine takes a window's page back when the window has passed it, perhaps right after the step, and no call reports it. So
the pages that a step is to save are copied out before anything that comes after the step: on a device by copies behind the
step's work, for which the engine's streams wait; in host memory at once.

The engine has two: its loop's, and the one of its forward passes, which waits for the other before each of them. But between
two steps its cache manager copies partly reused blocks on the latter, perhaps to a page that was just taken back. Where that
stream is not known, because no layer's hook was ever called, the host waits for the copies.

    FREE ──copy_out──► COPYING ──its event──► COPIED ──stored, or given up──► FREE

Invariant: a slot is given back only when nothing is copied into it any more and no save reads it. The executor's thread of one
rank. Copies per byte: one (engine to this memory).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.errors import LayoutMismatch
from kvpool.layout import Layout
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.blocks import WAIT_SLICE_S, Event, LayerSaves
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.engines.shared_bytes import SharedBytes
from kvpool_client.trtllm.geometry import Geometry, GroupGeometry
from kvpool_client.trtllm.plan import ByGroup

CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Window:
    """The slots of one layer group. `cache`: over them, from which saves read; `copies`: from the engine's blocks to them."""

    geometry: GroupGeometry
    memory: PinnedBytes
    free: list[int]
    cache: Cache
    copies: LayerSaves


class WindowMemory:
    """See the module. Without windows it has no memory. `caches`: the engine's, of each layer group."""

    def __init__(self, geometry: Geometry, layout: Layout, caches: Sequence[Cache], size: int) -> None:
        """Raises LayoutMismatch where `size` bytes have no room for a window's blocks of each group, or OSError."""
        numbers = [number for number, group in enumerate(geometry.groups) if not group.is_full]
        groups = {number: geometry.groups[number] for number in numbers}
        least = sum(group.run * group.chunk_bytes for group in groups.values())
        if least > size:
            raise LayoutMismatch(
                f"blocks of windows have {size} bytes to wait in, expected at least {least}, a window of each layer group: set "
                "TLLM_KVPOOL_WINDOW_MIB to a larger number"
            )
        self._windows: dict[int, _Window] = {}
        self._last: dict[int, Event] = {}  # by layer group, whose copies are on a stream of their own
        for number, group in groups.items():
            count = size // least * group.run
            side, shared = caches[number].side, SharedBytes.create("kvpool-windows", count * group.chunk_bytes)
            memory = PinnedBytes(shared.mapping(), side.device if side is not None else None)
            shared.close()
            layers = memory.bytes.reshape(count, group.layers, group.layer_bytes)
            own = Cache(
                [layers[:, layer] for layer in range(group.layers)],
                layout.of_group(number),
                block_tokens=group.tokens_per_block,
                form="packed",
            )
            copies = caches[number].layer_saves(memory)
            self._windows[number] = _Window(group, memory, list(range(count)), own, copies)

    def __repr__(self) -> str:
        return f"<WindowMemory {sum(len(window.free) for window in self._windows.values())} slots free>"

    def cache(self, number: int) -> Cache:
        """The slots of a layer group, as blocks that saves read."""
        return self._windows[number].cache

    def take_slots(self, number: int, count: int) -> tuple[int, ...] | None:
        """So many free slots of a layer group; None where there are fewer."""
        free = self._windows[number].free
        return tuple(free.pop() for _ in range(count)) if count <= len(free) else None

    def give_back_slots(self, slots: ByGroup) -> None:
        """Free slots that nothing is copied into and that no save reads."""
        for number, window in self._windows.items():
            window.free.extend(slots[number])

    def copy_out(self, pairs: Sequence[Sequence[tuple[int, int]]], stream: Any, forward_stream: Any) -> list[Event]:
        """Copy blocks to slots, (slot, block) by layer group, behind all that the engine has queued; what is queued on its
        streams from now on comes after these copies. Returns the events behind which the bytes are here.

        Raises what a device that refuses raises; then nothing is copied any more.
        """
        events: dict[int, Event] = {}
        try:
            for number, window in self._windows.items():
                event = self._queue(window, pairs[number]) if pairs[number] else None
                if event is not None:
                    events[number] = event
            for event in events.values():
                event.hold(stream.cuda_stream)
                if forward_stream is not None:
                    event.hold(forward_stream.cuda_stream)
                # No deadline: a page that is written before it was copied would be stored wrong, and a device that hangs ends
                # no step of its engine either.
                while forward_stream is None and not event.wait(WAIT_SLICE_S):
                    pass
        except BaseException:
            for window in self._windows.values():
                window.copies.end_saves()
            raise
        self._last |= events
        return list(events.values())

    def close(self) -> None:
        """Give the memory back to the driver. Requires: no save reads it."""
        for number, window in self._windows.items():
            event = self._last.get(number)
            if event is None or event.wait(CLOSE_WAIT_S):  # memory that a device may still write stays registered
                window.memory.close()

    def _queue(self, window: _Window, pairs: Sequence[tuple[int, int]]) -> Event | None:
        group, copies = window.geometry, window.copies
        slots = np.array([slot for slot, _ in pairs], dtype=np.uint64)
        block_ids = np.array([block for _, block in pairs], dtype=np.int64).tobytes()
        first, mark, event = slots * np.uint64(group.chunk_bytes), copies.after_engine(), None
        for layer in range(group.layers):
            starts = first + np.uint64(layer * group.layer_bytes)
            event = copies.queue_gather(layer, starts, block_ids, group.layer_bytes, mark=mark)
        return event
