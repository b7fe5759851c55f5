"""SGLang's unified cache as a linker sees it, for tests without SGLang: base class, pools, and the calls in their order.

Written after the sglang 0.5.23 wheel (`mem_cache/unified_cache/unified_cache_linker.py`, `memory_pool.py`);
tests/engines/sglang/wheel_linker.py runs the linker under the wheel's own tree and pools.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from tests.engines.sglang import standin
from tests.engines.sglang.standin import PoolHitPolicy, PoolName, PoolTransfer
from tests.rigs.stand_in_modules import stand_in

MODULE = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
PAGE, SLOTS, LAYERS = 4, 64, 3


class Event:
    """An event of the engine's stream."""

    def __init__(self) -> None:
        self.has_come = True

    def query(self) -> bool:
        return self.has_come


class UnifiedCacheLinker(ABC):
    """The base class's contract."""

    forward_stream: Any = None
    events: Sequence[Event] = (Event(),)

    def record_offload_ready(self) -> list[Event]:
        return list(self.events)

    @abstractmethod
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]: ...

    @abstractmethod
    def load(self, rid: str, transfers: list[Any]) -> bool: ...

    @abstractmethod
    def start_layer_wise_loading(self) -> int: ...

    @abstractmethod
    def finish_layer_wise_loading(self, counter_index: int) -> bool: ...

    @abstractmethod
    def cancel_queued_load(self, rid: str) -> bool: ...

    @abstractmethod
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool: ...

    @abstractmethod
    def num_completed_offloads(self) -> int: ...

    @abstractmethod
    def pop_completed_offload(self) -> bool: ...

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def installed() -> AbstractContextManager[None]:
    """SGLang's modules are these, for the linker."""
    contents: dict[str, dict[str, Any]] = {
        standin.MODULE: standin.CONTENT,
        MODULE: {"UnifiedCacheLinker": UnifiedCacheLinker},
    }
    return stand_in(contents, "kvpool_client.sglang.linker")


def params_of(cache: Any, **named: Any) -> Any:
    """CacheInitParams of an engine with this cache."""
    allocator = SimpleNamespace(get_kvcache=lambda: cache)
    return SimpleNamespace(
        **{
            "token_to_kv_pool_allocator": allocator,
            "req_to_token_pool": None,
            "page_size": PAGE,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            **named,
        }
    )


class MHATokenToKVPool:
    """SGLang's, by what a linker reads of it."""

    kv_cache_layout = "nhd"
    start_layer = 0
    k_scale_buffer = None

    def __init__(self, torch: Any, layers: int = LAYERS, heads: int = 2) -> None:
        self.page_size, self.layer_num, self.size = PAGE, layers, SLOTS
        self.head_num, self.head_dim, self.dtype = heads, 16, torch.bfloat16
        shape = (SLOTS + PAGE, heads, 16)
        self.k_buffer = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]
        self.v_buffer = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]


def kv(keys: Sequence[str], slots: Any = None) -> PoolTransfer:
    """A transfer of the KV."""
    return PoolTransfer(PoolName.KV, device_indices=slots, keys=list(keys))


def window(name: PoolName, keys: Sequence[str], slots: Any = None) -> PoolTransfer:
    """A transfer of trailing pages."""
    return PoolTransfer(name, device_indices=slots, keys=list(keys), hit_policy=PoolHitPolicy.TRAILING_PAGES)
