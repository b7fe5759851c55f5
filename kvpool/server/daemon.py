"""The daemon in service of one pool: who connects, what is asked, metrics and events, and its configuration while it runs.

It exists from the pool's making to its end (`app.py` has both); until `serve` nobody can connect. Control thread only, but
for the self-probe, HTTP and event threads that it starts and joins.
"""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import kvpool_native
from kvpool import __version__
from kvpool.clock import Deadline, MonotonicClock
from kvpool.config.config import Config
from kvpool.errors import LayoutMismatch, Refused
from kvpool.ids import MODEL_BYTES_MAX, PROOF_BYTES, ConnectionId
from kvpool.layout import Layout
from kvpool.pool.pool import Pool
from kvpool.protocol import columns, versions
from kvpool.protocol.records import messages as m
from kvpool.server.connections.connection import Connection, Handlers
from kvpool.server.connections.input_budget import InputBudget
from kvpool.server.connections.lease_frames import LeaseFrames, ServeAtOnce
from kvpool.server.connections.local_socket import AcceptedHello, LocalSocket, Peer
from kvpool.server.connections.requests import ConnectionVerbs, end_connection
from kvpool.server.connections.roster import Roster
from kvpool.server.connections.turns import Turns
from kvpool.server.events.unpublished import Unpublished
from kvpool.server.health.health import Health
from kvpool.server.health.supervision import Supervision
from kvpool.server.health.systemd import ServiceManager
from kvpool.server.metrics.measurements import LoopReader, Scrape
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.operators import Operators
from kvpool.server.peers.peer_list import PeerVerbs, ReloadedFleet, peer_rows
from kvpool.server.reload import KeyFile, Reload
from kvpool.server.service import VERBS, ConnectionCounts, OperatorVerbs, engine_handlers, operator_handlers
from kvpool.server.steering import SteeringVerbs

if TYPE_CHECKING:
    from kvpool.server.events.publishers import EventPublishers
    from kvpool.server.metrics.http import MetricsServer

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
LAST_ANSWERS_S = 0.5


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of connecting, which no reload changes: how many may, who is an operator, the secret of all keys."""

    max_connections: int
    operators: Operators
    domain: bytes


class Daemon:
    """See the module. `stopping` is set by a signal or by a `failure`."""

    def __init__(
        self,
        config: Config,
        reread: Callable[[], Config],
        *,
        terms: Terms,
        listener: LocalSocket,
        pool: Pool,
        clock: MonotonicClock,
        manager: ServiceManager,
        fleets: Sequence[ReloadedFleet] = (),
    ) -> None:
        """`reread` reads the configuration again from where it came. Raises ConfigError or OSError."""
        self._config = config
        self._terms = terms
        self._listener = listener
        self._pool = pool
        self._clock = clock
        self._fleets = fleets
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self._counts = ConnectionCounts(lambda: listener.refused_connections)
        self._roster = Roster(terms.max_connections, config.server.user_quota, clock, terms.operators.include)
        self._input = InputBudget(self._end_unfinished)
        self._next_connection = itertools.count(pool.first_connection)
        self._times = RequestTimes(VERBS)
        self._lease_frames = LeaseFrames(pool.chains, self._times, clock)
        self._turns = Turns(clock)
        pool.on_overdue(self._end_overdue)
        self._health = Health(
            pool.problems,
            clock,
            shortcomings_of_pool=pool.shortcomings,
            watchdog_interval_s=manager.watchdog_interval_s,
            probe_every_s=config.server.probe_interval or None if config.server.has_metrics else None,
            early_ends=listener.life.early_ends,
        )
        self.supervision = Supervision(manager, self._health, clock)
        self.reload = Reload(
            config,
            read=reread,
            key_files=[
                KeyFile("events.allow", self._read_router_keys, self._let_routers_in),
                *(KeyFile("peer.allow", fleet.read_allowed, fleet.admit) for fleet in fleets),
            ],
            apply=self._reconfigure,
            on_turn=lambda is_running: self.supervision.note_reloading(is_running=is_running),
        )
        self._metrics: dict[str, MetricsServer] = {}
        self._publisher = self._make_publisher()

    @property
    def has_connections(self) -> bool:
        """Whether anybody is connected."""
        return len(self._roster) > 0

    @property
    def config(self) -> Config:
        """The configuration that it has now."""
        return self._config

    def start(self) -> None:
        """Have metrics and events served: before the pool is, so that its start is seen."""
        self._start_metrics()
        self._publisher.start()

    def serve(self) -> None:
        """Let engines and operators in."""
        self._listener.start(self._admit, self._adopt, self._roster, self._on_failed)

    async def end_threads(self) -> None:
        """End all threads but the pool's."""
        loop = asyncio.get_running_loop()
        await self.supervision.end_probe()
        for listening in self._metrics.values():
            await loop.run_in_executor(None, listening.stop)
        self._publisher.close_listeners()
        await loop.run_in_executor(None, self._publisher.stop)

    async def close_connections(self) -> None:
        """Close all connections. Written answers are sent, without waiting for peers that do not read."""
        for member in self._roster:
            member.connection.close()
        deadline = Deadline(LAST_ANSWERS_S, self._clock)
        while len(self._roster) and not deadline.has_passed():
            await asyncio.sleep(DRAIN_POLL_S)
        for member in self._roster:
            member.connection.abort()

    def reload_soon(self) -> None:
        """Read the configuration again, if it does not stop."""
        if not self.stopping.is_set():
            self.reload.ask_reload()

    def _reconfigure(self, config: Config) -> None:
        self._config = config
        logging.getLogger().setLevel(config.log.level.upper())
        self._listener.handshake_timeout_s = config.server.handshake_timeout
        self._pool.reconfigure(config)

    def _read_router_keys(self, config: Config) -> frozenset[bytes] | None:
        """The keys of the clients file in use; None where nothing is published, or nobody is asked for a key."""
        events = self._config.events
        if events.publish is None or not events.allow or not config.events.allow:
            return None
        from kvpool.config.curve_keys import read_allow_list  # as above: only where events are published

        return read_allow_list("events.allow", config.events.allow)

    def _let_routers_in(self, keys: frozenset[bytes]) -> str:
        self._publisher.let_in(keys)
        return f"{len(keys)} keys (for routers that connect from now on)"

    def _start_metrics(self) -> None:
        server = self._config.server
        if not server.has_metrics:
            return
        # The Prometheus library costs a start 50 ms and 3 MiB: only where somebody asks for metrics.
        from kvpool.server.metrics.answers import SNAPSHOT_TIMEOUT_S, make_app
        from kvpool.server.metrics.collector import make_registry
        from kvpool.server.metrics.http import MetricsServer

        loop = asyncio.get_running_loop()
        snapshots = LoopReader(loop, self._take_snapshot, SNAPSHOT_TIMEOUT_S)
        health = LoopReader(loop, self._health.report, SNAPSHOT_TIMEOUT_S)
        app = make_app(make_registry(snapshots.read), health.read, self._clock)
        for name, address in (("metrics", server.metrics), ("metrics_socket", server.metrics_socket)):
            if address:
                self._metrics[name] = MetricsServer(address, app, self._clock, server.socket_mode)

    def _make_publisher(self) -> "EventPublishers | Unpublished":
        if self._config.events.publish is None:
            return Unpublished()
        # ZMQ costs a start 30 ms and its own thread: only where somebody wants events published.
        from kvpool.server.events.publishers import EventPublishers
        from kvpool.server.events.source import EventSource

        pool, loop = self._pool, asyncio.get_running_loop()
        publishers = EventPublishers(
            self._config.events,
            lambda: EventSource(loop, pool.journal, pool.namespaces),
            socket_mode=self._config.server.socket_mode,
            clock=self._clock,
            loop=loop,
        )
        pool.journal.listen(publishers.wake, publishers.stats, publishers.problems)
        pool.namespaces.on_opened = publishers.wake
        return publishers

    def _take_snapshot(self) -> Scrape:
        info = self._pool.info()
        return Scrape(
            build={"version": __version__, "checksum": info["checksum"], "key_hash": info["key_hash"]},
            pool=self._pool.measure(self._counts.stats()),
            connections=self._roster.count_roles(),
            verbs=self._times.verbs(),
            health=self._health.report(),
            peers=peer_rows(self._fleets),
        )

    def _admit(self, hello: m.Hello, peer: Peer) -> AcceptedHello:
        if self.stopping.is_set():
            raise Refused("stopping", "the daemon is stopping")
        self._roster.check_role(peer, hello.role)
        if hello.role == m.ROLE_ADMIN:
            self._terms.operators.check(peer)
            return AcceptedHello(self._welcome(), ())
        if hello.role == m.ROLE_PEER:
            if not self._config.peer.uses_shared_memory:
                raise Refused("role", "this daemon's memory is for its own engines alone")
            return AcceptedHello(replace(self._welcome(), remote_bytes=0), self._pool.fds()[:2])
        if hello.role != m.ROLE_ENGINE:
            raise Refused("role", f"role is {hello.role!r}, expected {m.ROLE_ENGINE!r} or {m.ROLE_ADMIN!r}")
        if len(hello.model.encode()) > MODEL_BYTES_MAX:
            raise Refused("model", f"model name has more than {MODEL_BYTES_MAX} bytes")
        layout = Layout.from_wire(hello.layout)
        if layout.group is not None:
            raise LayoutMismatch(f"layout is that of one group ({layout.group}), expected the layout with all groups")
        ended = columns.unpack_ended(hello.ended)
        self._pool.open_namespaces(hello.model, layout, self._user_of(peer))
        log.debug("engine of model %s connects: %s", hello.model, peer)
        self._pool.former_writers.note_return(ended, pid=peer.pid, user=peer.uid)
        return AcceptedHello(replace(self._welcome(), life=self._pool.life), self._pool.fds())

    async def _adopt(self, accepted: socket.socket, hello: m.Hello, peer: Peer, welcome: m.Welcome) -> None:
        connection_id = ConnectionId(welcome.connection)
        try:
            handlers, serve_at_once = self._handlers_of(connection_id, hello, peer)
            if hello.role == m.ROLE_ENGINE:
                self._pool.note_holder(connection_id, welcome.proof, pid=peer.pid, user=peer.uid)
        except BaseException:
            self._roster.end_handshake(peer)
            raise
        connection = Connection(
            connection_id,
            handlers,
            clock=self._clock,
            turns=self._turns,
            times=self._times,
            on_closed=self._on_closed,
            on_protocol_error=self._on_protocol_error,
            on_failed=self._on_failed,
            on_unfinished=self._input.note_unfinished,
            version=versions.choose(hello.oldest, hello.version),
            serve_at_once=serve_at_once,
        )
        self._roster.add_connection(connection, peer, hello)
        self._counts.accepted += 1
        self._counts.open = len(self._roster)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except BaseException:
            self._on_closed(connection_id)
            raise
        log.debug("connection %d: %s, %s", connection_id, hello.role, peer)

    def _handlers_of(
        self, connection_id: ConnectionId, hello: m.Hello, peer: Peer
    ) -> tuple[Handlers, ServeAtOnce | None]:
        if hello.role == m.ROLE_ADMIN:
            handlers = operator_handlers(
                self._pool,
                OperatorVerbs(self._pool, self._info, self._counts, peer),
                SteeringVerbs(self.reload, peer, self._drain),
                ConnectionVerbs(self._pool, self._roster, peer, budget=self._input, clock=self._clock),
                PeerVerbs(self._fleets),
            )
            return handlers, None
        if hello.role == m.ROLE_PEER:
            return {}, None
        layout, user = Layout.from_wire(hello.layout), self._user_of(peer)
        session = self._pool.open_session(connection_id, hello.model, layout, user)
        handlers = engine_handlers(self._pool, session, user=user, clock=self._clock)
        return handlers, self._lease_frames.of_session(session)

    def _drain(self, is_on: bool) -> bool:
        before, self._pool.chains.is_drained = self._pool.chains.is_drained, is_on
        self.supervision.note_drained(is_on=is_on)
        return before

    def _user_of(self, peer: Peer) -> int | None:
        """The user whose share counts what the peer's connection holds: operators have no share."""
        return None if self._terms.operators.include(peer) else peer.uid

    def _welcome(self) -> m.Welcome:
        server = self._config.server
        geometry = self._pool.geometry
        return m.Welcome(
            epoch=self._pool.epoch,
            version=__version__,
            domain=self._terms.domain,
            arena_bytes=geometry.arena_bytes,
            index_bytes=geometry.index_bytes,
            lease_ttl_s=float(server.lease_ttl),
            reservation_ttl_s=float(server.reservation_ttl),
            verify=self._config.dram.verify,
            keeps_tokens=server.keep_token_ids,
            staging_bytes=self._pool.staged.staging_bytes,
            remote_bytes=0 if self._pool.remote_table is None else self._pool.remote_table.size,
            has_store=self._pool.sharing.has_store,
            connection=next(self._next_connection),
            proof=os.urandom(PROOF_BYTES),
        )

    def _info(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "openssl": kvpool_native.tls_library() or "none",
            "pid": os.getpid(),
            "socket": self._config.server.socket,
            "max_connections": self._terms.max_connections,
            "metrics": str(self._metrics["metrics"].address) if "metrics" in self._metrics else "off",
            "metrics_socket": self._config.server.metrics_socket or "off",
            "events": self._publisher.publish_endpoint,
            "events_replay": self._publisher.replay_endpoint or "off",
            **({"events_of_models": self._publisher.model_endpoints} if self._publisher.model_endpoints else {}),
            **self.supervision.info(),
        }

    def _on_closed(self, connection_id: ConnectionId, may_write: bool = False) -> None:
        """`may_write`: what is reserved for it stays so in this life; the next one looks whether its process has ended."""
        self._roster.remove(connection_id)
        self._input.note_unfinished(connection_id, 0)
        self._counts.open = len(self._roster)
        if may_write:
            self._pool.end_reading(connection_id)
        else:
            self._pool.drop_connection(connection_id)
            self._pool.forget_holder(connection_id)

    def _end_unfinished(self, connection_id: ConnectionId) -> None:
        self._end_connection(connection_id, "its request has been unfinished for the longest time, and too many are")

    def _end_overdue(self, connection_id: ConnectionId) -> None:
        self._end_connection(connection_id, "it has written slots for twice server.reservation_ttl")

    def _end_connection(self, connection_id: ConnectionId, reason: str) -> None:
        member = self._roster.find(connection_id)
        if member is not None:
            end_connection(self._pool, member, reason)

    def _on_protocol_error(self) -> None:
        self._counts.protocol_errors += 1

    def _on_failed(self, error: BaseException) -> None:
        """The daemon cannot be trusted to go on: a new one can."""
        self.failure = error
        self.stopping.set()
