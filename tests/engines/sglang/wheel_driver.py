"""A process in which SGLang's own storage layer, out of its wheel, drives the backend: `DIRECTORY SOCKET TURNS`.

DIRECTORY has the wheel's storage modules; stubs stand for the packages around them, whose own imports want a GPU build.
SGLang's factory makes the backend by its dynamic configuration and wraps it into its failure injector where the
environment says so: once for a model of KV alone, and once for one with a sliding window, states of Mamba, an indexer and a
draft, with the wheel's own names and policies of pools. Prints a JSON object of what was seen; exits 1 at the first wrong byte.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.engines.sglang.hybrid import HybridController, IndexerPool, MambaPool, Sidecar
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


def _config(storage: Any, socket: str, model: str) -> Any:
    extra = {
        "backend_name": "kvpool",
        "module_path": "kvpool_client.sglang",
        "class_name": "KVPoolStorage",
        "interface_v1": 1,
        "socket": socket,
        "revision": "1",
    }
    return storage.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model,
        extra_config=extra,
    )


def _drive_kv(storage: Any, factory: Any, socket: str, turns: int) -> dict[str, Any]:
    """A model of KV alone."""
    pool = TorchPool()
    backend = factory.create_backend("dynamic", _config(storage, socket, "tiny"), pool)
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
        pool.clear()
        got = controller.prefetch(keys, range(PAGES))
        assert all(pool.holds(number, keys[number]) for number in range(got)), "other bytes in a page"
        fetched += got
    assert backend.get_stats() is None
    backend.clear()
    left = inner.batch_exists(page_keys(0, PAGES))
    backend.close()
    return {"wrapper": type(backend).__name__, "fetched": fetched, "stored": stored, "left": left}


def _drive_hybrid(storage: Any, factory: Any, socket: str, turns: int) -> dict[str, Any]:
    """A model with pools beside its KV; a wrong byte is an AssertionError of the controller."""
    pool = TorchPool()
    sidecars = {
        "swa": Sidecar(TorchPool(layer_num=2, seed=1), trailing=2),
        "mamba": Sidecar(MambaPool(), trailing=1),
        "indexer": Sidecar(IndexerPool()),
        "draft": Sidecar(TorchPool(seed=2)),
    }
    backend = factory.create_backend("dynamic", _config(storage, socket, "hybrid"), pool)
    inner = getattr(backend, "_backend", backend)
    controller = HybridController(backend, pool, sidecars, storage)
    names = ["connected", *(f"{name}.connected" for name in sidecars)]
    wait_until(lambda: all(inner.counters()[name] == 1 for name in names), "all pools are connected")
    fetched, stored = 0, 0
    for turn in range(turns):
        keys = page_keys(10 + turn % 5, PAGES)
        stored += controller.backup(keys)
        fetched += controller.prefetch(keys)
    backend.clear()
    left = inner.batch_exists(page_keys(10, PAGES))
    backend.close()
    return {"hybrid_fetched": fetched, "hybrid_stored": stored, "hybrid_left": left}


def main(directory: Path, socket: str, turns: int) -> int:
    storage, factory = _storage_layer(directory)
    try:
        seen = _drive_kv(storage, factory, socket, turns) | _drive_hybrid(storage, factory, socket, turns)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
