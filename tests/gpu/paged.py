"""Part `paged`: loads into and saves from paged KV on a device, through a daemon: rates, the first layer, and what of a load is
hidden beside a running computation.

    rate      all layers of a chain, against one copy of the same bytes between pinned memory and the device
    first     from the call of `load` until layer 0 is in place
    hidden    1 - (layers with a load - layers without) / the load alone: each layer waits for its KV, then computes

The chain is saved once from random blocks; each load is compared with them.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvpool_client as kv
import kvpool_native
from kvpool_client.copying.device.driver import open_device
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from tests.gpu import setting
from tests.gpu.computing import Computing
from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.device.emulated import EmulatedArray
from tests.rigs.device.engine import DeviceKv

LAYERS, KV_HEADS, HEAD_DIM, CHUNK_TOKENS = (4, 2, 32, 64) if setting.IS_REHEARSAL else (32, 8, 128, 256)
LAYOUT = kv.Layout(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16", chunk_tokens=CHUNK_TOKENS)
CHUNKS = 4 if setting.IS_REHEARSAL else 32
BLOCK_TOKENS = 16
BLOCKS = 2 * CHUNKS * (CHUNK_TOKENS // BLOCK_TOKENS)
BYTES = CHUNKS * LAYOUT.chunk_bytes
DRAM = "64MiB" if setting.IS_REHEARSAL else "6GiB"
# The arena is registered with the driver in the background, from the first load on: seconds for some GiB.
REGISTERING_S = 0.1 if setting.IS_REHEARSAL else 8.0
HIDDEN_BAR = 0.9
WAIT_S = 60.0
SEED = 3


def main() -> None:
    """One daemon, one engine."""
    setting.use_driver()
    with tempfile.TemporaryDirectory() as directory:
        options = {"dram.capacity": DRAM, "dram.segment": "32MiB" if setting.IS_REHEARSAL else "1GiB"}
        with Daemon(Path(directory), **options) as daemon, daemon.connect(LAYOUT, timeout_s=WAIT_S) as pool:
            _measure(pool)


def _measure(pool: kv.Pool) -> None:
    engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
    layers = engine.random_layers(SEED)
    engine.write(layers)
    cache = pool.register(engine.arrays, BLOCK_TOKENS, "kv_first")
    wait_connected(pool)
    dice = random.Random(SEED)
    ids = dice.sample(range(BLOCKS), BLOCKS // 2)
    keys = pool.keys(list(range(CHUNKS * CHUNK_TOKENS)))
    expected = [
        engine.chunk(layers, ids[at : at + len(ids) // CHUNKS]) for at in range(0, len(ids), len(ids) // CHUNKS)
    ]
    assert pool.save(keys, cache, ids).commit().stored == CHUNKS
    into = dice.sample(range(BLOCKS), BLOCKS // 2)
    computing = Computing()

    def load(each_layer: Callable[[], None] = lambda: None) -> float:
        """A whole load, with something done once each layer is in place; seconds until the first one was."""
        with pool.acquire(pool.lookup(keys)) as lease:
            began = time.perf_counter()
            with pool.load(lease, cache, into) as running:
                assert running.wait_layer(0)
                first_s = time.perf_counter() - began
                for layer in range(LAYERS):
                    assert running.wait_layer(layer)
                    each_layer()
                assert running.wait().chunks == CHUNKS
        return first_s

    began = time.perf_counter()
    while time.perf_counter() - began < REGISTERING_S:
        load()
    alone = setting.seconds_of(load)
    assert engine.chunks(into, CHUNKS) == expected, "a load has brought other bytes than were saved"
    _report("load", alone, _floor_s(to_device=True))
    setting.figure("first layer of a load", [1e3 * load() for _ in range(setting.ROUNDS)], "ms")
    salts = iter(range(1 << 20))

    def save() -> None:
        assert (
            pool.save(pool.keys(list(range(CHUNKS * CHUNK_TOKENS)), salt=str(next(salts)).encode()), cache, ids)
            .commit()
            .stored
        )

    _report("save", setting.seconds_of(save), _floor_s(to_device=False))
    computing.adjust(min(alone) / LAYERS)
    bare = setting.seconds_of(lambda: computing.run(LAYERS))

    def beside() -> None:
        load(computing.queue)
        computing.wait()

    both = setting.seconds_of(beside)
    hidden = 1 - max(0.0, min(both) - min(bare)) / min(alone)
    setting.figure(
        "load hidden behind the layers' computation",
        [1e3 * taken for taken in both],
        "ms",
        ratio=hidden,
        bar=HIDDEN_BAR,
    )
    assert engine.chunks(into, CHUNKS) == expected, "a load beside a computation has brought other bytes"


def _report(what: str, seconds: list[float], floor_s: float) -> None:
    setting.figure(
        f"{what} of {CHUNKS} chunks, blocks of {BLOCK_TOKENS} tokens",
        setting.rates(seconds, BYTES),
        "GB/s",
        ratio=floor_s / min(seconds),
    )


def _floor_s(*, to_device: bool) -> float:
    """Seconds that one copy of the same bytes takes."""
    device, memory = open_device("cuda:0"), kvpool_native.Mapping.create("floor", BYTES)
    pinned = PinnedBytes(memory, device)
    wait_until(lambda: pinned.is_pinned, "the memory is pinned", WAIT_S)
    array, stream = EmulatedArray(np.zeros(BYTES, np.uint8)), device.stream()
    places = (array.address, pinned.address) if to_device else (pinned.address, array.address)
    target, source, size = (np.array([word], np.uint64).tobytes() for word in (*places, BYTES))

    def copy() -> None:
        stream.copy(target, source, size)
        assert stream.record().wait(WAIT_S)

    seconds = setting.seconds_of(copy)
    pinned.close()
    array.free()
    return min(seconds)


if __name__ == "__main__":
    main()
