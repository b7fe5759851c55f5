"""Step saves: the saves of an engine with one group of full attention, straight from its blocks, layer by layer.

The engine keeps a request's blocks until its saves have ended: they end in the background. A chunk can be saved only behind
its parent, so one request's saves go one after the other: what its later steps add waits until the earlier ones have been
published. So do saves that find no room (`save_room`), in their order.

The executor's thread of one rank. Copies per byte: one.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvpool_client.engines.failure_guard import ENGINE_FAILURES
from kvpool_client.trtllm.plan import SaveOrder
from kvpool_client.trtllm.saves.save_source import SaveSource
from kvpool_client.verbs.save import Save


class RankSaves(Protocol):
    """Saves of one rank."""

    def begin(self, orders: Sequence[SaveOrder]) -> None:
        """Take a step's orders, before its forward pass."""
        ...

    def layer(self, layer: int) -> None:
        """A layer's KV of the step has been queued."""
        ...

    def finish_step(self, stream: Any, forward_stream: Any) -> None:
        """The step's forward pass has been queued whole, behind which the engine's `stream` goes on. `forward_stream`: on which
        forward passes run; None where that is not known."""
        ...

    def go_on(self) -> None:
        """Collect the saves that have ended, and begin those that waited."""
        ...

    def drop(self, request_id: int) -> None:
        """Give a request's saves up: its blocks are others' from now on."""
        ...

    def busy(self) -> Iterable[int]:
        """Requests whose blocks may still be read."""
        ...

    def close(self) -> None:
        """End all saves."""
        ...


class StepSaves:
    """See the module. Invariant: `_under_way[r]` and `_waiting[r]` are what may still read blocks of request r."""

    def __init__(self, source: SaveSource) -> None:
        self._source = source
        self._open: list[tuple[int, Save]] = []
        self._under_way: dict[int, Save] = {}
        self._waiting: dict[int, SaveOrder] = {}

    def __repr__(self) -> str:
        return f"<StepSaves of {len(self._under_way)} requests>"

    def begin(self, orders: Sequence[SaveOrder]) -> None:
        """Open the saves for this step's layers; those of a request that is saving wait for its last one, others for room."""
        self.go_on()
        is_full = bool(self._waiting.keys() - self._under_way.keys())
        for order in orders:
            request_id = order.request_id
            if request_id in self._waiting:
                self._waiting[request_id] = self._waiting[request_id].followed_by(order)
            elif request_id in self._under_way:
                self._waiting[request_id] = order
            elif is_full or not self._source.take_room(order):
                is_full = True
                self._source.defer(order)
                self._waiting[request_id] = order
            else:
                save = self._opened(order)
                self._open += [(request_id, save)] if save is not None else []

    def layer(self, layer: int) -> None:
        """See `RankSaves`."""
        for _, save in self._open:
            self._guarded("save_kv_layer", save.layer, layer)

    def finish_step(self, stream: Any, forward_stream: Any) -> None:
        """Finish the step's saves in the background."""
        del stream, forward_stream
        for request_id, save in self._open:
            self._guarded("wait_for_save", save.commit, False)
            self._under_way[request_id] = save
        self._open.clear()

    def go_on(self) -> None:
        """See `RankSaves`; the layers of those that waited are written already."""
        for request_id in [request_id for request_id, save in self._under_way.items() if save.done()]:
            self._source.count(self._under_way.pop(request_id).wait())
            self._source.room.give_back(request_id)
        for request_id in [request_id for request_id in self._waiting if request_id not in self._under_way]:
            if not self._source.take_room(self._waiting[request_id]):
                break
            save = self._opened(self._waiting.pop(request_id))
            if save is not None:
                save.commit(wait=False)
                self._under_way[request_id] = save

    def drop(self, request_id: int) -> None:
        """See `RankSaves`."""
        order = self._waiting.pop(request_id, None)
        if order is not None:
            self._source.decline_order(order)
        save = self._under_way.pop(request_id, None)
        if save is not None:
            save.abort()
            self._source.count(save.wait())
        self._source.room.give_back(request_id)

    def busy(self) -> Iterable[int]:
        """See `RankSaves`."""
        return self._under_way.keys() | self._waiting.keys()

    def close(self) -> None:
        """See `RankSaves`."""
        for save in self._under_way.values():
            save.abort()
        self._under_way.clear()

    def _opened(self, order: SaveOrder) -> Save | None:
        """The save of an order that has room; None, and the room is given back, where it cannot begin."""
        source = self._source
        try:
            return source.pool.save(
                source.keys(order),
                source.caches[0],
                order.block_ids[0],
                first_chunk=order.first_chunk,
                retention=source.retention(order),
            )
        except ENGINE_FAILURES as error:
            source.guard.miss("save", error)
            source.decline_order(order)
            source.room.give_back(order.request_id)
            return None

    def _guarded(self, call: str, verb: Any, argument: object) -> None:
        try:
            verb(argument)
        except ENGINE_FAILURES as error:
            self._source.guard.miss(call, error)
