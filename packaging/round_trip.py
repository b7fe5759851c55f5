"""A save and a load through the daemon at the socket named by the first argument: exit code 0 where the bytes are the same."""

import sys

import numpy as np

import kvpool_client as kv

LAYOUT = kv.Layout(layers=4, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32)
CHUNKS = 8


def main() -> int:
    """Store chunks of known bytes in one Pool, load them in another."""
    payload = np.arange(CHUNKS * LAYOUT.chunk_bytes, dtype=np.uint32).astype(np.uint8).reshape(CHUNKS, -1)
    with (
        kv.connect(sys.argv[1], model="package", revision="1", layout=LAYOUT) as writer,
        kv.connect(sys.argv[1], model="package", revision="1", layout=LAYOUT) as reader,
    ):
        keys = writer.keys(np.arange(CHUNKS * LAYOUT.chunk_tokens, dtype=np.int32))
        result = writer.save(keys, from_=payload).commit()
        if result is None or result.stored + result.present != CHUNKS:
            print(f"stored {result}, expected {CHUNKS} chunks", file=sys.stderr)
            return 1
        into = np.zeros_like(payload)
        with reader.acquire(reader.lookup(keys)) as lease:
            loaded = reader.load(lease, into=into).wait() if lease.chunks == CHUNKS else None
    if loaded is None or loaded.chunks != CHUNKS or not np.array_equal(into, payload):
        print(f"loaded {loaded}, expected {CHUNKS} chunks with the bytes that were stored", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
