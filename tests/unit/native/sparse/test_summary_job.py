"""Native jobs that build the summaries of chunks in an arena, against summaries that are built one by one."""

import gc
import weakref

import numpy as np
import numpy.typing as npt
import pytest

import kvpool_native

DIM, KV_HEADS, LAYERS, CHUNK_TOKENS, BLOCK_TOKENS, EXTENTS = 64, 2, 3, 64, 32, 1
LAYER_BYTES = 2 * CHUNK_TOKENS * KV_HEADS * DIM * 2
SLOT_BYTES = (LAYERS + EXTENTS) * LAYER_BYTES
LONG_S = 30.0
Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def arena() -> kvpool_native.Mapping:
    made = kvpool_native.Mapping.create("test-summaries", 4 * SLOT_BYTES)
    halves = np.random.default_rng(1).normal(size=4 * SLOT_BYTES // 2).astype(np.float16)
    made.view()[:] = halves.view(np.uint8)
    return made


def _start(
    pool: kvpool_native.CopyPool,
    arena: kvpool_native.Mapping,
    offsets: list[int],
    target: Bytes | None,
    extents: int = EXTENTS,
) -> kvpool_native.SummaryJob:
    return pool.summarize(
        arena,
        np.array(offsets, np.uint64).tobytes(),
        target,
        form="clusters7",
        dtype="float16",
        head_dim=DIM,
        kv_heads=KV_HEADS,
        layers=LAYERS,
        layer_bytes=LAYER_BYTES,
        chunk_tokens=CHUNK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        extents=extents,
    )


def _expected(arena: kvpool_native.Mapping, offset: int) -> Bytes:
    """The summary extents of one chunk."""
    layers = np.arange(LAYERS, dtype=np.uint64)[:, None] * np.uint64(LAYER_BYTES)
    blocks = np.arange(CHUNK_TOKENS // BLOCK_TOKENS, dtype=np.uint64) * np.uint64(BLOCK_TOKENS * KV_HEADS * DIM * 2)
    keys = (np.uint64(arena.view().ctypes.data + offset) + layers + blocks).reshape(-1)
    records = np.zeros(len(keys) * KV_HEADS * kvpool_native.summary_bytes("clusters7", DIM), np.uint8)
    kvpool_native.build_summaries(
        form="clusters7",
        dtype="float16",
        head_dim=DIM,
        kv_heads=KV_HEADS,
        keys=keys,
        values=keys + np.uint64(LAYER_BYTES // 2),
        token_stride=KV_HEADS * DIM * 2,
        block_tokens=BLOCK_TOKENS,
        out=records,
    )
    return np.concatenate([records, np.zeros(EXTENTS * LAYER_BYTES - len(records), np.uint8)])


def test_summaries_lie_behind_the_layers(arena: kvpool_native.Mapping) -> None:
    pool = kvpool_native.CopyPool(2)
    offsets = [0, 2 * SLOT_BYTES]
    job = _start(pool, arena, offsets, None)
    assert job.wait(LONG_S)
    assert not job.is_cancelled()
    assert job.progress() == 2 * LAYERS
    sums = np.frombuffer(job.checksums(), np.uint32)
    for offset, checksum in zip(offsets, sums, strict=True):
        expected = _expected(arena, offset)
        found = arena.view()[offset + LAYERS * LAYER_BYTES : offset + SLOT_BYTES]
        assert np.array_equal(found, expected)
        assert kvpool_native.crc32c(expected) == checksum
    pool.stop()


def test_summaries_go_to_an_array(arena: kvpool_native.Mapping) -> None:
    pool = kvpool_native.CopyPool(1)
    target = np.full(2 * EXTENTS * LAYER_BYTES, 0xAA, np.uint8)
    job = _start(pool, arena, [SLOT_BYTES, 0], target)
    assert job.wait(LONG_S)
    expected = [_expected(arena, SLOT_BYTES), _expected(arena, 0)]
    assert np.array_equal(target, np.concatenate(expected))
    pool.stop()


def test_a_job_keeps_its_array_and_ends_with_its_handle(arena: kvpool_native.Mapping) -> None:
    pool = kvpool_native.CopyPool(1)
    target = np.zeros(64 * EXTENTS * LAYER_BYTES, np.uint8)
    watched = weakref.ref(target)
    job = _start(pool, arena, [0] * 64, target)
    del target
    gc.collect()
    assert watched() is not None
    job.cancel()
    assert job.wait(0)
    assert job.is_cancelled()
    del job
    gc.collect()
    assert watched() is None
    pool.stop()


def test_what_lies_outside_is_refused(arena: kvpool_native.Mapping) -> None:
    pool = kvpool_native.CopyPool(1)
    with pytest.raises(ValueError, match="outside"):
        _start(pool, arena, [4 * SLOT_BYTES - LAYER_BYTES], None)
    with pytest.raises(ValueError, match="target"):
        _start(pool, arena, [0], np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="positive"):
        _start(pool, arena, [0], None, extents=0)
    pool.stop()
    assert _start(pool, arena, [0], None).is_cancelled()
