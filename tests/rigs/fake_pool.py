"""An in-process stand-in for a Pool's bytes: a dict of chunks, faults on demand, and copies as late as allowed.

Keys, layouts and registration are the real client's. A load copies a layer only when it is waited for, and a save reads
a layer at its announcement: an engine that reads too early or announces too early computes with wrong KV and its test
fails. One thread.
"""

from collections.abc import Sequence
from typing import Any

import kvpool_client as kv

AWAY = "/nonexistent/kvpool.sock"
Stored = dict[bytes, list[Any]]


class FakePool:
    """`stored` maps a key to one tensor [2, chunk_tokens, kv_heads, head_dim] for each layer.

    `fail_at = (chunk, layer)` ends the next load there, or that with the number `fail_load`, for `fail_reason`;
    `lose_leases` makes acquire answer nothing.
    """

    def __init__(self, layout: kv.Layout) -> None:
        self._real = kv.connect(AWAY, model="fake", layout=layout)
        self.layout, self.shares = layout, self._real.shares
        self.stored: Stored = {}
        self.fail_at: tuple[int, int] | None = None
        self.fail_load: int | None = None
        self.fail_reason = "checksum"
        self.lose_leases = False
        self.open_leases = 0
        self.loads: list[FakeLoad] = []
        self.saves: list[FakeSave] = []

    def close(self) -> None:
        self._real.close()

    def register(self, layers: Sequence[Any], block_tokens: int, form: str = "auto") -> kv.Cache:
        return self._real.register(layers, block_tokens=block_tokens, form=form)

    def keys(self, tokens: object, **arguments: Any) -> kv.KeyChain:
        return self._real.keys(tokens, **arguments)

    def lookup(self, keys: kv.KeyChain) -> kv.Hit:
        chunks = next((number for number in range(len(keys)) if keys[number] not in self.stored), len(keys))
        return kv.Hit(chunks, chunks * self.layout.chunk_tokens, bytes([1]) * chunks, keys)

    def acquire(self, hit: kv.Hit) -> "FakeLease":
        return FakeLease(self, hit.keys, 0 if self.lose_leases else hit.chunks)

    def load(self, lease: "FakeLease", cache: kv.Cache, block_ids: Any, first_chunk: int = 0) -> "FakeLoad":
        ids = cache.checked_block_ids(block_ids, lease.chunks - first_chunk, may_skip=True)
        load = FakeLoad(self, lease, cache, ids.tolist(), first_chunk)
        self.loads.append(load)
        return load

    def save(self, keys: kv.KeyChain, cache: kv.Cache, block_ids: Any) -> "FakeSave":
        ids = cache.checked_block_ids(block_ids, len(keys), may_skip=False)
        save = FakeSave(self, keys, cache, ids.tolist())
        self.saves.append(save)
        return save


class FakeLease:
    def __init__(self, pool: FakePool, keys: kv.KeyChain, chunks: int) -> None:
        self._pool = pool
        self.keys = keys
        self.chunks = chunks
        self.tokens = chunks * pool.layout.chunk_tokens
        self._is_held = True
        pool.open_leases += 1

    def release(self) -> None:
        self._pool.open_leases -= self._is_held
        self._is_held = False


class FakeLoad:
    def __init__(self, pool: FakePool, lease: FakeLease, cache: kv.Cache, ids: list[int], first_chunk: int) -> None:
        self._pool = pool
        self.lease = lease
        self._cache = cache
        self._ids = ids
        self._first_chunk = first_chunk
        self.chunks = self.chunks_so_far = lease.chunks
        self.copied: set[int] = set()
        self.reason = "complete"

    def wait_layer(self, layer: int) -> bool:
        is_chosen = self._pool.fail_load is None or self._pool.loads[self._pool.fail_load] is self
        if is_chosen and self._pool.fail_at is not None and self._pool.fail_at[1] == layer:
            self.chunks_so_far = max(self._first_chunk, self._pool.fail_at[0])
            self.reason = self._pool.fail_reason
            self._pool.fail_at = None
        if layer not in self.copied and self.reason != "cancelled":
            self.copied.add(layer)
            self._copy(layer)
        return self.chunks_so_far > self._first_chunk

    def wait(self) -> kv.LoadResult:
        if self.reason != "cancelled":
            for layer in range(self._pool.layout.layers):
                self.wait_layer(layer)
        return kv.LoadResult(self.chunks_so_far, self.chunks_so_far * self._pool.layout.chunk_tokens, self.reason)

    def cancel(self) -> None:
        self.chunks_so_far, self.reason = self._first_chunk, "cancelled"

    def _copy(self, layer: int) -> None:
        for chunk in range(self._first_chunk, self.chunks_so_far):
            source = self._pool.stored[self.lease.keys[chunk]][layer]
            for position, block in enumerate(_blocks(self._cache, self._ids, chunk - self._first_chunk)):
                if block >= 0:
                    start = position * self._cache.block_tokens
                    _plane_first(self._cache, layer)[:, block] = source[:, start : start + self._cache.block_tokens]


class FakeSave:
    def __init__(self, pool: FakePool, keys: kv.KeyChain, cache: kv.Cache, ids: list[int]) -> None:
        self._pool = pool
        self._keys = keys
        self._cache = cache
        self._ids = ids
        self._absent = [chunk for chunk in range(len(keys)) if keys[chunk] not in pool.stored]
        self._read: dict[int, dict[int, Any]] = {}
        self.announced: list[int] = []
        self.is_aborted = self.is_committed = False
        self.layers, self.end_token = pool.layout.layers, keys.tokens

    def __enter__(self) -> "FakeSave":
        return self

    def __exit__(self, *error: object) -> None:
        self.is_aborted |= not self.is_committed

    @property
    def is_announced(self) -> bool:
        return bool(self.announced)

    def layer(self, layer: int) -> None:
        assert layer not in self.announced
        self.announced.append(layer)
        planes = _plane_first(self._cache, layer)
        self._read[layer] = {
            chunk: planes[:, _blocks(self._cache, self._ids, chunk)].flatten(1, 2).clone() for chunk in self._absent
        }

    def wait(self) -> kv.SaveResult:
        return self.commit()

    def _announce_all(self) -> None:
        for layer in set(range(self.layers)) - set(self.announced):
            self.layer(layer)

    def _as_one_commit(self) -> None:
        return None

    def commit(self) -> kv.SaveResult:
        assert not self.is_aborted
        self.is_committed = True
        self._announce_all()
        for chunk in self._absent:
            layers = [self._read[layer][chunk] for layer in range(self._pool.layout.layers)]
            self._pool.stored[self._keys[chunk]] = layers
        present = len(self._keys) - len(self._absent)
        states = tuple("stored" if chunk in self._absent else "present" for chunk in range(len(self._keys)))
        return kv.SaveResult(len(self._absent), present, 0, states, {})

    def abort(self) -> None:
        self.is_aborted = True


def _blocks(cache: kv.Cache, ids: list[int], number: int) -> list[int]:
    return ids[number * cache.blocks_per_chunk : (number + 1) * cache.blocks_per_chunk]


def _plane_first(cache: kv.Cache, layer: int) -> Any:
    tensor: Any = cache.layers[layer]
    return tensor if cache.form == "kv_first" else tensor.transpose(0, 1)
