"""KV on a device: the torch path of loads and saves, byte for byte equal to the native one.

The CPU stands in for the device where torch sees no GPU: everything but the streams is the same code. The `gpu` tests run
the same on CUDA.
"""

from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.copying.copies import EngineBlocks
from tests.rigs.daemon import Daemon, in_both_write_modes
from tests.rigs.payload import payload_of, store, tokens_of

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

LAYOUT = kv.Layout(layers=4, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32)
BLOCKS = 24

pytestmark = pytest.mark.torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the engine's tensors are; on the CPU the device's path is forced."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    monkeypatch.setattr(EngineBlocks, "is_on_device", property(lambda self: self.cache is not None))
    return name


def _layers(form: str, device: str, layout: kv.Layout = LAYOUT) -> list[Any]:
    axes = {"kv_first": (2, BLOCKS), "block_first": (BLOCKS, 2), "mla": (BLOCKS,)}[form]
    shape = (*axes, 16, layout.kv_heads, layout.head_dim)
    return [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layout.layers)]


def _ids(seed: int, chunks: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).permutation(BLOCKS)[: 2 * chunks].tolist()
    return ids


@in_both_write_modes
@pytest.mark.parametrize("form", ["kv_first", "block_first"])
def test_chunks_stored_by_the_native_path_load_onto_a_device(device: str, daemon: Daemon, form: str) -> None:
    with daemon.connect(LAYOUT) as pool:
        keys = pool.keys(tokens_of(1, 6 * 32))
        store(pool, keys)
        layers = _layers(form, device)
        cache = pool.register(layers, 16, form)
        ids = _ids(2, 6)
        with pool.acquire(pool.lookup(keys)) as lease, pool.load(lease, cache, ids) as load:
            assert [load.wait_layer(layer) for layer in range(4)] == [True] * 4
            assert load.wait() == kv.LoadResult(6, 192, "complete")
        again = pool.keys(tokens_of(1, 6 * 32), salt=b"again")
        with pool.save(again, cache, ids) as save:
            for layer in (3, 1, 0, 2):
                save.layer(layer)
            result = save.commit()
        assert result is not None
        assert result.stored == 6
        with pool.acquire(pool.lookup(again)) as lease:
            into = np.zeros((6, LAYOUT.chunk_bytes), np.uint8)
            assert pool.load(lease, into=into).wait().chunks == 6
        assert np.array_equal(into, payload_of(keys, LAYOUT))
    assert daemon.problems() == []


@in_both_write_modes
def test_one_plane_is_enough(device: str, daemon: Daemon) -> None:
    layout = kv.Layout(layers=2, kv_heads=1, head_dim=64, dtype="bfloat16", chunk_tokens=32, planes=1)
    with daemon.connect(layout) as pool:
        keys = pool.keys(tokens_of(3, 3 * 32))
        store(pool, keys)
        layers = _layers("mla", device, layout)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert pool.load(lease, pool.register(layers, 16), [5, 4, 3, 2, 1, 0]).wait().chunks == 3
        first = layers[0].cpu().view(torch.uint8)[5].reshape(-1).numpy()
        assert np.array_equal(first, payload_of(keys, layout, 0, 1)[0][: len(first)])


def test_skipped_blocks_are_not_written(device: str, daemon: Daemon) -> None:
    with daemon.connect(LAYOUT) as pool:
        keys = pool.keys(tokens_of(4, 2 * 32))
        store(pool, keys)
        layers = _layers("kv_first", device)
        with pool.acquire(pool.lookup(keys)) as lease:
            result = pool.load(lease, pool.register(layers, 16, "kv_first"), [-1, 7], first_chunk=1).wait()
        assert result.chunks == 2
        assert not layers[0][:, :7].any()
        assert layers[0][:, 7].any()


def test_a_corrupt_chunk_shortens_the_load(device: str, daemon: Daemon) -> None:
    with daemon.connect(LAYOUT) as pool:
        keys = pool.keys(tokens_of(5, 4 * 32))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        assert lease.session is not None
        lease.session.arena.view()[int(lease.offsets[2]) + 3 * LAYOUT.layer_bytes] ^= 1
        cache = pool.register(_layers("kv_first", device), 16, "kv_first")
        result = pool.load(lease, cache, _ids(6, 4)).wait()
        assert result == kv.LoadResult(2, 64, "checksum")
        assert pool.lookup(keys).chunks == 2


@in_both_write_modes
def test_cancel_and_abort_end_the_threads(device: str, daemon: Daemon) -> None:
    with daemon.connect(LAYOUT) as pool:
        keys = pool.keys(tokens_of(7, 4 * 32))
        cache = pool.register(_layers("block_first", device), 16, "block_first")
        with pool.save(keys, cache, _ids(8, 4)) as save:
            save.layer(0)
        assert pool.lookup(keys).chunks == 0
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            load = pool.load(lease, cache, _ids(9, 4))
            load.cancel()
            assert load.wait().reason in ("cancelled", "complete")
    assert daemon.stats()["reservations"] == 0
