"""Storage backend that SGLang's factory makes: HiCacheStorage's verbs over a PageStore.

Imports sglang; nothing else in `kvpool_client` imports this module. Only the zero-copy interface (`interface_v1`) is served.
The copying one misses, and so do models whose KV needs sidecar pools (Mamba, sliding windows, indexers): KV without its sidecar
would be wrong, so for them nothing is found and nothing is stored.
Threads: as SGLang calls, see PageStore.
"""

import os
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvpool_client.sglang.host_pages import Shard
from kvpool_client.sglang.names import named, server_args_of_process
from kvpool_client.sglang.page_store import PageStore
from kvpool_client.sglang.settings import Settings

KV = "kv"
_NOT_SERVED = (
    "interface: only the zero-copy interface is served: set interface_v1 to 1 in --hicache-storage-backend-extra-config"
)
_SPLIT_PAGES = (
    "dcp: decode context parallelism gives each rank a part of every page: run with --dcp-size 1, or without "
    "--hicache-storage-backend"
)
_HAS_SIDECARS = (
    "sidecars: the model has pools beside its KV (hybrid attention, state or draft) and pages of it are not stored: "
    "run it without --hicache-storage-backend, or without its draft model"
)


class KVPoolStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang's class is untyped here
    """See `kvpool_client.sglang`. Configured by SGLang's extra config; raises InvalidArgument where that is wrong."""

    def __init__(self, storage_config: Any, _kwargs: object = None) -> None:
        settings = Settings.read(storage_config.extra_config, storage_config.model_name)
        self._shard = Shard(
            tp_rank=storage_config.tp_rank,
            tp_size=storage_config.tp_size,
            pp_rank=storage_config.pp_rank,
            pp_size=storage_config.pp_size,
            cp_rank=storage_config.attn_cp_rank,
            cp_size=storage_config.attn_cp_size,
            is_replicated=storage_config.is_mla_model,
        )
        settings, refusal = named(settings, storage_config.model_name, server_args_of_process(), os.environ)
        refusal = refusal or (_SPLIT_PAGES if getattr(storage_config, "dcp_size", 1) > 1 else "")
        self._store = PageStore(settings, self._shard, refusal)
        self._has_sidecars = False

    def __repr__(self) -> str:
        return f"<KVPoolStorage {self._store!r}>"

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool that pages are read from and written to."""
        super().register_mem_pool_host(mem_pool_host)
        self._store.register(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool of a hybrid model. Any but the KV itself makes every page a miss."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._has_sidecars = self._has_sidecars or str(host_pool_name) != KV

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """How many leading pages are there."""
        return 0 if self._is_hybrid("batch_exists", len(keys)) else self._store.count_present(keys)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Load pages. Returns which are in place."""
        if self._is_hybrid("batch_get_v1", len(keys)):
            return [False] * len(keys)
        return self._store.load(keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Store pages. Returns which are stored."""
        if self._is_hybrid("batch_set_v1", len(keys)):
            return [False] * len(keys)
        return self._store.save(keys, host_indices, extra_info)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: object = None) -> Any:
        """How many leading pages are there, for models with KV alone."""
        if pool_transfers or self._is_hybrid("batch_exists_v2", len(keys)):
            return PoolTransferResult(0, {})
        pages = self._store.count_present(keys)
        return PoolTransferResult(pages, {KV: pages} if pages else {}, list(range(1, pages + 1)))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Load pages pool by pool; every pool but the KV misses."""
        return {each.name: self._transfer(each, self.batch_get_v1) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Store pages pool by pool; every pool but the KV declines."""
        return {each.name: self._transfer(each, self.batch_set_v1) for each in transfers}

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """A miss: see the module."""
        self._store.refuse("get", _NOT_SERVED, 1)

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Misses: see the module."""
        self._store.refuse("batch_get", _NOT_SERVED, len(keys))
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Declined: see the module."""
        return self.batch_set([key])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Declined: see the module."""
        self._store.refuse("batch_set", _NOT_SERVED, len(keys))
        return False

    def clear(self) -> bool:
        """Drop every chunk of this model from the node's pool."""
        return self._store.clear()

    def get_stats(self) -> None:
        """None: SGLang takes its own histogram class here and nothing else. `counters` has the figures."""
        return

    def counters(self) -> dict[str, int | float | str]:
        """Pages moved, failures by call, and the Pool's own counters."""
        return self._store.stats()

    def close(self) -> None:
        """End the connection."""
        self._store.close()

    def _is_hybrid(self, call: str, pages: int) -> bool:
        if self._has_sidecars:
            self._store.refuse(call, _HAS_SIDECARS, pages)
        return self._has_sidecars

    def _transfer(self, transfer: Any, verb: Any) -> list[bool]:
        keys = transfer.keys or []
        if str(transfer.name) != KV or transfer.host_indices is None:
            self._store.refuse("transfer", f"{_HAS_SIDECARS} (pool {transfer.name})", len(keys))
            return [False] * len(keys)
        answer: list[bool] = verb(keys, transfer.host_indices)
        return answer
