"""Engines of several tensor-parallel sizes whose KV is on a device: each rank stores and loads its extents alone.

The device is the emulated driver's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

import kvpool_client as kv
import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.driver import open_device
from tests.e2e.shares import test_group_sizes as group_sizes
from tests.e2e.shares.test_joint_saves import BLOCK_TOKENS, BLOCKS, CHUNKS, IDS, LAYOUT, assert_loads, shares_of
from tests.rigs.daemon import Daemon
from tests.rigs.device import emulated
from tests.rigs.device.engine import EngineArray, use_emulated_driver
from tests.rigs.groups.hybrid import key_of
from tests.rigs.module_daemons import module_daemon, module_daemons
from tests.rigs.payload import store, tokens_of
from tests.rigs.shares.rank_memory import Items, RankMemory, expected_part

__all__ = ["module_daemon", "module_daemons"]  # fixtures


@pytest.fixture
def device(module_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvpool_native.Device]:
    """An emulated device, of which the daemon knows nothing. When the test has ended, nothing is left of what it took."""
    assert module_daemon.is_running
    use_emulated_driver(monkeypatch)
    yield open_device("cuda:0")
    emulated.order("clear 1")


class Seen:
    """An array of the device, seen with other axes."""

    def __init__(self, array: EngineArray, host: Any) -> None:
        self._array, self._host = array, host

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        described = self._array.__cuda_array_interface__
        return {**described, "shape": self._host.shape, "strides": self._host.strides}


class DeviceRank:
    """A rank's paged KV on the device, in the bytes of a `RankMemory`, which shows how they lie."""

    def __init__(self, layout: kv.Layout, share: kv.Share, memory: str = "head_major") -> None:
        self.host = RankMemory(layout, share, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory=memory)
        self.share, self.form = share, self.host.form
        owned = [array if array.base is None else array.base for array in self.host.arrays]
        self._arrays = [EngineArray(array) for array in owned]
        self._owned = owned
        self.arrays = [Seen(array, host) for array, host in zip(self._arrays, self.host.arrays, strict=True)]

    def fill(self, keys: Sequence[bytes]) -> None:
        """Write its part of the chunks with these keys."""
        for chunk, key in enumerate(keys):
            self.host.fill(IDS[chunk].tolist(), expected_part(key, self.host.layout, self.share))
        for array, owned in zip(self._arrays, self._owned, strict=True):
            array.write(owned)

    def chunk(self, ids: Sequence[int]) -> Items:
        """The KV in these blocks on the device now."""
        for array, owned in zip(self._arrays, self._owned, strict=True):
            owned[...] = array.read()
        return self.host.chunk(ids)


def load_all(pool: kv.Pool, rank: DeviceRank, keys: kv.KeyChain) -> kv.LoadResult:
    cache = pool.register(rank.arrays, block_tokens=BLOCK_TOKENS, form=rank.form)
    assert cache.device == "cuda:0"
    with pool.acquire(pool.lookup(keys)) as lease, pool.load(lease, cache, IDS[: lease.chunks].reshape(-1)) as load:
        assert all(load.wait_layer(layer) for layer in range(rank.share.layers))
        return load.wait()


def save_all(pool: kv.Pool, keys: kv.KeyChain) -> kv.SaveResult:
    rank = DeviceRank(pool.layout, pool.shares[0])
    rank.fill([keys[chunk] for chunk in range(len(keys))])
    cache = pool.register(rank.arrays, block_tokens=BLOCK_TOKENS, form=rank.form)
    with pool.save(keys, cache, IDS[: len(keys)].reshape(-1)) as save:
        for layer in reversed(range(pool.shares[0].layers)):
            save.layer(layer)
        return save.commit()


def _slow(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("written", "read", "write_mode"),
    [
        (1, 4, "in-place"),
        (2, 0, "copy"),
        (4, 1, "in-place"),
        (8, 2, "copy"),
        (0, 8, "in-place"),
        *(_slow(size, 4, "copy") for size in (1, 2, 8, 0)),
        *(_slow(size, 0, "in-place") for size in (1, 4, 8, 0)),
        *(_slow(size, 1, "copy") for size in (1, 2, 8, 0)),
    ],
    indirect=["write_mode"],
)
def test_every_size_loads_what_any_other_stored(
    device: kvpool_native.Device, module_daemon: Daemon, written: int, read: int
) -> None:
    """What ranks load has been tested on the host for all sizes: here it is each size's way to a device and from one."""
    assert device is not None
    seed = 100 + 10 * written + read
    for share in shares_of(written):
        with module_daemon.connect(layout=LAYOUT, share=share) as pool:
            keys = pool.keys(tokens_of(seed, CHUNKS * LAYOUT.chunk_tokens))
            result = save_all(pool, keys)
            assert result.stored + result.part == CHUNKS
    for share in shares_of(read):
        with module_daemon.connect(layout=LAYOUT, share=share) as pool:
            rank = DeviceRank(LAYOUT, share)
            assert load_all(pool, rank, keys) == kv.LoadResult(CHUNKS, CHUNKS * LAYOUT.chunk_tokens, "complete")
            for chunk in range(CHUNKS):
                assert np.array_equal(rank.chunk(IDS[chunk].tolist()), expected_part(keys[chunk], LAYOUT, share))
    assert_loads(module_daemon, LAYOUT, kv.Share.whole(LAYOUT), seed)


@pytest.mark.parametrize("write_mode", ["in-place", _slow("copy")], indirect=["write_mode"])
def test_ranks_of_a_hybrid_model_load_what_another_size_stored(
    device: kvpool_native.Device, module_daemon: Daemon
) -> None:
    assert device is not None
    for shares in group_sizes.shares_of(2):
        with group_sizes.connect(module_daemon, shares) as pool:
            keys = group_sizes.keys_of(pool, 30)
            named = pool.chunks_to_save(keys)
            ranks, caches = _group_caches(pool)
            for group, (rank, chunks) in enumerate(zip(ranks, named, strict=True)):
                rank.fill([key_of(keys, group, chunk) for chunk in chunks])
            result = pool.save(keys, caches, [IDS[: len(chunks)].reshape(-1) for chunks in named]).commit()
            assert result.stored + result.part == CHUNKS + len(group_sizes.WINDOWS)
    for shares in group_sizes.shares_of(4):
        with group_sizes.connect(module_daemon, shares) as pool:
            keys = group_sizes.keys_of(pool, 30)
            ranks, caches = _group_caches(pool)
            with pool.acquire(pool.lookup(keys)) as lease:
                ids = [IDS[: len(chunks)].reshape(-1) for chunks in lease.ranges]
                assert pool.load(lease, caches, ids).wait().chunks == CHUNKS
                for group, (rank, leased) in enumerate(zip(ranks, lease.ranges, strict=True)):
                    for place, chunk in enumerate(leased):
                        right = expected_part(key_of(keys, group, chunk), rank.host.layout, rank.share)
                        assert np.array_equal(rank.chunk(IDS[place].tolist()), right)
    assert module_daemon.problems() == []


def _group_caches(pool: kv.Pool) -> tuple[list[DeviceRank], list[Cache]]:
    """A rank's memory of each group, and its registration."""
    ranks = [DeviceRank(part, share) for part, share in zip(pool.layout.group_layouts, pool.shares, strict=True)]
    caches = [
        pool.register(rank.arrays, block_tokens=BLOCK_TOKENS, form=rank.form, group=group)
        for group, rank in enumerate(ranks)
    ]
    return ranks, caches


@pytest.mark.parametrize("extent", [2, 3, 30])
def test_a_flipped_bit_in_its_own_extents_alone_ends_a_ranks_load(
    device: kvpool_native.Device, module_daemon: Daemon, extent: int
) -> None:
    assert device is not None
    share = shares_of(4)[1]
    with module_daemon.connect(layout=LAYOUT) as writer, module_daemon.connect(layout=LAYOUT, share=share) as pool:
        keys = pool.keys(tokens_of(20 + extent, CHUNKS * LAYOUT.chunk_tokens))
        store(writer, keys)
        lease = pool.acquire(pool.lookup(keys))
        assert lease.hold.session is not None
        lease.hold.session.arena.view()[int(lease.hold.rows.offsets[3]) + extent * LAYOUT.extent_bytes] ^= 1
        rank = DeviceRank(LAYOUT, share)
        cache = pool.register(rank.arrays, block_tokens=BLOCK_TOKENS, form=rank.form)
        result = pool.load(lease, cache, IDS.reshape(-1)).wait()
        is_its_own = extent in share.extents(LAYOUT)
        assert (result.chunks, result.reason) == ((3, "checksum") if is_its_own else (CHUNKS, "complete"))
        lease.release()
    assert len(module_daemon.problems()) == (0 if is_its_own else 1), "what nobody has found is found by a deep check"


def test_heads_that_lie_together_on_a_device_are_refused(device: kvpool_native.Device, module_daemon: Daemon) -> None:
    assert device is not None
    share = shares_of(2)[0]
    with module_daemon.connect(layout=LAYOUT, share=share) as pool:
        rank = DeviceRank(LAYOUT, share, "kv_first")
        with pytest.raises(LayoutMismatch, match="expected each head group's bytes of a block in a row there"):
            pool.register(rank.arrays, block_tokens=BLOCK_TOKENS, form=rank.form)
