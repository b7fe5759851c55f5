"""Connection guard: the connections below a ZMQ socket on which others connect, their bounds, and the right to end one.

ZMQ accepts without a bound, keeps a connection that never says anything, reads messages and their parts into memory without
a bound (`unread_bytes.py`), and has no call that ends a connection. So the guard follows the socket's monitor, holds a
duplicate of each accepted connection's descriptor, and shuts one down

- whose peer has not sent its Hello in time, with or without a handshake;
- the oldest of these from one source, or from the source that has most, where there are too many;
- where one source has more than half of all connections;
- of whose bytes more than `unread_bytes_max` were not read as messages, or before its first message `first_bytes_max`;
- over which more than `backlog_per_look_max` messages were read between two looks with others waiting behind them;
- over which something has come more than `arrivals_per_look_max` times between two looks, of a kind that sends little;
- that `end` names: its peer breaks the protocol or sends too much, or it is no longer served.

ZMQ then sees an ordinary end of the connection. Who connects too often is kept away by the accept gate, so that neither
descriptors nor the loop's time grow with it: between an accepted connection and the gate lies a turn of the loop.

A number of a descriptor is used again after its connection has ended; therefore a duplicate is held only if it is a connection
of the listener's own place, and never anything else of this process. A connection is known by a number of its own, never the
same twice.

Loop thread only. Invariant: `_connections` has no descriptor twice, and its duplicates are closed when ZMQ reports the end;
`_strangers` has, by source, those that have not sent their Hello and were not shut down, the oldest first.
"""

import asyncio
import os
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpool.clock import Clock, Deadline
from kvpool.peers.arrival_watch import ArrivalWatch
from kvpool.peers.control.accept_gate import AcceptGate, source_of, source_of_peer
from kvpool.peers.control.guarded_connection import GuardedConnection, GuardSettings
from kvpool.peers.guarded_listener import descriptor_of
from kvpool.peers.loop_share import LoopShare
from kvpool.peers.loop_socket import LoopSocket
from kvpool.peers.token_bucket import TokenBucket
from kvpool.peers.unread_bytes import HEARTBEAT_BYTES, LOOK_S, received_bytes, unread_bytes, wire_bytes

# Connections that are looked at in a turn of the loop.
LOOKED_AT_ONCE = 64
SOURCES_KNOWN_MAX = 4096
# So long nobody connects from a source that did so too often.
PAUSE_S = 1.0
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
# How long the end of a monitor is waited for: some hundred events, which ZMQ writes at once.
MONITOR_END_S, MONITOR_POLL_MS = 2.0, 50


class ConnectionGuard:
    """See the module. `ended`: connections shut down until now; `crowded`, `silent`: of these, those for which there was no
    room, and those without a Hello."""

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        gate: AcceptGate,
        settings: GuardSettings,
        on_end: Callable[[int], None],
        on_flood: Callable[[], None] = lambda: None,
        share: LoopShare | None = None,
    ) -> None:
        """`router` is bound later, so that no connection is missed. `on_end`: called with the number of each that has ended.
        `on_flood`: with each that was ended because more has come than is read.
        `share`: of the loop's time. Beyond it ZMQ waits for the loop, once some hundreds of events are not read."""
        self._loop = loop
        self._clock = clock
        self._gate = gate
        self._settings = settings
        self._on_end = on_end
        self._on_flood = on_flood
        self._places: Collection[int | str] = ()
        self._numbers = 0
        self._connections: dict[int, GuardedConnection] = {}
        self._by_number: dict[int, GuardedConnection] = {}
        self._of_source: Counter[bytes] = Counter()
        self._strangers: dict[bytes, OrderedDict[int, GuardedConnection]] = {}
        self._accepts = TokenBucket(settings.accepts_per_s, 2 * settings.accepts_per_s, clock)
        self._accepts_of: OrderedDict[bytes, TokenBucket] = OrderedDict()
        self._round: list[GuardedConnection] = []
        self._next: asyncio.TimerHandle | None = None
        self.ended = self.crowded = self.silent = 0
        self._held: dict[int, GuardedConnection] = {}  # by the duplicate's descriptor
        monitor = router.get_monitor_socket(EVENTS)
        self._arrivals = ArrivalWatch(loop, self._note_arrival)
        self._monitor = LoopSocket(monitor, loop, self._take, share=share)

    def __len__(self) -> int:
        return len(self._connections)

    def watch(self, places: Collection[int | str]) -> None:
        """The listener's own ports, or paths of the file system, known after it was bound and before the loop's next turn."""
        self._places = places

    def note_message(self, parts: Sequence[zmq.Frame], route: bytes) -> int:
        """A message with these parts was read: the number of its connection; 0 where that is unknown, or ended before another
        one with its descriptor."""
        found = self._connection_of(parts[0], route)
        if found is None:
            self._monitor.take_all()  # what has ended or been accepted since is reported there before its first message
            found = self._connection_of(parts[0], route)
        if found is None:
            return 0
        found.route = route
        found.has_spoken = True
        found.read += self.wire_bytes(map(len, parts))
        return found.number

    def wire_bytes(self, sizes: Iterable[int]) -> int:
        """Bytes that a message with parts of these sizes had on its connection."""
        return wire_bytes(sizes, is_encrypted=self._settings.is_encrypted)

    def _connection_of(self, part: zmq.Frame, route: bytes) -> GuardedConnection | None:
        found = self._connections.get(descriptor_of(part))
        if found is None or found.route == route:
            return found
        is_first = not found.route and source_of(str(part.get("Peer-Address"))) == found.source
        return found if is_first else None

    def note_hello(self, number: int) -> bool:
        """The peer of a connection was admitted. Whether the connection is there."""
        found = self._by_number.get(number)
        if found is None or found.is_ended:
            return False
        found.hello = None
        self._no_stranger(found)
        self._gate.note_known(found.source)
        return True

    def note_read(self, messages: Iterable[tuple[int, int]], *, is_backlog: bool) -> None:
        """Messages were read elsewhere: of each the descriptor of its connection, and its bytes there. `is_backlog`: others
        wait behind them."""
        for descriptor, size in messages:
            found = self._connections.get(descriptor)
            if found is None:
                continue
            found.has_spoken = True
            found.read += size
            found.backlog += is_backlog
            if found.backlog > self._settings.backlog_per_look_max:
                self._end_flood(found)

    def end_connection(self, number: int) -> None:
        """Shut a connection down, if it is one that is known."""
        found = self._by_number.get(number)
        if found is not None:
            self._shut_down(found)

    def end_all(self) -> None:
        """Shut every connection down: those that may will come again."""
        for found in self._connections.values():
            self._shut_down(found)

    def end_strangers(self) -> None:
        """Shut down every connection whose peer was not admitted yet: those that may will come again."""
        for found in [one for one in self._connections.values() if one.hello is not None]:
            self._shut_down(found)

    def close(self) -> None:
        """Stop watching. `end_monitor` has to follow."""
        self._monitor.release()
        self._arrivals.close()
        if self._next is not None:
            self._next.cancel()
        for found in self._connections.values():
            found.peer.close()
        self._connections.clear()

    def end_monitor(self) -> None:
        """Close the monitor, once ZMQ has stopped to write to it: without a reader it would wait for ever, with all connections
        of its context. Any thread, after `close`. REQUIRES: the watched socket is closed."""
        monitor = self._monitor.release()
        until = Deadline(MONITOR_END_S, self._clock)
        while not monitor.closed and not until.has_passed():
            if not monitor.poll(MONITOR_POLL_MS):
                continue
            if parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_MONITOR_STOPPED:
                monitor.close(linger=0)

    def _take(self, parts: list[zmq.Frame]) -> None:
        event = parse_monitor_message([part.bytes for part in parts])
        descriptor = int(event["value"])
        former = self._connections.pop(descriptor, None)
        if former is not None:
            self._drop(former)
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._accept(descriptor)

    def _accept(self, descriptor: int) -> None:
        try:
            peer = socket.socket(fileno=descriptor)
        except OSError:
            return  # it has ended already, and its number is something else's
        try:
            if not self._is_ours(peer):
                return
            source = source_of_peer(peer)
            held = self._hold(descriptor)
        except OSError:
            self._end_unheld(peer)
            return
        finally:
            peer.detach()
        self._numbers += 1
        made = GuardedConnection(self._numbers, held, source, Deadline(self._settings.hello_s, self._clock))
        self._connections[descriptor] = self._by_number[made.number] = self._held[held.fileno()] = made
        self._of_source[source] += 1
        self._strangers.setdefault(source, OrderedDict())[made.number] = made
        self._bound(made)
        self._look_later()

    def _hold(self, descriptor: int) -> socket.socket:
        """A duplicate, watched. Raises OSError."""
        held = socket.socket(fileno=os.dup(descriptor))  # Python's own `dup` would have it block, for ZMQ too
        try:
            self._arrivals.add_connection(held.fileno())
        except OSError:
            held.close()
            raise
        return held

    def _end_unheld(self, peer: socket.socket) -> None:
        """It has ended already, or there is no descriptor for its duplicate: then there is no bound on it, and it ends."""
        try:
            if self._is_ours(peer):
                peer.shutdown(socket.SHUT_RDWR)
                self.ended += 1
        except OSError:
            return

    def _bound(self, made: GuardedConnection) -> None:
        """Make room for others after a new connection."""
        settings, source = self._settings, made.source
        strangers = sum(map(len, self._strangers.values()))
        crowd: bytes | None = None
        if len(self._strangers[source]) > settings.strangers_max // 4:
            crowd = source
        elif strangers > settings.strangers_max:
            crowd = max(self._strangers, key=lambda one: len(self._strangers[one]))
        if self._of_source[source] > (settings.connections_max + settings.strangers_max) // 2:
            self.crowded += 1
            self._shut_down(made)
        elif crowd is not None:
            self.crowded += 1
            self._shut_down(next(iter(self._strangers[crowd].values())))
        if not self._accepts_from(source).take_tokens():
            self._gate.close(source, PAUSE_S)
        elif not self._accepts.take_tokens() or len(self) > settings.connections_max + settings.strangers_max:
            self._gate.close_strangers(LOOK_S)

    def _accepts_from(self, source: bytes) -> TokenBucket:
        per_s = self._settings.accepts_per_s_of_source
        found = self._accepts_of.pop(source, None) or TokenBucket(per_s, 5 * per_s, self._clock)
        self._accepts_of[source] = found
        if len(self._accepts_of) > SOURCES_KNOWN_MAX:
            self._accepts_of.popitem(last=False)
        return found

    def _no_stranger(self, found: GuardedConnection) -> None:
        of_source = self._strangers.get(found.source)
        if of_source is not None and of_source.pop(found.number, None) is not None and not of_source:
            del self._strangers[found.source]

    def _drop(self, former: GuardedConnection) -> None:
        """ZMQ has closed it."""
        former.is_ended = True
        del self._held[former.peer.fileno()]
        self._arrivals.remove(former.peer.fileno())
        former.peer.close()
        self._no_stranger(former)
        del self._by_number[former.number]
        self._of_source[former.source] -= 1
        if not self._of_source[former.source]:
            del self._of_source[former.source]
        self._on_end(former.number)

    def _is_ours(self, peer: socket.socket) -> bool:
        try:
            peer.getpeername()
            if peer.family == socket.AF_UNIX:
                return peer.getsockname() in self._places
            is_tcp = peer.type == socket.SOCK_STREAM and peer.family in (socket.AF_INET, socket.AF_INET6)
            return is_tcp and peer.getsockname()[1] in self._places
        except OSError:
            return False

    def _look_later(self, after_s: float = LOOK_S) -> None:
        if self._next is None and (self._connections or not self._gate.is_open):
            self._next = self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        """Look at a few connections; at all of them in a round of LOOK_S and a bit."""
        self._next = None
        self._gate.open_due()
        looked, self._round = self._round[:LOOKED_AT_ONCE], self._round[LOOKED_AT_ONCE:]
        for found in looked:
            if not found.is_ended:
                self._look_at(found)
        if self._round:
            self._look_later(LOOK_S / 100)
        else:
            self._round = list(self._connections.values())
            self._look_later()

    def _look_at(self, found: GuardedConnection) -> None:
        if found.hello is not None and found.hello.has_passed():
            self._end_wait(found)
            if found.is_ended:
                return
        found.backlog = found.arrivals = 0
        found.read = min(self._check_bytes(found), found.read + HEARTBEAT_BYTES)

    def _note_arrival(self, held: int) -> None:
        """Soon after a flood has begun: until it is ended, ZMQ reads it into memory."""
        found = self._held[held]
        if found.is_ended:
            return
        came = self._check_bytes(found)
        if came != found.seen:  # ZMQ may not have read yet what was seen before
            found.seen = came
            found.arrivals += 1
        if found.arrivals > self._settings.arrivals_per_look_max:
            self._end_flood(found)

    def _check_bytes(self, found: GuardedConnection) -> int:
        """The bytes that have come over a connection, or where nobody counts those, that wait in the kernel. It ends where too
        many are not read."""
        is_counted = found.peer.family != socket.AF_UNIX
        try:
            came = received_bytes(found.peer) if is_counted else unread_bytes(found.peer)
        except OSError:
            return 0  # it has ended
        most = self._settings.unread_bytes_max if found.has_spoken else self._settings.first_bytes_max
        if came - (found.read if is_counted else 0) > most:
            self._end_flood(found)
        return came

    def _end_flood(self, found: GuardedConnection) -> None:
        if not found.is_ended:
            self._shut_down(found)
            self._on_flood()

    def _end_wait(self, found: GuardedConnection) -> None:
        """The time for its Hello is over."""
        if self._settings.is_greeted:
            self.silent += 1
            self._shut_down(found)
        elif sum(one.hello is None and not one.is_ended for one in self._connections.values()) >= (
            self._settings.connections_max
        ):
            self.crowded += 1
            self._shut_down(found)
        else:
            self.note_hello(found.number)

    def _shut_down(self, found: GuardedConnection) -> None:
        """Once for each connection: messages that came before are still delivered, and may be as bad."""
        if found.is_ended:
            return
        found.is_ended = True
        self._no_stranger(found)
        try:
            found.peer.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already
        self.ended += 1
