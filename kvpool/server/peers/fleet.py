"""Fleet: this node among others. What it offers them, what it asks of them, and who they are.

Built before the pool, because the pool's peer tier reads what is known of the others; serves after it. Loop thread only, but
for the threads of members and streams.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TypedDict

from zmq.utils import z85

from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.config.peer_options import PeerConfig
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.keys import domain_tag
from kvpool.peers.control.client import ControlClient
from kvpool.peers.control.guarded_connection import GuardSettings
from kvpool.peers.control.identity import NodeIdentity
from kvpool.peers.control.link import LinkSettings, PeerLink
from kvpool.peers.control.listener import UNREAD_BYTES_MAX, ListenerSettings
from kvpool.peers.control.name_claims import NameClaims
from kvpool.peers.control.records import INCARNATION_BYTES, SOCKET_BYTES_MAX
from kvpool.peers.control.server import ControlServer, ControlServerSettings
from kvpool.peers.following.follower import FollowSettings
from kvpool.peers.following.followers import Followers
from kvpool.peers.members.member import BookSettings, Member, MembersChange
from kvpool.pool.lower_tiers import TierPlan
from kvpool.pool.pool import Pool
from kvpool.server.descriptor_room import PeerRoom
from kvpool.server.peers.former_members import FormerMembers
from kvpool.server.peers.key_reporter import KeyReporter
from kvpool.server.peers.link_log import LinkLog, stream_problems
from kvpool.server.peers.member_source import LIST, NOWHERE, linger_s, make_members, source_of
from kvpool.server.peers.near_offers import NearOffers
from kvpool.server.peers.node_names import NodeNames
from kvpool.server.peers.offers import Offers
from kvpool.server.peers.peer_list import describe, name_of
from kvpool.server.peers.trust import read_trust
from kvpool.tiers.base import ArenaMemory
from kvpool.tiers.peer.pull_driver import PULLS_MAX
from kvpool.tiers.peer.tier import PeerTier
from kvpool.transfer.engine.engine import Engine, EngineSettings
from kvpool.transfer.engine.engine_transport import EngineTransport
from kvpool.transfer.near.host import host_tag
from kvpool.transfer.near.near_transport import NearTransport
from kvpool.transfer.transport import Transport

log = logging.getLogger(__name__)

BYTES_PER_PAIR = 10  # of a chunk and a node that has it, in the remote index


class _Bounds(TypedDict):
    threads: int
    jobs_max: int
    clock: Clock


class Fleet:
    """See the module. Raises ConfigError for keys or members that cannot be used."""

    def __init__(self, config: PeerConfig, domain: bytes, room: PeerRoom, clock: Clock, *, socket: str) -> None:
        """`domain`: the key of the trust domain. `socket`: this node's, which hands out its memory."""
        assert config.listen is not None
        assert config.stream is not None
        trust = read_trust(config)
        self._config = config
        self._room = room
        self._clock = clock
        self._domain = domain_tag(domain)
        self._random = secrets.SystemRandom()
        self._keys = trust.keys
        self._allowed = trust.allowed
        self._links: dict[NodeName, PeerLink] = {}
        self._claims = NameClaims()
        self._names = NodeNames(config.node_name, self._claims, shared_key=self._keys.public if self._keys else b"")
        self._former = FormerMembers(clock)
        self._tiers: list[PeerTier] = []
        self._list_links: Callable[[], list[PeerLink]] = list  # none before the start
        self._parts = AsyncExitStack()  # what has begun, and ends in the reverse order
        self._has_ended = True
        self._is_closed = False
        self._socket = os.path.abspath(socket)
        self._host = host_tag() if config.uses_shared_memory else None
        if config.uses_shared_memory and self._host is None:
            log.warning("chunks of daemons on this host come over the stream: the kernel gives no boot id")
        self._engine = Engine(engine_settings(config), self._random) if config.uses_rdma else None
        self.chunks = RemoteChunks(max(1, config.index // BYTES_PER_PAIR), os.urandom(INCARNATION_BYTES))

    def __repr__(self) -> str:
        return f"<Fleet of {self._config.node_name}, {len(self._links)} links>"

    def plan_tier(self, _config: Config) -> TierPlan:
        """The peer tier of this node's pool; see `lower_tiers.Planner`."""
        return TierPlan(lambda site: site.remote(self._make_tier(site.memory, site.clock)))

    def _make_tier(self, memory: ArenaMemory, clock: Clock) -> PeerTier:
        config = self._config
        bounds: _Bounds = {"threads": config.threads, "jobs_max": PULLS_MAX, "clock": clock}
        transports: list[Transport] = []
        if self._host is not None:
            transports.append(NearTransport(memory.arena, memory.index, host=self._host, **bounds))
        if self._engine is not None:
            transports.append(EngineTransport(self._engine, memory.arena, memory.index, **bounds))
        self._tiers.append(
            PeerTier(
                memory,
                self.chunks,
                self._links.get,
                config=config,
                clock=clock,
                random=self._random,
                transports=transports,
            )
        )
        return self._tiers[-1]

    async def start(self, pool: Pool) -> None:
        """Serve others, and find them. Raises OSError or ConfigError where an address cannot be used."""
        pool.remote_table = self.chunks.mapping
        config, loop = self._config, asyncio.get_running_loop()
        assert config.listen is not None
        self.offers = self._make_offers(pool, loop)
        self._parts.push_async_callback(self._close_offers)
        self.reporter = KeyReporter(pool.journal, loop)
        self._parts.callback(self.reporter.close)
        pool.chains.writers.followed.listen(self.reporter)
        self._followers = Followers(
            self.chunks, settings=FollowSettings(), clock=self._clock, random=self._random, loop=loop
        )
        self._parts.callback(self._followers.close)
        identity = NodeIdentity(config.node_name, os.urandom(INCARNATION_BYTES), self._domain, self.offers.stream)
        self.server = ControlServer(
            (config.listen,),
            self.offers,
            follows=self.reporter,
            identity=identity,
            keys=self._keys,
            allowed=self._allowed or frozenset(),
            settings=_server_settings(self._room),
            clock=self._clock,
            loop=loop,
            claims=self._claims,
            on_hello=self._note_hello,
        )
        self._parts.callback(self.server.close)
        self.client = ControlClient(
            self._note_link,
            identity=identity,
            keys=self._keys,
            settings=LinkSettings(),
            clock=self._clock,
            random=self._random,
            loop=loop,
        )
        self._list_links = self.client.links
        self._link_log = LinkLog(self._clock, loop)
        self._parts.callback(self._link_log.close)
        self._claims.watch(lambda: [(one.life.node, one.life.incarnation) for one in self.client.links() if one.life])
        self._claims.on_end = self._use_freed
        self._parts.callback(self.client.close)
        own = frozenset((config.node_name, *self.server.endpoints))
        book = BookSettings(own=own, allowed=self._allowed, linger_s=linger_s(config))
        public = self._keys.public if self._keys else b""
        self._members = make_members(
            config,
            Member(self.server.endpoints[0], public, config.node_name, identity.incarnation),
            lambda change: _hop(loop, self._follow_members, change),
            book=book,
            clock=self._clock,
            random=self._random,
        )
        self._parts.push_async_callback(self._stop_members)
        for tier in self._tiers:
            tier.fleet_stats, tier.fleet_problems = self._stats, self.fleet_problems
        await loop.run_in_executor(None, self._members.start)

    def _make_offers(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> Offers:
        try:
            return Offers(
                pool,
                self._config,
                self._clock,
                loop,
                room=self._room,
                engine=self._engine,
                near=self._near_offers(pool),
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(error.errno, f"peer.stream {self._config.stream} cannot be bound: {reason}") from error

    def _near_offers(self, pool: Pool) -> NearOffers | None:
        """What other daemons of this host may copy out of this node's memory. None where a rate holds: nobody could hold them
        to it there."""
        if self._host is None or self._config.rate or len(self._socket.encode()) > SOCKET_BYTES_MAX:
            return None
        return NearOffers(self._host, self._socket, pool.epoch)

    def _stats(self) -> dict[str, int]:
        """Counters of all parts, by name."""
        links, doubles = self.client.stats(), self._names.count_doubles()
        parts = {
            "members": self._members.stats(),
            "offers": self.offers.stats(),
            "asked": self.server.stats(),
            "links": {**links, "ready": links["ready"] - doubles, "doubles": doubles},
            "followed": self._followers.stats(),
        }
        return {f"{part}.{name}": count for part, counted in parts.items() for name, count in counted.items()}

    def fleet_problems(self) -> list[str]:
        """See `PeerLister`: why the members may be out of date or the library is not used, and which members cannot be used.

        Any thread."""
        found = (self._members.problem(), self._engine.problem() if self._engine is not None else "")
        links = self._list_links()
        return [
            *(problem for problem in found if problem),
            *self._names.problems(links),
            *LinkLog.problems(links),
            *stream_problems(one for tier in self._tiers for one in tier.nodes.all() if one[0] in self._links),
        ]

    async def close(self) -> bool:
        """End everything that has begun. False where a thread is left waiting for the network."""
        self._is_closed = True
        await self._parts.aclose()
        return self._has_ended

    async def _close_offers(self) -> None:
        self._has_ended = await self.offers.close()

    async def _stop_members(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._members.stop)

    def _follow_members(self, change: MembersChange) -> None:
        if self._is_closed:
            return
        for member in change.left:
            if (link := self.client.link_to(member.identity)) is not None:
                self._former.note_left(link)
        for member in (*change.joined, *change.renewed):
            self._former.note_joined(member.identity)
        self.client.follow(change)
        self._use_freed()

    def read_allowed(self, config: Config) -> frozenset[bytes] | None:
        """The keys that `peer.allow` of another reading of the configuration lists; None where no keys are used. Raises
        ConfigError."""
        return None if self._allowed is None else read_trust(config.peer).allowed

    def admit(self, allowed: frozenset[bytes]) -> str:
        """Have nodes with these keys, and no others, from now on: links to others end, and what they were lent. What that
        changes, in a few words; empty for nothing."""
        before, self._allowed = self._allowed, allowed
        if before is None or before == allowed:
            return ""
        self.server.admit(allowed)
        for link in self._list_links():
            if link.member.public_key and z85.decode(link.member.public_key) not in allowed:
                self.client.drop(link.member)
        self._members.admit(allowed)
        return f"{len(allowed)} keys, {len(allowed - before)} of them new, {len(before - allowed)} no longer"

    def describe(self) -> str:
        """This node among others, in a few words for the log. REQUIRES: it has started."""
        here, count = self.here(), len(self._members.current())
        listed = f"{count} member{'s' * (count != 1)}"
        members = listed if here["members_from"] in (LIST, NOWHERE) else f"members from {here['members_from']}"
        address, keys = here["listen"].removeprefix("tcp://"), "keys" if here["has_keys"] else "no keys"
        return f"peers: {here['node']} at {address}, {members}, {keys}, encryption {'on' if here['is_encrypted'] else 'off'}"

    def here(self) -> dict[str, Any]:
        """See `PeerLister`."""
        config = self._config
        return {
            "node": config.node_name,
            "listen": self.server.endpoints[0],
            "stream": self.offers.stream,
            "members_from": source_of(config),
            "has_keys": self._keys is not None,
            "is_encrypted": config.encrypt,
        }

    def peer_links(self) -> list[PeerLink]:
        """See `PeerLister`."""
        return self._list_links()

    def former_links(self) -> list[PeerLink]:
        """See `PeerLister`."""
        return self._former.links()

    def peer_row(self, link: PeerLink) -> dict[str, Any]:
        """See `PeerLister`."""
        if self._names.is_double(link):
            fault = self._names.fault_of(link, self._list_links())
            row = describe(link, self._followers, None)
            return row | {"state": "refused", "code": "name", "known_chunks": 0, "last_error": fault}
        records = [record for tier in self._tiers if (record := tier.nodes.find(name_of(link))) is not None]
        return describe(link, self._followers, records[0] if records else None)

    def _note_link(self, link: PeerLink) -> None:
        self._link_log.note_link(link)
        links = self._list_links()
        if self._names.note_link(link, links):
            self._use_link(link)
        elif link.life is not None:
            fault = self._names.fault_of(link, links)
            log.warning("peer %s is refused: %s", link.member.endpoint.removeprefix("tcp://"), fault)
        self._use_freed()

    def _note_hello(self, name: str) -> None:
        """A node has connected: it is there, perhaps anew, and is asked without waiting longer."""
        for link in self._list_links():
            if link.life is None and link.last_life is not None and link.last_life.node == name:
                link.hurry()

    def _use_freed(self) -> None:
        """Use the links of nodes whose names no other has any more."""
        for link in self._names.take_freed(self._list_links()):
            self._use_link(link)

    def _use_link(self, link: PeerLink) -> None:
        """A link with a name of its own has become ready, or no longer is."""
        self._followers.note_link(link)
        if link.life is None:
            for name in [name for name, known in self._links.items() if known is link]:
                del self._links[name]
            return
        name = NodeName(link.life.node)
        self._links[name] = link
        for tier in self._tiers:
            tier.note_life(name, link.life.incarnation)


def engine_settings(config: PeerConfig) -> EngineSettings:
    """How TransferEngine or NIXL is used by this node."""
    assert config.listen is not None
    return EngineSettings(
        host=config.listen.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"),
        protocol=config.rdma_protocol,
        devices=config.rdma_devices,
        ports=config.rdma_ports,
        buffer_bytes=config.rdma_buffer,
        library="nixl" if config.transport == "nixl" else "mooncake",
        node=config.node_name,
    )


def _server_settings(room: PeerRoom) -> ControlServerSettings:
    guard = GuardSettings(UNREAD_BYTES_MAX, connections_max=room.control, strangers_max=room.control_strangers)
    return ControlServerSettings(connections_max=room.control, listener=ListenerSettings(guard=guard))


def _hop(loop: asyncio.AbstractEventLoop, follow: Callable[[MembersChange], None], change: MembersChange) -> None:
    """Follow a change of members on the loop. Called on the members' thread."""
    loop.call_soon_threadsafe(follow, change)
