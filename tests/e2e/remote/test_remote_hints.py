"""Chunks that another node is known to have, or has no more: found by lookup, and misses where they are not fetched."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.key_column import KeyColumn
from kvpool.protocol import versions
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.server.health.probe import Probe
from kvpool.states import Level
from kvpool_client.connection.session import Session
from kvpool_client.verbs.pending import PendingChunks
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.nodes.remote_daemon import NODE, RemoteDaemon
from tests.rigs.payload import assert_right_bytes, chunks_leased, load_all, store, tokens_of
from tests.rigs.runs.children import assert_in_child

DRAM, PEER = int(Level.DRAM), int(Level.PEER)
_seeds = itertools.count(1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteDaemon]:
    with RemoteDaemon(tmp_path_factory.mktemp("remote")) as daemon:
        yield daemon


@pytest.fixture
def pool(shared: RemoteDaemon) -> Iterator[kv.Pool]:
    with shared.connect() as connected:
        yield connected


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests for leases, as they are made."""
    made: list[str] = []
    call = Session.call

    def noted(session: Session, request: object, *arguments: Any) -> object:
        if isinstance(request, m.Acquire):
            made.append("leaves" if len(request.keys) < 32 * request.chunks else "keys")
        return call(session, request, *arguments)

    monkeypatch.setattr(Session, "call", noted)
    return made


def chains(pool: kv.Pool, chunks: int, first: int) -> tuple[kv.KeyChain, kv.KeyChain]:
    """The keys of a prompt of its own, and of its first chunks."""
    tokens = tokens_of(next(_seeds), chunks * SMALL.chunk_tokens)
    return pool.keys(tokens), pool.keys(tokens[: first * SMALL.chunk_tokens])


def column(keys: kv.KeyChain, first: int, end: int) -> KeyColumn:
    return KeyColumn.of(keys[number] for number in range(first, end))


def test_a_hit_goes_on_over_another_nodes_chunks_and_its_lease_has_those_of_this_node(
    shared: RemoteDaemon, pool: kv.Pool, requests: list[str]
) -> None:
    keys, first = chains(pool, 6, 2)
    assert not pool.lookup(keys)
    shared.announce(column(keys, 2, 5))
    assert not pool.lookup(keys)  # nobody has what comes before
    assert store(pool, first).stored == 2
    hit = pool.lookup(keys)
    assert (hit.chunks, hit.tokens, hit.chunks_here) == (5, 5 * SMALL.chunk_tokens, 2)
    assert hit.tiers.tolist() == [DRAM, DRAM, PEER, PEER, PEER]
    with pool.acquire(hit) as lease:
        assert (lease.chunks, lease.tiers.tolist()) == (2, [DRAM, DRAM])
        into = np.zeros((2, SMALL.chunk_bytes), np.uint8)
        result = pool.load(lease, into=into).wait()
    assert requests == ["keys"]
    assert (result.chunks, result.reason) == (2, "complete")
    assert_right_bytes(keys, SMALL, result, into)


def test_chunks_that_are_only_hinted_at_are_a_miss_of_one_round_trip_and_are_saved(
    shared: RemoteDaemon, pool: kv.Pool, requests: list[str]
) -> None:
    keys, _ = chains(pool, 4, 0)
    shared.announce(column(keys, 0, 4))
    hit = pool.lookup(keys)
    assert (hit.tiers.tolist(), hit.chunks_here) == ([PEER] * 4, 0)
    lease = pool.acquire(hit)
    assert (lease.chunks, lease.hold.is_live, requests) == (0, False, ["keys"])
    assert pool.load(lease, into=np.zeros((0, SMALL.chunk_bytes), np.uint8)).wait().chunks == 0
    assert store(pool, keys).stored == 4
    assert pool.lookup(keys).tiers.tolist() == [DRAM] * 4
    result, into = load_all(pool, keys)
    assert result.chunks == 4
    assert_right_bytes(keys, SMALL, result, into)


def test_a_hit_on_this_node_alone_is_leased_by_its_leaf(pool: kv.Pool, requests: list[str]) -> None:
    keys, _ = chains(pool, 4, 0)
    assert store(pool, keys).stored == 4
    with pool.acquire(pool.lookup(keys)) as lease:
        assert lease.chunks == 4
    assert requests == ["leaves"]


def test_a_new_life_of_the_other_node_is_a_miss_at_once(shared: RemoteDaemon, pool: kv.Pool) -> None:
    keys, _ = chains(pool, 4, 0)
    shared.announce(column(keys, 0, 4))
    assert pool.lookup(keys).chunks == 4
    shared.remote.clear(NODE)
    assert not pool.lookup(keys)


def test_hits_are_counted_at_their_level(shared: RemoteDaemon, pool: kv.Pool) -> None:
    keys, _ = chains(pool, 3, 0)
    shared.announce(column(keys, 0, 3))
    pool.lookup(keys)
    assert pool.stats()["lookup_hit_chunks"] == 3


def test_a_pending_chunk_that_its_writer_gave_up_is_not_stored_because_another_node_has_it(
    shared: RemoteDaemon, pool: kv.Pool
) -> None:
    keys, _ = chains(pool, 1, 0)
    shared.announce(column(keys, 0, 1))
    session = pool._link.session
    assert session is not None
    assert session.index.lookup(keys[0]) == bytes([PEER])
    assert not PendingChunks(session, column(keys, 0, 1)).wait(1.0)
    assert store(pool, keys).stored == 1
    assert PendingChunks(session, column(keys, 0, 1)).wait(1.0)


def test_a_forked_child_misses(shared: RemoteDaemon, pool: kv.Pool) -> None:
    keys, _ = chains(pool, 2, 0)
    shared.announce(column(keys, 0, 2))
    assert_in_child(lambda: not pool.lookup(keys))
    assert pool.lookup(keys).chunks == 2


def test_a_daemon_without_a_table_passes_none(shared_daemon: Daemon) -> None:
    hello = m.Hello(m.MAGIC, versions.NEWEST, m.ROLE_ENGINE, "test-model", SMALL.to_wire())
    with contextlib.closing(BlockingConnection(shared_daemon.socket, hello, 5.0)) as connection:
        assert (len(connection.fds), connection.welcome.remote_bytes) == (2, 0)


def test_the_probe_takes_both_welcomes(shared: RemoteDaemon) -> None:
    probe = Probe(shared.socket, lambda _: None)
    with contextlib.closing(probe):
        probe.run()


@pytest.mark.parametrize("at", [0, 8])
def test_a_table_that_cannot_be_read_is_as_none(shared: RemoteDaemon, at: int) -> None:
    """Of another kind, or another version: the pool serves what this node has."""
    table = shared.remote.mapping.view()
    table[at] += 1
    try:
        with shared.connect() as pool:
            assert pool.connected
            assert "the table of other nodes' chunks cannot be read" in str(pool.stats()["last_error"])
            keys, first = chains(pool, 4, 2)
            shared.announce(column(keys, 0, 4))
            assert not pool.lookup(keys)
            assert store(pool, first).stored == 2
            assert pool.lookup(keys).chunks == 2
    finally:
        table[at] -= 1


def test_a_table_of_garbage_gives_hints_that_are_misses_and_right_bytes(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = np.random.default_rng(seed)
    with RemoteDaemon(tmp_path) as daemon, daemon.connect() as pool:
        table = daemon.remote.mapping.view()
        keys, first = chains(pool, 40, 20)
        assert store(pool, first).stored == 20
        for _ in range(20):
            table[:] = np.frombuffer(chance.bytes(len(table)), np.uint8)
            for chain in (keys, first, chains(pool, 30, 0)[0]):
                hit = pool.lookup(chain)
                assert len(hit.tiers) == hit.chunks <= len(chain)
                assert chunks_leased(pool, hit) == hit.chunks_here
            result, into = load_all(pool, keys)
            assert result.chunks == 20
            assert_right_bytes(keys, SMALL, result, into)
        assert daemon.problems() == []


def test_a_truncated_table_is_refused() -> None:
    buckets = kvpool_native.RemoteIndex.buckets_for(1000)
    size = kvpool_native.RemoteIndex.bytes_of(buckets)
    mapping = kvpool_native.Mapping.create("truncated", size)
    kvpool_native.RemoteIndex(mapping, buckets, bytes(16))
    for shown in (4096, size - 4096):
        with pytest.raises(ValueError, match="not a remote index"):
            kvpool_native.RemoteView(kvpool_native.Mapping.attach(mapping.fd, shown, writable=False))
    with pytest.raises(OSError, match="size"):
        kvpool_native.Mapping.attach(mapping.fd, size + 4096, writable=False)
