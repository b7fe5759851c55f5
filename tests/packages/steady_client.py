"""A client that loads and saves, again and again, while its daemon is exchanged: run on a machine by the package's Python.

First argument the socket, second a file: when that exists, it prints what it saw, and ends. Exit code 1: bytes were wrong.
"""

import sys
import time
from itertools import count
from pathlib import Path

import numpy as np

import kvpool_client as kv

LAYOUT = kv.Layout(layers=4, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32)
CHUNKS = 8
PAUSE_S = 0.01


def _keys(pool: kv.Pool, number: int) -> kv.KeyChain:
    return pool.keys(np.arange(CHUNKS * LAYOUT.chunk_tokens, dtype=np.int32) + number)


def _is_hit(pool: kv.Pool, keys: kv.KeyChain, into: np.typing.NDArray[np.uint8]) -> bool:
    with pool.acquire(pool.lookup(keys)) as lease:
        if lease.chunks != CHUNKS:
            return False
        loaded = pool.load(lease, into=into).wait()
    return loaded is not None and loaded.chunks == CHUNKS


def main() -> int:
    """Load the first chunks until the file exists, and save others beside it."""
    payload = np.arange(CHUNKS * LAYOUT.chunk_bytes, dtype=np.uint32).astype(np.uint8).reshape(CHUNKS, -1)
    into = np.zeros_like(payload)
    away_s, last = 0.0, 0.0
    saved_since = 0
    with kv.connect(sys.argv[1], model="package", revision="1", layout=LAYOUT) as pool:
        first = _keys(pool, 0)
        pool.save(first, from_=payload).commit()
        for number in count(1):
            if _is_hit(pool, first, into):
                if not np.array_equal(into, payload):
                    print("loaded other bytes than were saved")
                    return 1
                now = time.monotonic()
                if last and now - last > away_s:
                    away_s, saved_since = now - last, 0
                last = now
                result = pool.save(_keys(pool, number), from_=payload).commit()
                saved_since += result is not None and result.stored == CHUNKS
            if number == 1:
                print("loaded" if last else "missed", flush=True)
            if Path(sys.argv[2]).exists():
                break
            time.sleep(PAUSE_S)
    print(f"away_s:{away_s:.2f}\nsaved_since:{saved_since}\nlast_s:{time.monotonic() - last:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
