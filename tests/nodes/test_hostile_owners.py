"""Tests of an owner with keys that count, who lies: no wrong byte, no connection to a third party, every wait has its end."""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

import kvpool_client as kv
import kvpool_native
from kvpool.config.curve_keys import make_key_pair
from kvpool.key_column import KeyColumn
from kvpool.keys import domain_tag
from kvpool.peers.control import records as r
from kvpool.peers.control.identity import NodeIdentity
from tests.hostile.rigs.daemon_watch import assert_never_internal, private_bytes
from tests.rigs.daemon import wait_until
from tests.rigs.nodes.hostile_owner import EXTENT, GONE, WAITING, Asked, HostileOwner, Liar, honest, hostile_owner, mark
from tests.rigs.nodes.network import (
    ANSWER_S,
    PULL_S,
    STALL_S,
    STREAM_PORT,
    HostedDaemon,
    Network,
    chain_of,
    ends_within,
    load,
    network,
    wait_known,
)
from tests.rigs.nodes.peers import identity_of

CHUNKS = 24
GROWTH_MAX = 64 << 20


@dataclass
class Victim:
    """A daemon, and the liar that it may ask."""

    net: Network
    owner: HostileOwner
    here: HostedDaemon
    pool: kv.Pool
    chains: int = 0

    @property
    def liar(self) -> Liar:
        """What the owner offers and sends."""
        return self.owner.liar

    def known_chain(self) -> kv.KeyChain:
        """A chain that the owner claims to have."""
        self.chains += 1
        keys = chain_of(self.pool, self.chains, CHUNKS)
        self.owner.announce(KeyColumn.of(keys[number] for number in range(len(keys))))
        wait_known(self.pool, keys, CHUNKS)
        return keys


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """The nodes of this module."""
    with (
        network(tmp_path_factory.mktemp("nodes"), ("owner", "here")) as net,
        hostile_owner(net["owner"], net["here"]) as owner,
        net["here"].daemon() as here,
        here.connect(timeout_s=120.0) as pool,
    ):
        yield Victim(net, owner, here, pool)


@pytest.fixture
def victim(both: Victim) -> Iterator[Victim]:
    """The same, with an owner that is honest before and after."""
    before = private_bytes(both.here)
    yield both
    both.liar.twist, both.liar.stream = lambda offer: offer, honest
    wait_until(lambda: both.here.stats()["peer.links.ready"] == 1, "the nodes are linked", 60.0)
    wait_until(lambda: load(both.pool, both.known_chain()).reason == "complete", "the owner is asked again", 60.0)
    with both.here.admin() as admin:
        admin.flush(None, None, "")
    wait_until(lambda: both.here.stats()["peer.pulls_under_way"] == 0, "no pull is left")
    assert private_bytes(both.here) - before < GROWTH_MAX
    assert both.here.problems() == []
    assert_never_internal(both.here)


async def other_bytes(asked: Asked) -> AsyncIterator[bytes]:
    """A byte of each last extent differs from its checksum."""
    for number, extent, data in asked.extents():
        sent = data if extent < asked.layout.extents - 1 else data[:-1] + bytes([data[-1] ^ 1])
        yield mark(EXTENT, number, extent, len(data), kvpool_native.crc32c(data)) + sent


def length(size: int) -> Callable[[Asked], AsyncIterator[bytes]]:
    """Extents of another length."""

    async def send(asked: Asked) -> AsyncIterator[bytes]:
        for number, extent, data in asked.extents():
            sent = (data * 2)[: min(size, 2 * len(data))]
            yield mark(EXTENT, number, extent, size, kvpool_native.crc32c(sent)) + sent

    return send


async def endless_extents(asked: Asked) -> AsyncIterator[bytes]:
    """Everything but the last extent, and then the first ones again, without an end."""
    for _ in itertools.count():
        for number, extent, data in asked.extents():
            if extent < asked.layout.extents - 1:
                yield mark(EXTENT, number, extent, len(data), kvpool_native.crc32c(data)) + data
                await asyncio.sleep(0)


async def endless_waiting(asked: Asked) -> AsyncIterator[bytes]:
    """Always about to send something, as fast as possible."""
    while True:
        yield mark(WAITING) * 512
        await asyncio.sleep(0)


async def now_and_then_waiting(asked: Asked) -> AsyncIterator[bytes]:
    """Always about to send something, often enough to be no stalled stream."""
    while True:
        yield mark(WAITING)
        await asyncio.sleep(STALL_S / 4)


async def byte_by_byte(asked: Asked) -> AsyncIterator[bytes]:
    """The right bytes, one at a time, often enough to be no stalled stream."""
    async for piece in honest(asked):
        for at in range(len(piece)):
            yield piece[at : at + 1]
            await asyncio.sleep(STALL_S / 4)


async def garbage(asked: Asked) -> AsyncIterator[bytes]:
    """No marks at all."""
    while True:
        yield os.urandom(64 << 10)
        await asyncio.sleep(0)


async def silence(asked: Asked) -> AsyncIterator[bytes]:
    """Nothing."""
    await asyncio.sleep(3600)
    yield b""


async def last_extent_first(asked: Asked) -> AsyncIterator[bytes]:
    """Right extents in another order."""
    for number, extent, data in reversed(list(asked.extents())):
        yield mark(EXTENT, number, extent, len(data), kvpool_native.crc32c(data)) + data


async def others_chunks(asked: Asked) -> AsyncIterator[bytes]:
    """Chunks that travel on other connections, or that nobody asked for."""
    for number, extent, data in asked.extents():
        yield mark(EXTENT, number + 1, extent, len(data), kvpool_native.crc32c(data)) + data


async def gone_and_yet_there(asked: Asked) -> AsyncIterator[bytes]:
    """A chunk is gone, and is sent all the same."""
    for number, extent, data in asked.extents():
        yield mark(GONE, number) if not extent else b""
        yield mark(EXTENT, number, extent, len(data), kvpool_native.crc32c(data)) + data


def _with_campaign(names: Iterable[str], *, always: Sequence[str]) -> list[ParameterSet]:
    """All these cases; only some of them run without the campaign."""
    return [pytest.param(name, marks=[] if name in always else pytest.mark.campaign) for name in names]


AT_ONCE, BY_STALL, BY_DEADLINE = 0.0, STALL_S, PULL_S
STREAMS = {
    "other bytes": (other_bytes, AT_ONCE, "nothing: the checksum is wrong"),
    "a byte less": (length(4095), AT_ONCE, "nothing: the length is wrong"),
    "a byte more": (length(4097), AT_ONCE, "nothing: the length is wrong"),
    "an absurd length": (length(1 << 63), AT_ONCE, "nothing: the length is wrong"),
    "extents without end": (endless_extents, AT_ONCE, "nothing: the extent is not the next one"),
    "waiting without end": (endless_waiting, BY_DEADLINE, "peer.pull_timeout"),
    "waiting now and then": (now_and_then_waiting, BY_DEADLINE, "peer.pull_timeout"),
    "byte by byte": (byte_by_byte, BY_DEADLINE, "peer.pull_timeout"),
    "garbage": (garbage, AT_ONCE, "nothing: it is no mark"),
    "silence": (silence, BY_STALL, "peer.stall_timeout"),
    "the last extent first": (last_extent_first, AT_ONCE, "nothing: the extent is not the next one"),
    "others' chunks": (others_chunks, AT_ONCE, "nothing: the chunk is not of this connection"),
    "gone and yet there": (gone_and_yet_there, AT_ONCE, "nothing: the chunk was gone"),
}


@pytest.mark.parametrize("name", _with_campaign(STREAMS, always=("other bytes", "a byte more", "silence")))
def test_no_stream_brings_a_wrong_byte_or_lasts_beyond_its_deadline(victim: Victim, name: str) -> None:
    stream, seconds, option = STREAMS[name]
    keys = victim.known_chain()
    victim.liar.stream = stream
    streams = victim.liar.counts["streams"]
    with ends_within(seconds, option):
        assert load(victim.pool, keys).chunks < CHUNKS
    assert victim.liar.counts["streams"] > streams, "it was asked"


OFFERS: dict[str, Callable[[r.Offer], r.Offer]] = {
    "more chunks than asked for": lambda offer: replace(offer, chunks=offer.chunks + 1),
    "another pull": lambda offer: replace(offer, pull=offer.pull + 1),
    "too many connections": lambda offer: replace(offer, connections=r.CONNECTIONS_MAX + 1),
    "the most connections": lambda offer: replace(offer, connections=r.CONNECTIONS_MAX),
    "no address": lambda offer: replace(offer, address=""),
    "a name": lambda offer: replace(offer, address=f"tcp://localhost:{STREAM_PORT}"),
    "port 0": lambda offer: replace(offer, address=offer.address.rpartition(":")[0] + ":0"),
    "checks of another number": lambda offer: replace(offer, checks=bytes(4)),
}


@pytest.mark.parametrize("name", _with_campaign(OFFERS, always=("more chunks than asked for", "too many connections")))
def test_no_offer_keeps_a_pull_beyond_its_deadline(victim: Victim, name: str) -> None:
    keys = victim.known_chain()
    victim.liar.twist, offers = OFFERS[name], victim.liar.offers
    with ends_within(ANSWER_S + STALL_S, "peer.answer_timeout and peer.stall_timeout"):
        load(victim.pool, keys)
        wait_until(lambda: victim.here.stats()["peer.pulls_under_way"] == 0, "the pull has ended")
    assert victim.liar.offers > offers


@pytest.mark.parametrize("where", _with_campaign(("here", "a third host"), always=("here",)))
def test_an_offer_with_another_address_connects_to_nobody_there(victim: Victim, where: str) -> None:
    keys = victim.known_chain()
    asking, owner = victim.net["here"].host, victim.net["owner"].host
    host, address = (asking, "127.0.0.1") if where == "here" else (owner, "10.9.9.9")
    if host is owner:
        owner.run("ip", "address", "replace", f"{address}/32", "dev", "lo")
        asking.run("ip", "route", "replace", f"{address}/32", "via", owner.address, "onlink", "dev", "veth0")
    with host.entered():
        canary = socket.create_server((address, 0))
    port = canary.getsockname()[1]
    victim.liar.twist, offers = lambda offer: replace(offer, address=f"tcp://{address}:{port}"), victim.liar.offers
    with canary, ends_within(ANSWER_S, "peer.answer_timeout"):
        assert load(victim.pool, keys).chunks == 0
        wait_until(lambda: victim.here.stats()["peer.pulls_under_way"] == 0, "the pull has ended")
        canary.setblocking(False)
        with pytest.raises(BlockingIOError):
            canary.accept()
    assert victim.liar.offers > offers
    assert victim.here.stats()["peer.failed_pulls_foreign"] > 0


@pytest.mark.campaign
def test_a_handshake_that_never_ends_delays_nobody(tmp_path: Path) -> None:
    with network(tmp_path, ("owner", "here")) as net:
        with net["owner"].host.entered():
            silent = socket.create_server((net["owner"].host.address, 9470))
        with silent, net["here"].daemon() as here, here.connect() as pool:
            wait_until(lambda: here.stats()["peer.links.connects"] > 1, "the link has given up, and tries again")
            assert pool.lookup(chain_of(pool, 1, CHUNKS)).chunks == 0
            assert here.stop() == 0


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("what", "remedy"),
    [("version", "update this node"), ("domain", "server.domain_secret_file"), ("another key", "its public key")],
)
def test_a_node_that_cannot_be_a_peer_is_not_asked(tmp_path: Path, what: str, remedy: str) -> None:
    with network(tmp_path, ("owner", "here")) as net:
        identity = identity_of("owner")
        if what == "domain":
            identity = replace(identity, domain=domain_tag(b"another"))
        if what == "another key":
            net["owner"].pair = make_key_pair()
        with hostile_owner(net["owner"], net["here"], identity=identity) as owner, net["here"].daemon() as here:
            if what == "version":
                owner.do(lambda: setattr(owner.server, "_identity", Newer(identity)))
            wait_until(lambda: here.stats()["peer.links.connects"] > 1, "the link was refused, and tries again")
            assert here.stats()["peer.links.ready"] == 0
            wait_until(lambda: here.problems() != [], "the operator reads that the node cannot be used")
            (problem,) = here.problems()
            assert problem.startswith("peers: ")
            assert remedy in problem


@dataclass
class Newer:
    """Speaks versions that nobody knows yet."""

    identity: NodeIdentity

    def accept(self, hello: r.Hello) -> int:
        """Whatever comes."""
        return r.NEWEST_VERSION + 1

    def hello(self, **versions: int) -> r.Hello:
        """In a version of its own."""
        return self.identity.hello(oldest=r.NEWEST_VERSION + 1, newest=r.NEWEST_VERSION + 1)
