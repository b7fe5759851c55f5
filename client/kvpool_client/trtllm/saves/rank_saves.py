"""Rank saves: the saves of one rank, out of the engine's blocks, and of the memory in which blocks of windows wait.

    of this step ──has no windows, room──► open ──layers, the step is queued──► under way ──published──► ended
         │                                                                         ▲
         └──the step is queued, its windows are copied out──► waiting ──all is here, room

Blocks of full groups stay the request's until its saves have ended: they are read in the background. Those of windows are
copied out before the next step (`window_memory`). One request's saves go one after the other, because a full group's chunk can
be saved only behind its parent; what later steps add becomes one order. Those that find no room (`save_room`) wait in their
order. Where there is no room for a window's blocks they are not stored: no prompt goes on at that step's end. Of a step whose
forward pass fails nothing is stored.

The executor's thread of one rank. Copies per byte: one of full groups, two of windows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpool_client.copying.device.blocks import Event
from kvpool_client.engines.failure_guard import ENGINE_FAILURES
from kvpool_client.trtllm.plan import ByGroup, SaveOrder
from kvpool_client.trtllm.saves.save_source import SaveSource
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


class RankSaves:
    """See the module. Invariant: `_open`, `_under_way[r]` and `_waiting[r]` are what may still read blocks of request r; every
    slot that is taken is in one of `_waiting`, `_under_way` and `_left`."""

    def __init__(self, source: SaveSource) -> None:
        self._source = source
        self._taken: list[SaveOrder] = []  # of this step, carried out behind it
        self._open: list[tuple[SaveOrder, Save]] = []  # of this step, whose layers are read as they are written
        self._waiting: dict[int, _Copied] = {}
        self._under_way: dict[int, tuple[Save, ByGroup]] = {}
        self._left: list[_Copied] = []  # given up while their copies were under way

    def __repr__(self) -> str:
        return f"<RankSaves of {len(self._under_way)} requests, {self._source.memory!r}>"

    def begin_step(self, orders: Sequence[SaveOrder]) -> None:
        """Take a step's orders, before its forward pass, and open the saves for its layers."""
        self.advance_saves()
        has_room = not self._source.room.has_deferred
        for order in filter(self._source.is_served, orders):
            is_behind = order.request_id in self._waiting or order.request_id in self._under_way
            if is_behind or any(order.windows):
                self._taken.append(order)
                continue
            has_room = has_room and self._source.take_room(order)
            if not has_room:
                self._taken.append(order)
            elif (save := self._source.begin_save(order, self._source.no_slots)) is not None:
                self._open.append((order, save))

    def announce_layer(self, layer: int) -> None:
        """A layer's KV of the step has been queued."""
        for _, save in self._open:
            self._announce_to(save, layer)

    def finish_step(self, stream: Any, forward_stream: Any) -> None:
        """The step's forward pass has been queued whole, behind which the engine's `stream` goes on: its saves go on in the
        background, and windows are copied out before anything that comes after it. `forward_stream`: on which forward passes
        run; None where that is not known."""
        opened, self._open = self._open, []
        for order, save in opened:
            self._commit_save(order, save, self._source.no_slots)
        taken, self._taken = self._taken, []
        if not taken:
            return
        for copied in self._copied_out(taken, stream, forward_stream):
            request_id = copied.order.request_id
            before = self._waiting.get(request_id)
            self._waiting[request_id] = copied if before is None else before.followed_by(copied)
        self.advance_saves()

    def advance_saves(self) -> None:
        """Collect the saves that have ended, and begin those that waited. Between two steps."""
        self._give_up_step()
        for request_id in [request_id for request_id, (save, _) in self._under_way.items() if save.done()]:
            self._end_save(request_id, *self._under_way.pop(request_id))
        for copied in [copied for copied in self._left if copied.is_here()]:
            self._left.remove(copied)
            self._source.memory.give_back_slots(copied.slots)
        has_room = True
        for request_id in [request_id for request_id in self._waiting if request_id not in self._under_way]:
            copied = self._waiting[request_id]
            if not copied.is_here():
                continue
            has_room = has_room and self._source.take_room(copied.order)
            if not has_room:
                self._source.defer_order(copied.order)
                continue
            del self._waiting[request_id]
            if (save := self._source.begin_save(copied.order, copied.slots)) is not None:
                self._commit_save(copied.order, save, copied.slots)

    def drop_request(self, request_id: int) -> None:
        """Give a request's saves up: its blocks are others' from now on."""
        copied = self._waiting.pop(request_id, None)
        if copied is not None:
            self._left.append(copied)
            self._source.decline_order(copied.order)
        save, slots = self._under_way.pop(request_id, (None, ()))
        if save is not None:
            save.abort()
            self._end_save(request_id, save, slots)
        self._source.room.give_back_bytes(request_id)

    def busy_requests(self) -> Iterable[int]:
        """Requests whose blocks may still be read."""
        return self._under_way.keys() | self._waiting.keys()

    def close(self) -> None:
        """End all saves."""
        self._give_up_step()
        for save, _ in self._under_way.values():
            save.abort()
        self._under_way.clear()
        self._waiting.clear()
        self._source.memory.close()

    def _give_up_step(self) -> None:
        """Give up what is left of a step that was not finished: its forward pass has failed, its blocks were not written."""
        taken, self._taken = self._taken, []
        for order in taken:
            self._source.decline_order(order)
        opened, self._open = self._open, []
        for order, save in opened:
            save.abort()
            self._end_save(order.request_id, save, self._source.no_slots)

    def _announce_to(self, save: Save, layer: int) -> None:
        try:
            save.layer(layer)
        except ENGINE_FAILURES as error:
            self._source.guard.miss("save_kv_layer", error)

    def _commit_save(self, order: SaveOrder, save: Save, slots: ByGroup) -> None:
        """Have a save end in the background."""
        try:
            save.commit(wait=False)
        except ENGINE_FAILURES as error:
            self._source.guard.miss("wait_for_save", error)
            save.abort()
        self._under_way[order.request_id] = save, slots

    def _end_save(self, request_id: int, save: Save, slots: ByGroup) -> None:
        """Count an ended save, and give back what it had."""
        self._source.count_result(save.wait())
        self._source.room.give_back_bytes(request_id)
        self._source.memory.give_back_slots(slots)

    def _copied_out(self, orders: Sequence[SaveOrder], stream: Any, forward_stream: Any) -> Iterator[_Copied]:
        """The orders, their windows copied out; without windows where these have no slots, or cannot be copied."""
        found = [self._with_slots(order) for order in orders]
        pairs = [
            [
                pair
                for order, slots in found
                for pair in zip(slots[number], order.block_ids[number] if slots[number] else (), strict=True)
            ]
            for number in range(len(self._source.no_slots))
        ]
        try:
            events = tuple(self._source.memory.copy_out(pairs, stream, forward_stream))
        except ENGINE_FAILURES as error:
            self._source.guard.miss("wait_for_save", error)
            for _, slots in found:
                self._source.memory.give_back_slots(slots)
            found, events = [self._without_windows(order) for order, _ in found], ()
        for order, slots in found:
            yield _Copied(order, slots, events)

    def _with_slots(self, order: SaveOrder) -> tuple[SaveOrder, ByGroup]:
        """The order with a slot for each block of a window, and those that have none taken out of it."""
        windows, block_ids, slots = list(order.windows), list(order.block_ids), []
        for number, chunks in enumerate(order.windows):
            taken = self._source.memory.take_slots(number, len(chunks)) if chunks else ()
            slots.append(taken or ())
            if taken is None:
                self._source.decline_blocks(len(chunks))
                windows[number], block_ids[number] = (), ()
        return replace(order, windows=tuple(windows), block_ids=tuple(block_ids)), tuple(slots)

    def _without_windows(self, order: SaveOrder) -> tuple[SaveOrder, ByGroup]:
        self._source.decline_blocks(sum(len(chunks) for chunks in order.windows))
        block_ids = tuple(
            () if chunks else blocks for chunks, blocks in zip(order.windows, order.block_ids, strict=True)
        )
        return replace(order, windows=self._source.no_slots, block_ids=block_ids), self._source.no_slots
