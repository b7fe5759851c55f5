"""Loads of a hybrid model onto a device out of the daemon's device tier: windows are copied there as full chunks are."""

from dataclasses import replace

import pytest

import kvpool_client as kv
from kvpool.protocol.records import device as dm
from tests.rigs.device.device_daemon import DeviceDaemon
from tests.rigs.device.rank_engine import DeviceRankEngine
from tests.rigs.layouts import DIVIDED, STATE, shares_of
from tests.rigs.prompts import CHUNKS, prompt, store

LAYOUT = replace(DIVIDED, groups=DIVIDED.groups[:STATE])
WINDOWS = 2
OPTIONS = {"hbm.capacity": "16MiB"}


def _engine(daemon: DeviceDaemon, size: int = 1, rank: int = 0) -> DeviceRankEngine:
    """A rank of a hybrid model on the daemon's device; its loads are compared with the payload of their keys."""
    return DeviceRankEngine(daemon.connect(LAYOUT, share=shares_of(LAYOUT, size)[rank], timeout_s=60.0))


def _lease(engine: DeviceRankEngine, keys: kv.KeyChain) -> kv.Lease:
    lease = engine.pool.acquire(engine.pool.lookup(keys))
    assert lease.chunks == CHUNKS
    return lease


def _copied(daemon: DeviceDaemon, engine: DeviceRankEngine, seed: int) -> kv.KeyChain:
    """A prompt with a copy of all that a hit needs: the first load opens the device, and the next lease has copies made."""
    with daemon.connect(LAYOUT) as whole:
        keys = prompt(whole, seed)
        assert store(whole, keys).stored == CHUNKS + WINDOWS
    for _ in range(2):
        engine.clear()
        engine.assert_loads(keys)
    daemon.wait_for_copies(CHUNKS + WINDOWS)
    return keys


def _corrupt(lease: kv.Lease) -> None:
    """Flip a bit of every leased chunk in DRAM; the second time they are as they were."""
    assert lease.hold.session is not None
    arena = lease.hold.session.arena.view()
    for group in range(2):
        for offset in lease.hold.rows_from(0)[group].offsets:
            arena[int(offset)] ^= 1


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (4, 2)])
def test_what_a_hit_needs_is_loaded_from_copies_alone(daemon: DeviceDaemon, size: int, rank: int) -> None:
    engine = _engine(daemon, size, rank)
    keys = _copied(daemon, engine, 1)
    lease = _lease(engine, keys)
    with lease:
        assert set(lease.tiers.tolist()) == {kv.Level.HBM}
        _corrupt(lease)
        engine.clear()
        assert engine.load(lease).chunks == CHUNKS
        engine.assert_has(keys, lease.ranges)
        _corrupt(lease)
    engine.pool.close()
    assert daemon.problems() == []


def test_copies_are_asked_for_by_row_of_the_lease(daemon: DeviceDaemon) -> None:
    engine = _engine(daemon)
    keys = _copied(daemon, engine, 3)
    session = engine.pool._link.session
    assert session is not None
    lease = _lease(engine, keys)
    with lease:
        whole = session.call(dm.FindCopies(lease.hold.id, 0), dm.Copies)
        for first in (0, 1, CHUNKS - 1, CHUNKS, CHUNKS + 1, CHUNKS + WINDOWS):
            found = session.call(dm.FindCopies(lease.hold.id, first), dm.Copies)
            assert len(found.generations) == 8 * (CHUNKS + WINDOWS - first)
            assert found.offsets == whole.offsets[8 * first :]
        assert session.call(dm.FindCopies(lease.hold.id + 1, 0), dm.Copies).offsets == b""
        assert session.call(dm.FindCopies(lease.hold.id, 1 << 62), dm.Copies).offsets == b""
    engine.pool.close()
