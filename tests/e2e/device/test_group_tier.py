"""Loads of a hybrid model onto a device out of the daemon's device tier: windows are copied there as full chunks are."""

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.records import device as dm
from kvpool_client.copying.cache import Cache
from tests.e2e.shares import test_group_sizes as group_sizes
from tests.e2e.shares.test_device_sizes import DeviceRank
from tests.e2e.shares.test_joint_saves import BLOCK_TOKENS, IDS
from tests.rigs.device.device_daemon import DeviceDaemon
from tests.rigs.groups.hybrid import key_of
from tests.rigs.shares.rank_memory import expected_part

OPTIONS = {"hbm.capacity": "16MiB"}
CHUNKS, WINDOWS = group_sizes.CHUNKS, len(group_sizes.WINDOWS)


class GroupEngine:
    """A rank of a hybrid model on the daemon's device; its loads are compared with the payload of their keys."""

    def __init__(self, daemon: DeviceDaemon, shares: list[kv.Share]) -> None:
        self.pool = group_sizes.connect(daemon, shares)
        self.ranks = [
            DeviceRank(part, share) for part, share in zip(self.pool.layout.group_layouts, shares, strict=True)
        ]
        self.caches: list[Cache] = [
            self.pool.register(rank.arrays, block_tokens=BLOCK_TOKENS, form=rank.form, group=group)
            for group, rank in enumerate(self.ranks)
        ]

    def lease(self, keys: kv.KeyChain) -> kv.Lease:
        lease = self.pool.acquire(self.pool.lookup(keys))
        assert lease.chunks == CHUNKS
        return lease

    def load(self, lease: kv.Lease) -> kv.LoadResult:
        ids = [IDS[: len(chunks)].reshape(-1) for chunks in lease.ranges]
        return self.pool.load(lease, self.caches, ids).wait()

    def assert_loads(self, keys: kv.KeyChain, lease: kv.Lease) -> None:
        for rank in self.ranks:
            for array in rank.host.arrays:
                array[...] = 0
            rank.fill([])
        assert self.load(lease).chunks == CHUNKS
        for group, (rank, leased) in enumerate(zip(self.ranks, lease.ranges, strict=True)):
            for place, chunk in enumerate(leased):
                right = expected_part(key_of(keys, group, chunk), rank.host.layout, rank.share)
                assert np.array_equal(rank.chunk(IDS[place].tolist()), right), (group, chunk)


def _copied(daemon: DeviceDaemon, engine: GroupEngine, seed: int) -> kv.KeyChain:
    """A prompt with a copy of all that a hit needs: the first load opens the device, and the next lease has copies made."""
    assert group_sizes.save_part(daemon, group_sizes.shares_of(1)[0], seed).stored == CHUNKS + WINDOWS
    keys = group_sizes.keys_of(engine.pool, seed)
    for _ in range(2):
        lease = engine.lease(keys)
        with lease:
            engine.assert_loads(keys, lease)
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
    engine = GroupEngine(daemon, group_sizes.shares_of(size)[rank])
    keys = _copied(daemon, engine, 1)
    lease = engine.lease(keys)
    with lease:
        assert set(lease.tiers.tolist()) == {kv.Level.HBM}
        _corrupt(lease)
        engine.assert_loads(keys, lease)
        _corrupt(lease)
    engine.pool.close()
    assert daemon.problems() == []


def test_copies_are_asked_for_by_row_of_the_lease(daemon: DeviceDaemon) -> None:
    engine = GroupEngine(daemon, group_sizes.shares_of(1)[0])
    keys = _copied(daemon, engine, 3)
    session = engine.pool._link.session
    assert session is not None
    lease = engine.lease(keys)
    with lease:
        whole = session.call(dm.FindCopies(lease.hold.id, 0), dm.Copies)
        for first in (0, 1, CHUNKS - 1, CHUNKS, CHUNKS + 1, CHUNKS + WINDOWS):
            found = session.call(dm.FindCopies(lease.hold.id, first), dm.Copies)
            assert len(found.generations) == 8 * (CHUNKS + WINDOWS - first)
            assert found.offsets == whole.offsets[8 * first :]
        assert session.call(dm.FindCopies(lease.hold.id + 1, 0), dm.Copies).offsets == b""
        assert session.call(dm.FindCopies(lease.hold.id, 1 << 62), dm.Copies).offsets == b""
    engine.pool.close()
