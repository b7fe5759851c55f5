"""`bench lookup`: the keys of a 128k-token prompt and the lookup of its 512 chunks, int32 array in."""

from collections.abc import Callable
from typing import Any

import numpy as np

import kvpool_client as kv
from kvpool.cli.bench_measure import latencies, timed_s
from kvpool.errors import KVPoolError

TOKENS = 131_072
LAYOUT = kv.Layout(layers=1, kv_heads=1, head_dim=16, dtype="bfloat16", chunk_tokens=256)
MISS_BAR_US = 50
WHOLE_BAR_US = 500


def bench_lookup(socket: str, is_quick: bool, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Rows: keys, a miss, a hit of 512 chunks, and keys with lookup together."""
    samples = 20 if is_quick else 400
    tokens = np.random.default_rng(2).integers(0, 50_000, TOKENS, dtype=np.int32)
    with kv.connect(socket, model="bench-lookup", layout=LAYOUT, timeout_s=10.0) as pool:
        missing = pool.keys(tokens[::-1].copy())
        keys = pool.keys(tokens)
        store_zeros(pool, keys)
        hashing = [timed_s(lambda: pool.keys(tokens)) for _ in range(samples)]
        advance()
        miss = [timed_s(lambda: pool.lookup(missing)) for _ in range(samples)]
        hit = [timed_s(lambda: pool.lookup(keys)) for _ in range(samples)]
        advance()
        whole = [timed_s(lambda: pool.lookup(pool.keys(tokens))) for _ in range(samples)]
        advance()
    return [
        latencies("keys of 128k tokens", hashing, bar_us=WHOLE_BAR_US),
        latencies("lookup, miss", miss, bar_us=MISS_BAR_US),
        latencies("lookup, 512 chunks hit", hit, bar_us=WHOLE_BAR_US),
        latencies("keys and lookup, 512 hit", whole, bar_us=WHOLE_BAR_US),
    ]


def store_zeros(pool: kv.Pool, keys: kv.KeyChain) -> None:
    """Have all chunks of `keys` stored. Raises KVPoolError if the daemon declines."""
    result = pool.save(keys, from_=np.zeros((len(keys), pool.layout.chunk_bytes), np.uint8)).commit()
    if result is None or result.stored + result.present != len(keys):
        raise KVPoolError(f"the daemon declined to store {len(keys)} small chunks: {result}")
