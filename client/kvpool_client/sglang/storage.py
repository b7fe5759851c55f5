"""Storage backend that SGLang's factory makes: HiCacheStorage's verbs over a PageStore.

Imports sglang; nothing else in `kvpool_client` imports this module. Only the zero-copy interface (`interface_v1`) is served,
the copying one misses. Models with host pools beside their KV (Mamba, sliding windows, indexers, drafts) use the second form
of the verbs, which names pools: KV without what belongs to it would be wrong, so where one pool cannot be stored, none is.
Threads: as SGLang calls, see PageStore.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.weights import Revision
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.sglang.host_pages import KV, Shard, is_logical
from kvpool_client.sglang.names import named, server_args_of_process, with_draft
from kvpool_client.sglang.page_store import PageStore
from kvpool_client.sglang.settings import Settings
from kvpool_client.sglang.sidecars import Sidecars, has_draft

_log = logging.getLogger(__name__)
_NOT_SERVED = (
    "interface: only the zero-copy interface is served: set interface_v1 to 1 in --hicache-storage-backend-extra-config"
)
_SPLIT_PAGES = (
    "dcp: decode context parallelism gives each rank a part of every page: run with --dcp-size 1, or without "
    "--hicache-storage-backend"
)


class KVPoolStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang's class is untyped here
    """See `kvpool_client.sglang`. Configured by SGLang's extra config; raises ConfigError where that is wrong."""

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
        self._settings = settings
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), _log)
        self._revision, refusal = named(settings, storage_config.model_name, server_args_of_process(), os.environ)
        self._draft_revision: Revision | None = None
        if self._revision is not None:
            self._revision.begin_reading(self._reader)
        self._refusal = refusal or (_SPLIT_PAGES if getattr(storage_config, "dcp_size", 1) > 1 else "")
        self._store = PageStore(settings, self._shard, self._revision, refusal=self._refusal)
        self._sidecars = Sidecars(self._shard, self._store_of)
        self._is_logical = False

    def __repr__(self) -> str:
        return f"<KVPoolStorage {self._store!r} {self._sidecars!r}>"

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool of the KV. One that only counts slots has no bytes: other pools have them."""
        super().register_mem_pool_host(mem_pool_host)
        self._is_logical = is_logical(mem_pool_host)
        if self._is_logical:
            return
        if has_draft(mem_pool_host, KV):
            self._store = self._store_of(KV, self._shard, True, "")
        self._store.register(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a host pool beside the KV. The KV's own comes here a second time."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._sidecars.register(host_pool, str(host_pool_name))

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """How many leading pages are there, of the KV alone."""
        return 0 if self._is_logical or self._is_refused("batch_exists", len(keys)) else self._store.count_present(keys)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Load pages of the KV. Returns which are in place."""
        if self._is_logical or self._is_refused("batch_get_v1", len(keys)):
            return [self._is_served_elsewhere()] * len(keys)
        return self._store.load(keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Store pages of the KV. Returns which are stored."""
        if self._is_logical or self._is_refused("batch_set_v1", len(keys)):
            return [self._is_served_elsewhere()] * len(keys)
        return self._store.save(keys, host_indices, extra_info)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: object = None) -> Any:
        """The prefixes that all pools can serve, each by its hit policy."""
        transfers = pool_transfers or ()
        if self._is_refused("batch_exists_v2", len(keys)) or (self._is_logical and not transfers):
            return PoolTransferResult(0, {}, [])
        pages = len(keys) if self._is_logical else self._store.count_present(keys)
        try:
            prefixes, longest = self._sidecars.prefixes(transfers, keys[:pages])
        except LookupError as error:
            self._store.refuse("batch_exists_v2", str(error), len(keys))
            return PoolTransferResult(0, {}, [])
        return PoolTransferResult(prefixes[-1] if prefixes else 0, ({KV: pages} if pages else {}) | longest, prefixes)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Load pages pool by pool. Returns which are in place, by pool."""
        return {each.name: self._transferred("batch_get_v2", each) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Store pages pool by pool. Returns which are stored, by pool."""
        return {each.name: self._transferred("batch_set_v2", each, extra_info) for each in transfers}

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
        names = {store.model: store for store in (self._store, *self._sidecars.stores)}
        cleared = [store.clear() for store in names.values()]
        return all(cleared)

    def get_stats(self) -> None:
        """None: SGLang takes its own histogram class here and nothing else. `counters` has the figures."""
        return

    def counters(self) -> dict[str, int | float | str]:
        """Pages moved, failures by call, and the Pool's own counters; those of the pools beside the KV by their names. Of
        weights in files how many bytes they have, and how many were read."""
        revision = self._draft_revision or self._revision
        return (revision.counts() if revision is not None else {}) | self._store.stats() | self._sidecars.stats()

    def close(self) -> None:
        """End the connections."""
        self._reader.stop()
        self._store.close()
        self._sidecars.close()

    def _store_of(self, name: str, shard: Shard, has_draft_kv: bool, refusal: str) -> PageStore:
        revision, unidentified = self._revision, ""
        if has_draft_kv and not self._refusal and revision is not None:
            if self._draft_revision is None:
                given, args = self._settings.revision, server_args_of_process()
                self._draft_revision, unidentified = with_draft(revision, given, args, os.environ)
            if self._draft_revision is not None:
                self._draft_revision.begin_reading(self._reader)
            revision = self._draft_revision
        return PageStore(self._settings, shard, revision, refusal=self._refusal or refusal or unidentified, name=name)

    def _is_refused(self, call: str, pages: int) -> bool:
        refusal = self._sidecars.refusal
        if refusal:
            self._store.refuse(call, refusal, pages)
        return bool(refusal)

    def _is_served_elsewhere(self) -> bool:
        """Whether pages of the KV are in place as soon as those of the pools beside it are."""
        return self._is_logical and len(self._sidecars) > 0 and not self._sidecars.refusal

    def _transferred(self, call: str, transfer: Any, extra_info: object = None) -> list[bool]:
        keys, name = transfer.keys or [], str(transfer.name)
        is_get = call == "batch_get_v2"
        if not keys:
            return []
        if name == KV:
            if is_get:
                return self.batch_get_v1(keys, transfer.host_indices)
            return self.batch_set_v1(keys, transfer.host_indices, extra_info)
        if self._is_refused(call, len(keys)):
            return [False] * len(keys)
        try:
            store = self._sidecars.find_store(name)
        except LookupError as error:
            self._store.refuse(call, str(error), len(keys))
            return [False] * len(keys)
        if is_get:
            return store.load(keys, transfer.host_indices)
        return store.save(keys, transfer.host_indices, extra_info)
