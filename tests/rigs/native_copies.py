"""Tools of the tests of native copies: an arena with its directory, an engine's paged KV, a model of the stored bytes."""

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvpool_native

EXTENTS = 3
CHUNK_TOKENS = 64
TOKEN_BYTES = 40  # of one plane
PLANES = 2
EXTENT_BYTES = PLANES * CHUNK_TOKENS * TOKEN_BYTES
CHUNK_BYTES = EXTENTS * EXTENT_BYTES
BLOCKS = 40
LONG_S = 30.0
COMPLETE, GONE, CHECKSUM, CANCELLED = range(4)

Bytes = npt.NDArray[np.uint8]


class Store:
    """An arena whose directory lends slots, with everything a client sees of it."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, extents: int = EXTENTS) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan(64 << 20, 1 << 20, 256)
        self.arena = kvpool_native.Mapping.create("test-arena", geometry.arena_bytes)
        self._index = kvpool_native.Mapping.create("test-index", geometry.index_bytes)
        self._directory = kvpool_native.Directory(self.arena, self._index, geometry, bytes(16))
        self._class = self._directory.add_class(chunk_bytes, extents)
        self._namespace = self._directory.add_namespace()
        for segment in range(geometry.segments):
            self._directory.mark_segment_ready(segment)
        self.index = kvpool_native.IndexView(self._index)
        self.bytes: Bytes = self.arena.view()
        self._keys = b""

    def reserve(self, chunks: int) -> bytes:
        """The offsets of slots for new chunks, as a column."""
        parent = self._keys[-32:]
        self._new = os.urandom(32 * chunks)
        made = self._directory.reserve(self._namespace, self._class, parent, self._new, 1)
        self._reservation = made.id
        assert set(made.states) == {1}
        self.generations, self.slots = bytes(made.generations), bytes(made.slots)
        return bytes(made.offsets)

    def commit(self, checksums: bytes) -> None:
        """Publish what was reserved."""
        self._directory.commit(self._reservation, 0, checksums)
        self._directory.end_reservation(self._reservation, 2)
        self._keys += self._new

    def drop(self, chunk: int) -> None:
        """Have a chunk, and what hangs on it, leave the pool."""
        assert self._directory.discard(self._keys[32 * chunk : 32 * chunk + 32]) > 0


class Engine:
    """Paged KV as engines hold it: one array for each layer."""

    def __init__(self, form: str, block_tokens: int, fill: int | None = None) -> None:
        self.form, self.block_tokens = form, block_tokens
        plane = (block_tokens, TOKEN_BYTES)
        shape = {
            "kv_first": (PLANES, BLOCKS, *plane),
            "block_first": (BLOCKS, PLANES, *plane),
            "packed": (BLOCKS, PLANES * block_tokens * TOKEN_BYTES),
        }[form]
        random = np.random.default_rng(7)
        self.arrays: list[Bytes] = [
            random.integers(0, 256, shape, dtype=np.uint8) if fill is None else np.full(shape, fill, np.uint8)
            for _ in range(EXTENTS)
        ]
        self.view = self._view()

    def _view(self) -> kvpool_native.CacheView:
        first = self.arrays[0]
        block_axis = 1 if self.form == "kv_first" else 0
        plane_axis = {"kv_first": 0, "block_first": 1, "packed": None}[self.form]
        planes = 1 if plane_axis is None else PLANES
        return kvpool_native.CacheView(
            bases=[array.ctypes.data for array in self.arrays],
            planes=planes,
            blocks=BLOCKS,
            plane_block_bytes=PLANES * self.block_tokens * TOKEN_BYTES // planes,
            plane_stride=0 if plane_axis is None else first.strides[plane_axis],
            block_stride=first.strides[block_axis],
            owner=self.arrays,
        )

    @property
    def blocks_per_chunk(self) -> int:
        return CHUNK_TOKENS // self.block_tokens

    def chunk(self, ids: Sequence[int]) -> bytes:
        """The bytes that a chunk of these blocks is stored as."""
        parts = []
        for array in self.arrays:
            if self.form == "packed":
                parts += [array[block].tobytes() for block in ids]
            else:
                planes = array if self.form == "kv_first" else array.swapaxes(0, 1)
                parts += [planes[plane, block].tobytes() for plane in range(PLANES) for block in ids]
        return b"".join(parts)

    def chunks(self, ids: Sequence[int]) -> list[bytes]:
        step = self.blocks_per_chunk
        return [self.chunk(ids[at : at + step]) for at in range(0, len(ids), step)]


def column(values: Sequence[int]) -> bytes:
    return np.asarray(values, np.int64).tobytes()


def save(pool: kvpool_native.CopyPool, store: Store, engine: Engine, ids: Sequence[int]) -> bytes:
    """Save and publish chunks; the offsets."""
    offsets = store.reserve(len(ids) // engine.blocks_per_chunk)
    job = pool.save(engine.view, store.arena, offsets, column(ids), EXTENTS, EXTENT_BYTES)
    job.announce_all()
    assert job.wait(LONG_S)
    store.commit(job.checksums())
    return offsets


def start_load(
    pool: kvpool_native.CopyPool,
    store: Store,
    engine: Engine,
    ids: Sequence[int],
    offsets: bytes,
) -> kvpool_native.LoadJob:
    return pool.load(
        engine.view,
        store.arena,
        store.index,
        offsets,
        store.slots,
        store.generations,
        column(ids),
        EXTENTS,
        EXTENT_BYTES,
        True,
    )


def some_ids(count: int, seed: int = 1) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(BLOCKS)[:count]]
