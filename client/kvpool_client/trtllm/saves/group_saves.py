"""Group saves: the saves of an engine with several layer groups, or with a window.

    taken ──the step is queued──► copied out ──its windows are here──► under way ──published──► ended

Blocks of windows are copied out before the next step (`window_memory`); those of full groups stay the request's until its
saves have ended, and are read in the background. One request's saves go one after the other, because a full group's chunk can
be saved only behind its parent. Where there is no room for a window's blocks they are not stored: no prompt goes on at that
step's end.

The executor's thread of one rank. Copies per byte: one of full groups, two of windows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpool_client.copying.device.blocks import Event
from kvpool_client.engines.failure_guard import ENGINE_FAILURES
from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.plan import ByGroup, SaveOrder
from kvpool_client.trtllm.saves.save_source import SaveSource
from kvpool_client.trtllm.saves.window_memory import WindowMemory
from kvpool_client.verbs.save import Save


@dataclass(frozen=True, slots=True)
class _Copied:
    """An order whose windows are copied out. `slots`: where, by layer group; `events`: behind which they are there."""

    order: SaveOrder
    slots: ByGroup
    events: tuple[Event, ...]

    def followed_by(self, later: "_Copied") -> "_Copied":
        """One for both; `later` is of the same request."""
        slots = tuple(one + other for one, other in zip(self.slots, later.slots, strict=True))
        events = tuple(event for event in self.events if not event.is_done()) + later.events
        return _Copied(self.order.followed_by(later.order), slots, events)

    def is_here(self) -> bool:
        """Whether its windows have arrived."""
        return all(event.is_done() for event in self.events)


class GroupSaves:
    """See the module. Invariant: `_under_way[r]` and `_waiting[r]` are what may still read blocks of request r; every slot that
    is taken is in one of `_waiting`, `_under_way` and `_left`."""

    def __init__(self, source: SaveSource, geometry: Geometry, memory: WindowMemory) -> None:
        self._source = source
        self._geometry = geometry
        self._memory = memory
        self._taken: list[SaveOrder] = []
        self._waiting: dict[int, _Copied] = {}
        self._under_way: dict[int, tuple[Save, ByGroup]] = {}
        self._left: list[_Copied] = []  # given up while their copies were under way

    def __repr__(self) -> str:
        return f"<GroupSaves of {len(self._under_way)} requests, {self._memory!r}>"

    def begin(self, orders: Sequence[SaveOrder]) -> None:
        """Take a step's orders. One without windows is from before this rank had posted its KV."""
        self.go_on()
        self._taken = [order for order in orders if len(order.windows) == len(self._geometry.groups)]

    def layer(self, layer: int) -> None:
        """See `RankSaves`: steps are saved whole."""

    def finish_step(self, stream: Any, forward_stream: Any) -> None:
        """Copy the windows out; what the engine queues on its streams from now on comes after that."""
        taken, self._taken = self._taken, []
        if not taken:
            return
        found = [self._with_slots(order) for order in taken]
        pairs = [
            [
                pair
                for order, slots in found
                for pair in zip(slots[number], order.block_ids[number] if slots[number] else (), strict=True)
            ]
            for number in range(len(self._geometry.groups))
        ]
        try:
            events = tuple(self._memory.copy_out(pairs, stream, forward_stream))
        except ENGINE_FAILURES as error:
            self._source.guard.miss("wait_for_save", error)
            for _, slots in found:
                self._memory.give_back(slots)
            found, events = [self._without_windows(order) for order, _ in found], ()
        for order, slots in found:
            copied, before = _Copied(order, slots, events), self._waiting.get(order.request_id)
            self._waiting[order.request_id] = copied if before is None else before.followed_by(copied)
        self.go_on()

    def go_on(self) -> None:
        """See `RankSaves`."""
        for request_id in [request_id for request_id, (save, _) in self._under_way.items() if save.done()]:
            save, slots = self._under_way.pop(request_id)
            self._source.count(save.wait())
            self._source.room.give_back(request_id)
            self._memory.give_back(slots)
        for copied in [copied for copied in self._left if copied.is_here()]:
            self._left.remove(copied)
            self._memory.give_back(copied.slots)
        for request_id in [request_id for request_id in self._waiting if request_id not in self._under_way]:
            if not self._waiting[request_id].is_here():
                continue
            if not self._source.take_room(self._waiting[request_id].order):
                break
            self._open(self._waiting.pop(request_id))

    def drop(self, request_id: int) -> None:
        """See `RankSaves`."""
        copied = self._waiting.pop(request_id, None)
        if copied is not None:
            self._left.append(copied)
            self._source.decline_order(copied.order)
        save, slots = self._under_way.pop(request_id, (None, ()))
        if save is not None:
            save.abort()
            self._source.count(save.wait())
            self._memory.give_back(slots)
        self._source.room.give_back(request_id)

    def busy(self) -> Iterable[int]:
        """See `RankSaves`."""
        return self._under_way.keys() | self._waiting.keys()

    def close(self) -> None:
        """See `RankSaves`."""
        for save, _ in self._under_way.values():
            save.abort()
        self._under_way.clear()
        self._waiting.clear()
        self._memory.close()

    def _with_slots(self, order: SaveOrder) -> tuple[SaveOrder, ByGroup]:
        """The order with a slot for each block of a window, and those that have none taken out of it."""
        windows, block_ids, slots = list(order.windows), list(order.block_ids), []
        for number, group in enumerate(self._geometry.groups):
            taken = () if group.is_full else self._memory.take(number, len(windows[number]))
            slots.append(taken or ())
            if taken is None:
                self._source.decline(len(windows[number]))
                windows[number], block_ids[number] = (), ()
        return replace(order, windows=tuple(windows), block_ids=tuple(block_ids)), tuple(slots)

    def _without_windows(self, order: SaveOrder) -> tuple[SaveOrder, ByGroup]:
        self._source.decline(sum(len(chunks) for chunks in order.windows))
        block_ids = tuple(
            blocks if group.is_full else ()
            for group, blocks in zip(self._geometry.groups, order.block_ids, strict=True)
        )
        nothing: ByGroup = tuple(() for _ in self._geometry.groups)
        return replace(order, windows=nothing, block_ids=block_ids), nothing

    def _open(self, copied: _Copied) -> None:
        order, source = copied.order, self._source
        every = range(order.first_chunk, order.end)
        groups = list(enumerate(self._geometry.groups))
        try:
            save = source.pool.save(
                source.keys(order),
                [source.caches[number] if group.is_full else self._memory.cache(number) for number, group in groups],
                [order.block_ids[number] if group.is_full else copied.slots[number] for number, group in groups],
                chosen=[every if group.is_full else order.windows[number] for number, group in groups],
                retention=source.retention(order),
            )
            save.commit(wait=False)
        except ENGINE_FAILURES as error:
            source.guard.miss("save", error)
            source.decline_order(order)
            source.room.give_back(order.request_id)
            self._memory.give_back(copied.slots)
            return
        self._under_way[order.request_id] = (save, copied.slots)
