"""A worker's half of the TensorRT-LLM connector: carries the step's plan out on one rank's KV.

Loads copy staged chunks into the engine's blocks, layer by layer on a side stream; a layer's hook makes the forward's stream
wait for its event. They read the scheduler's verified memory and can fail only as any copy to the device can; that error alone
is raised, because the engine would continue with wrong KV. Saves follow the forward and end in the background (`saves`); a
request's blocks are released when its saves have ended.

The executor's thread of this rank only. Copies per byte: one in each direction, two where a save is of a window.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.blocks import Event, LayerLoads
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.refusals import Refusals
from kvpool_client.engines.shared_bytes import SharedBytes
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.pool import Pool
from kvpool_client.trtllm.claims.stager import connect
from kvpool_client.trtllm.claims.staging import group_offsets
from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.pages import EnginePages, pages_of_layout, pages_of_tensor
from kvpool_client.trtllm.plan import NO_BLOCK, LoadOrder, Plan
from kvpool_client.trtllm.saves.rank_saves import RankSaves
from kvpool_client.trtllm.saves.save_source import SaveSource
from kvpool_client.trtllm.saves.window_memory import WindowMemory
from kvpool_client.trtllm.settings import Settings
from kvpool_client.trtllm.shared import Board

CLOSE_WAIT_S = 5.0

_log = logging.getLogger(__name__)


class WorkerHalf:
    """One rank. `_events`: behind which each layer's loads of the step have arrived, of an engine with one group; `_arrivals`:
    behind which the last loads have, of each layer group."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), _log)
        self._settings = settings.begun(self._reader)
        self._describe: Callable[[], tuple[EnginePages, ...]] | None = None  # until the weights have a name
        self._rank = rank
        self._guard = FailureGuard(_log)
        self._refusals = Refusals("trtllm")
        self._geometry: Geometry | None = None
        self._pool: Pool | None = None
        self._caches: list[Cache] = []
        self._saves: RankSaves | None = None
        self._board: Board | None = None
        self._staging: PinnedBytes | None = None
        self._loads: list[LayerLoads] = []
        self._offsets: list[int] = []
        self._plan: Plan | None = None
        self._events: list[Event | None] = []
        self._arrivals: list[Event | None] = []
        self._loading = 0
        self._stream: Any = None
        self._forward_stream: Any = None  # on which the hooks of a step's layers were called
        self._layers_run: set[int] = set()
        self._is_layerwise = False
        self._has_all_hooks = False
        self._ending: list[int] = []
        self._save_counts: dict[str, int] = {}
        self._loaded_blocks = 0

    def __repr__(self) -> str:
        return f"<WorkerHalf rank {self._rank}, {self._caches!r}, {self._saves!r}>"

    def register(self, tensor: Any) -> None:
        """Register this rank's KV from the first cache manager's pool tensor; see `_register`."""
        self._register(lambda: (pages_of_tensor(tensor, self._settings.tokens_per_block, self._settings.format),))

    def register_layout(self, layout: Any) -> None:
        """Register this rank's KV from the second cache manager's KvCacheLayout; see `_register`."""
        given = self._settings
        self._register(
            lambda: pages_of_layout(
                layout, given.tokens_per_block, given.format, has_scratch_pages=given.has_scratch_pages
            )
        )

    def _register(self, describe: Callable[[], tuple[EnginePages, ...]]) -> None:
        """Connect with this geometry. With a pool that cannot be stored everything stays a miss, and one log line has the
        reason."""
        if self._settings.later is not None:
            self._describe = describe
        if self._settings.refusal:
            return
        try:
            self._serve(describe())
        except ENGINE_FAILURES as error:
            self._refusals.count("layout")
            self._guard.miss("register_kv_caches", f"kvpool shares nothing with this engine: {error}")

    def _take_name(self) -> None:
        """Connect once the files of the weights were read."""
        if self._settings.later is None:
            return
        self._settings = self._settings.named()
        if self._settings.later is None and self._describe is not None:
            self._register(self._describe)

    def _serve(self, pages: Sequence[EnginePages]) -> None:
        geometry = Geometry(tuple(group.geometry for group in pages))
        layout = geometry.layout(self._rank, self._settings.ranks)
        block = geometry.tokens_per_block
        caches = [
            Cache(group.layers, layout.of_group(number), block_tokens=block, form="packed")
            for number, group in enumerate(pages)
        ]
        is_writer = not geometry.is_replicated or self._rank == 0
        memory = WindowMemory(geometry, layout, caches, self._settings.window_bytes) if is_writer else None
        pool = connect(self._settings, layout)
        if memory is not None:
            source = SaveSource(pool, geometry, caches, memory, self._settings, self._guard)
            self._saves, self._save_counts = RankSaves(source), source.counts
        self._pool, self._geometry, self._caches = pool, geometry, caches
        self._is_layerwise = self._settings.is_layerwise and pages[0].is_by_layer and len(pages) == 1

    def bind(self, plan: Plan | None) -> None:
        """Take the step's plan; map what it names; end the saves of requests whose blocks were freed."""
        self._refusals.show()
        self._take_name()
        self._plan = plan
        if plan is None or self._geometry is None:
            return
        try:
            self._map(plan, self._geometry)
        except ENGINE_FAILURES as error:
            self._guard.miss("bind_connector_meta", error)
        for request_id in plan.dropped:
            if self._saves is not None:
                self._saves.drop_request(request_id)

    def start_loads(self, stream: Any) -> None:
        """Queue the plan's loads, and reserve room for its saves. Raises what a failing device raises, nothing else."""
        plan, self._stream = self._plan, stream
        self._layers_run.clear()
        if plan is None:
            return
        with self._on_stream():
            if plan.loads:
                self._load(plan.loads)
                for event in () if self._is_layerwise else self._arrivals:
                    _hold(stream, event)
            if self._saves is not None:
                self._saves.begin_step(plan.saves)

    def wait_layer(self, layer: int, stream: Any) -> None:
        """Nothing queued on `stream` from now on runs before this layer's loads have arrived.

        `layer` counts the model's layers. Where some have no KV the pool's number is lower, and its event comes before.
        """
        if self._plan is not None:  # no warm-up, and no graph that is captured
            self._forward_stream = stream
        if self._events and self._is_layerwise:
            _hold(stream, self._events[min(layer, len(self._events) - 1)])

    def save_layer(self, layer: int) -> None:
        """This layer's KV of the step has been queued: saves may read it when it is written.

        Only once a whole step has shown that the model's layers are the pool's; before, saves follow the whole forward.
        """
        self._layers_run.add(layer)
        if self._saves is None or not self._is_layerwise or not self._has_all_hooks:
            return
        with self._on_stream():
            self._saves.announce_layer(layer)

    def finish_step(self, stream: Any) -> None:
        """The forward has been queued whole on `stream`: its saves go on in the background, but for what the next step may
        overwrite."""
        if self._saves is not None:
            with self._on_stream():
                self._saves.finish_step(stream, self._forward_stream)
        self._plan, self._events = None, self._events[-1:]
        if self._layers_run and self._geometry is not None:
            self._has_all_hooks = self._layers_run == set(range(self._geometry.groups[0].layers))

    def finished(self, ended: list[int]) -> list[int]:
        """Of the requests that have ended so far, those whose blocks no save reads any more; each once."""
        self._post_loaded()
        if self._saves is not None:
            with self._on_stream():
                self._saves.advance_saves()
        self._ending += ended
        busy = set(self._saves.busy_requests()) if self._saves is not None else set()
        answer = [request_id for request_id in self._ending if request_id not in busy]
        self._ending = [request_id for request_id in self._ending if request_id in busy]
        return answer

    def stats(self) -> dict[str, int | float | str]:
        """Blocks moved, failures by call, and the Pool's own counters."""
        pool = self._pool.stats() if self._pool is not None else {}
        counts = {"loaded_blocks": self._loaded_blocks, **self._save_counts}
        return {**counts, **self._refusals.counts(), **self._guard.counts(), **pool}

    def close(self) -> None:
        """End the saves and the connection."""
        self._reader.stop()
        if self._saves is not None:
            self._saves.close()
        if self._pool is not None:
            self._pool.close()
        if self._staging is not None and all(_ends(event) for event in self._arrivals):
            self._staging.close()

    def _on_stream(self) -> Any:
        """Within the context, queued work waits for the forward's stream, on which the KV is written."""
        torch = sys.modules.get("torch")  # optional heavy dependency: an engine with KV on a device has it loaded
        array = self._caches[0].layers[0] if self._caches else None
        is_on_device = bool(self._caches) and self._caches[0].device.startswith("cuda") and self._stream is not None
        if torch is None or not is_on_device or not isinstance(array, torch.Tensor):
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def _map(self, plan: Plan, geometry: Geometry) -> None:
        if self._board is None:
            self._board = Board.attach(plan.board, self._settings.ranks)
            self._board.post(self._rank, geometry)
        if not self._loads and plan.staging:
            memory = SharedBytes.attach(plan.staging, plan.staging_bytes)
            shard = 0 if geometry.is_replicated else self._rank
            start = shard * (plan.staging_bytes // geometry.shards(self._settings.ranks))
            self._offsets = [start + offset for offset in group_offsets(geometry, plan.staging_slots)]
            side = self._caches[0].side
            self._staging = PinnedBytes(memory.mapping(), side.device if side is not None else None)
            memory.close()
            self._loads = [cache.layer_loads(self._staging) for cache in self._caches]
            self._board.set_mapped(self._rank)

    def _load(self, orders: tuple[LoadOrder, ...]) -> None:
        """Queue all layers of all layer groups; `_events[i]` is recorded after layer i of every order."""
        assert self._loads, "a claim was made before this rank had mapped the staging"
        events = [self._load_group(number, orders) for number in range(len(self._loads))]
        self._events, self._arrivals = events[0], [of_group[-1] for of_group in events]
        self._loading = orders[-1].sequence
        self._post_loaded()

    def _load_group(self, number: int, orders: tuple[LoadOrder, ...]) -> list[Event | None]:
        assert self._geometry is not None
        group, loads = self._geometry.groups[number], self._loads[number]
        slots = [
            (slot, block)
            for order in orders
            for slot, block in zip(order.slots[number], order.block_ids[number], strict=True)
            if block != NO_BLOCK
        ]
        if not slots:  # a window has passed all of them
            return [None]
        offsets = [self._offsets[number] + slot * group.chunk_bytes for slot, _ in slots]
        ids = np.array([block for _, block in slots], dtype=np.int64)
        mark, spread = loads.after_engine(), loads.plan(offsets, ids)
        self._loaded_blocks += len(slots)
        return [loads.queue_spread(layer, spread, group.layer_bytes, mark) for layer in range(group.layers)]

    def _post_loaded(self) -> None:
        """Post on the board that the staged chunks were read, once the last layer has arrived."""
        if self._loading and self._board is not None and all(_has_passed(event) for event in self._arrivals):
            self._board.set_done(self._rank, self._loading)
            self._loading = 0


def _hold(stream: Any, event: Event | None) -> None:
    """What is queued on the engine's stream from now on runs after the event."""
    if event is not None:
        event.hold(stream.cuda_stream)


def _has_passed(event: Event | None) -> bool:
    return event is None or event.is_done()


def _ends(event: Event | None) -> bool:
    """Whether the last load ends: memory that a device may still read stays registered."""
    return event is None or event.wait(CLOSE_WAIT_S)
