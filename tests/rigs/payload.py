"""Bytes that derive from a chunk's key, so that any reader can recognise wrong ones by itself.

Also the engine side of a test: paged arrays filled and read by chunk.
"""

import ctypes

import numpy as np
import numpy.typing as npt

import kvpool_client as kv

Bytes = npt.NDArray[np.uint8]


def chunk_bytes_of(key: bytes, size: int) -> Bytes:
    """The `size` bytes that a chunk with this key must have."""
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "little")))
    return np.frombuffer(generator.bytes(size), dtype=np.uint8)


def payload_of(keys: kv.KeyChain, layout: kv.Layout, first: int = 0, count: int | None = None) -> Bytes:
    """Contiguous payload [chunks, chunk_bytes] of chunks `first` on."""
    last = len(keys) if count is None else first + count
    rows = [chunk_bytes_of(keys[number], layout.chunk_bytes) for number in range(first, last)]
    return np.stack(rows) if rows else np.empty((0, layout.chunk_bytes), np.uint8)


def tokens_of(seed: int, count: int) -> npt.NDArray[np.int32]:
    """`count` token ids that depend on the seed."""
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.int32)


def store(pool: kv.Pool, keys: kv.KeyChain, first: int = 0) -> kv.SaveResult:
    """Save chunks `first` on with the bytes that their keys ask for."""
    save = pool.save(keys, from_=payload_of(keys, pool.layout, first), first_chunk=first)
    result = save.commit()
    assert result is not None
    return result


def chunks_leased(pool: kv.Pool, hit: kv.Hit) -> int:
    """How many chunks a lease of a hit has; it is released again."""
    with pool.acquire(hit) as lease:
        return lease.chunks


def load_all(pool: kv.Pool, keys: kv.KeyChain) -> tuple[kv.LoadResult, Bytes]:
    """Look up, acquire and load what is there; the result and the bytes."""
    with pool.acquire(pool.lookup(keys)) as lease:
        into = np.zeros((lease.chunks, pool.layout.chunk_bytes), np.uint8)
        result = pool.load(lease, into=into).wait()
    return result, into


def flip_bit(lease: kv.Lease, chunk: int, at: int = 0, mask: int = 1) -> None:
    """Change a byte of a leased chunk in the arena, without the daemon's knowledge."""
    assert lease.hold.session is not None
    lease.hold.session.arena.view()[int(lease.hold.rows.offsets[chunk]) + at] ^= mask


def assert_right_bytes(keys: kv.KeyChain, layout: kv.Layout, result: kv.LoadResult, into: Bytes) -> None:
    """Every chunk that the result claims has the bytes of its key."""
    for number in range(result.chunks):
        assert np.array_equal(into[number], chunk_bytes_of(keys[number], layout.chunk_bytes)), f"chunk {number}"


def paged_layers(layout: kv.Layout, blocks: int, block_tokens: int, form: str) -> list[npt.NDArray[np.uint16]]:
    """Zeroed paged KV, one 16-bit array for each layer."""
    axes = (2, blocks) if form == "kv_first" else (blocks, 2)
    shape = (*axes, block_tokens, layout.kv_heads, layout.head_dim)
    return [np.zeros(shape, np.uint16) for _ in range(layout.layers)]


def write_chunk(
    layers: list[npt.NDArray[np.uint16]], form: str, block_ids: list[int], layout: kv.Layout, row: Bytes
) -> None:
    """Put a chunk's layer-major bytes into paged KV, in plain numpy: the oracle of the native copies."""
    shape = (layout.layers, 2, len(block_ids), -1)
    parts = row.view(np.uint16).reshape(shape)
    for layer, array in enumerate(layers):
        for plane in range(2):
            for position, block in enumerate(block_ids):
                target = array[plane, block] if form == "kv_first" else array[block, plane]
                target[...] = parts[layer, plane, position].reshape(target.shape)


def read_chunk(layers: list[npt.NDArray[np.uint16]], form: str, block_ids: list[int], layout: kv.Layout) -> Bytes:
    """A chunk's layer-major bytes out of paged KV, in plain numpy."""
    parts = []
    for array in layers:
        for plane in range(2):
            for block in block_ids:
                source = array[plane, block] if form == "kv_first" else array[block, plane]
                parts.append(np.ascontiguousarray(source).view(np.uint8).reshape(-1))
    return np.concatenate(parts)


def bytes_at(address: int, size: int) -> Bytes:
    """A copy of memory of this process, as native code reads it."""
    return np.frombuffer(ctypes.string_at(address, size), np.uint8)
