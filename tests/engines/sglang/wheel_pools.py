"""A process in which host pools of SGLang's own classes, out of its wheel, are moved by the backend: `DIRECTORY SOCKET`.

DIRECTORY has the wheel's modules of host pools; whatever else they import is an empty stand-in, because it wants a GPU build.
So pools are made without their constructors, with the memory that these would allocate; addresses of their pages are computed
by SGLang's code. Each pool has pages stored and brought back into other pages. Prints the pages that came back by pool.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from tests.engines.sglang.standin import page_keys
from tests.rigs.daemon import wait_until

POOL_MODULES = tuple(
    f"sglang.srt.mem_cache.{name}"
    for name in (
        "hicache_storage",
        "memory_pool_host",
        *(f"pool_host.{kind}" for kind in ("base", "mamba", "dsa", "mha")),
    )
)
PAGES, PAGE_TOKENS, LAYERS = 6, 4, 3
KEYS = 2


class _Wheel:
    """Finds the wheel's modules of host pools, and an empty stand-in for each other module of SGLang's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("sglang"):
            return None
        if name in POOL_MODULES:
            return importlib.util.spec_from_file_location(name, self._directory / f"{name.replace('.', '/')}.py")
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]  # a loader

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        for name in ("is_cuda", "is_hip", "is_npu", "is_xpu", "is_mps"):
            setattr(module, name, lambda: False)
        module.HostKVCache, module.HiSparseHostPoolMixin = object, type("Mixin", (), {})
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing: a stand-in is empty."""


def _made(cls: Any, **fields: Any) -> Any:
    pool = cls.__new__(cls)
    vars(pool).update({"page_size": PAGE_TOKENS, "size": PAGES * PAGE_TOKENS, "layer_num": LAYERS, **fields})
    return pool


def _mamba(cls: Any) -> tuple[Any, list[Any]]:
    """A pool of states, and its buffers, page by page."""
    temporal = torch.zeros(PAGES, LAYERS, 1, 2, 4, 8)
    convolutions = [torch.zeros(PAGES, LAYERS, 1, 3, size, dtype=torch.bfloat16) for size in (10, 6)]
    pool = _made(
        cls,
        page_size=1,
        size=PAGES,
        layout="page_first",
        num_mamba_layers=LAYERS,
        temporal_buffer=temporal,
        conv_buffer=convolutions,
        kv_buffer=[temporal, *convolutions],
        temporal_state_elem_size=64,
        temporal_dtype=torch.float32,
        temporal_state_shape=(2, 4, 8),
        conv_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
        conv_state_elem_sizes=[30, 18],
        conv_state_shapes=[(3, 10), (3, 6)],
    )
    return pool, [temporal, *convolutions]


def _indexer(cls: Any) -> tuple[Any, list[Any]]:
    stride = PAGE_TOKENS * 132
    buffer = torch.zeros(PAGES + 1, LAYERS, 1, stride, dtype=torch.uint8)
    fields = {"indexer_page_stride_size": stride, "indexer_dtype": torch.uint8, "index_k_with_scale_buffer": buffer}
    return _made(cls, layout="page_first", dtype=torch.uint8, **fields), [buffer]


def _paged(cls: Any, layout: str) -> tuple[Any, list[Any]]:
    """A pool of compressed KV."""
    if layout == "layer_first":
        buffers = [torch.zeros(PAGES, 96, dtype=torch.uint8) for _ in range(LAYERS)]
        return _made(
            cls, layout=layout, dtype=torch.uint8, item_bytes=96, slot_page_size=PAGE_TOKENS, kv_buffer=buffers
        ), buffers
    buffer = torch.zeros(PAGES, LAYERS, 96, dtype=torch.uint8)
    return _made(cls, layout=layout, dtype=torch.uint8, item_bytes=96, slot_page_size=PAGE_TOKENS, kv_buffer=buffer), [
        buffer
    ]


def _states(cls: Any) -> tuple[Any, list[Any]]:
    """A pool of compressed states."""
    buffer = torch.zeros(PAGES, LAYERS, 160, dtype=torch.uint8)
    fields = {"state_page_bytes": 160, "swa_page_size": PAGE_TOKENS, "kv_buffer": buffer}
    return _made(cls, layout="page_first", dtype=torch.uint8, **fields), [buffer]


def _asymmetric(cls: Any) -> tuple[Any, list[Any]]:
    """Keys of 24 dimensions and values of 16."""
    keys, values = (torch.zeros(PAGES, LAYERS, PAGE_TOKENS, 2, dim, dtype=torch.float16) for dim in (24, 16))
    pool = _made(
        cls,
        layout="page_first_direct",
        dtype=torch.float16,
        head_num=2,
        head_dim=24,
        v_head_dim=16,
        kv_buffer=(keys, values),
    )
    return pool, [keys, values]


def _pages_of(buffers: list[Any]) -> list[Any]:
    """The bytes of each buffer, a page a row."""
    return [buffer.view(torch.uint8).reshape(buffer.shape[0], -1).numpy() for buffer in buffers]


def _came_back(backend: Any, storage: Any, pools: dict[str, tuple[Any, list[Any]]], keys: list[str]) -> dict[str, int]:
    """Pages of each pool that are in other pages after they were stored and brought back, byte by byte."""
    found = {}
    for seed, (name, (pool, buffers)) in enumerate(pools.items()):
        rows, policy = _pages_of(buffers), storage.PoolHitPolicy.ALL_PAGES
        for row in rows:
            row[:] = np.random.default_rng(seed).integers(0, 256, row.shape, dtype=np.uint8)
        stored = [row[:KEYS].copy() for row in rows]

        def transfer(first: int, name: str = name, pool: Any = pool, policy: Any = policy) -> Any:
            slots = torch.arange(first * pool.page_size, (first + KEYS) * pool.page_size)
            return storage.PoolTransfer(storage.PoolName(name), slots, keys=keys, hit_policy=policy)

        assert backend.batch_set_v2([transfer(0)]) == {name: [True] * KEYS}, name
        for row in rows:
            row[:] = 0
        came = backend.batch_get_v2([transfer(PAGES - KEYS)])[name]
        last = slice(PAGES - KEYS, PAGES)
        is_right = all(np.array_equal(row[last], before) for row, before in zip(rows, stored, strict=True))
        is_clean = not any(row[: PAGES - KEYS].any() for row in rows)
        found[name] = sum(came) if is_right and is_clean else -1
    return found


def main(directory: Path, socket: str) -> int:
    sys.meta_path.insert(0, _Wheel(directory))
    storage, others, _, mamba, dsa, mha = (importlib.import_module(name) for name in POOL_MODULES)
    from kvpool_client.sglang import KVPoolStorage

    extra = {"interface_v1": 1, "socket": socket, "revision": "1"}
    fields = {
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "pools",
        "extra_config": extra,
    }
    config = storage.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, **fields)
    pools = {
        "mamba": _mamba(mamba.MambaPoolHost),
        "indexer": _indexer(dsa.DSAIndexerPoolHost),
        "deepseek_v4_c4": _paged(others.DeepSeekV4PagedHostPool, "page_first"),
        "deepseek_v4_c128": _paged(others.DeepSeekV4PagedHostPool, "layer_first"),
        "deepseek_v4_c4_state": _states(others.DeepSeekV4StateHostPool),
        "swa": _asymmetric(mha.AsymmetricMHATokenToKVPoolHost),
    }
    backend = KVPoolStorage(config, {})  # type: ignore[operator]
    backend.register_mem_pool_host(others.LogicalHostPool(PAGES * PAGE_TOKENS, PAGE_TOKENS, "page_first"))
    for name, (pool, _) in pools.items():
        backend.register_mem_host_pool_v2(pool, storage.PoolName(name))
    wait_until(
        lambda: all(backend.counters().get(f"{name}.connected") == 1 for name in pools), "all pools are connected"
    )
    keys = page_keys(1, KEYS)
    found = _came_back(backend, storage, pools, keys)
    asked = [storage.PoolTransfer(storage.PoolName(name), keys=keys) for name in pools]
    hits = backend.batch_exists_v2(keys, asked).kv_hit_pages
    backend.close()
    print(json.dumps({"came_back": found, "hits": hits}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
