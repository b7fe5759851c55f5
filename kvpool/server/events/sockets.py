"""Event sockets: the publisher's ZMQ sockets. Binding, access control, replay requests.

XPUB, which subscribers see as PUB, sends messages and never waits: a subscriber that does not read loses messages beyond the
high-water mark. It also reports subscriptions. ROUTER replays messages:

    ask     [b"", number]           or [b"", number, topic]       number := u64, big endian: the first one wanted
    answer  [b"", topic, number, payload] for each that is kept, then [b"", b"", -1 as 8 bytes, b""]

With keys both use CURVE, and a ZAP handler admits exactly the keys of the clients file. Messages from outside are bounded by
REQUEST_BYTES_MAX before they are read, and an invalid one is counted and dropped. Requests are read as they come, whether or
not there is room for a replay. Connections have bounds too (`listener_guard.py`). ZMQ remembers all subscriptions: once
SUBSCRIPTIONS_BYTES_MAX of them, or of other messages, have come, all subscribers are disconnected, which forgets them, and
those that go on come again.

One thread: the maker of the sockets passes them on before it starts. What the guards do is the loop's.
"""

import asyncio
import errno
import os
import stat
import struct

import zmq

from kvpool.clock import Clock
from kvpool.config.addresses import ZmqAddress
from kvpool.config.curve_keys import read_allow_list, read_key_file
from kvpool.config.event_options import ROUTERS_MAX, EventsConfig
from kvpool.errors import ConfigError
from kvpool.ownership import is_served, make_socket_directory
from kvpool.peers.guarded_listener import context_for_others, descriptor_of
from kvpool.peers.zap import ZAP_DOMAIN, ZAP_ENDPOINT, ZapHandler
from kvpool.server.events.listener_guard import ListenerGuard
from kvpool.server.events.local_door import LocalDoor
from kvpool.server.events.replay import (
    HEARTBEAT_S,
    NUMBER,
    PEER_MESSAGES_MAX,
    RETRY_MS_MAX,
    Message,
    ReplayBuffer,
    Replays,
)

END_OF_REPLAY = struct.pack(">q", -1)
REQUEST_BYTES_MAX = 4096
# Messages that are read from a socket before the others' turn.
MESSAGES_PER_TURN = 64
# Routers whose request waits until a further replay can begin, each with its latest one.
ASKED_MAX = 2 * ROUTERS_MAX
SUBSCRIPTIONS_BYTES_MAX = 256 << 10
# Of the sockets that report connections to the guards: ZMQ waits for the loop beyond these and 1000 of its own.
REPORTS_WAITING_MAX = 64


class EventSockets:
    """XPUB and, where configured, ROUTER, both bound. `close` ends them.

    `buffer` has the messages that can be asked for again. `lost`: peers that asked for others since the last look;
    `subscribed`: topics that were subscribed to since then.
    """

    def __init__(self, config: EventsConfig, socket_mode: int, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: on which connections are watched.

        Raises OSError, naming the option, when an address cannot be bound, ConfigError for keys that are none."""
        assert config.publish is not None
        self._context = context_for_others()
        self._context.setsockopt(zmq.RCVHWM, REPORTS_WAITING_MAX)
        self._clock = clock
        self._loop = loop
        self._guards: dict[int, ListenerGuard] = {}  # by the kind of the socket
        self._doors: dict[int, LocalDoor] = {}  # of those in the file system
        self._closed_guards: list[ListenerGuard] = []
        self._made: list[zmq.Socket[bytes]] = []
        self._subscribed_bytes = 0
        self._secret = _secret_key_of(config.keys) if config.keys else b""
        path = config.allow
        self._access = ZapHandler(read_allow_list("events.allow", path) if path else frozenset(), clock)
        self._zap: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._asked: dict[bytes, tuple[int, bytes | None]] = {}
        self.poller = zmq.Poller()
        self.bad_requests = 0
        self.buffer = ReplayBuffer(messages_max=config.replay_messages, bytes_max=config.buffer)
        self._replays = Replays(self.buffer, self._replay_to, clock)
        self.lost: set[bytes] = set()
        self.subscribed: set[bytes] = set()
        try:
            if self._secret:
                self._zap = self._context.socket(zmq.REP)
                self._zap.bind(ZAP_ENDPOINT)
                self.poller.register(self._zap, zmq.POLLIN)
            self._publish = self._bound(
                zmq.XPUB,
                "events.publish",
                config.publish,
                high_water_mark=config.queue_messages,
                socket_mode=socket_mode,
            )
            self.poller.register(self._publish, zmq.POLLIN)
            if config.replay is not None:
                mark = PEER_MESSAGES_MAX
                self._replay = self._bound(
                    zmq.ROUTER, "events.replay", config.replay, high_water_mark=mark, socket_mode=socket_mode
                )
                self.poller.register(self._replay, zmq.POLLIN)
        except BaseException:
            self.close()
            raise

    @property
    def publish_endpoint(self) -> str:
        """The endpoint for subscribers."""
        return _endpoint_of(self._publish)

    @property
    def replay_endpoint(self) -> str:
        """The endpoint for replays; empty where there is none."""
        return "" if self._replay is None else _endpoint_of(self._replay)

    @property
    def refused_routers(self) -> int:
        """Connections of routers whose keys are not admitted."""
        return self._access.refused

    def let_in(self, clients: frozenset[bytes]) -> None:
        """Admit routers with these keys from now on, and no others. Any thread."""
        self._access.allowed = clients

    @property
    def ended_connections(self) -> int:
        """Connections of routers and others that were shut down."""
        return sum(guard.ended for guard in self._guards.values())

    @property
    def accept_closures(self) -> int:
        """How often nobody or few could connect for a moment, because too many did."""
        return sum(guard.closures for guard in self._guards.values())

    @property
    def unsent_replays(self) -> int:
        """Replays that ended early: the peer had gone, did not read, or asked for something else."""
        return self._replays.unsent_replays

    @property
    def wait_ms(self) -> int | None:
        """Milliseconds until there may be work that the poller does not signal; None: never."""
        if not all(door.is_open for door in self._doors.values()):
            return RETRY_MS_MAX
        return self._replays.wait_ms

    def send(self, message: Message) -> None:
        """Send a message to every subscriber that has room for it."""
        self._publish.send_multipart(message, zmq.NOBLOCK)

    def serve(self) -> int:
        """Answer replay and access requests. Returns how many messages were replayed."""
        if self._zap is not None:
            while self._zap.poll(0):
                self._zap.send_multipart(self._access.answer(self._zap.recv_multipart()))
        subscriptions = 0
        while subscriptions < MESSAGES_PER_TURN and self._publish.poll(0):
            self._note_subscription(self._publish.recv_multipart())
            subscriptions += 1
        self._note_turn(zmq.XPUB, subscriptions)
        if self._replay is None:
            return 0
        read: list[tuple[int, list[int]]] = []
        for _ in range(MESSAGES_PER_TURN):
            if not self._replay.poll(0):
                break
            frames = self._replay.recv_multipart(copy=False)
            read.append((descriptor_of(frames[-1]), [len(frame) for frame in frames[1:]]))
            self._take_request([frame.bytes for frame in frames])
        self._note_turn(zmq.ROUTER, len(read))
        if read and (guard := self._guards.get(zmq.ROUTER)) is not None:
            guard.note_requests(read, is_backlog=len(read) == MESSAGES_PER_TURN)
        while self._asked and self._replays.has_room:
            peer = next(iter(self._asked))
            self._replays.begin_replay(peer, *self._asked.pop(peer))
        return self._replays.send_waiting()

    def _note_turn(self, kind: int, read: int) -> None:
        if (door := self._doors.get(kind)) is not None:
            door.note_turn(is_full=read == MESSAGES_PER_TURN)

    def end_subscribers(self) -> None:
        """Disconnect all subscribers: they come again by themselves. Any thread."""
        if (guard := self._guards.get(zmq.XPUB)) is not None:
            guard.end_all()

    def close_listeners(self) -> None:
        """Accept nobody any more. On the loop; further calls do nothing."""
        closed, self._guards = list(self._guards.values()), {}
        self._closed_guards += closed
        for guard in closed:
            guard.close()

    def close(self) -> None:
        """Close everything at once, without waiting. REQUIRES: on the loop's thread, or the listeners are closed."""
        self.close_listeners()
        for door in self._doors.values():
            door.open()  # the file of a daemon that has ended has its own name
        for made in self._made:
            made.close(linger=0)
        for guard in self._closed_guards:
            guard.end_monitor()
        self._context.destroy(linger=0)
        for door in self._doors.values():
            door.remove()

    def _bound(
        self, kind: int, option: str, address: ZmqAddress, *, high_water_mark: int, socket_mode: int
    ) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        self._made.append(made)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, high_water_mark)
        made.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        made.setsockopt(zmq.IPV6, int("[" in address.endpoint))
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A peer that does not read does not answer heartbeats either, and is disconnected with its queue.
            made.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
            made.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 1000))
        else:
            made.setsockopt(zmq.XPUB_VERBOSE, 1)
        if self._secret:
            made.setsockopt(zmq.CURVE_SERVER, 1)
            made.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
            made.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)

        def bind_file(path: str) -> None:
            _bind_file(made, option, path, socket_mode, has_keys=bool(self._secret))

        def note_flood() -> None:
            if (door := self._doors.get(kind)) is not None:
                door.close()

        self._guards[kind] = ListenerGuard(
            made, option, address, bind_file=bind_file, on_flood=note_flood, clock=self._clock, loop=self._loop
        )
        if address.endpoint.startswith("ipc://"):
            self._doors[kind] = LocalDoor(address.endpoint.removeprefix("ipc://"), self._clock)
        return made

    def _note_subscription(self, frames: list[bytes]) -> None:
        """XPUB reports each subscription: 1, or 0 where it ends, and the topic prefix. Subscribers can send other things
        too."""
        is_begin = len(frames) == 1 and frames[0][:1] == b"\1"
        is_end = len(frames) == 1 and frames[0][:1] == b"\0"
        if is_begin:
            self.subscribed.add(frames[0][1:])
        elif not is_end:
            self.bad_requests += 1
        if not is_end:  # which makes room
            self._subscribed_bytes += sum(map(len, frames))
        if self._subscribed_bytes > SUBSCRIPTIONS_BYTES_MAX:
            self._subscribed_bytes = 0
            self.end_subscribers()

    def _take_request(self, request: list[bytes]) -> None:
        is_request = 3 <= len(request) <= 4 and request[1] == b"" and len(request[2]) == NUMBER.size
        if not is_request:
            self.bad_requests += 1
            return
        peer, (first,) = request[0], NUMBER.unpack(request[2])
        topic = request[3] if len(request) == 4 else None
        if self.buffer.has_lost(first, topic):
            self.lost.add(peer)
        if peer in self._asked or len(self._asked) < ASKED_MAX:
            self._asked[peer] = (first, topic)
        else:
            self._replays.unsent_replays += 1

    def _replay_to(self, peer: bytes, message: Message | None) -> bool:
        assert self._replay is not None
        frames = (b"", END_OF_REPLAY, b"") if message is None else message
        try:
            self._replay.send_multipart([peer, b"", *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise ConnectionResetError(error.errno, "the peer has gone") from error
        return True


def _bind_file(made: "zmq.Socket[bytes]", option: str, path: str, socket_mode: int, *, has_keys: bool) -> None:
    """Bind in the file system: the socket is made with its final rights, and nobody can connect before."""
    fault = make_socket_directory(path, is_private=True)
    if fault and not has_keys:
        raise ConfigError([f"{option} is ipc://{path}, where others could put a socket of their own: {fault}"])
    _check_free(option, path)
    umask = os.umask(0o777 & ~socket_mode)
    try:
        made.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{option} ipc://{path} cannot be bound: {error.strerror}") from error
    finally:
        os.umask(umask)
    os.chmod(path, socket_mode)


def _check_free(option: str, path: str) -> None:
    """ZMQ removes any file at the path to which it binds. Raises ConfigError for what is no socket, OSError for one that
    serves."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(
            [f"{option} is ipc://{path}, which exists and is no socket: move it away, or choose another path"]
        )
    if is_served(path):
        raise OSError(
            errno.EADDRINUSE, f"{option} ipc://{path} is served by another process: stop it, or choose another path"
        )


def _endpoint_of(bound: "zmq.Socket[bytes]") -> str:
    endpoint = bound.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


def _secret_key_of(path: str) -> bytes:
    return read_key_file("events.keys", path).secret
