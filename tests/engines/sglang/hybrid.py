"""SGLang's hybrid models as a storage backend sees them: host pools beside the KV, and the controller that moves all of them.

Written after the sglang 0.5.23 wheel: `mem_cache/pool_host/mamba.py`, `dsa.py`, `memory_pool_host.py` (LogicalHostPool), and
`mem_cache/hybrid_cache/hybrid_cache_controller.py` (`_storage_hit_query`, `_page_transfer`, `_sync_trailing_keys`,
`_page_backup`). The classes of transfers are the stand-in's or the wheel's, as the caller passes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.engines.sglang.standin import BATCH_PAGES, ExtraInfo

# Pages of the KV, and tokens of each.
PAGES, PAGE_SIZE = 16, 4


class OpaquePool:
    """Pages as a few parts of uint8, each part at a stride of its own, filled by their key."""

    layout = "page_first"
    dtype = "torch.uint8"

    def __init__(self, part_bytes: Sequence[int], *, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.size = pages * page_size
        self.parts = [np.zeros((pages, size), np.uint8) for size in part_bytes]
        self.kv_buffer: Any = self.parts

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Where the parts of each page lie."""
        pages = [int(slot) // self.page_size for slot in indices.tolist()][:: self.page_size]
        addresses = [part.ctypes.data + page * part.shape[1] for page in pages for part in self.parts]
        return addresses, [part.shape[1] for _ in pages for part in self.parts]

    def fill(self, page: int, key: str, rank: int = 0) -> None:
        """Give a page the content that belongs to its key."""
        for part, content in zip(self.parts, self._contents(key, rank), strict=True):
            part[page] = content

    def holds(self, page: int, key: str, rank: int = 0) -> bool:
        """True if a page has the content of its key."""
        return all(
            (part[page] == content).all() for part, content in zip(self.parts, self._contents(key, rank), strict=True)
        )

    def clear(self) -> None:
        """Zeros in every page."""
        for part in self.parts:
            part[...] = 0

    def slots(self, pages: Sequence[int]) -> Any:
        """The host indices of pages."""
        return np.concatenate([np.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def _contents(self, key: str, rank: int) -> list[Any]:
        rng = np.random.default_rng([int.from_bytes(bytes.fromhex(key)[:8], "little"), rank, self.page_size])
        return [rng.integers(0, 256, part.shape[1], dtype=np.uint8) for part in self.parts]


class MambaPool(OpaquePool):
    """MambaPoolHost: a slot for a state, of a temporal part and two convolutions of other sizes."""

    def __init__(self, slots: int = 8, layers: int = 3) -> None:
        super().__init__([layers * 4096, layers * 768, layers * 384], pages=slots, page_size=1)
        self.num_mamba_layers = layers
        self.temporal_dtype = "torch.float32"


class IndexerPool(OpaquePool):
    """DSAIndexerPoolHost: a packed part for each page of the KV, whose indices it shares."""

    def __init__(self) -> None:
        super().__init__([PAGE_SIZE * 132], pages=PAGES, page_size=PAGE_SIZE)


class LogicalPool:
    """LogicalHostPool: slots without bytes."""

    layout = "page_first"
    dtype = "torch.uint8"
    kv_buffer = None
    layer_num = 0

    def __init__(self) -> None:
        self.page_size = PAGE_SIZE
        self.size = PAGES * PAGE_SIZE

    def get_page_buffer_meta(self, indices: Any) -> None:
        return None

    def slots(self, pages: Sequence[int]) -> Any:
        return np.concatenate([np.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def fill(self, page: int, key: str, rank: int = 0) -> None:
        """Nothing: it has no bytes."""

    def holds(self, page: int, key: str, rank: int = 0) -> bool:
        return True

    def clear(self) -> None:
        """Nothing: it has no bytes."""


@dataclass
class Sidecar:
    """A host pool beside the KV. `trailing`: pages that a prefix needs of it, 0 for all; those have the KV's indices."""

    pool: Any
    trailing: int = 0


class HybridController:
    """HybridCacheController's use of a backend. `words`: the module with PoolTransfer, PoolName and PoolHitPolicy."""

    def __init__(self, backend: Any, pool: Any, sidecars: Mapping[str, Sidecar], words: Any) -> None:
        self.backend, self.pool, self.sidecars, self.words = backend, pool, sidecars, words
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, words.PoolName.KV)
        for name, sidecar in sidecars.items():
            backend.register_mem_host_pool_v2(sidecar.pool, words.PoolName(name))
        backend.on_host_pools_registered()

    def backup(self, keys: Sequence[str], rank: int = 0) -> bool:
        """Store a prompt whose last page ends a node of the tree: all pages of the KV and of pools with its indices, the last
        ones of the others. Returns whether everything is stored."""
        transfers = []
        for name, sidecar in self.sidecars.items():
            own = list(keys[-sidecar.trailing :] if sidecar.trailing else keys)
            for page, key in enumerate(own):
                sidecar.pool.fill(page, key, rank)
            transfers.append(self._transfer(name, own, range(len(own))))
        stored = self.backend.batch_set_v2(transfers, ExtraInfo())
        for page, key in enumerate(keys):
            self.pool.fill(page, key, rank)
        done = [all(self.backend.batch_set_v1(list(keys), self.pool.slots(range(len(keys))), ExtraInfo()))]
        done += [all(stored[each.name]) and len(stored[each.name]) == len(each.keys) for each in transfers]
        return all(done)

    def query(self, keys: Sequence[str]) -> Any:
        """The backend's PoolTransferResult for a prompt."""
        transfers = [
            self._transfer(name, list(keys[-sidecar.trailing :]) if sidecar.trailing else None, None)
            for name, sidecar in self.sidecars.items()
        ]
        return self.backend.batch_exists_v2(list(keys), transfers, ExtraInfo())

    def prefetch(self, keys: Sequence[str], rank: int = 0) -> int:
        """Fetch the longest prefix into other pages than it was stored from, and compare every byte. Returns the pages that the
        engine can go on from: none where one pool's are missing."""
        hits = self.query(keys).kv_hit_pages
        for pool in (self.pool, *(sidecar.pool for sidecar in self.sidecars.values())):
            pool.clear()
        hit_keys, pages = list(keys[:hits]), list(reversed(range(hits)))
        done = 0
        for first in range(0, hits, BATCH_PAGES):
            batch = slice(first, first + BATCH_PAGES)
            done += self._fetch_batch(hit_keys[batch], pages[batch], rank)
            if done < min(hits, first + BATCH_PAGES):
                return 0
        fetched = [self._fetch_trailing(name, hit_keys, rank) for name in self._trailing()]
        return hits if all(fetched) else 0

    def _trailing(self) -> list[str]:
        return [name for name, sidecar in self.sidecars.items() if sidecar.trailing]

    def _fetch_batch(self, keys: list[str], pages: list[int], rank: int) -> int:
        if not keys:
            return 0
        results = {"kv": self.backend.batch_get_v1(keys, self.pool.slots(pages), ExtraInfo())}
        shared = [self._transfer(name, keys, pages) for name, each in self.sidecars.items() if not each.trailing]
        results |= self.backend.batch_get_v2(shared, ExtraInfo()) if shared else {}
        for name, flags in results.items():
            pool = self.pool if str(name) == "kv" else self.sidecars[str(name)].pool
            assert len(flags) == len(keys)
            for page, key, is_there in zip(pages, keys, flags, strict=True):
                assert not is_there or pool.holds(page, key, rank), f"other bytes in a page of {name}"
        return min(flags.index(False) if False in flags else len(flags) for flags in results.values())

    def _fetch_trailing(self, name: str, keys: list[str], rank: int) -> bool:
        sidecar = self.sidecars[name]
        own = keys[-sidecar.trailing :]
        pages = list(reversed(range(len(own))))
        if not own:
            return True
        flags = next(iter(self.backend.batch_get_v2([self._transfer(name, own, pages)], ExtraInfo()).values()))
        for page, key, is_there in zip(pages, own, flags, strict=True):
            assert not is_there or sidecar.pool.holds(page, key, rank), f"other bytes in a page of {name}"
        return all(flags)

    def _transfer(self, name: str, keys: list[str] | None, pages: Sequence[int] | None) -> Any:
        sidecar, policies = self.sidecars[name], self.words.PoolHitPolicy
        return self.words.PoolTransfer(
            name=self.words.PoolName(name),
            keys=keys,
            host_indices=sidecar.pool.slots(pages) if pages is not None and len(pages) else None,
            hit_policy=policies.TRAILING_PAGES if sidecar.trailing else policies.ALL_PAGES,
            indices_from_pool=None if sidecar.trailing else self.words.PoolName.KV,
        )
