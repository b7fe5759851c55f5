"""TensorRT-LLM's connector interface, for tests without TensorRT-LLM: base classes, the data of a step, arguments, modules.

Written after `pyexecutor/connectors/kv_cache_connector.py` of TensorRT-LLM main in autumn 2026, whose signatures stand in
tests/golden/engine_interfaces.txt; release 1.2.1 has the part that its only cache manager uses.
"""

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.rigs.stand_in_modules import stand_in

INTERFACE = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class KvCacheConnectorWorker(ABC):
    """The worker's interface."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    def register_kv_cache_layout(self, layout: Any) -> None:
        raise NotImplementedError("this KV cache cannot be described as one pool tensor")

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(ABC):
    """The scheduler's interface."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        return self.request_finished(request, cache_block_ids_by_layer_group[0])

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        self.update_state_after_alloc(request, block_ids_by_layer_group[0])


@dataclass
class RequestData:
    """One request of a step."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """One step."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


@contextmanager
def installed() -> Iterator[types.ModuleType]:
    """`tensorrt_llm` importable as far as a connector needs it; answers its `_utils`, whose rank tests set."""
    contents: dict[str, dict[str, Any]] = {
        INTERFACE: {
            "KvCacheConnectorScheduler": KvCacheConnectorScheduler,
            "KvCacheConnectorWorker": KvCacheConnectorWorker,
        },
        "tensorrt_llm._utils": {"mpi_rank": lambda: 0},
    }
    with stand_in(contents, "kvpool_client.trtllm.connector"):
        yield sys.modules["tensorrt_llm._utils"]


def llm_args(**fields: Any) -> Any:
    """TorchLlmArgs, as far as a connector reads them."""
    given = {"model": "tiny", "revision": COMMIT, "tensor_parallel_size": 1, "attn_backend": "TRTLLM", **fields}
    cache = types.SimpleNamespace(
        tokens_per_block=given.pop("tokens_per_block", 4), dtype=given.pop("kv_dtype", "auto")
    )
    return types.SimpleNamespace(kv_cache_config=cache, **given)
