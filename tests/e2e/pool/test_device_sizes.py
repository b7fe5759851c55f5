"""Engines of several tensor-parallel sizes whose KV is on a device: each rank stores and loads its extents alone.

The device is the emulated driver's.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from _pytest.mark.structures import ParameterSet

import kvpool_client as kv
import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool_client.copying.device.driver import open_device
from tests.e2e.pool.conftest import Shared
from tests.rigs.device import emulated
from tests.rigs.device.engine import use_emulated_driver
from tests.rigs.device.rank_engine import DeviceRankEngine
from tests.rigs.layouts import CHUNK, DIVIDED, HEADS, STATE, Case, shares_of
from tests.rigs.prompts import CHUNKS, Ranks, assert_served, flip, prompt, store


@pytest.fixture(autouse=True)
def device(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvpool_native.Device]:
    """An emulated device, of which the daemon knows nothing. When the test has ended, nothing is left of what it took."""
    assert shared.daemon.is_running
    use_emulated_driver(monkeypatch)
    yield open_device("cuda:0")
    emulated.order("clear 1")


def _slow(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.slow)


HYBRID = replace(DIVIDED, groups=DIVIDED.groups[:STATE])


@pytest.mark.parametrize(
    ("layout", "written", "read", "write_mode"),
    [
        (HEADS, 1, 4, "in-place"),
        (HEADS, 2, 0, "copy"),
        (HEADS, 4, 1, "in-place"),
        (HEADS, 8, 2, "copy"),
        (HEADS, 0, 8, "in-place"),
        *(_slow(HEADS, size, 4, "copy") for size in (1, 2, 8, 0)),
        *(_slow(HEADS, size, 0, "in-place") for size in (1, 4, 8, 0)),
        *(_slow(HEADS, size, 1, "copy") for size in (1, 2, 8, 0)),
        (HYBRID, 2, 4, "in-place"),
        _slow(HYBRID, 2, 4, "copy"),
    ],
    indirect=["write_mode"],
)
def test_every_size_loads_what_any_other_stored(shared: Shared, layout: kv.Layout, written: int, read: int) -> None:
    """What ranks load has been tested on the host for all sizes: here it is each size's way to a device and from one."""
    with Ranks(Case(layout, tuple(shares_of(layout, written))), shared.connect) as ranks:
        keys = ranks.prompt(1)
        for pool in ranks.pools:
            result = DeviceRankEngine(pool).save(keys)
            assert result.stored + result.part == ranks.needed(keys)
    for share in shares_of(layout, read):
        with shared.connect(layout, share=share) as pool:
            DeviceRankEngine(pool).assert_loads(keys)
    with shared.connect(layout) as whole:
        assert_served(whole, keys, CHUNKS)


@pytest.mark.parametrize("extent", [2, 3, 30])
def test_a_flipped_bit_in_its_own_extents_alone_ends_a_ranks_load(shared: Shared, extent: int) -> None:
    share = shares_of(HEADS, 4)[1]
    with shared.connect(HEADS) as writer, shared.connect(HEADS, share=share) as pool:
        keys = prompt(pool, 20)
        store(writer, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            flip(lease, 3, extent * HEADS.extent_bytes)
            result = DeviceRankEngine(pool).load(lease)
            is_its_own = extent in share.extents(HEADS)
            whole = kv.LoadResult(CHUNKS, CHUNKS * CHUNK, "complete")
            assert result == (kv.LoadResult(3, 3 * CHUNK, "checksum") if is_its_own else whole)
    assert len(shared.daemon.problems()) == (0 if is_its_own else 1), "what nobody has found is found by a deep check"


def test_heads_that_lie_together_on_a_device_are_refused(shared: Shared) -> None:
    refused = pytest.raises(LayoutMismatch, match="expected each head group's bytes of a block in a row there")
    with shared.connect(HEADS, share=shares_of(HEADS, 2)[0]) as pool, refused:
        DeviceRankEngine(pool, "kv_first")
