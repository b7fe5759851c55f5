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
HIDDEN_BAR = 0.9
WAIT_S = 60.0
SEED = 3


def main() -> None:
    """One daemon, one engine."""
    setting.use_driver()
    with tempfile.TemporaryDirectory() as directory:
        options = {
            "dram.capacity": DRAM,
            "dram.allow_overcommit": "true",
            "dram.segment": "32MiB" if setting.IS_REHEARSAL else "1GiB",
        }
        with Daemon(Path(directory), **options) as daemon, daemon.connect(LAYOUT, timeout_s=WAIT_S) as pool:
            wait_connected(pool)
            _measure(PagedEngine(pool))


class PagedEngine:
    """An engine whose chain is stored from random blocks, and loaded into others."""

    def __init__(self, pool: kv.Pool) -> None:
        self.pool = pool
        self._kv = DeviceKv(LAYOUT, "kv_first", BLOCKS)
        layers = self._kv.random_layers(SEED)
        self._kv.write(layers)
        self._cache = pool.register(self._kv.arrays, BLOCK_TOKENS, "kv_first")
        dice, count = random.Random(SEED), BLOCKS // 2
        self._from, self._into = dice.sample(range(BLOCKS), count), dice.sample(range(BLOCKS), count)
        step = count // CHUNKS
        self._expected = [self._kv.chunk(layers, self._from[at : at + step]) for at in range(0, count, step)]
        self._salts = iter(range(1 << 20))
        self._keys = self._store()

    def save(self) -> None:
        """Save the blocks once more, under keys that the pool has not."""
        self._store()

    def load(self, each_layer: Callable[[], None] = lambda: None) -> float:
        """Load the chain, with something done once each layer is in place; seconds until the first one was."""
        with self.pool.acquire(self.pool.lookup(self._keys)) as lease:
            began = time.perf_counter()
            with self.pool.load(lease, self._cache, self._into) as running:
                assert running.wait_layer(0)
                first_s = time.perf_counter() - began
                for layer in range(LAYERS):
                    assert running.wait_layer(layer)
                    each_layer()
                assert running.wait().chunks == CHUNKS
        return first_s

    def compare(self) -> None:
        """What was loaded is what was saved."""
        assert self._kv.chunks(self._into, CHUNKS) == self._expected, "a load has brought other bytes than were saved"

    def _store(self) -> kv.KeyChain:
        salt = str(next(self._salts)).encode()
        keys = self.pool.keys(list(range(CHUNKS * CHUNK_TOKENS)), salt=salt)
        assert self.pool.save(keys, self._cache, self._from).commit().stored == CHUNKS
        return keys


def _measure(engine: PagedEngine) -> None:
    engine.load()
    setting.figure("arena registered after", [setting.wait_registered(engine.pool, WAIT_S)], "s")
    alone = setting.seconds_of(engine.load)
    engine.compare()
    _report("load", alone, _floor_s(to_device=True))
    setting.figure("first layer of a load", [1e3 * engine.load() for _ in range(setting.ROUNDS)], "ms")
    _measure_beside(engine, min(alone))
    _report("save", setting.seconds_of(engine.save), _floor_s(to_device=False))


def _measure_beside(engine: PagedEngine, alone_s: float) -> None:
    computing = Computing()
    computing.adjust(alone_s / LAYERS)
    bare = setting.seconds_of(lambda: computing.run(LAYERS))

    def beside() -> None:
        engine.load(computing.queue)
        computing.wait()

    both = setting.seconds_of(beside)
    hidden = 1 - max(0.0, min(both) - min(bare)) / alone_s
    times = [1e3 * taken for taken in both]
    setting.figure("load hidden behind the layers' computation", times, "ms", ratio=hidden, bar=HIDDEN_BAR)
    engine.compare()


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
