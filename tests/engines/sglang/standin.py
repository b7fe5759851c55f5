"""SGLang's HiCache as a storage backend sees it, for tests without SGLang: base class, configuration, pools, controller.

Written after the interface of the sglang 0.5.23 wheel (`mem_cache/hicache_storage.py`, `managers/cache_controller.py`);
tests/engines/sglang/test_wheel.py runs the same contract on the wheel itself, its failure injector included.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from tests.rigs.stand_in_modules import stand_in

MODULE = "sglang.srt.mem_cache.hicache_storage"
BATCH_PAGES = 128


@dataclass
class StorageConfig:
    """The fields of HiCacheStorageConfig."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "tiny"
    extra_config: dict[str, Any] = field(default_factory=dict)
    dcp_size: int = 1
    dcp_rank: int = 0


@dataclass
class ExtraInfo:
    """HiCacheStorageExtraInfo."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(str, Enum):
    """Some of PoolName's."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"
    DRAFT_SWA = "draft_swa"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):
    """PoolHitPolicy."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    """PoolTransfer: one pool's part of a transfer."""

    name: str
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: str | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    """PoolTransferResult."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    """The base class's contract: five abstract verbs, and the ones that the controller really calls."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    def on_host_pools_registered(self) -> None:
        self.is_attached = True

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...


class Injector:
    """Fails calls at random before the backend sees them, as SGLang's own injector does (delays are the wheel test's)."""

    def __init__(self, backend: Any, failure: float, seed: int) -> None:
        self._backend = backend
        self._failure = failure
        self._random = random.Random(seed)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return 0 if self._fails() else self._backend.batch_exists(keys, extra_info)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return [False] * len(keys) if self._fails() else self._backend.batch_get_v1(keys, host_indices, extra_info)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return [False] * len(keys) if self._fails() else self._backend.batch_set_v1(keys, host_indices, extra_info)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        return PoolTransferResult(0, {}) if self._fails() else self._backend.batch_exists_v2(keys, pool_transfers)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> Any:
        return self._none_of(transfers) if self._fails() else self._backend.batch_get_v2(transfers, extra_info)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> Any:
        return self._none_of(transfers) if self._fails() else self._backend.batch_set_v2(transfers, extra_info)

    @staticmethod
    def _none_of(transfers: Sequence[Any]) -> dict[Any, list[bool]]:
        return {each.name: [False] * len(each.keys or []) for each in transfers}

    def _fails(self) -> bool:
        return self._random.random() < self._failure


CONTENT = {"HiCacheStorage": HiCacheStorage, "PoolTransferResult": PoolTransferResult, "PoolName": PoolName}


def installed() -> AbstractContextManager[None]:
    """`sglang.srt.mem_cache.hicache_storage` importable, for the backend."""
    return stand_in({MODULE: CONTENT}, "kvpool_client.sglang.storage")


class HostPool:
    """A HostKVCache of numpy memory: pages in one of SGLang's layouts, filled by tests."""

    def __init__(
        self,
        *,
        layout: str = "page_first",
        pages: int = 16,
        page_size: int = 4,
        layer_num: int = 3,
        heads: int = 2,
        seed: int = 0,
    ) -> None:
        """`seed`: of its contents, where a test has several pools."""
        self._seed = seed
        self.layout = layout
        self.page_size = page_size
        self.size = pages * page_size
        self.layer_num = layer_num
        self.head_num = heads
        self.head_dim = 8
        self.dtype = "torch.bfloat16"
        per_token = heads * self.head_dim
        shapes = {
            "page_first": (2, self.size, layer_num, per_token),
            "layer_first": (2, layer_num, self.size, per_token),
            "mla": (self.size, layer_num, per_token),
        }
        self.kv_buffer = np.zeros(shapes[layout], np.uint16)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Where the parts of each page lie."""
        rows = [int(slot) for slot in indices.tolist()][:: self.page_size]
        strides, base = self.kv_buffer.strides, self.kv_buffer.ctypes.data
        part = self.page_size * self.head_num * self.head_dim * 2
        if self.layout == "layer_first":
            addresses = [
                base + plane * strides[0] + layer * strides[1] + row * strides[2]
                for row in rows
                for layer in range(self.layer_num)
                for plane in range(2)
            ]
            return addresses, [part] * len(addresses)
        part *= self.layer_num
        if self.layout == "mla":
            return [base + row * strides[0] for row in rows], [part] * len(rows)
        addresses = [base + plane * strides[0] + row * strides[1] for row in rows for plane in range(2)]
        return addresses, [part] * len(addresses)

    def page(self, number: int) -> Any:
        """A view of one page, for tests to fill and compare."""
        slots = slice(number * self.page_size, (number + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, slots]
        return self.kv_buffer[slots] if self.layout == "mla" else self.kv_buffer[:, slots]

    def fill(self, number: int, key: str, rank: int = 0) -> None:
        """Give a page the content that belongs to its key."""
        page = self.page(number)
        page[...] = self._content(key, rank, page.shape)

    def holds(self, number: int, key: str, rank: int = 0) -> bool:
        """True if a page has the content of its key."""
        page = self.page(number)
        return bool((page == self._content(key, rank, page.shape)).all())

    def clear(self) -> None:
        """Zeros in every page."""
        self.kv_buffer[...] = 0

    def slots(self, pages: Sequence[int]) -> Any:
        """The host indices of pages."""
        return np.concatenate([np.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def _content(self, key: str, rank: int, shape: tuple[int, ...]) -> Any:
        seed = [int.from_bytes(bytes.fromhex(key)[:8], "little"), rank, self._seed]
        return np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)


def page_keys(seed: int, count: int, salt: str | None = None) -> list[str]:
    """SGLang's page hashes of a prompt: SHA-256, chained, seeded by the namespace of the salt."""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1" + salt.encode()).digest() if salt is not None else b""
    keys = []
    for page in range(count):
        digest = hashlib.sha256(digest + seed.to_bytes(8, "little") + page.to_bytes(8, "little")).digest()
        keys.append(digest.hex())
    return keys


class Controller:
    """HiCacheController's use of a backend: backs nodes up in batches, asks for hits, fetches until the first False."""

    def __init__(self, backend: Any, pool: Any) -> None:
        self.backend = backend
        self.pool = pool

    def backup(
        self,
        keys: Sequence[str],
        pages: Sequence[int],
        prefix: Sequence[str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> int:
        """Pages that were written. `extra`: what came with the request."""
        written = 0
        for first in range(0, len(keys), BATCH_PAGES):
            batch = list(keys[first : first + BATCH_PAGES])
            slots = self.pool.slots(pages[first : first + BATCH_PAGES])
            info = ExtraInfo([*prefix, *keys[:first]] if prefix is not None else None, extra)
            if not all(self.backend.batch_set_v1(batch, slots, info)):
                break
            written += len(batch)
        return written

    def prefetch(self, keys: Sequence[str], pages: Sequence[int]) -> int:
        """Pages that were fetched."""
        hits = self.backend.batch_exists(list(keys), ExtraInfo())
        assert 0 <= hits <= len(keys)
        results = (
            self.backend.batch_get_v1(list(keys[:hits]), self.pool.slots(pages[:hits]), ExtraInfo()) if hits else []
        )
        assert len(results) == hits
        return results.index(False) if False in results else hits
