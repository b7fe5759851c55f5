"""Summaries behind the KV of each chunk: built by the save, stored with a checksum, and there wherever the chunk
comes from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.states import Level
from kvpool_client.copying.leased_memory import LeasedMemory
from tests.rigs.daemon import WRITE_MODES, Daemon, Start, in_both_write_modes, wait_connected, wait_until
from tests.rigs.device.engine import DeviceKv, use_emulated_driver
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.payload import Bytes, bytes_at, tokens_of

# A chunk's summaries fill more than one extent, and not the whole of the last.
LAYOUT = kv.Layout(layers=8, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=16, summaries="clusters7")
CHUNKS = 11
SIZE = LAYOUT.summary_extents * LAYOUT.layer_bytes
USED = LAYOUT.layers * LAYOUT.kv_heads * LAYOUT.summary_bytes


def payload_of(keys: kv.KeyChain) -> Bytes:
    """KV as an engine computes it, [chunks, chunk_bytes]; it depends on the keys."""
    rows = [np.random.default_rng(list(keys[number])) for number in range(len(keys))]
    return np.stack([dice.standard_normal(LAYOUT.chunk_bytes // 2).astype("<f2").view(np.uint8) for dice in rows])


def keys_of(pool: kv.Pool, seed: int = 1) -> kv.KeyChain:
    return pool.keys(tokens_of(seed, CHUNKS * LAYOUT.chunk_tokens))


def store(pool: kv.Pool, seed: int = 1) -> kv.KeyChain:
    keys = keys_of(pool, seed)
    result = pool.save(keys, from_=payload_of(keys)).commit()
    assert (result.stored, dict(result.reasons)) == (CHUNKS, {})
    return keys


def assert_loads(pool: kv.Pool, keys: kv.KeyChain) -> None:
    """A load gives the KV, and nothing of the summaries."""
    into = np.zeros((CHUNKS, LAYOUT.chunk_bytes), np.uint8)
    with pool.acquire(pool.lookup(keys)) as lease:
        assert pool.load(lease, into=into).wait() == kv.LoadResult(CHUNKS, CHUNKS * LAYOUT.chunk_tokens, "complete")
    assert np.array_equal(into, payload_of(keys))


def summaries_in(memory: LeasedMemory) -> Bytes:
    """The bytes of all summaries, after they were verified: [chunks, bytes of the extents]."""
    assert (memory.chunks, memory.verify(timeout_s=60.0).chunks) == (CHUNKS, CHUNKS)
    wait_until(lambda: bool(memory.good_summaries().all()), "all extents have landed")
    found = np.stack([bytes_at(address, SIZE) for address in memory.summaries.tolist()])
    assert memory.are_current() == CHUNKS
    return found


def summaries_of(pool: kv.Pool, keys: kv.KeyChain) -> Bytes:
    with pool.leased_memory(pool.acquire(pool.lookup(keys))) as memory:
        return summaries_in(memory)


@pytest.mark.parametrize(("form", "write_mode"), [("clusters7", "in-place"), ("mean", "copy")], indirect=["write_mode"])
def test_a_saved_chunk_has_its_summaries_with_checksums(module_daemon: Daemon, form: str) -> None:
    layout = replace(LAYOUT, summaries=form)
    before = module_daemon.stats()
    with module_daemon.connect(layout) as pool:
        keys = store(pool, seed=11)
        assert_loads(pool, keys)
        with pool.leased_memory(pool.acquire(pool.lookup(keys))) as memory:
            assert memory.verify().chunks == CHUNKS
            assert memory.good_summaries().tolist() == [True] * CHUNKS
            found = bytes_at(int(memory.summaries[0]), layout.summary_extents * layout.layer_bytes)
        used = layout.layers * layout.kv_heads * layout.summary_bytes
        assert found[:used].any()
        assert not found[used:].any(), "what is left of the last extent is zero"
        stats = module_daemon.stats()
        assert stats["dram.chunks"] - before["dram.chunks"] == CHUNKS
        assert stats["usage.saved_bytes"] - before["usage.saved_bytes"] == CHUNKS * layout.stored_bytes
    assert module_daemon.problems() == []


def test_equal_kv_has_equal_summaries_in_both_write_modes(module_daemons: Callable[[str], Daemon]) -> None:
    found = []
    for mode in WRITE_MODES:
        with module_daemons(mode).connect(LAYOUT) as pool:
            found.append(summaries_of(pool, store(pool, seed=12)))
    assert np.array_equal(found[0], found[1])
    assert len({row.tobytes() for row in found[0]}) == CHUNKS, "other KV has other summaries"


@in_both_write_modes
def test_layers_that_are_announced_one_by_one_are_summarized_at_the_end(module_daemon: Daemon) -> None:
    with module_daemon.connect(LAYOUT) as pool:
        keys, again = keys_of(pool, seed=13), keys_of(pool, seed=14)
        rows = payload_of(keys)
        with pool.save(keys, from_=rows) as save:
            for layer in reversed(range(LAYOUT.layers)):
                save.layer(layer)
            assert save.commit().stored == CHUNKS
        assert pool.save(again, from_=rows).commit().stored == CHUNKS
        assert np.array_equal(summaries_of(pool, keys), summaries_of(pool, again))
        assert_loads(pool, keys)


@in_both_write_modes
def test_an_aborted_save_stores_nothing(module_daemon: Daemon) -> None:
    with module_daemon.connect(LAYOUT) as pool:
        keys = keys_of(pool, seed=15)
        with pool.save(keys, from_=payload_of(keys)) as save:
            save.layer(0)
        assert pool.lookup(keys).chunks == 0
        assert_loads(pool, store(pool, seed=15))


def test_saves_from_a_device_are_summarized_and_loads_onto_it_give_the_kv(
    module_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_emulated_driver(monkeypatch)
    engine = DeviceKv(LAYOUT, "kv_first", CHUNKS)
    with module_daemon.connect(LAYOUT) as pool:
        keys = keys_of(pool, seed=16)
        cache = pool.register(engine.arrays, block_tokens=LAYOUT.chunk_tokens, form=engine.register_form)
        layers = engine.random_layers(3)
        engine.write(layers)
        ids = list(range(CHUNKS))
        assert pool.save(keys, cache, ids).commit().stored == CHUNKS
        from_device = summaries_of(pool, keys)
        rows = np.stack([np.frombuffer(engine.chunk(layers, [block]), np.uint8) for block in ids])
        again = keys_of(pool, seed=17)
        assert pool.save(again, from_=rows).commit().stored == CHUNKS
        assert np.array_equal(from_device, summaries_of(pool, again))
        engine.write([np.zeros_like(layer) for layer in layers])
        with pool.acquire(pool.lookup(keys)) as lease:
            assert pool.load(lease, cache, ids).wait().reason == "complete"
        assert engine.chunks(ids, CHUNKS) == [row.tobytes() for row in rows]


def test_a_summary_that_was_overwritten_is_found_and_the_kv_is_good(module_daemon: Daemon) -> None:
    with module_daemon.connect(LAYOUT) as pool:
        keys = store(pool, seed=18)
        with pool.leased_memory(pool.acquire(pool.lookup(keys))) as memory:
            session = memory.lease.session
            assert session is not None
            session.arena.view()[int(memory.lease.rows.offsets[3]) + LAYOUT.chunk_bytes + USED - 1] ^= 1
            assert memory.good_summaries().tolist() == [number != 3 for number in range(CHUNKS)]
            assert memory.verify().chunks == CHUNKS
        assert_loads(pool, keys)
        assert len(module_daemon.problems()) == 1, "a deep check reads all extents"


@pytest.mark.parametrize(
    "write_mode", ["copy", pytest.param("in-place", marks=pytest.mark.slow)], indirect=["write_mode"]
)
def test_summaries_survive_a_restart_on_disk(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", ssd__checkpoint_interval="100ms")
    daemon.wait_open()
    with daemon.connect(LAYOUT) as pool:
        keys = store(pool)
        before = summaries_of(pool, keys)
        with daemon.admin() as admin:
            assert admin.demote_all(60.0)["chunks"] == CHUNKS
        assert daemon.stop() == 0
        daemon.start()
        wait_connected(pool)
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the catalogue is read")
        assert set(pool.lookup(keys).tiers) == {Level.SSD}
        assert np.array_equal(summaries_of(pool, keys), before)
        assert_loads(pool, keys)
    assert daemon.problems() == []


def test_summaries_come_from_another_node(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), owner.connect(LAYOUT) as there, here.connect(LAYOUT) as pool:
        keys = store(there)
        expected = summaries_of(there, keys)
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
        assert np.array_equal(summaries_of(pool, keys), expected)
        assert here.stats()["peer.read_bytes"] == CHUNKS * LAYOUT.stored_bytes
        assert_loads(pool, keys)


def test_the_kv_is_whole_on_another_node_only_after_the_commit(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), owner.connect(LAYOUT) as there, here.connect(LAYOUT) as pool:
        keys = keys_of(pool)
        with there.save(keys, from_=payload_of(keys)) as save:
            for layer in range(LAYOUT.layers):
                save.layer(layer)
                assert save._copying
                assert layer == LAYOUT.layers - 1 or save._copying[0][1].wait(60.0)
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the save has been reported")
            with pool.acquire(pool.lookup(keys)) as lease:
                load = pool.load(lease, into=np.zeros((CHUNKS, LAYOUT.chunk_bytes), np.uint8))
                assert load.wait_layer(LAYOUT.layers - 2, 60.0)
                assert not load.wait_layer(LAYOUT.layers - 1, 0.2)
                load.cancel()
                assert save.commit().stored == CHUNKS
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "it is known to be stored")
        assert_loads(pool, keys)


def test_layouts_with_and_without_summaries_share_nothing(module_daemon: Daemon) -> None:
    plain = replace(LAYOUT, summaries="")
    with module_daemon.connect(LAYOUT) as pool, module_daemon.connect(plain) as other:
        store(pool, seed=19)
        assert other.lookup(keys_of(other, seed=19)).chunks == 0
        store(other, seed=19)
        assert pool.lookup(keys_of(pool, seed=19)).chunks == CHUNKS
