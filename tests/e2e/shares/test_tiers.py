"""Shares of chunks that come from elsewhere: a load ends as the extents that it asked for land, from a disk or a node."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvpool_client as kv
from kvpool.types import Level
from tests.e2e.remote.test_two_daemons import two_daemons
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import store, tokens_of
from tests.rigs.shares.rank_memory import RankMemory, expected_part

LAYOUT = kv.Layout(layers=3, kv_heads=4, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=4)
CHUNKS = 12


def _load_each_rank(daemon: Daemon, keys: kv.KeyChain, level: Level) -> None:
    """Every rank of an engine of size 4 loads its part; the first one brings the chunks here."""
    for rank in range(4):
        share = kv.Share.of_rank(LAYOUT, rank, 4)
        with daemon.connect(layout=LAYOUT, share=share, timeout_s=60.0) as pool:
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the chunks are known")
            hit = pool.lookup(keys)
            assert rank or set(hit.tiers.tolist()) == {level}
            mine = RankMemory(LAYOUT, share, blocks=CHUNKS, block_tokens=32, memory="kv_first")
            cache = pool.register(mine.arrays, block_tokens=32, form="kv_first")
            with pool.acquire(hit) as lease:
                load = pool.load(lease, cache, list(range(CHUNKS)))
                assert all(load.wait_layer(layer) for layer in range(LAYOUT.layers))
                assert load.wait() == kv.LoadResult(CHUNKS, CHUNKS * 32, "complete")
            for chunk in range(CHUNKS):
                assert np.array_equal(mine.chunk([chunk]), expected_part(keys[chunk], LAYOUT, share))


def test_shares_are_loaded_from_another_node(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), owner.connect(layout=LAYOUT) as there:
        keys = there.keys(tokens_of(1, CHUNKS * LAYOUT.chunk_tokens))
        assert store(there, keys).stored == CHUNKS
        _load_each_rank(here, keys, Level.PEER)


def test_shares_are_loaded_from_the_disk(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(dram__capacity="16MiB", ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with daemon.connect(layout=LAYOUT) as pool, daemon.admin() as admin:
        keys = pool.keys(tokens_of(2, CHUNKS * LAYOUT.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        assert admin.demote_all(60.0)["left"] == 0
    daemon.kill()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    _load_each_rank(daemon, keys, Level.SSD)
    assert daemon.problems() == []


def test_a_full_check_names_the_layer_and_head_group_of_wrong_bytes(daemon: Daemon) -> None:
    with daemon.connect(layout=LAYOUT) as pool:
        keys = pool.keys(tokens_of(3, LAYOUT.chunk_tokens))
        assert store(pool, keys).stored == 1
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.hold.session is not None
            lease.hold.session.arena.view()[int(lease.hold.rows.offsets[0]) + 9 * LAYOUT.extent_bytes] ^= 1
        (problem,) = daemon.problems(deep=True)
    assert problem.endswith(": bad checksum in layer 2 head group 1, dropped")
