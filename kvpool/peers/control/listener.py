"""Peer listener: the ROUTER socket on which other nodes connect, with CURVE and its access control.

Bound to configured addresses only, and to none beyond loopback without keys. Its listening sockets are this module's own, so
that the accept gate can filter them; ZMQ has duplicates. All messages of all peers together are bounded by a rate, and by a
share of the loop's time; beyond them nothing is read for a moment, and ZMQ then takes turns among the connections that wait.
Loop thread only.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import zmq

from kvpool.clock import Clock
from kvpool.config.addresses import ZmqAddress
from kvpool.config.curve_keys import KeyPair
from kvpool.errors import ConfigError
from kvpool.peers.control import wire
from kvpool.peers.control.accept_gate import AcceptGate
from kvpool.peers.control.connection_guard import ConnectionGuard
from kvpool.peers.control.guarded_connection import GuardSettings
from kvpool.peers.guarded_listener import accept_from, context_for_others, listen
from kvpool.peers.loop_share import LoopShare
from kvpool.peers.loop_socket import LoopSocket
from kvpool.peers.token_bucket import TokenBucket
from kvpool.peers.zap import ZAP_DOMAIN, ZAP_ENDPOINT, ZAP_FRAMES, ZapHandler

OPTION = "peer.listen"
# Answers that wait for a peer to read them. ZMQ notes what was read in steps of half of it: the other half has room for all
# that an honest peer waits for.
HIGH_WATER_MARK = 40
# A connection's bytes that are not read yet: more than all that a link asks at once, half a MiB for the most keys.
UNREAD_BYTES_MAX = 8 * wire.MESSAGE_BYTES_MAX
# ZMQ counts the encryption of a message with it.
ZMQ_MESSAGE_BYTES_MAX = wire.MESSAGE_BYTES_MAX + 256
HANDSHAKE_S = 5.0
HEARTBEAT_S = 5.0
# Of all peers together.
FRAMES_PER_S = 20_000.0
# Of the loop's time, for all messages of all peers.
LOOP_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Bounds of a listener. `handshakes_per_minute`: of one key from one address. `guard`: of connections."""

    handshakes_per_minute: int = 60
    guard: GuardSettings = field(default_factory=lambda: GuardSettings(UNREAD_BYTES_MAX))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that has come. `route`: the way back. `key`: the public key in hexadecimal, empty without keys. `connection`:
    the number of its connection; 0 where that has ended. `host`: the address that it comes from."""

    route: bytes
    key: str
    connection: int
    parts: Sequence[memoryview]
    host: str = ""

    @property
    def peer(self) -> str:
        """Whose budgets count: the key's, or without keys the connection's."""
        return self.key or self.route.hex()


class PeerListener:
    """See the module. Bound by the constructor, until `close`."""

    def __init__(
        self,
        addresses: tuple[ZmqAddress, ...],
        on_message: Callable[[Arrival], None],
        *,
        on_end: Callable[[int], None],
        keys: KeyPair | None,
        allowed: frozenset[bytes],
        settings: ListenerSettings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`on_end`: called with the number of each connection that has ended. Raises ConfigError, and OSError for an address
        that cannot be bound; then nothing is."""
        _check_access(addresses, keys, allowed)
        self._on_message = on_message
        self._frames = TokenBucket(FRAMES_PER_S, FRAMES_PER_S / 20, clock)
        self._share = LoopShare(LOOP_SHARE, clock)
        self._zap = ZapHandler(allowed, clock, handshakes_per_minute=settings.handshakes_per_minute)
        self._sockets: list[LoopSocket] = []
        self._guard: ConnectionGuard | None = None
        self._listening: list[socket.socket] = []
        self._context = context_for_others()
        router = self._make_router(keys)
        self._router = LoopSocket(router, loop, self._take, self._pause_s, share=self._share)
        try:
            if keys is not None:
                self._listen_to_zap(loop)
            self._gate = AcceptGate(self._listening, clock)
            self._guard = ConnectionGuard(
                router,
                loop,
                clock,
                gate=self._gate,
                settings=replace(settings.guard, is_encrypted=keys is not None),
                on_end=on_end,
            )
            self._listening += [listen(OPTION, address) for address in addresses]
            self.endpoints = tuple(accept_from(router, OPTION, listening) for listening in self._listening)
            self._guard.watch({listening.getsockname()[1] for listening in self._listening})
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<PeerListener {', '.join(self.endpoints)}>"

    def send(self, route: bytes, message: bytes) -> bool:
        """Whether the message has gone to ZMQ: the peer is there, and reads its answers."""
        try:
            self._router.send([route, message])
        except zmq.ZMQError:
            return False
        return True

    def note_hello(self, connection: int) -> bool:
        """The peer of a connection was admitted, and may be silent. Whether the connection is there."""
        return self._guard is not None and self._guard.note_hello(connection)

    def end_connection(self, connection: int) -> None:
        """Shut a connection down."""
        if self._guard is not None:
            self._guard.end_connection(connection)

    def admit(self, allowed: frozenset[bytes]) -> None:
        """Admit these keys from now on. Connections without a Hello end, and those of admitted keys come again; the others are
        the caller's to end. REQUIRES: keys."""
        assert allowed
        assert self._zap.allowed
        self._zap.allowed = allowed
        if self._guard is not None:
            self._guard.end_strangers()

    def close(self) -> None:
        """Close every socket, without waiting for what is not sent."""
        if self._guard is not None:
            self._guard.close()
        for made in (self._router, *self._sockets):
            made.close()
        if self._guard is not None:
            self._guard.end_monitor()
        for listening in self._listening:
            listening.close()
        self._context.destroy(linger=0)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        guard = self._guard
        assert guard is not None
        return {
            "refused_handshakes": self._zap.refused,
            "connections": len(guard),
            "ended_connections": guard.ended,
            "crowded_connections": guard.crowded,
            "silent_connections": guard.silent,
            "accept_closures": self._gate.closures,
        }

    def _listen_to_zap(self, loop: asyncio.AbstractEventLoop) -> None:
        zap = self._context.socket(zmq.REP)
        zap.bind(ZAP_ENDPOINT)

        def answer(parts: list[zmq.Frame]) -> None:
            made.send(self._zap.answer([part.bytes for part in parts]))

        made = LoopSocket(zap, loop, answer, parts_max=ZAP_FRAMES, share=self._share)
        self._sockets.append(made)

    def _make_router(self, keys: KeyPair | None) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        router.setsockopt(zmq.RCVHWM, 0)  # bounded by the guard; `unread_bytes.py` says why
        router.setsockopt(zmq.MAXMSGSIZE, ZMQ_MESSAGE_BYTES_MAX)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        router.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 1000))
        if keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        return router

    def _pause_s(self) -> float:
        return 0.0 if self._frames.take_tokens() else self._frames.wait_s

    def _take(self, parts: list[zmq.Frame]) -> None:
        route, body = parts[0].bytes, parts[1:]
        if not body:
            return  # a ROUTER has a route and at least one part of each message
        assert self._guard is not None
        connection = self._guard.note_message(body, route)
        host = str(body[0].get("Peer-Address"))
        self._on_message(Arrival(route, _user_of(body[0]), connection, [part.buffer for part in body], host))


def _user_of(part: zmq.Frame) -> str:
    """The key that the ZAP handler has put on a message."""
    with suppress(zmq.ZMQError):  # without CURVE there is none
        return str(part.get("User-Id"))
    return ""


def _check_access(addresses: tuple[ZmqAddress, ...], keys: KeyPair | None, allowed: frozenset[bytes]) -> None:
    faults = [f"peers' address {one} is no tcp address" for one in addresses if not one.endpoint.startswith("tcp://")]
    if not addresses:
        faults.append("peers have no address to connect to, expected at least one")
    if (keys is None) != (not allowed):
        faults.append("peers' key pair and list of allowed keys: expected both or none")
    if keys is None:
        remedy = "make a pair with `kvpoolctl keygen`, and list the other nodes' public keys"
        remote = [one for one in addresses if not one.is_local]
        faults += [f"peers' address {one} is beyond loopback, expected keys: {remedy}" for one in remote]
    if faults:
        raise ConfigError(faults)
