"""`bench copy`: paged KV into the pool and back, per copying thread, against memcpy of the same bytes.

Save counts from the reservation to the answered commit, load from the acquire to the last verified layer. The three are
taken in turn inside one window, so that the machine's moods hit all alike. The first round warms page tables and is not
counted. The last load of each size is compared with the source.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
import kvpool_native
from kvpool.cli.bench_measure import cpu_seconds, median, spread, timed_s
from kvpool.errors import KVPoolError

BLOCK_TOKENS = 16
TOTAL_BYTES = 512 << 20
QUICK_BYTES = 64 << 20
SAVE_BAR = 0.7
LOAD_BAR = 0.8
SIZES = {
    "32 MiB": kv.Layout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", chunk_tokens=256),
    "2 MiB": kv.Layout(layers=8, kv_heads=2, head_dim=128, dtype="bfloat16", chunk_tokens=256),
    "0.5 MiB": kv.Layout(layers=4, kv_heads=1, head_dim=128, dtype="bfloat16", chunk_tokens=256),
}

Layers = list[npt.NDArray[np.uint16]]


def bench_copy(socket: str, is_quick: bool, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """One row for each chunk size."""
    return [_size(socket, name, layout, is_quick, advance) for name, layout in SIZES.items()]


def _size(socket: str, name: str, layout: kv.Layout, is_quick: bool, advance: Callable[[], None]) -> dict[str, Any]:
    total = QUICK_BYTES if is_quick else TOTAL_BYTES
    rounds = 3 if is_quick else 9
    chunks = total // layout.chunk_bytes
    source, target = _engine(layout, chunks, fill=True), _engine(layout, chunks, fill=False)
    flat, copy = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    rates: dict[str, list[float]] = {"save": [], "load": [], "memcpy": []}
    with kv.connect(socket, model=f"bench-{name}", layout=layout, timeout_s=10.0) as pool:
        saving, loading = (
            pool.register(source, BLOCK_TOKENS, "kv_first"),
            pool.register(target, BLOCK_TOKENS, "kv_first"),
        )
        cpu_before = cpu_seconds()
        for number in range(rounds):
            random = np.random.default_rng(number)
            block_ids = random.permutation(saving.blocks)
            keys = pool.keys(random.integers(0, 50_000, chunks * layout.chunk_tokens, dtype=np.int32))
            seconds = {
                "memcpy": timed_s(lambda: kvpool_native.copy_plain(copy, flat)),
                "save": timed_s(lambda: _save(pool, keys, saving, block_ids)),  # noqa: B023 - called at once
                "load": timed_s(lambda: _load(pool, keys, loading, block_ids)),  # noqa: B023 - called at once
            }
            if number:
                for path, duration in seconds.items():
                    rates[path].append(total / duration / 1e9)
            advance()
        used = cpu_seconds() - cpu_before
    _compare(source, target, name)
    return _row(name, chunks, rates, used)


def _engine(layout: kv.Layout, chunks: int, *, fill: bool) -> Layers:
    blocks = chunks * layout.chunk_tokens // BLOCK_TOKENS
    shape = (2, blocks, BLOCK_TOKENS, layout.kv_heads, layout.head_dim)
    random = np.random.default_rng(1)
    if fill:
        return [random.integers(0, 65535, shape, dtype=np.uint16) for _ in range(layout.layers)]
    return [np.ones(shape, np.uint16) for _ in range(layout.layers)]


def _save(pool: kv.Pool, keys: kv.KeyChain, cache: kv.Cache, block_ids: npt.NDArray[np.int64]) -> None:
    result = pool.save(keys, cache, block_ids).commit()
    if result is None or result.stored != len(keys):
        raise KVPoolError(f"the daemon declined a save of {len(keys)} chunks: {result}; it needs 1 GiB of its own")


def _load(pool: kv.Pool, keys: kv.KeyChain, cache: kv.Cache, block_ids: npt.NDArray[np.int64]) -> None:
    with pool.acquire(pool.lookup(keys)) as lease:
        result = pool.load(lease, cache, block_ids).wait()
    if result.chunks != len(keys):
        raise KVPoolError(f"a load of {len(keys)} chunks ended early: {result}")


def _compare(source: Layers, target: Layers, name: str) -> None:
    if not all(np.array_equal(saved, loaded) for saved, loaded in zip(source, target, strict=True)):
        raise KVPoolError(f"wrong bytes: {name} chunks came back other than they were saved")


def _row(name: str, chunks: int, rates: dict[str, list[float]], used: float) -> dict[str, Any]:
    save, load, memcpy = (median(rates[path]) for path in ("save", "load", "memcpy"))
    return {
        "chunk": name,
        "chunks": chunks,
        "memcpy_gb_per_s": round(memcpy, 2),
        "save_gb_per_s": round(save, 2),
        "save_spread": spread(rates["save"]),
        "save_ratio": round(save / memcpy, 2),
        "save_bar": SAVE_BAR,
        "load_gb_per_s": round(load, 2),
        "load_spread": spread(rates["load"]),
        "load_ratio": round(load / memcpy, 2),
        "load_bar": LOAD_BAR,
        "ratio": round(min(save, load) / memcpy, 2),
        "cpu_seconds": round(used, 2),
    }
