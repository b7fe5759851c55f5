"""Tests of two daemons with a bad network between them: no wrong byte, and every wait ends by the deadline that is named."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.nodes.network import (
    ANSWER_S,
    PULL_S,
    STALL_S,
    HostedDaemon,
    Network,
    chain_of,
    ends_within,
    load,
    network,
    wait_known,
)
from tests.rigs.nodes.proxy import Weather
from tests.rigs.nodes.two_nodes import assert_converged
from tests.rigs.payload import assert_right_bytes, store

CHUNKS = 24
CHAIN_BYTES = CHUNKS * SMALL.chunk_bytes


@dataclass
class Pair:
    """An owner, and a node that pulls from it, with a proxy between them."""

    net: Network
    owner: HostedDaemon
    here: HostedDaemon
    there: kv.Pool
    pool: kv.Pool
    chains: int = 0

    @property
    def stream(self) -> Weather:
        """Of the owner's stream."""
        return self.net.stream["owner"]

    @property
    def control(self) -> Weather:
        """Of the owner's control plane."""
        return self.net.control["owner"]

    def known_chain(self) -> kv.KeyChain:
        """A new chain, which the owner has and the other node knows."""
        self.chains += 1
        keys = chain_of(self.pool, self.chains, CHUNKS)
        assert store(self.there, keys).stored == CHUNKS
        wait_known(self.pool, keys, CHUNKS)
        return keys

    def clear_up(self) -> None:
        """Good weather again: what is not here is pulled, nothing is left, and nothing is broken."""
        for weather in (self.stream, self.control):
            vars(weather).update(vars(Weather()))
        keys = self.known_chain()
        wait_until(lambda: load(self.pool, keys).reason == "complete", "the node pulls again", 60.0)
        with self.here.admin() as admin:
            admin.flush(None, None, "")
        for daemon in (self.owner, self.here):
            wait_until(lambda: daemon.stats()["leases"] == 0, "no lease is left")  # noqa: B023 - used at once
            assert daemon.stats()["peer.pulls_under_way"] == 0
            # A proxy with nobody behind it ends handshakes, as wrong keys do: a problem until the next attempt, and no longer.
            wait_until(lambda: daemon.stats()["peer.links.ready"] == 1, "the nodes are linked")  # noqa: B023 - used at once
            assert daemon.problems() == []
        assert_converged(self.owner, self.here)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The daemons of this module."""
    with (
        network(tmp_path_factory.mktemp("nodes"), ("owner", "here"), seed=1) as net,
        net["owner"].daemon() as owner,
        net["here"].daemon() as here,
        owner.connect() as there,
        here.connect(timeout_s=120.0) as pool,
    ):
        yield Pair(net, owner, here, there, pool)


@pytest.fixture
def pair(both: Pair) -> Iterator[Pair]:
    """The same, in good weather before and after."""
    yield both
    both.clear_up()


@pytest.mark.slow
def test_a_stream_that_stalls_ends_by_its_deadline(pair: Pair) -> None:
    keys = pair.known_chain()
    pair.stream.is_stalled = True
    with ends_within(STALL_S, "peer.stall_timeout"):
        assert load(pair.pool, keys).chunks == 0


def test_an_owner_that_does_not_answer_is_a_miss_by_its_deadline(pair: Pair) -> None:
    keys = pair.known_chain()
    pair.control.is_stalled = True
    with ends_within(ANSWER_S, "peer.answer_timeout"):
        assert load(pair.pool, keys).chunks == 0


def test_a_slow_peer_brings_what_it_can_and_ends_by_its_deadline(pair: Pair) -> None:
    keys = pair.known_chain()
    pair.stream.bytes_per_s = CHAIN_BYTES / (2 * PULL_S)
    with ends_within(PULL_S, "peer.pull_timeout"):
        # Layer 0 of all chunks comes first: no chunk is whole before all of them are nearly so.
        assert load(pair.pool, keys).chunks < CHUNKS


def test_a_slow_network_brings_the_first_layer_of_all_chunks_first(pair: Pair) -> None:
    keys = pair.known_chain()
    pair.stream.bytes_per_s = 2 * CHAIN_BYTES / PULL_S
    order = load_by_layer(pair, keys)
    assert order == sorted(order)
    assert order[0] > 0, "layer 0 was there before bytes of others had passed"
    assert order[-1] >= CHAIN_BYTES * 0.9
    assert order[0] <= CHAIN_BYTES * 0.75, "layer 0 of all chunks comes before most bytes of the other two"


def load_by_layer(pair: Pair, keys: kv.KeyChain) -> list[int]:
    """Bytes that the owner had sent when each layer of all chunks was in place. Compares the bytes at the end."""
    into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
    before = pair.net.middle.counts["passed_bytes"]
    with pair.pool.acquire(pair.pool.lookup(keys)) as lease:
        running = pair.pool.load(lease, into=into)
        order = []
        for layer in range(SMALL.layers):
            assert running.wait_layer(layer)
            order.append(pair.net.middle.counts["passed_bytes"] - before)
        result = running.wait()
    assert result.reason == "complete"
    assert_right_bytes(keys, SMALL, result, into)
    return order


@pytest.mark.campaign
def test_a_far_network_only_takes_longer(pair: Pair) -> None:
    keys = pair.known_chain()
    pair.stream.delay_s = pair.control.delay_s = 0.05
    assert load(pair.pool, keys).reason == "complete"


@pytest.mark.campaign
@pytest.mark.parametrize("after", [0, 1, 5000, 100_000], ids=lambda count: f"after {count} bytes")
def test_a_stream_that_is_cut_ends_at_once(pair: Pair, after: int) -> None:
    keys = pair.known_chain()
    pair.stream.cut_after = after
    with ends_within(0.0, "nothing: the connection has ended"):
        assert load(pair.pool, keys).chunks < CHUNKS


def test_changed_bytes_are_never_served(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(2):
        keys = pair.known_chain()
        pair.stream.flip_at = chance.randrange(CHAIN_BYTES // 2 - 1)
        flipped = pair.net.middle.counts["flipped"]
        with ends_within(PULL_S, "peer.pull_timeout"):
            assert load(pair.pool, keys).chunks < CHUNKS
        assert pair.net.middle.counts["flipped"] > flipped
        pair.clear_up()


@pytest.mark.campaign
def test_changed_bytes_of_the_control_plane_end_the_link_and_nothing_else(pair: Pair) -> None:
    keys = pair.known_chain()
    flipped = pair.net.middle.counts["flipped"]
    pair.control.flip_at = 700  # behind the handshake
    pair.net.middle.cut()
    wait_until(lambda: pair.net.middle.counts["flipped"] > flipped, "a byte was changed")
    assert load(pair.pool, keys).chunks in (0, CHUNKS)


@pytest.mark.campaign
def test_a_lossy_network_brings_right_bytes_or_none(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    whole = 0
    for _ in range(30):
        keys = pair.known_chain() if pair.here.stats()["peer.links.ready"] else chain_of(pair.pool, pair.chains, CHUNKS)
        pair.stream.cut_chance = pair.stream.stall_chance = 0.02 * chance.random()
        pair.control.cut_chance = 0.02 * chance.random()
        with ends_within(ANSWER_S + PULL_S, "peer.answer_timeout and peer.pull_timeout"):
            whole += load(pair.pool, keys).reason == "complete"
        pair.control.cut_chance = 0.0
    print(f"{whole} of 30 chains came whole")


@pytest.mark.campaign
def test_an_owner_that_is_killed_in_the_middle_is_a_miss_of_the_rest(pair: Pair) -> None:
    keys = pair.known_chain()
    pair.stream.bytes_per_s = CHAIN_BYTES / PULL_S
    with pair.pool.acquire(pair.pool.lookup(keys)) as lease:
        assert lease.chunks == CHUNKS
        wait_until(lambda: pair.owner.stats()["peer.offers.sent_bytes"] > 0, "bytes have been sent")
        pair.owner.kill()
        with ends_within(STALL_S, "peer.stall_timeout"):
            wait_until(lambda: pair.here.stats()["peer.pulls_under_way"] == 0, "the pull has ended")
    assert load(pair.pool, keys).chunks < CHUNKS
    pair.owner.start()
    wait_until(lambda: pair.there.connected, "the owner's client is served again")
