"""Two daemons with TransferEngine or NIXL: what one has stored comes to the other by it, and whatever fails is a miss."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.server.keeping.own_keeper import drop_everything
from kvpool.states import Level
from kvpool.transfer.engine.engine import LIBRARIES
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.payload import assert_right_bytes, payload_of, store, tokens_of
from tests.rigs.transfer.engine_daemons import (
    DEVICES,
    LIBRARY,
    PATIENCE,
    PROTOCOL,
    child_of,
    connected,
    engine_daemons,
    load,
    needs_engine,
    needs_nixl,
    serving,
    until,
)
from tests.rigs.transfer.stranger import stranger

CHUNKS = 40
# Layers so large that a part of the smallest buffer has a few of them.
LARGE = kv.Layout(layers=6, kv_heads=4, head_dim=64, dtype="float16", chunk_tokens=64)
LARGE_CHUNKS = 20
SLOW = {"owner__peer__rate": "6MiB", "owner__dram__capacity": "64MiB", "here__dram__capacity": "64MiB"}


def chain_of(pool: kv.Pool, layout: kv.Layout, chunks: int, seed: int = 1) -> kv.KeyChain:
    return pool.keys(tokens_of(seed, chunks * layout.chunk_tokens))


def announced(pool: kv.Pool, keys: kv.KeyChain) -> None:
    until(lambda: pool.lookup(keys).chunks == len(keys), "the hint has come")


@contextmanager
def stored_there(
    directory: Path, library: str = "mooncake", layout: kv.Layout = SMALL, chunks: int = CHUNKS, **options: str
) -> Iterator[tuple[Daemon, Daemon, kv.Pool, kv.KeyChain]]:
    """Two connected daemons, a Pool on the second, and a chain that the first one has and the second one knows."""
    with (
        engine_daemons(directory, library, **options) as (owner, here),
        owner.connect(layout) as there,
        here.connect(layout) as pool,
    ):
        connected(owner, here)
        keys = chain_of(pool, layout, chunks)
        assert store(there, keys).stored == chunks
        announced(pool, keys)
        yield owner, here, pool, keys


@LIBRARY
def test_what_one_has_stored_comes_by_the_library(tmp_path: Path, library: str) -> None:
    with stored_there(tmp_path, library) as (owner, here, pool, keys):
        assert set(pool.lookup(keys).tiers) == {Level.PEER}
        assert load(pool, keys, SMALL).reason == "complete"
        stats = here.stats()
        assert stats["peer.rdma.pulls"] == 1
        assert stats["peer.tcp.pulls"] == 0
        assert stats["peer.rdma.read_bytes"] == owner.stats()["peer.rdma.served_bytes"] == CHUNKS * SMALL.chunk_bytes
        until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended")


@LIBRARY
def test_layer_0_of_all_chunks_is_there_long_before_the_rest(tmp_path: Path, library: str) -> None:
    with stored_there(tmp_path, library, LARGE, LARGE_CHUNKS, **SLOW) as (_, here, pool, keys):
        with pool.acquire(pool.lookup(keys)) as lease:
            into = np.zeros((LARGE_CHUNKS, LARGE.chunk_bytes), np.uint8)
            running = pool.load(lease, into=into)
            assert running.wait_layer(0, 20.0 * PATIENCE)
            assert running.chunks_so_far == LARGE_CHUNKS
            assert not running.done(), "the other layers are on their way"
            result = running.wait()
            assert result.reason == "complete"
            assert_right_bytes(keys, LARGE, result, into)
        assert here.stats()["peer.rdma.pulls"] == 1


@LIBRARY
def test_an_owner_that_is_killed_in_mid_transfer_is_a_miss_and_its_next_life_is_a_hit(
    tmp_path: Path, library: str
) -> None:
    """Its next life has the region elsewhere: what was known of the former one is stale."""
    with stored_there(tmp_path, library, LARGE, LARGE_CHUNKS, **SLOW) as (owner, _, pool, keys):
        with pool.acquire(pool.lookup(keys)) as lease:
            into = np.zeros((LARGE_CHUNKS, LARGE.chunk_bytes), np.uint8)
            running = pool.load(lease, into=into)
            assert running.wait_layer(0, 20.0 * PATIENCE)
            child = child_of(owner)
            owner.kill()
            result = running.wait()
            assert result.chunks < LARGE_CHUNKS
            assert_right_bytes(keys, LARGE, result, into)
        until(lambda: not Path(f"/proc/{child}").exists(), "its process has ended with it")
        owner.start()
        serving(owner)
        until(lambda: pool.lookup(keys).chunks == 0, "the former life's hints have gone")
        with owner.connect(LARGE) as there:
            store(there, keys)
            until(lambda: load(pool, keys, LARGE).chunks == LARGE_CHUNKS, "the new life's chunks are hits")


@LIBRARY
def test_a_puller_that_is_killed_in_mid_transfer_leaves_nothing_behind_and_its_next_life_has_hits(
    tmp_path: Path, library: str
) -> None:
    with stored_there(tmp_path, library, LARGE, LARGE_CHUNKS, **SLOW) as (owner, here, pool, keys):
        with pool.acquire(pool.lookup(keys)) as lease:
            into = np.zeros((LARGE_CHUNKS, LARGE.chunk_bytes), np.uint8)
            running = pool.load(lease, into=into)
            assert running.wait_layer(0, 20.0 * PATIENCE)
            here.kill()
            assert_right_bytes(keys, LARGE, running.wait(), into)
        until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended")
        until(lambda: owner.stats()["peer.rdma.quarantined_bytes"] == 0, "nothing is about to be written")
        here.start()
        connected(owner, here)
        with here.connect(LARGE) as again:
            announced(again, keys)
            until(lambda: load(again, keys, LARGE).chunks == LARGE_CHUNKS, "the next life has hits")
        assert here.stats()["peer.rdma.pulls"] >= 1


@LIBRARY
def test_a_librarys_process_has_nothing_of_an_arena_that_outlives_its_daemon(tmp_path: Path, library: str) -> None:
    """Whatever it, or another node by it, still writes when the next life has begun is in memory of that process alone."""
    kept = {"here__server__keep_memory": "keeper", "here__server__keep_for": "10m"}
    with stored_there(tmp_path, library, LARGE, LARGE_CHUNKS, **SLOW, **kept) as (owner, here, pool, keys):
        try:
            with pool.acquire(pool.lookup(keys)) as lease:
                running = pool.load(lease, into=np.zeros((LARGE_CHUNKS, LARGE.chunk_bytes), np.uint8))
                assert running.wait_layer(0, 20.0 * PATIENCE)
                process = Path(f"/proc/{child_of(here)}")
                mapped = (process / "maps").read_text()
                opened = [os.readlink(one) for one in (process / "fd").iterdir()]
                here.kill()
                running.wait()
            assert "memfd:kvpool-child" in mapped
            assert "kvpool-arena" not in " ".join([mapped, *opened])
            here.start()
            assert "from life 1" in str(here.info()["dram_began"])
            assert "dram_withheld_slots" not in here.info(), "what the daemon was writing itself is free"
            connected(owner, here)
            with here.connect(LARGE) as again:
                announced(again, keys)
                until(lambda: load(again, keys, LARGE).chunks == LARGE_CHUNKS, "the next life has hits")
        finally:
            here.kill()
            drop_everything(here.socket)


@LIBRARY
@pytest.mark.parametrize("whose", ["owner", "here"])
def test_an_end_of_a_process_is_survived_and_the_stream_goes_on_meanwhile(
    tmp_path: Path, library: str, whose: str
) -> None:
    with engine_daemons(tmp_path, library) as (owner, here), owner.connect() as there, here.connect() as pool:
        connected(owner, here)
        struck = owner if whose == "owner" else here
        os.kill(child_of(struck), signal.SIGABRT)
        keys = chain_of(pool, SMALL, CHUNKS)
        store(there, keys)
        announced(pool, keys)
        until(lambda: load(pool, keys, SMALL).chunks == CHUNKS, "the chunks come, by either way")
        until(lambda: struck.stats()["peer.rdma.process_starts"] == 2, "it was started again")


@needs_engine
@pytest.mark.skipif(PROTOCOL != "rdma", reason="over TCP the owner's process sends the bytes")
def test_a_read_by_rdma_needs_nothing_of_the_owners_process(tmp_path: Path) -> None:
    """The device reads its memory, over the connection that was made before."""
    with stored_there(tmp_path) as (owner, here, pool, keys):
        child = child_of(owner)
        os.kill(child, signal.SIGSTOP)
        try:
            assert load(pool, keys, SMALL).reason == "complete"
        finally:
            os.kill(child, signal.SIGCONT)
        assert here.stats()["peer.rdma.pulls"] == 1


@LIBRARY
@pytest.mark.skipif(PROTOCOL == "rdma", reason="an RDMA read needs nothing of the owner's process")
def test_a_process_that_hangs_is_a_miss_in_time(tmp_path: Path, library: str) -> None:
    options = {"here__peer__stall_timeout": "300ms", "here__peer__pull_timeout": "1s"}
    with stored_there(tmp_path, library, SMALL, CHUNKS, **options) as (owner, here, pool, keys):
        child = child_of(owner)
        os.kill(child, signal.SIGSTOP)
        try:
            assert load(pool, keys, SMALL).chunks < CHUNKS
            assert here.stats()["peer.rdma.quarantined_bytes"] > 0
            until(lambda: load(pool, keys, SMALL).chunks == CHUNKS, "the stream is used next")
            assert here.stats()["peer.tcp.pulls"] > 0
        finally:
            os.kill(child, signal.SIGCONT)
        until(lambda: here.stats()["peer.rdma.quarantined_bytes"] == 0, "the late reads have ended", 60.0)


@pytest.mark.parametrize(
    ("library", "of_owner"),
    [
        pytest.param("mooncake", "tcp", marks=needs_engine, id="mooncake, none"),
        pytest.param("nixl", "tcp", marks=needs_nixl, id="nixl, none"),
        pytest.param("nixl", "rdma", marks=needs_nixl, id="nixl, mooncake"),
    ],
)
def test_a_node_without_the_library_is_pulled_from_by_the_stream(tmp_path: Path, library: str, of_owner: str) -> None:
    """That has none or the other one, whether it is installed there or not: they have no way in common, which both say."""
    with (
        engine_daemons(tmp_path, library, owner__peer__transport=of_owner) as (owner, here),
        owner.connect() as there,
        here.connect() as pool,
    ):
        serving(here)
        keys = chain_of(pool, SMALL, CHUNKS)
        store(there, keys)
        announced(pool, keys)
        assert load(pool, keys, SMALL).reason == "complete"
        stats = here.stats()
        assert (stats["peer.rdma.pulls"], stats["peer.tcp.pulls"], stats["peer.rdma.refused"]) == (0, 1, 1)


@needs_engine
def test_what_a_stranger_writes_meanwhile_is_never_served(tmp_path: Path) -> None:
    """Whoever reaches the port can write: a wrong layer is a miss, and a pull that succeeds has the right bytes."""
    with (
        engine_daemons(tmp_path) as (owner, here),
        owner.connect() as there,
        here.connect() as pool,
        stranger() as another,
    ):
        connected(owner, here)
        half = 4 << 20
        another.begin(str(owner.info()["peer_rdma_server"]), half, half, 1_000_000)
        seeds = iter(range(1, 1000))

        def is_struck() -> bool:
            keys = chain_of(pool, SMALL, CHUNKS, next(seeds))
            store(there, keys)
            announced(pool, keys)
            found = load(pool, keys, SMALL).chunks
            with owner.admin() as admin:
                admin.flush(None, None, "")
            return found < CHUNKS

        for _ in range(2):
            until(is_struck, "the stranger has struck", 60.0)
        assert here.stats()["peer.rdma.pulls"] > 1


@LIBRARY
def test_layers_of_a_save_are_followed(tmp_path: Path, library: str) -> None:
    with engine_daemons(tmp_path, library) as (owner, here), owner.connect() as there, here.connect() as pool:
        connected(owner, here)
        keys = chain_of(pool, SMALL, CHUNKS)
        with there.save(keys, from_=payload_of(keys, SMALL)) as save:
            for layer in range(SMALL.layers):
                save.layer(layer)
                assert save._copying
                assert save._copying[0][1].wait(20.0 * PATIENCE)
            announced(pool, keys)
            with pool.acquire(pool.lookup(keys)) as lease:
                into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
                running = pool.load(lease, into=into)
                assert running.wait_layer(SMALL.layers - 2, 20.0 * PATIENCE)
                assert running.chunks_so_far == CHUNKS
                result = save.commit()
                assert result is not None
                assert result.stored == CHUNKS
                loaded = running.wait()
                assert loaded.chunks == CHUNKS
                assert_right_bytes(keys, SMALL, loaded, into)
        assert here.stats()["peer.rdma.pulls"] == 1


@LIBRARY
def test_what_is_used_is_shown(tmp_path: Path, library: str) -> None:
    with engine_daemons(tmp_path, library) as (owner, here):
        serving(owner, here)
        info = owner.info()
        assert info["peer_rdma_library"] == LIBRARIES[library]
        assert info["peer_rdma_protocol"] == PROTOCOL
        assert info["peer_rdma_devices"] == DEVICES
        assert info["peer_rdma_buffer_bytes"] == 8 << 20
