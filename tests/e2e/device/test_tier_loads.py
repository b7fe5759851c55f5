"""Loads onto a device out of the daemon's device tier: byte for byte what DRAM has, however copies go, without a look at DRAM.

The daemon and the engine use the emulated driver in processes of their own, and share the memory of the copies.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.blocks import DeviceBlocks
from tests.rigs.daemon import SMALL, wait_connected, wait_until
from tests.rigs.device import emulated
from tests.rigs.device.device_daemon import DeviceDaemon, DeviceEngine
from tests.rigs.device.engine import DeviceKv, use_emulated_driver
from tests.rigs.payload import flip_bit, payload_of, store, tokens_of

KIND, OPTIONS = DeviceDaemon, {"hbm.capacity": "16MiB"}  # one that takes orders of its own
CHUNKS, BLOCKS = 12, 48
LAST_LAYER = (SMALL.layers - 1) * SMALL.layer_bytes


class TierEngine:
    """An engine on a device whose loads are compared with the payload of their keys."""

    def __init__(self, daemon: DeviceDaemon, ordinal: int = 0) -> None:
        self.pool = daemon.connect()
        self.kv = DeviceKv(SMALL, "kv_first", BLOCKS, ordinal=ordinal)
        self.cache: Cache = self.pool.register(self.kv.arrays, 16, "kv_first")
        self.ids = np.random.default_rng(ordinal).permutation(BLOCKS)[: 2 * CHUNKS].tolist()

    def keys(self, seed: int) -> kv.KeyChain:
        return self.pool.keys(tokens_of(seed, CHUNKS * SMALL.chunk_tokens))

    def lease(self, keys: kv.KeyChain) -> kv.Lease:
        lease = self.pool.acquire(self.pool.lookup(keys))
        assert lease.chunks == CHUNKS
        return lease

    def load(self, keys: kv.KeyChain) -> None:
        """Load a chain, and compare its bytes."""
        with self.lease(keys) as lease:
            assert self.pool.load(lease, self.cache, self.ids).wait() == kv.LoadResult(
                CHUNKS, CHUNKS * SMALL.chunk_tokens, "complete"
            )
        self.compare(keys)

    def compare(self, keys: kv.KeyChain, chunks: int = CHUNKS) -> None:
        expected = [row.tobytes() for row in payload_of(keys, SMALL, 0, chunks)]
        assert self.kv.chunks(self.ids, CHUNKS)[:chunks] == expected

    def clear(self) -> None:
        """Blocks without any chunk's bytes."""
        self.kv.write([np.zeros(self.kv.shape, np.uint16) for _ in self.kv.arrays])

    def close(self) -> None:
        self.pool.close()


@pytest.fixture
def small_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceDaemon]:
    """A daemon with 2 MiB of an emulated device."""
    use_emulated_driver(monkeypatch)
    with DeviceDaemon(tmp_path) as daemon:
        daemon.wait_for_state("ok")
        yield daemon
    emulated.order("clear 1")


@pytest.fixture
def engine(daemon: DeviceDaemon) -> Iterator[TierEngine]:
    """An engine on the daemon's device."""
    engine = TierEngine(daemon)
    yield engine
    engine.close()


def _copied(daemon: DeviceDaemon, engine: TierEngine, seed: int) -> kv.KeyChain:
    """A chain with a copy of each chunk: the first load opens the device, and the next lease has copies made."""
    keys = engine.keys(seed)
    store(engine.pool, keys)
    engine.load(keys)
    engine.load(keys)
    daemon.wait_for_copies(daemon.stats()["dram.chunks"])
    engine.clear()
    return keys


def test_chunks_with_copies_are_loaded_from_them_alone(daemon: DeviceDaemon, engine: TierEngine) -> None:
    keys = _copied(daemon, engine, 1)
    assert set(engine.pool.lookup(keys).tiers.tolist()) == {kv.Level.HBM}
    with engine.lease(keys) as lease:
        for chunk in range(CHUNKS):  # what DRAM has is not looked at
            flip_bit(lease, chunk, LAST_LAYER)
        with engine.pool.load(lease, engine.cache, engine.ids) as load:
            assert [load.wait_layer(layer) for layer in range(SMALL.layers)] == [True] * SMALL.layers
            assert load.wait().chunks == CHUNKS
        engine.compare(keys)
        for chunk in range(CHUNKS):
            flip_bit(lease, chunk, LAST_LAYER)


def test_a_lease_with_some_copies_takes_the_rest_from_dram(daemon: DeviceDaemon, engine: TierEngine) -> None:
    _copied(daemon, engine, 2)
    longer = engine.pool.keys(tokens_of(2, (CHUNKS + 4) * SMALL.chunk_tokens))
    store(engine.pool, longer, CHUNKS)
    ids = list(range(BLOCKS))[: 2 * (CHUNKS + 4)]
    daemon.control.order("hang 1")  # else it copies the others too, and the load takes those
    with engine.pool.acquire(engine.pool.lookup(longer)) as lease:
        assert lease.tiers.tolist() == [kv.Level.HBM] * CHUNKS + [kv.Level.DRAM] * 4
        flip_bit(lease, 3, LAST_LAYER)
        flip_bit(lease, CHUNKS + 2, LAST_LAYER)
        result = engine.pool.load(lease, engine.cache, ids[4:], first_chunk=2).wait()
    daemon.control.order("hang 0")
    assert result.chunks == CHUNKS + 2
    assert result.reason in ("checksum", "gone"), "the daemon drops it where it was about to copy it"


def test_copies_that_go_while_the_device_reads_them_are_replaced_from_dram(
    small_daemon: DeviceDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load's copies hang, all copies are dropped, and others are written in their place."""
    daemon, engine = small_daemon, TierEngine(small_daemon)
    keys = _copied(daemon, engine, 3)
    room = (2 << 20) // SMALL.chunk_bytes
    others = engine.pool.keys(tokens_of(4, room * SMALL.chunk_tokens))
    store(engine.pool, others)
    queue = DeviceBlocks.queue_spread

    def queue_and_hang(self: DeviceBlocks, *arguments: Any, **named: Any) -> kvpool_native.DeviceEvent:
        emulated.order("hang 1")
        return queue(self, *arguments, **named)

    monkeypatch.setattr(DeviceBlocks, "queue_spread", queue_and_hang)
    with engine.lease(keys) as lease, DeviceEngine(daemon) as other:
        calls = emulated.calls("cuMemcpyBatchAsync")
        load = engine.pool.load(lease, engine.cache, engine.ids)
        try:
            wait_until(lambda: emulated.calls("cuMemcpyBatchAsync") > calls, "copies are queued")
            with daemon.admin() as admin:
                admin.flush(None, None, "hbm")
            leased = other.lease([others[at] for at in range(len(others))])
            wait_until(lambda: daemon.stats()["hbm.chunks"] >= 2 * CHUNKS, "other copies are in their place")
        finally:
            monkeypatch.undo()
            emulated.order("hang 0")
        assert load.wait().chunks == CHUNKS
        assert emulated.calls("cuMemcpyBatchAsync") > calls + SMALL.layers, "layers were copied again"
        other.release(leased)
    engine.compare(keys)
    engine.close()


@pytest.mark.slow
def test_a_daemon_that_is_killed_takes_no_copy_away(small_daemon: DeviceDaemon) -> None:
    daemon, engine = small_daemon, TierEngine(small_daemon)
    keys = _copied(daemon, engine, 6)
    lease = engine.lease(keys)
    emulated.order("hang 1")
    load = engine.pool.load(lease, engine.cache, engine.ids)
    daemon.kill()
    emulated.order("hang 0")
    result = load.wait()
    engine.compare(keys, result.chunks)
    daemon.start()
    daemon.wait_for_state("ok")
    wait_connected(engine.pool)
    _copied(daemon, engine, 6)
    engine.load(keys)
    engine.close()


def test_an_engine_on_another_device_loads_from_dram(daemon: DeviceDaemon, engine: TierEngine) -> None:
    emulated.require_two_devices()
    keys = _copied(daemon, engine, 7)
    other = TierEngine(daemon, ordinal=1)
    other.load(keys)
    with other.lease(keys) as lease:
        flip_bit(lease, 4, LAST_LAYER)
        assert other.pool.load(lease, other.cache, other.ids).wait().reason == "checksum"
    other.close()


def test_nothing_stays_mapped_when_the_pool_is_closed(daemon: DeviceDaemon) -> None:
    before = emulated.live()
    engine = TierEngine(daemon)
    mapped = emulated.live()["mappings"]
    keys = _copied(daemon, engine, 9)
    engine.load(keys)
    assert emulated.live()["mappings"] == mapped + 1
    engine.close()
    assert emulated.live()["mappings"] == mapped
    del engine, keys
    wait_until(lambda: emulated.live()["registrations"] == before["registrations"], "nothing is registered")
    assert emulated.live()["memory"] == before["memory"]
