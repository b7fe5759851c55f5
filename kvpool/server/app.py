"""The daemon's process: builds everything from a valid configuration, serves, drains, ends.

    STARTING ──first segment faulted in──► SERVING ──SIGTERM/SIGINT──► DRAINING ──nothing under way, or
    stop_timeout──► STOPPED

The socket appears with SERVING. In DRAINING new connections and reservations are refused, reservations under way may still be
committed, and DRAM is written down beside them and after, for ssd.stop_timeout at most. Control thread only, but for the
pre-fault, transfer, self-probe and HTTP threads that it starts and joins.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kvpool_native
from kvpool import __version__, failpoint
from kvpool.clock import Deadline, MonotonicClock, wall_time_s
from kvpool.config.config import Config
from kvpool.errors import ConfigError, Refused
from kvpool.keys import domain_key
from kvpool.layout import Layout
from kvpool.pool.pool import Pool
from kvpool.protocol import versions
from kvpool.protocol.records import messages as m
from kvpool.server.connections.connection import Connection, Handlers
from kvpool.server.connections.input_budget import InputBudget
from kvpool.server.connections.local_socket import AcceptedHello, LocalSocket, Peer
from kvpool.server.connections.refusal_log import RefusalLog
from kvpool.server.connections.requests import ConnectionVerbs, end_connection
from kvpool.server.connections.roster import Roster
from kvpool.server.connections.turns import Turns
from kvpool.server.descriptor_room import fit_connections, raise_limit
from kvpool.server.health.health import Health
from kvpool.server.health.supervision import Supervision
from kvpool.server.health.systemd import ServiceManager
from kvpool.server.metrics.measurements import LoopReader, Scrape
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.operators import Operators
from kvpool.server.reload import Reload
from kvpool.server.service import VERBS, ConnectionCounts, OperatorVerbs, engine_handlers, operator_handlers
from kvpool.server.steering import SteeringVerbs
from kvpool.types import ConnectionId
from kvpool.units import format_size

if TYPE_CHECKING:
    from kvpool.server.events.publisher import EventPublisher
    from kvpool.server.metrics.http import MetricsServer

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
EXTEND_EVERY_S = 5.0
LAST_ANSWERS_S = 0.5
MODEL_BYTES_MAX = 512


class App:
    """One serving daemon."""

    def __init__(self, config: Config, reread: Callable[[], Config]) -> None:
        """`reread` reads the configuration again from where it came. Raises ConfigError."""
        self._config = config
        self._reload = Reload(
            config,
            read=reread,
            read_keys=self._read_router_keys,
            apply=self._reconfigure,
            let_in=self._let_routers_in,
            on_turn=lambda is_running: self._supervision.note_reloading(is_running=is_running),
        )
        self._clock = MonotonicClock()
        self._counts = ConnectionCounts()
        self._operators = Operators(os.geteuid(), config.server.admin_group)
        self._max_connections = fit_connections(config, raise_limit())
        self._roster = Roster(self._max_connections, config.server.user_share, self._clock, self._operators.include)
        self._input = InputBudget(self._end_unfinished)
        self._next_connection = itertools.count(1)
        self._domain = domain_key(_read_secret(config.server.domain_secret_file))
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self.has_ended = True  # False after `run`: a thread is left that waits for a disk
        self._times = RequestTimes(VERBS)
        self._turns = Turns(self._clock)
        self._metrics: dict[str, MetricsServer] = {}
        self._publisher: EventPublisher | None = None

    async def run(self) -> None:
        """Serve until a signal. Raises SocketInUse, OSError or MemoryError if serving cannot begin or go on."""
        started_ns = self._clock.now_ns()
        if fault := kvpool_native.copy_variant_fault():
            raise ConfigError([fault])
        server = self._config.server
        listener = LocalSocket(
            server.socket,
            mode=server.socket_mode,
            handshake_timeout_s=server.handshake_timeout,
            on_refused=RefusalLog(self._clock).note,
        )
        self._listener = listener
        try:
            self._pool = Pool(self._config, self._clock)
            self._pool.on_overdue(self._end_overdue)
            manager = ServiceManager(os.environ)
            self._health = Health(
                self._pool.problems,
                self._clock,
                shortcomings_of_pool=self._pool.shortcomings,
                watchdog_interval_s=manager.watchdog_interval_s,
                probe_every_s=server.probe_interval or None if server.has_metrics else None,
            )
            self._supervision = Supervision(manager, self._health, self._clock)
            try:
                self._start_metrics()
                self._publisher = self._start_publisher()
                await self._pool.start()
                self._catch_signals()
                listener.start(self._admit, self._adopt, self._roster, self._on_failed)
                serving = self._describe_serving()
                self._supervision.begin_serving(server.socket, f"serving {serving}", self._pool.discard)
                self._log_ready(serving, (self._clock.now_ns() - started_ns) / 1e9)
                asyncio.get_running_loop().run_in_executor(None, kvpool_native.tune_copies)
                await self._stop.wait()
                self._reload.cancel()
                self._supervision.begin_draining()
                if self._failure is not None:
                    raise self._failure
                await self._drain()
            finally:
                for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)  # to the end of the process
                await self._supervision.end()
                for listening in self._metrics.values():
                    await asyncio.get_running_loop().run_in_executor(None, listening.stop)
                if self._publisher is not None:
                    await asyncio.get_running_loop().run_in_executor(None, self._publisher.stop)
                self.has_ended = await self._pool.stop()
        finally:
            await listener.stop()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        # Not the loop's: that would give them their deadly defaults back when it is closed, and the process has work left then.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._stop.set))
        signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(self._reload_soon))

    def _reload_soon(self) -> None:
        if not self._stop.is_set():
            self._reload.ask()

    def _reconfigure(self, config: Config) -> None:
        self._config = config
        logging.getLogger().setLevel(config.log.level.upper())
        self._listener.handshake_timeout_s = config.server.handshake_timeout
        self._pool.reconfigure(config)

    def _read_router_keys(self, config: Config) -> frozenset[bytes] | None:
        """The keys of the clients file in use; None where there is no publisher, or it asks nobody for a key."""
        if (
            self._publisher is None
            or not self._config.events.curve_clients_file
            or not config.events.curve_clients_file
        ):
            return None
        from kvpool.server.events.sockets import read_client_keys  # as above: only where events are published

        return read_client_keys(config.events.curve_clients_file)

    def _let_routers_in(self, keys: frozenset[bytes]) -> None:
        assert self._publisher is not None
        self._publisher.let_in(keys)

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

    def _start_publisher(self) -> "EventPublisher | None":
        events = self._config.events
        if events.publish is None:
            return None
        # ZMQ costs a start 30 ms and its own thread: only where somebody wants events published.
        from kvpool.server.events.publisher import EventPublisher
        from kvpool.server.events.source import EventSource

        source = EventSource(asyncio.get_running_loop(), self._pool.journal, self._pool.namespaces)
        publisher = EventPublisher(
            events,
            source,
            host=socket.gethostname(),
            socket_mode=self._config.server.socket_mode,
            wall_time_s=wall_time_s,
            clock=self._clock,
        )
        self._pool.journal.listen(publisher.wake, publisher.stats, publisher.problems)
        self._pool.namespaces.on_opened = publisher.wake
        publisher.start()
        return publisher

    def _take_snapshot(self) -> Scrape:
        info = self._pool.info()
        self._counts.refused = self._listener.refused_connections
        return Scrape(
            build={"version": __version__, "checksum": info["checksum"], "key_hash": info["key_hash"]},
            pool=self._pool.measure(self._counts.stats()),
            connections=self._roster.count_roles(),
            verbs=self._times.verbs(),
            health=self._health.report(),
        )

    def _admit(self, hello: m.Hello, peer: Peer) -> AcceptedHello:
        if self._stop.is_set():
            raise Refused("stopping", "the daemon is stopping")
        self._roster.check_role(peer, hello.role)
        if hello.role == m.ROLE_ADMIN:
            self._operators.check(peer)
            return AcceptedHello(self._welcome(), ())
        if hello.role != m.ROLE_ENGINE:
            raise Refused("role", f"role is {hello.role!r}, expected {m.ROLE_ENGINE!r} or {m.ROLE_ADMIN!r}")
        if len(hello.model.encode()) > MODEL_BYTES_MAX:
            raise Refused("model", f"model name has more than {MODEL_BYTES_MAX} bytes")
        self._pool.open_namespaces(hello.model, Layout.from_wire(hello.layout), self._user_of(peer))
        log.debug("engine of model %s connects: pid %d uid %d", hello.model, peer.pid, peer.uid)
        return AcceptedHello(self._welcome(), self._pool.fds())

    async def _adopt(self, accepted: socket.socket, hello: m.Hello, peer: Peer) -> None:
        connection_id = ConnectionId(next(self._next_connection))
        try:
            handlers = self._handlers_of(connection_id, hello, peer)
        except BaseException:
            self._roster.end(peer)
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
            on_unfinished=self._input.note,
            version=versions.choose(hello.oldest, hello.version),
        )
        self._roster.add(connection, peer, hello)
        self._counts.accepted += 1
        self._counts.open = len(self._roster)
        self._counts.refused = self._listener.refused_connections
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except BaseException:
            self._on_closed(connection_id)
            raise
        log.debug("connection %d: %s, pid %d uid %d", connection_id, hello.role, peer.pid, peer.uid)

    def _handlers_of(self, connection_id: ConnectionId, hello: m.Hello, peer: Peer) -> Handlers:
        if hello.role == m.ROLE_ADMIN:
            return operator_handlers(
                self._pool,
                OperatorVerbs(self._pool, self._info, self._counts, peer),
                SteeringVerbs(self._reload, peer),
                ConnectionVerbs(self._pool, self._roster, self._input, self._clock, peer),
            )
        layout, user = Layout.from_wire(hello.layout), self._user_of(peer)
        session = self._pool.open_session(connection_id, hello.model, layout, user)
        return engine_handlers(self._pool, session)

    def _user_of(self, peer: Peer) -> int | None:
        """Whose share counts what the peer's connection keeps: operators are not bound."""
        return None if self._operators.include(peer) else peer.uid

    def _welcome(self) -> m.Welcome:
        server = self._config.server
        geometry = self._pool.geometry
        return m.Welcome(
            epoch=self._pool.epoch,
            version=__version__,
            domain=self._domain,
            arena_bytes=geometry.arena_bytes,
            index_bytes=geometry.index_bytes,
            lease_ttl_s=float(server.lease_ttl),
            reservation_ttl_s=float(server.reservation_ttl),
            verify=self._config.dram.verify,
            keeps_tokens=server.keep_token_ids,
            staging_bytes=self._pool.staged.staging_bytes,
        )

    def _info(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "socket": self._config.server.socket,
            "max_connections": self._max_connections,
            "metrics": str(self._metrics["metrics"].address) if "metrics" in self._metrics else "off",
            "metrics_socket": self._config.server.metrics_socket or "off",
            "events": "off" if self._publisher is None else self._publisher.publish_endpoint,
            "events_replay": (self._publisher.replay_endpoint if self._publisher else "") or "off",
            **self._supervision.info(),
        }

    def _on_closed(self, connection_id: ConnectionId) -> None:
        self._roster.remove(connection_id)
        self._input.note(connection_id, 0)
        self._counts.open = len(self._roster)
        self._counts.refused = self._listener.refused_connections
        self._pool.drop_connection(connection_id)

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
        self._failure = error
        self._stop.set()

    async def _drain(self) -> None:
        """Let saves under way end while DRAM is written down; nothing new is reserved any more."""
        failpoint.reach("daemon.drain.begin")
        started_ns = self._clock.now_ns()
        self._pool.chains.is_stopping = True
        deadline = Deadline(self._config.server.stop_timeout, self._clock)
        writing = asyncio.ensure_future(
            self._pool.demote_all(self._config.stop_timeout, lambda: len(self._roster) > 0 or self._pool.is_ending)
        )
        while self._pool.is_busy and not deadline.has_passed():
            await asyncio.sleep(DRAIN_POLL_S)
        await self._supervision.end()
        await self._close_connections()
        while not writing.done():
            self._supervision.go_on_draining()
            await asyncio.wait([writing], timeout=EXTEND_EVERY_S)
        kept = writing.result()
        failpoint.reach("daemon.drain.end")
        log.info(
            "stopped by signal: %d chunks written down, %d dropped with the DRAM tier, durable: %s, drained in %.2f s",
            kept["chunks"],
            kept["left"],
            "yes" if kept["durable"] else "no",
            (self._clock.now_ns() - started_ns) / 1e9,
        )

    async def _close_connections(self) -> None:
        """What has been answered is sent; who does not read it is not waited for."""
        for member in self._roster:
            member.connection.close()
        deadline = Deadline(LAST_ANSWERS_S, self._clock)
        while len(self._roster) and not deadline.has_passed():
            await asyncio.sleep(DRAIN_POLL_S)
        for member in self._roster:
            member.connection.abort()

    def _describe_serving(self) -> str:
        capacity = format_size(self._config.dram.capacity)
        return f"at {self._config.server.socket}: dram {capacity} ({self._pool.page_use().mode} pages)"

    def _log_ready(self, serving: str, seconds: float) -> None:
        probing = self._supervision.describe_probing()
        log.info("kvpoold %s ready in %.2f s %s, transport shared memory, %s", __version__, seconds, serving, probing)


def _read_secret(path: str) -> bytes:
    if not path:
        return b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(
            [f"server.domain_secret_file is {path!r}: {error.strerror}, expected a readable file"]
        ) from error
    with os.fdopen(fd, "rb") as file:
        return file.read(4096)
