"""Nodes of a fleet in this process: pools that pull from one another over real sockets on loopback."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kvpool.clock import MonotonicClock
from kvpool.config.addresses import parse_zmq
from kvpool.config.config import Config, load_config
from kvpool.config.peer_options import PeerConfig
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from kvpool.keys import domain_tag
from kvpool.peers.control.client import ControlClient
from kvpool.peers.control.identity import NodeIdentity
from kvpool.peers.control.link import LinkSettings, PeerLink
from kvpool.peers.control.server import ControlServer, ControlServerSettings
from kvpool.peers.members.member import Member
from kvpool.pool.lower_tiers import Site, TierPlan
from kvpool.server.descriptor_room import PeerRoom
from kvpool.server.peers.key_reporter import KeyReporter
from kvpool.server.peers.offers import Offers
from kvpool.states import Level
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiers.peer.tier import PeerTier
from tests.rigs.clock import LaterClock
from tests.rigs.tiers.memory_tier import Medium
from tests.rigs.tiers.tiered_pool import TieredPool, medium_of

DOMAIN = domain_tag(b"fleet")
PAIRS = 20_000


def peer_config(**options: Any) -> PeerConfig:
    """Section `peer` with these options, its stream at any port, and more offered than any rig has."""
    stream = parse_zmq("tcp://127.0.0.1:0")
    return replace(load_config().peer, **{"stream": stream, "offered": 4 << 30, **options})


class Node:
    """One node. `hints`: what it believes of the others; `clock`: its peer tier's."""

    def __init__(
        self, name: str, dram_chunks: int, *, media: Sequence[Medium] = (), pulls: PeerConfig | None = None
    ) -> None:
        self.name = NodeName(name)
        self._clock = MonotonicClock()
        self.clock = LaterClock()
        self._pulls = pulls or peer_config(answer_timeout=5.0, stall_timeout=5.0)
        self.hints = RemoteChunks(PAIRS, os.urandom(16))
        self.tiers: list[PeerTier] = []
        self.links: dict[NodeName, PeerLink] = {}
        self.pool = TieredPool(media, dram_chunks, kinds=[self._plan], levels=[Level.SSD] * len(media))

    @property
    def tier(self) -> PeerTier:
        """Its peer tier."""
        return self.tiers[0]

    async def start(self, offers: PeerConfig | None = None) -> None:
        """Serve others and this process."""
        loop = asyncio.get_running_loop()
        await self.pool.start()
        self.offers = Offers(self.pool.pool, offers or peer_config(), self._clock, loop, room=PeerRoom())
        identity = NodeIdentity(self.name, os.urandom(16), DOMAIN, self.offers.stream)
        address = parse_zmq("tcp://127.0.0.1:0")
        assert address is not None
        self.server = ControlServer(
            (address,),
            self.offers,
            follows=KeyReporter(self.pool.pool.journal, loop),
            identity=identity,
            keys=None,
            allowed=frozenset(),
            settings=ControlServerSettings(),
            clock=self._clock,
            loop=loop,
        )
        self.client = ControlClient(
            self._note_link,
            identity=identity,
            keys=None,
            settings=LinkSettings(),
            clock=self._clock,
            random=random.Random(1),
            loop=loop,
        )

    async def stop(self) -> None:
        """End, with nothing broken."""
        self.client.close()
        self.server.close()
        assert await self.offers.close()
        await self.pool.stop()
        assert not self.hints.verify()

    async def join(self, other: "Node") -> None:
        """Have a link to another node."""
        self.hints.join(other.name)
        self.client.add_member(Member(other.server.endpoints[0]))
        await self.pool.until_moved(lambda: other.name in self.links)

    def believe(self, other: "Node", keys: Sequence[bytes]) -> None:
        """Believe that another node has these chunks."""
        assert self.hints.note_stored(other.name, KeyColumn.of(keys))
        while self.hints.advance():
            pass

    def _plan(self, _config: Config) -> TierPlan:
        return TierPlan(self._link_tier)

    def _link_tier(self, site: Site) -> RemoteLink:
        tier = PeerTier(
            site.memory,
            self.hints,
            self.links.get,
            config=self._pulls,
            clock=self.clock,
            random=random.Random(2),
        )
        self.tiers.append(tier)
        return site.remote(tier)

    def _note_link(self, link: PeerLink) -> None:
        if link.life is not None:
            self.links[NodeName(link.life.node)] = link


@asynccontextmanager
async def two_nodes(
    *,
    has_disk: bool = False,
    sends_encrypted: bool = False,
    wants_encrypted: bool = False,
    offers: PeerConfig | None = None,
) -> AsyncIterator[tuple[Node, Node]]:
    """One that pulls, and the other one that it pulls from."""
    here = Node("here", 48, pulls=peer_config(answer_timeout=5.0, stall_timeout=5.0, encrypt=wants_encrypted))
    there = Node("there", 48, media=[medium_of(96)] if has_disk else ())
    await there.start(offers or peer_config(encrypt=sends_encrypted))
    await here.start()
    await here.join(there)
    yield here, there
    await here.stop()
    await there.stop()
