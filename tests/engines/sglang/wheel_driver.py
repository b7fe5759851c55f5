"""A process in which SGLang's own storage layer, out of its wheel, drives the backend: `DIRECTORY SOCKET TURNS`.

DIRECTORY has the wheel's storage modules; stubs stand for the packages around them, whose own imports want a GPU build.
SGLang's factory makes the backend by its dynamic configuration and wraps it into its failure injector where the
environment says so. Prints a JSON object of what was seen; exits 1 at the first wrong byte.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engines.sglang.standin import Controller, HostPool, page_keys
from tests.rigs.daemon import wait_until

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage")
PAGES = 8


class TorchPool(HostPool):
    """A host pool whose slots are torch tensors, as SGLang's are."""

    def slots(self, pages: Any) -> Any:
        return torch.from_numpy(super().slots(pages))


def _storage_layer(directory: Path) -> tuple[Any, Any]:
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(directory / name.replace(".", "/"))]
        sys.modules[name] = package
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
    return storage, factory.StorageBackendFactory


def main(directory: Path, socket: str, turns: int) -> int:
    storage, factory = _storage_layer(directory)
    extra = {
        "backend_name": "kvpool",
        "module_path": "kvpool_client.sglang",
        "class_name": "KVPoolStorage",
        "interface_v1": 1,
        "socket": socket,
        "revision": "1",
    }
    config = storage.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="tiny",
        extra_config=extra,
    )
    pool = TorchPool()
    backend = factory.create_backend("dynamic", config, pool)
    assert isinstance(backend, storage.HiCacheStorage)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    inner = getattr(backend, "_backend", backend)
    wait_until(lambda: inner.counters()["connected"] == 1, "connected")
    controller = Controller(backend, pool)
    fetched, stored = 0, 0
    for turn in range(turns):
        keys = page_keys(turn % 5, PAGES)
        for number, key in enumerate(keys):
            pool.fill(number, key)
        stored += controller.backup(keys, range(PAGES))
        pool.kv_buffer[...] = np.uint16(0)
        got = controller.prefetch(keys, range(PAGES))
        if not all(pool.holds(number, keys[number]) for number in range(got)):
            return 1
        fetched += got
    assert backend.get_stats() is None
    backend.clear()
    left = inner.batch_exists(page_keys(0, PAGES))
    backend.close()
    print(json.dumps({"wrapper": type(backend).__name__, "fetched": fetched, "stored": stored, "left": left}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
