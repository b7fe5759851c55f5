"""A worker's half of the TensorRT-LLM connector: carries the step's plan out on one rank's KV.

Loads copy staged chunks into the engine's blocks, layer by layer on a side stream; a layer's hook makes the forward's stream
wait for its event. They read the scheduler's verified memory and can fail only as any copy to the device can; that error alone
is raised, because the engine would continue with wrong KV. Saves go straight from blocks to the pool, layer by layer after the
forward, and end in the background; a request's blocks are released when its saves have ended.

The executor's thread of this rank only. Copies per byte: one in each direction.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from kvpool.layout import Layout
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.blocks import Event, LayerLoads
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.refusals import Refusals
from kvpool_client.engines.shared_bytes import SharedBytes
from kvpool_client.pool import Pool
from kvpool_client.retention import ranges_of_blocks
from kvpool_client.save import Save
from kvpool_client.trtllm.claims import connect
from kvpool_client.trtllm.pages import EnginePages, pages_of_layout, pages_of_tensor
from kvpool_client.trtllm.plan import Geometry, LoadOrder, Plan, SaveOrder
from kvpool_client.trtllm.settings import Settings
from kvpool_client.trtllm.shared import Board

# Each save under way has a thread; beyond this many, further ones are declined (a guess).
SAVES_MAX = 128
CLOSE_WAIT_S = 5.0

_log = logging.getLogger(__name__)


class WorkerHalf:
    """One rank. Invariant: `_under_way[r]` and `_waiting[r]` are what may still read blocks of request r.

    A chunk can be saved only behind its parent, so one request's saves go one after the other: what its later steps
    add waits until the earlier ones have been published.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._guard = FailureGuard(_log)
        self._refusals = Refusals("trtllm")
        self._geometry: Geometry | None = None
        self._layout: Layout | None = None
        self._pool: Pool | None = None
        self._cache: Cache | None = None
        self._board: Board | None = None
        self._staging: PinnedBytes | None = None
        self._loads: LayerLoads | None = None
        self._first_offset = 0
        self._plan: Plan | None = None
        self._events: list[Event | None] = []
        self._loading = 0
        self._stream: Any = None
        self._layers_run: set[int] = set()
        self._is_layerwise = False
        self._has_all_hooks = False
        self._open: list[tuple[int, Save]] = []
        self._under_way: dict[int, Save] = {}
        self._waiting: dict[int, SaveOrder] = {}
        self._ending: list[int] = []
        self._counts = {
            "loaded_blocks": 0,
            "saved_blocks": 0,
            "present_blocks": 0,
            "declined_blocks": 0,
            "clipped_blocks": 0,
        }

    def __repr__(self) -> str:
        return f"<WorkerHalf rank {self._rank}, {self._cache!r}, {len(self._under_way)} requests saving>"

    def register(self, tensor: Any) -> None:
        """Register this rank's KV from the first cache manager's pool tensor; see `_register`."""
        self._register(lambda: pages_of_tensor(tensor, self._settings.tokens_per_block, self._settings.format))

    def register_layout(self, layout: Any) -> None:
        """Register this rank's KV from the second cache manager's KvCacheLayout; see `_register`."""
        self._register(lambda: pages_of_layout(layout, self._settings.tokens_per_block, self._settings.format))

    def _register(self, describe: Callable[[], EnginePages]) -> None:
        """Connect with this geometry. With a pool that cannot be stored everything stays a miss, and one log line has the
        reason."""
        if self._settings.refusal:
            return
        try:
            pages = describe()
            layout = pages.geometry.layout(self._rank, self._settings.ranks)
            cache = Cache(pages.layers, layout, block_tokens=self._settings.tokens_per_block, form="packed")
            self._pool = connect(self._settings, layout)
        except ENGINE_FAILURES as error:
            self._refusals.count("layout")
            self._guard.miss("register_kv_caches", f"kvpool shares nothing with this engine: {error}")
            return
        self._is_layerwise = self._settings.is_layerwise and pages.is_by_layer
        self._geometry, self._layout, self._cache = pages.geometry, layout, cache

    def bind(self, plan: Plan | None) -> None:
        """Take the step's plan; map what it names; end the saves of requests whose blocks were freed."""
        self._refusals.show()
        self._plan = plan
        if plan is None or self._geometry is None:
            return
        try:
            self._map(plan, self._geometry)
        except ENGINE_FAILURES as error:
            self._guard.miss("bind_connector_meta", error)
        for request_id in plan.dropped:
            self._waiting.pop(request_id, None)
            save = self._under_way.pop(request_id, None)
            if save is not None:
                save.abort()

    def start_loads(self, stream: Any) -> None:
        """Queue the plan's loads, and reserve room for its saves. Raises what a failing device raises, nothing else."""
        plan, self._stream = self._plan, stream
        self._layers_run.clear()
        if plan is None:
            return
        with self._on_stream():
            if plan.loads:
                self._load(plan.loads)
                if not self._is_layerwise:
                    _hold(stream, self._events[-1])
            self._go_on_saving()
            for order in plan.saves:
                self._take_order(order)

    def wait_layer(self, layer: int, stream: Any) -> None:
        """Nothing queued on `stream` from now on runs before this layer's loads have arrived.

        `layer` counts the model's layers. Where some have no KV the pool's number is lower, and its event comes before.
        """
        if self._events and self._is_layerwise:
            _hold(stream, self._events[min(layer, len(self._events) - 1)])

    def save_layer(self, layer: int) -> None:
        """This layer's KV of the step has been queued: saves may read it when it is written.

        Only once a whole step has shown that the model's layers are the pool's; before, saves follow the whole forward.
        """
        self._layers_run.add(layer)
        if not self._is_layerwise or not self._has_all_hooks:
            return
        with self._on_stream():
            for _, save in self._open:
                self._guarded("save_kv_layer", save.layer, layer)

    def finish_step(self) -> None:
        """The forward has been queued whole: finish its saves in the background."""
        with self._on_stream():
            for request_id, save in self._open:
                self._guarded("wait_for_save", save.commit, False)
                self._under_way[request_id] = save
        self._open.clear()
        self._plan, self._events = None, self._events[-1:]
        if self._layers_run and self._layout is not None:
            self._has_all_hooks = self._layers_run == set(range(self._layout.layers))

    def finished(self, ended: list[int]) -> list[int]:
        """Of the requests that have ended so far, those whose blocks no save reads any more; each once."""
        self._note_loaded()
        with self._on_stream():
            self._go_on_saving()
        self._ending += ended
        busy = self._under_way.keys() | self._waiting.keys()
        answer = [request_id for request_id in self._ending if request_id not in busy]
        self._ending = [request_id for request_id in self._ending if request_id in busy]
        return answer

    def stats(self) -> dict[str, int | float | str]:
        """Blocks moved, failures by call, and the Pool's own counters."""
        pool = self._pool.stats() if self._pool is not None else {}
        return {**self._counts, **self._refusals.counts(), **self._guard.counts(), **pool}

    def close(self) -> None:
        """End the saves and the connection."""
        for save in self._under_way.values():
            save.abort()
        self._under_way.clear()
        if self._pool is not None:
            self._pool.close()
        if self._staging is not None and (not self._events or _ends(self._events[-1])):
            self._staging.close()

    def _on_stream(self) -> Any:
        """Within the context, queued work waits for the forward's stream, on which the KV is written."""
        if self._cache is None or not self._cache.device.startswith("cuda") or self._stream is None:
            return nullcontext()
        import torch  # optional heavy dependency: an engine with KV on a device has it loaded

        return torch.cuda.stream(self._stream)

    def _map(self, plan: Plan, geometry: Geometry) -> None:
        if self._board is None:
            self._board = Board.attach(plan.board, self._settings.ranks)
            self._board.post(self._rank, geometry)
        if self._loads is None and plan.staging and self._cache is not None:
            memory = SharedBytes.attach(plan.staging, plan.staging_bytes)
            shard = 0 if geometry.is_replicated else self._rank
            self._first_offset = shard * (plan.staging_bytes // geometry.shards(self._settings.ranks))
            side = self._cache.side
            self._staging = PinnedBytes(memory.mapping(), side.device if side is not None else None)
            memory.close()
            self._loads = self._cache.layer_loads(self._staging)
            self._board.set_mapped(self._rank)

    def _load(self, orders: tuple[LoadOrder, ...]) -> None:
        """Queue all layers; `_events[i]` is recorded after layer i of every order."""
        assert self._loads is not None, "a claim was made before this rank had mapped the staging"
        assert self._layout is not None
        slots = [
            (slot, block)
            for order in orders
            for slot, block in zip(order.slots, order.block_ids, strict=True)
            if block >= 0
        ]
        offsets = [self._first_offset + slot * self._layout.chunk_bytes for slot, _ in slots]
        ids = np.array([block for _, block in slots], dtype=np.int64)
        mark, spread = self._loads.after_engine(), self._loads.plan(offsets, ids)
        self._events = [
            self._loads.queue_spread(layer, spread, self._layout.layer_bytes, mark)
            for layer in range(self._layout.layers)
        ]
        self._loading = orders[-1].sequence
        self._counts["loaded_blocks"] += len(slots)
        self._note_loaded()

    def _note_loaded(self) -> None:
        """Post on the board that the staged chunks were read, once the last layer has arrived."""
        if self._loading and self._board is not None and _has_passed(self._events[-1]):
            self._board.set_done(self._rank, self._loading)
            self._loading = 0

    def _take_order(self, order: SaveOrder) -> None:
        """Open the save for this step's layers, or have it wait for the request's last one."""
        is_writer = self._geometry is not None and (not self._geometry.is_replicated or self._rank == 0)
        if self._pool is None or not is_writer:
            return
        request_id = order.request_id
        if request_id in self._waiting:
            self._waiting[request_id] = self._waiting[request_id].followed_by(order)
        elif request_id in self._under_way:
            self._waiting[request_id] = order
        else:
            save = self._open_save(order)
            self._open += [(request_id, save)] if save is not None else []

    def _open_save(self, order: SaveOrder) -> Save | None:
        if self._pool is None or len(self._under_way) + len(self._open) >= SAVES_MAX:
            self._counts["declined_blocks"] += len(order.block_ids)
            return None
        try:
            tokens = np.frombuffer(order.tokens, dtype=np.int32)
            keys = self._pool.keys(tokens, salt=order.salt or None, adapter=order.adapter)
            retention = ranges_of_blocks(
                order.priorities,
                self._settings.tokens_per_block,
                first_block=order.first_chunk,
                duration_s=self._settings.retention_s,
            )
            return self._pool.save(
                keys, self._cache, order.block_ids, first_chunk=order.first_chunk, retention=retention
            )
        except ENGINE_FAILURES as error:
            self._guard.miss("save", error)
            return None

    def _go_on_saving(self) -> None:
        """Collect the saves that have ended, and begin those that waited for them: their layers are written already."""
        for request_id in [request_id for request_id, save in self._under_way.items() if save.done()]:
            self._count(self._under_way.pop(request_id))
            order = self._waiting.pop(request_id, None)
            save = self._open_save(order) if order is not None else None
            if save is not None:
                save.commit(wait=False)
                self._under_way[request_id] = save

    def _count(self, save: Save) -> None:
        result = save.wait()
        self._counts["saved_blocks"] += result.stored
        self._counts["present_blocks"] += result.present
        self._counts["declined_blocks"] += result.declined
        self._counts["clipped_blocks"] += result.clipped

    def _guarded(self, call: str, verb: Any, argument: object) -> None:
        try:
            verb(argument)
        except ENGINE_FAILURES as error:
            self._guard.miss(call, error)


def _hold(stream: Any, event: Event | None) -> None:
    """What is queued on the engine's stream from now on runs after the event."""
    if event is not None:
        event.hold(stream.cuda_stream)


def _has_passed(event: Event | None) -> bool:
    return event is None or event.is_done()


def _ends(event: Event | None) -> bool:
    """Whether the last load ends: memory that a device may still read stays registered."""
    return event is None or event.wait(CLOSE_WAIT_S)
