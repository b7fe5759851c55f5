"""Connector classes that TensorRT-LLM makes: its connector's verbs over the two halves.

Imports tensorrt_llm; nothing else in `kvpool_client` imports this module. Threads: as the executor calls, one thread on each
rank.

What is relied on, read in TensorRT-LLM's main of autumn 2026:

1. `new_block_ids_by_layer_group[g][i]` is block i's page in group g; flat lists are empty where there are several groups. A
   block whose window has passed is -1 in its place. A list grows by what is new: no page is reported again.
2. Pages that a window passes go back to the manager when a step's tokens are counted, after the forward pass is queued. The
   page carries an event, and whoever gets it next waits for that (`_SharedPageLock.unlock`, `_KVCache.resize`).
3. `wait_for_save` runs on the current stream of the executor's loop. Forward passes run on the `execution_stream`: each of the
   two waits for the other around a pass (`PyExecutor._forward_step`).
4. No connector runs beside host or disk tiers of the manager: pages of a suspended request stay where they are.
5. A promise is accepted by setting the request's history to its end: groups with a window then have pages for their last blocks
   alone. `cancel_load` hands back all of it, or its beginning.
6. `py_num_connector_matched_tokens` is what a request takes of a promise. Without it the step behind a claim stores less of
   windows.
"""

import importlib
import os
from typing import Any

from kvpool_client.trtllm.scheduler_half import SchedulerHalf
from kvpool_client.trtllm.settings import Settings
from kvpool_client.trtllm.worker_half import WorkerHalf

_PLACES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def _interface() -> Any:
    """The module of TensorRT-LLM's connector interface, where this version has it."""
    try:
        return importlib.import_module(_PLACES[0])
    except ModuleNotFoundError:
        return importlib.import_module(_PLACES[1])


def _settings(llm_args: Any) -> Settings:
    version = getattr(importlib.import_module("tensorrt_llm"), "__version__", "")
    return Settings.read(llm_args, os.environ, str(version))


_engine = _interface()


class KVPoolScheduler(_engine.KvCacheConnectorScheduler):  # type: ignore[misc, name-defined]  # TensorRT-LLM's class is untyped here
    """See `kvpool_client.trtllm`. Raises ConfigError where the environment's settings are wrong.

    Under attention data parallelism every owner has one, and its plans go to the owner's own worker.
    """

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.half = SchedulerHalf(_settings(llm_args))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens promised beyond those computed; always loaded before the forward, never asynchronously."""
        return self.half.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Do nothing: blocks are read from the scheduler's output, which is complete in every version."""

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """Do nothing: as `update_state_after_alloc`."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """The step's plan for the workers."""
        return self.half.plan(scheduler_output)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Whether saves may still read the request's blocks."""
        return self.half.finish(request)

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """As `request_finished`."""
        return self.half.finish(request)

    def request_reset(self, request: Any) -> None:
        """The request's blocks were freed; it runs again."""
        self.half.reset(request)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The runtime rejects a part of the claimed tokens, `start` up to `end`: the first of them, or the last.

        Raises BrokenClaim where layer groups with a window have nothing staged for the end that is left.
        """
        self.half.cancel(request, start, end)


class KVPoolWorker(_engine.KvCacheConnectorWorker):  # type: ignore[misc, name-defined]  # TensorRT-LLM's class is untyped here
    """See `kvpool_client.trtllm`. Raises ConfigError where the environment's settings are wrong."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        settings = _settings(llm_args)
        rank = 0 if settings.is_attention_dp else int(importlib.import_module("tensorrt_llm._utils").mpi_rank())
        self.half = WorkerHalf(settings, rank)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Register the rank's KV pool."""
        self.half.register(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Register the rank's KV pages, as the second cache manager describes them."""
        self.half.register_layout(layout)

    def bind_connector_meta(self, metadata: Any) -> None:
        """Take the step's plan."""
        super().bind_connector_meta(metadata)
        self.half.bind(metadata)

    def start_load_kv(self, stream: Any) -> None:
        """Begin the plan's loads."""
        self.half.start_loads(stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Have the forward's stream wait for a layer."""
        self.half.wait_layer(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A layer's KV was queued."""
        self.half.save_layer(layer_idx)

    def wait_for_save(self, stream: Any) -> None:
        """The step was queued; its saves go on in the background, and `stream` waits for copies of windows."""
        self.half.finish_step(stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Requests whose saves have ended. Nothing is ever loaded asynchronously."""
        return self.half.finished(finished_gen_req_ids), []
