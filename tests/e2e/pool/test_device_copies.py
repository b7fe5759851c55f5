"""KV on a device, through a daemon: loads and saves byte for byte as in host memory, and what fails or ends in between.

The device is the emulated driver's; the tests marked `gpu` run the first of them with torch on CUDA.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool_client.copying.device.driver import open_device
from tests.e2e.pool.conftest import TIMEOUT_S, Shared
from tests.rigs.daemon import Daemon, in_both_write_modes, wait_connected, wait_until
from tests.rigs.device import emulated
from tests.rigs.device.engine import DeviceKv, engine_stream, use_emulated_driver
from tests.rigs.payload import payload_of, tokens_of
from tests.rigs.prompts import load, prompt, store
from tests.rigs.runs.children import assert_in_child
from tests.rigs.sets import names_of, rows_for, store_set

LAYOUT = kv.Layout(layers=4, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32)
LATENT = replace(LAYOUT, kv_heads=1, planes=1)
PACKED = kv.Layout(layers=4, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32, format="mine", block_tokens=16)
BLOCKS, CHUNKS = 24, 6
FORMS = {"kv_first": LAYOUT, "block_first": LAYOUT, "packed": PACKED, "mla": LATENT}
CUDA_ERROR_UNKNOWN = 999
GPU_DEVICE = Path("/dev/nvidiactl")
# What a load or a save calls; none of them may raise into the engine.
CALLS = (
    *("cuCtxPushCurrent_v2", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"),
    *("cuMemcpyBatchAsync", "cuMemHostRegister_v2"),
)


@pytest.fixture(autouse=True)
def device(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[kvpool_native.Device | None]:
    """The first of two emulated devices. When the test has ended, nothing is left of what it took."""
    assert shared.daemon.is_running, "begun before the environment changes, it is forked"
    if request.node.get_closest_marker("gpu"):
        yield None
        return
    use_emulated_driver(monkeypatch)
    yield open_device("cuda:0")
    emulated.order("clear 1")


def _ids(seed: int, chunks: int = CHUNKS) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).permutation(BLOCKS)[: 2 * chunks].tolist()
    return ids


def _assert_stored(pool: kv.Pool, keys: kv.KeyChain, rows: list[bytes]) -> None:
    """The native path loads these chunks into host memory."""
    with pool.acquire(pool.lookup(keys)) as lease:
        result, (found,) = load(pool, lease)
    assert result.chunks == len(rows)
    assert [row.tobytes() for row in found] == rows


def _right(keys: kv.KeyChain, layout: kv.Layout = LAYOUT) -> list[bytes]:
    """What chunks with these keys have."""
    return [row.tobytes() for row in payload_of(keys, layout)]


@in_both_write_modes
@pytest.mark.parametrize("form", FORMS)
def test_chunks_of_host_memory_load_onto_a_device_and_are_saved_from_there(shared: Shared, form: str) -> None:
    layout = FORMS[form]
    with shared.connect(layout) as pool:
        keys = prompt(pool, 1, CHUNKS, tail=0)
        store(pool, keys)
        engine = DeviceKv(layout, form, BLOCKS)
        cache = pool.register(engine.arrays, 16, engine.register_form)
        assert cache.device == "cuda:0"
        ids = _ids(2)
        with pool.acquire(pool.lookup(keys)) as lease, pool.load(lease, cache, ids) as begun:
            assert [begun.wait_layer(layer) for layer in range(4)] == [True] * 4
            assert begun.wait() == kv.LoadResult(CHUNKS, CHUNKS * 32, "complete")
        assert engine.chunks(ids, CHUNKS) == _right(keys, layout)
        again = pool.keys(tokens_of(1, CHUNKS * 32), salt=b"again")
        with pool.save(again, cache, ids) as save:
            for layer in (3, 1, 0, 2):
                save.layer(layer)
            assert save.commit().stored == CHUNKS
        _assert_stored(pool, again, _right(keys, layout))
    assert shared.daemon.problems() == []


def test_skipped_blocks_are_not_written(shared: Shared) -> None:
    with shared.connect(LAYOUT) as pool:
        keys = prompt(pool, 4, 3, tail=0)
        store(pool, keys)
        engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
        with pool.acquire(pool.lookup(keys)) as lease:
            cache = pool.register(engine.arrays, 16, "kv_first")
            result = pool.load(lease, cache, [-1, 7, -1, -1], first_chunk=1).wait()
        assert result.chunks == 3
        layers = engine.read()
        assert not any(np.delete(layer, 7, axis=1).any() for layer in layers)
        assert all(layer[:, 7].any() for layer in layers)


@in_both_write_modes
@pytest.mark.parametrize("form", FORMS)
def test_sets_are_saved_from_a_device_and_load_onto_it_each_chunk_alone(shared: Shared, form: str) -> None:
    layout = FORMS[form]
    with shared.connect(layout) as pool:
        names = names_of(*range(CHUNKS))
        assert store_set(pool, names[[0, 2, 3, 5]]).stored == 4
        engine = DeviceKv(layout, form, BLOCKS)
        cache, ids = pool.register(engine.arrays, 16, engine.register_form), _ids(3)
        with pool.acquire_set(names) as lease:
            load = pool.load_set(lease, cache=cache, block_ids=ids)
            assert [load.wait_layer(layer) for layer in range(4)] == [True] * 4
            result = load.wait()
        assert result.states == ("complete", "absent", "complete", "complete", "absent", "complete")
        found, rows = engine.chunks(ids, CHUNKS), rows_for(pool, names)
        assert [found[at] == rows[at].tobytes() for at in range(CHUNKS)] == [True, False, True, True, False, True]
        again = names_of(10, 11, 12)
        with pool.save_set(again, cache=cache, block_ids=[*ids[:2], *ids[4:6], *ids[10:12]]) as save:
            assert save.commit().states == ("stored",) * 3
        into = np.zeros((3, layout.chunk_bytes), np.uint8)
        with pool.acquire_set(again) as lease:
            assert pool.load_set(lease, into).wait().reason == "complete"
        assert np.array_equal(into, rows[[0, 2, 5]])
    assert shared.daemon.problems() == []


@in_both_write_modes
def test_a_save_has_what_the_engine_had_queued(shared: Shared) -> None:
    """Each layer is written by the engine's stream, late, and announced at once."""
    emulated.order("delay_us 20000")
    with engine_stream() as stream, shared.connect(LAYOUT) as pool:
        engine = DeviceKv(LAYOUT, "block_first", BLOCKS, stream=stream)
        cache, ids = pool.register(engine.arrays, 16, "block_first"), _ids(7)
        keys = prompt(pool, 7, CHUNKS, tail=0)
        layers = engine.random_layers(7)
        with pool.save(keys, cache, ids) as save:
            for layer in (2, 0, 3, 1):
                stream.write(engine.arrays[layer], layers[layer])
                save.layer(layer)
            assert save.commit().stored == CHUNKS
        rows = [engine.chunk(layers, ids[2 * chunk : 2 * chunk + 2]) for chunk in range(CHUNKS)]
        _assert_stored(pool, keys, rows)


def test_a_load_waits_for_what_the_engine_had_queued(shared: Shared) -> None:
    """Blocks that the engine's queued work still writes are loaded after it."""
    emulated.order("delay_us 20000")
    with engine_stream() as stream, shared.connect(LAYOUT) as pool:
        keys = prompt(pool, 8, CHUNKS, tail=0)
        store(pool, keys)
        engine = DeviceKv(LAYOUT, "kv_first", BLOCKS, stream=stream)
        cache, ids = pool.register(engine.arrays, 16, "kv_first"), _ids(8)
        layers = engine.random_layers(8)
        with pool.acquire(pool.lookup(keys)) as lease:
            for array, values in zip(engine.arrays, layers, strict=True):
                stream.write(array, values)
            assert pool.load(lease, cache, ids).wait().chunks == CHUNKS
        assert engine.chunks(ids, CHUNKS) == _right(keys)


def test_after_a_cancel_no_byte_is_written(shared: Shared) -> None:
    with shared.connect(LAYOUT) as pool:
        keys = prompt(pool, 9, CHUNKS, tail=0)
        store(pool, keys)
        engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
        cache, ids = pool.register(engine.arrays, 16, "kv_first"), _ids(9)
        with pool.acquire(pool.lookup(keys)) as lease:
            calls = emulated.calls("cuMemcpyBatchAsync")
            load = pool.load(lease, cache, ids)
            wait_until(lambda: emulated.calls("cuMemcpyBatchAsync") > calls, "a copy is queued")
            emulated.order("hang 1")
            cancelling = threading.Thread(target=load.cancel)
            cancelling.start()
            emulated.order("hang 0")
            wait_until(lambda: not cancelling.is_alive(), "the load is cancelled")
            seen = [layer.tobytes() for layer in engine.read()]
            result = load.wait()
            assert result.reason in ("cancelled", "complete")
            emulated.order("delay_us 0")
            assert [layer.tobytes() for layer in engine.read()] == seen


def test_two_devices_are_two(device: kvpool_native.Device, shared: Shared) -> None:
    emulated.require_two_devices()
    with shared.connect(LAYOUT) as pool:
        keys = prompt(pool, 11, CHUNKS, tail=0)
        store(pool, keys)
        other = open_device("cuda:1")
        assert open_device("cuda:0") is device
        assert device.uuid != other.uuid
        engines = [DeviceKv(LAYOUT, "kv_first", BLOCKS, ordinal=ordinal) for ordinal in range(2)]
        caches = [pool.register(engine.arrays, 16, "kv_first") for engine in engines]
        assert [cache.device for cache in caches] == ["cuda:0", "cuda:1"]
        ids = [_ids(11), _ids(12)]
        with pool.acquire(pool.lookup(keys)) as lease:
            loads = [pool.load(lease, cache, of) for cache, of in zip(caches, ids, strict=True)]
            assert [load.wait().chunks for load in loads] == [CHUNKS, CHUNKS]
        for engine, of in zip(engines, ids, strict=True):
            assert engine.chunks(of, CHUNKS) == _right(keys)


@in_both_write_modes
@pytest.mark.parametrize("numbers", [(1, 3, 0), pytest.param((2, 5, 8), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_driver_that_fails_costs_a_load_or_a_save_and_no_more(
    shared: Shared, name: str, numbers: tuple[int, ...]
) -> None:
    with shared.connect(LAYOUT) as pool:
        engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
        cache, ids = pool.register(engine.arrays, 16, "kv_first"), _ids(13)
        for number in numbers:
            keys = pool.keys(tokens_of(13, CHUNKS * 32), salt=b"%d" % number)
            store(pool, keys)
            expected = _right(keys)
            with pool.acquire(pool.lookup(keys)) as lease:
                emulated.order(f"fail {name} {number} {CUDA_ERROR_UNKNOWN}")
                result = pool.load(lease, cache, ids).wait()
                emulated.order("clear 1")
                assert (result.chunks, result.reason) in ((CHUNKS, "complete"), (0, "io"))
                if result.chunks:
                    assert engine.chunks(ids, CHUNKS) == expected
                assert pool.load(lease, cache, ids).wait().chunks == CHUNKS
            assert engine.chunks(ids, CHUNKS) == expected
            again = pool.keys(tokens_of(13, CHUNKS * 32), salt=b"again %d" % number)
            emulated.order(f"fail {name} {number} {CUDA_ERROR_UNKNOWN}")
            with pool.save(again, cache, ids) as save:
                for layer in range(4):
                    save.layer(layer)
                stored = save.commit().stored
            emulated.order("clear 1")
            assert stored in (0, CHUNKS)
            assert pool.lookup(again).chunks == stored
            assert pool.save(again, cache, ids).commit().declined == 0
            _assert_stored(pool, again, expected)


def test_a_new_daemon_is_used_without_registering_again(daemon: Daemon) -> None:
    with daemon.connect(LAYOUT, timeout_s=TIMEOUT_S) as pool:
        engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
        cache, ids = pool.register(engine.arrays, 16, "kv_first"), _ids(14)
        keys = prompt(pool, 14, CHUNKS, tail=0)
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        emulated.order("hang 1")
        load = pool.load(lease, cache, ids)
        save = pool.save(prompt(pool, 15, CHUNKS, tail=0), cache, ids)
        save.layer(0)
        daemon.kill()
        emulated.order("hang 0")
        with pytest.MonkeyPatch.context() as without:  # forked like the first one: its environment has no driver
            for name in emulated.environment():
                without.delenv(name)
            daemon.start()
        assert save.commit().stored == 0
        result = load.wait()
        if result.chunks:  # what was leased stays mapped, and nobody reuses it
            assert engine.chunks(ids, CHUNKS) == _right(keys)
        wait_connected(pool)
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert pool.load(lease, cache, ids).wait().chunks == CHUNKS
        assert engine.chunks(ids, CHUNKS) == _right(keys)


def test_a_forked_child_takes_nothing_and_disturbs_nobody(shared: Shared) -> None:
    with shared.connect(LAYOUT) as pool:
        keys = prompt(pool, 16, CHUNKS, tail=0)
        store(pool, keys)
        engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
        cache, ids = pool.register(engine.arrays, 16, "kv_first"), _ids(16)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert pool.load(lease, cache, ids).wait().chunks == CHUNKS
            assert_in_child(
                lambda: (
                    pool.load(lease, cache, ids).wait().chunks == 0
                    and pool.save(pool.keys(tokens_of(17, 64)), cache, [0, 1, 2, 3]).commit().stored == 0
                )
            )
            assert pool.load(lease, cache, ids).wait().chunks == CHUNKS
        assert engine.chunks(ids, CHUNKS) == _right(keys)


@in_both_write_modes
def test_nothing_stays_registered_or_allocated(shared: Shared) -> None:
    pool = shared.connect(LAYOUT)
    engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
    before = emulated.live()
    cache, ids = pool.register(engine.arrays, 16, "kv_first"), _ids(18)
    keys = prompt(pool, 18, CHUNKS, tail=0)
    assert pool.save(keys, cache, ids).commit().stored == CHUNKS
    with pool.acquire(pool.lookup(keys)) as lease:
        assert pool.load(lease, cache, ids).wait().chunks == CHUNKS
    wait_until(lambda: emulated.live()["registrations"] > 0, "the arena is registered")
    pool.close()
    wait_until(lambda: emulated.live()["registrations"] == 0, "nothing is registered")
    del lease, cache
    after = emulated.live()
    kinds = ("memory", "host", "registrations", "streams", "events", "modules")
    assert {kind: after[kind] for kind in kinds} == {kind: before[kind] for kind in kinds}
    assert after["mappings"] == before["mappings"], "the engine's own arrays"


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("form", ["kv_first", "block_first"])
def test_chunks_load_into_torch_tensors_on_a_gpu_and_are_saved_from_there(daemon: Daemon, form: str) -> None:
    if not GPU_DEVICE.exists() and not emulated.REAL:
        pytest.skip("there is no CUDA device here")  # without importing torch, which takes seconds
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    with daemon.connect(LAYOUT) as pool:
        keys = prompt(pool, 1, CHUNKS, tail=0)
        store(pool, keys)
        axes = (2, BLOCKS) if form == "kv_first" else (BLOCKS, 2)
        layers = [torch.zeros((*axes, 16, 2, 16), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        cache, ids = pool.register(layers, 16, form), _ids(2)
        with pool.acquire(pool.lookup(keys)) as lease, pool.load(lease, cache, ids) as begun:
            assert [begun.wait_layer(layer) for layer in range(4)] == [True] * 4
        again = pool.keys(tokens_of(1, CHUNKS * 32), salt=b"again")
        with pool.save(again, cache, ids) as save:
            for layer in (3, 1, 0, 2):
                save.layer(layer)
            assert save.commit().stored == CHUNKS
        _assert_stored(pool, again, _right(keys))
