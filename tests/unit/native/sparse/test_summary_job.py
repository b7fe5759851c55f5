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
