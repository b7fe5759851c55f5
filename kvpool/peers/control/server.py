"""Control server: what other nodes ask this one, over the sockets of `listener.py`.

A message passes these checks in turn, each with a counter of its own: the key, the messages in a second of its peer, the size,
the record (`wire.py`), the Hello, the sequence number, the number of unanswered pulls. What fails is answered with Refused; too
many such messages end the connection, and so does going on after a refusal for too many messages.

    nothing known ──Hello──► known ──Pull──► serve() … answer(Offer | Refused)      one answer for each Pull, by its deadline
                               │ ──Stage──► stage()     as many at a time as pulls
                               │ ──AskNear──► near(), answered at once
                               │ ──Release──► release()
                               │ ──Wrong──► check()
                               │ ──AskChanges, AskKeys──► changes() and keys(), one at a time of a connection
                               └─ silent, replaced, stopped, or its answer could not be sent ──► forget(), and it ends

Loop thread only: `serve` may keep `answer` for later, on the loop. Bounds: `ControlServerSettings`.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from zmq.utils import z85

from kvpool.clock import Clock, Deadline
from kvpool.config.addresses import ZmqAddress
from kvpool.config.curve_keys import KeyPair
from kvpool.peers.control import records as r
from kvpool.peers.control import wire
from kvpool.peers.control.identity import NodeIdentity
from kvpool.peers.control.listener import Arrival, ListenerSettings, PeerListener
from kvpool.peers.control.name_claims import NameClaims
from kvpool.peers.control.pullers import Connection, Pullers
from kvpool.peers.control.services import FollowService, PullService
from kvpool.peers.token_bucket import TokenBucket

log = logging.getLogger(__name__)

LOOK_S = 1.0
# Refused messages of one peer, at once and then in each STRIKES_S, before its connection is shut down.
STRIKES_MAX = 16
STRIKES_S = 10.0
PEERS_KNOWN_MAX = 4096
# After a pull's deadline its owner has this long to answer.
LATE_S = 0.5
# A request about this node's keys has to be answered this long after its wait.
FOLLOW_S = 5.0
# So has a Stage after its wait: bytes are copied meanwhile.
STAGE_S = 5.0
# A StageInto is answered when nothing of it is written any more, which its puller does not know otherwise.
STAGE_INTO_S = r.INTO_BEGIN_S + r.INTO_WRITE_S + STAGE_S
# What is counted, from the start on.
_COUNTED = "messages hellos pulls stages shm follows offers late_answers unsent ended_for_messages idle errors"
COUNTED = dict.fromkeys((*_COUNTED.split(), *(f"refused.{code}" for code in r.REFUSAL_CODES)), 0)


@dataclass(frozen=True, slots=True)
class ControlServerSettings:
    """Bounds of a control server. `frames_per_s`, `waiting_max` and `connections_per_peer` are of one peer."""

    frames_per_s: float = 1000.0
    waiting_max: int = 16
    connections_per_peer: int = 4
    connections_max: int = 1024
    idle_s: float = 30.0
    listener: ListenerSettings = field(default_factory=ListenerSettings)


class ControlServer:
    """See the module. Bound by the constructor; served until `close`.

    `counts`: messages and what became of them; refusals are `refused.CODE`.
    """

    def __init__(
        self,
        addresses: tuple[ZmqAddress, ...],
        service: PullService,
        *,
        follows: FollowService,
        identity: NodeIdentity,
        keys: KeyPair | None,
        allowed: frozenset[bytes],
        settings: ControlServerSettings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        claims: NameClaims | None = None,
        on_hello: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`keys`, `allowed`: both or neither; without them only loopback addresses are served. `claims`: of names, where others
        claim them too. `on_hello`: a node of this name has connected. Raises ConfigError, and OSError for an address that
        cannot be bound; then nothing is."""
        self._identity = identity
        self._service = service
        self._follows = follows
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._pullers = Pullers(
            clock,
            connections_max=settings.connections_max,
            per_peer_max=settings.connections_per_peer,
            idle_s=settings.idle_s,
            shared_key="" if keys is None else z85.decode(keys.public).hex(),
        )
        self._claims = claims or NameClaims()
        self._claims.watch(lambda: [(one.puller.node, one.puller.incarnation) for one in self._pullers.all()])
        self._on_hello = on_hello
        self._of_peer: OrderedDict[str, _Standing] = OrderedDict()
        self._next: asyncio.TimerHandle | None = None
        self._has_failed = False
        self.is_stopping = False
        self.counts: Counter[str] = Counter()
        self._listener = PeerListener(
            addresses,
            self._take,
            on_end=self._note_end,
            keys=keys,
            allowed=allowed,
            settings=settings.listener,
            clock=clock,
            loop=loop,
        )
        self.endpoints = self._listener.endpoints

    def __repr__(self) -> str:
        return f"<ControlServer {', '.join(self.endpoints)}, {len(self._pullers)} pullers>"

    def admit(self, allowed: frozenset[bytes]) -> None:
        """Admit these keys from now on, and end the connections of others. REQUIRES: the server has keys."""
        self._listener.admit(allowed)
        names = {key.hex() for key in allowed}
        for connection in self._pullers.all():
            if connection.puller.key not in names:
                self._forget(connection)

    def close(self) -> None:
        """End everything at once. What is held for pullers is forgotten."""
        self.is_stopping = True
        if self._next is not None:
            self._next.cancel()
        for connection in self._pullers.all():
            self._forget(connection)
        self._listener.close()

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {**COUNTED, **self.counts, **self._listener.stats(), "pullers": len(self._pullers)}

    def _take(self, arrival: Arrival) -> None:
        self.counts["messages"] += 1
        connection = self._pullers.of_route(arrival.route)
        standing = self._standing_of(arrival.peer if connection is None else connection.peer)
        if not standing.frames.take_tokens():
            self.counts["refused.rate"] += 1
            if standing.refusals.take_tokens():
                text = f"more than {self._settings.frames_per_s:g} messages in a second"
                self._send(arrival.route, r.Refused(r.RefusalCode.RATE, text))
            else:
                self._strike(standing, arrival)
            return
        try:
            most = wire.HELLO_BYTES_MAX if connection is None else wire.MESSAGE_BYTES_MAX
            self._serve(wire.decode_request(arrival.parts, bytes_max=most), connection, arrival)
        except wire.WireFault as fault:
            self.counts[f"refused.{fault.code}"] += 1
            self._send(arrival.route, r.Refused(fault.code, str(fault)), fault.sequence)
            if fault.code not in (r.RefusalCode.BUSY, r.RefusalCode.STOPPING):
                self._strike(standing, arrival)

    def _serve(self, message: wire.Message, connection: Connection | None, arrival: Arrival) -> None:
        sequence, record = message
        if isinstance(record, r.Hello):
            self._greet(record, sequence, arrival)
            return
        if connection is None:
            raise wire.WireFault(r.RefusalCode.HELLO, "nothing is served before a Hello on this connection", sequence)
        if sequence <= connection.sequence:
            raise wire.WireFault(r.RefusalCode.REPEATED, "sequence number was used before", sequence)
        connection.sequence = sequence
        if isinstance(record, r.Ping):
            self._send(connection.route, r.Pong(self._identity.incarnation), sequence)
        elif isinstance(record, r.Release):
            connection.waiting.pop(record.pull, None)
            self._safely(lambda: self._service.release(connection.puller, record.pull))
        elif isinstance(record, r.Wrong):
            self._safely(lambda: self._service.check(connection.puller, record))
        elif isinstance(record, r.Pull):
            self._pull(connection, record, sequence)
        elif isinstance(record, r.AnyStage):
            self._stage(connection, record, sequence)
        elif isinstance(record, r.AskNear):
            if not self._safely(lambda: self._near(connection, record, sequence)):
                failed = r.Refused(r.RefusalCode.FAILED, "the node failed to serve it, see its log")
                self._send_or_forget(connection, failed, sequence)
        else:
            self._follow(connection, record, sequence)

    def _greet(self, hello: r.Hello, sequence: int, arrival: Arrival) -> None:
        try:
            version = self._identity.accept(hello)
        except wire.WireFault as fault:
            raise wire.WireFault(fault.code, str(fault), sequence) from fault
        if self._pullers.is_shared(arrival.key) and not self._claims.claim(hello.node, hello.incarnation):
            text = f"another node that calls itself {hello.node[:64]!r} is connected: give each node a peer.name of its own"
            raise wire.WireFault(r.RefusalCode.NAME, text, sequence)
        peer = self._pullers.peer_of(arrival.peer, node=hello.node, key=arrival.key)
        for former in self._pullers.replaced_by(arrival.route, peer, node=hello.node, key=arrival.key):
            self._forget(former, ends=former.number != arrival.connection)
        if not self._listener.note_hello(arrival.connection):
            raise wire.WireFault(r.RefusalCode.HELLO, "this connection has ended: connect again", sequence)
        if self._pullers.is_full:
            raise wire.WireFault(r.RefusalCode.BUSY, "too many nodes are connected", sequence)
        self._pullers.add_connection(
            arrival.route,
            peer,
            node=hello.node,
            incarnation=hello.incarnation,
            key=arrival.key,
            number=arrival.connection,
            sequence=sequence,
            host=arrival.host,
        )
        self.counts["hellos"] += 1
        self._on_hello(hello.node)
        self._send(arrival.route, self._identity.hello(oldest=version, newest=version), sequence)
        self._look_later()

    def _pull(self, connection: Connection, pull: r.Pull, sequence: int) -> None:
        if pull.pull <= connection.pull:
            raise wire.WireFault(r.RefusalCode.REPEATED, f"pull {pull.pull} was used before", sequence)
        connection.pull = pull.pull
        if self.is_stopping:
            raise wire.WireFault(r.RefusalCode.STOPPING, "this node is about to end", sequence)
        self._check_waiting(connection, sequence)
        connection.waiting[pull.pull] = (sequence, Deadline(pull.deadline_ms / 1e3 + LATE_S, self._clock))
        self.counts["pulls"] += 1
        is_served = self._safely(
            lambda: self._service.serve(
                connection.puller, pull, lambda answer: self._answer(connection, pull.pull, answer)
            )
        )
        if not is_served:
            self._answer(
                connection, pull.pull, r.Refused(r.RefusalCode.FAILED, "the node failed to serve it, see its log")
            )

    def _check_waiting(self, connection: Connection, sequence: int) -> None:
        if self._pullers.waiting_of(connection.peer) >= self._settings.waiting_max:
            text = f"{self._settings.waiting_max} pulls of this node wait for their answers already"
            raise wire.WireFault(r.RefusalCode.BUSY, text, sequence)

    def _stage(self, connection: Connection, stage: r.AnyStage, sequence: int) -> None:
        if self.is_stopping:
            raise wire.WireFault(r.RefusalCode.STOPPING, "this node is about to end", sequence)
        self._check_waiting(connection, sequence)
        longest_s = STAGE_INTO_S if isinstance(stage, r.StageInto) else STAGE_S
        connection.stages[sequence] = Deadline(stage.wait_ms / 1e3 + longest_s, self._clock)
        self.counts["stages"] += 1

        def answer(found: r.Staged | r.Refused) -> bool:
            return self._answer_stage(connection, sequence, found)

        if not self._safely(lambda: self._service.stage(connection.puller, stage, answer)):
            answer(r.Refused(r.RefusalCode.FAILED, "the node failed to serve it, see its log"))

    def _answer_stage(self, connection: Connection, sequence: int, answer: r.Staged | r.Refused) -> bool:
        if connection.stages.pop(sequence, None) is None:
            self.counts["late_answers"] += 1
            return False
        if isinstance(answer, r.Refused):
            self.counts[f"refused.{answer.code}"] += 1
        return self._send_or_forget(connection, answer, sequence)

    def _near(self, connection: Connection, ask: r.AskNear, sequence: int) -> None:
        answer = self._service.near(connection.puller, ask)
        self.counts["shm"] += 1
        if isinstance(answer, r.Refused):
            self.counts[f"refused.{answer.code}"] += 1
        self._send_or_forget(connection, answer, sequence)

    def _follow(self, connection: Connection, ask: r.AskFollow, sequence: int) -> None:
        if self.is_stopping:
            raise wire.WireFault(r.RefusalCode.STOPPING, "this node is about to end", sequence)
        if connection.follow is not None:
            text = "a request about keys waits for its answer already on this connection"
            raise wire.WireFault(r.RefusalCode.BUSY, text, sequence)
        wait_s = ask.wait_ms / 1e3 if isinstance(ask, r.AskChanges) else 0.0
        connection.follow = (sequence, Deadline(wait_s + FOLLOW_S, self._clock))
        self.counts["follows"] += 1

        def answer(found: r.FollowAnswer | r.Refused) -> bool:
            return self._answer_follow(connection, sequence, found)

        def serve() -> None:
            if isinstance(ask, r.AskChanges):
                self._follows.changes(connection.puller, ask, answer)
            else:
                self._follows.keys(connection.puller, ask, answer)

        if not self._safely(serve):
            answer(r.Refused(r.RefusalCode.FAILED, "the node failed to serve it, see its log"))

    def _answer_follow(self, connection: Connection, sequence: int, answer: r.FollowAnswer | r.Refused) -> bool:
        if connection.follow is None or connection.follow[0] != sequence:
            self.counts["late_answers"] += 1
            return False
        connection.follow = None
        if isinstance(answer, r.Refused):
            self.counts[f"refused.{answer.code}"] += 1
        return self._send_or_forget(connection, answer, sequence)

    def _answer(self, connection: Connection, pull: int, answer: r.Offer | r.Refused) -> bool:
        waiting = connection.waiting.pop(pull, None)
        if waiting is None:
            self.counts["late_answers"] += 1
            return False
        if isinstance(answer, r.Refused):
            self.counts[f"refused.{answer.code}"] += 1
        else:
            self.counts["offers"] += 1
        return self._send_or_forget(connection, answer, waiting[0])

    def _send_or_forget(self, connection: Connection, answer: r.Answer, sequence: int) -> bool:
        """Whether the answer has gone. A peer that does not read loses its connection."""
        is_sent = self._send(connection.route, answer, sequence)
        if not is_sent:
            self._forget(connection)
        return is_sent

    def _send(self, route: bytes, record: r.Answer, sequence: int = 0) -> bool:
        """Whether the message has gone to ZMQ: the peer is there, and reads its answers."""
        is_sent = self._listener.send(route, wire.encode_message(record, sequence))
        self.counts["unsent"] += not is_sent
        return is_sent

    def _strike(self, standing: "_Standing", arrival: Arrival) -> None:
        if not standing.strikes.take_tokens():
            self.counts["ended_for_messages"] += 1
            self._listener.end_connection(arrival.connection)

    def _standing_of(self, peer: str) -> "_Standing":
        found = self._of_peer.pop(peer, None) or _Standing(self._settings, self._clock)
        self._of_peer[peer] = found
        if len(self._of_peer) > PEERS_KNOWN_MAX:
            self._of_peer.popitem(last=False)
        return found

    def _note_end(self, number: int) -> None:
        """A connection has ended."""
        found = self._pullers.of_number(number)
        if found is not None:
            self._forget(found, ends=False)

    def _forget(self, connection: Connection, *, ends: bool = True) -> None:
        """Release what is held for a connection. `ends`: it is shut down, so that it takes no descriptor."""
        if ends:
            self._listener.end_connection(connection.number)
        if self._pullers.forget(connection):
            connection.waiting.clear()
            connection.stages.clear()
            connection.follow = None
            self._safely(lambda: self._service.forget(connection.puller))
            self._safely(lambda: self._follows.forget(connection.puller))
            self._safely(self._claims.on_end)

    def _look_later(self) -> None:
        if self._next is None and not self.is_stopping:
            self._next = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Forget the silent, and refuse what nobody has answered. Only while there is anybody."""
        self._next = None
        for connection in self._pullers.idle():
            self.counts["idle"] += 1
            self._forget(connection)
        for connection in self._pullers.all():
            late = [pull for pull, (_, deadline) in connection.waiting.items() if deadline.has_passed()]
            for pull in late:
                self._answer(connection, pull, r.Refused(r.RefusalCode.FAILED, "no answer by the deadline"))
            for sequence in [number for number, deadline in connection.stages.items() if deadline.has_passed()]:
                self._answer_stage(connection, sequence, r.Refused(r.RefusalCode.FAILED, "no answer by the deadline"))
            if connection.follow is not None and connection.follow[1].has_passed():
                late_follow = r.Refused(r.RefusalCode.FAILED, "no answer by the deadline")
                self._answer_follow(connection, connection.follow[0], late_follow)
        if len(self._pullers):
            self._look_later()

    def _safely(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:
            self.counts["errors"] += 1
            if not self._has_failed:
                self._has_failed = True
                log.exception("a peer's request failed; further ones like it are counted, not logged")
            return False
        return True


class _Standing:
    """One peer's budgets: of frames, of refusals for too many, of strikes."""

    __slots__ = ("frames", "refusals", "strikes")

    def __init__(self, settings: ControlServerSettings, clock: Clock) -> None:
        self.frames = TokenBucket(settings.frames_per_s, settings.frames_per_s, clock)
        self.refusals = TokenBucket(1.0, 1, clock)
        self.strikes = TokenBucket(STRIKES_MAX / STRIKES_S, STRIKES_MAX, clock)
