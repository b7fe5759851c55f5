"""Link to one peer: a ZMQ DEALER with at most one connection, which is made again after it has ended.

             connect                handshake, Hello ──►             Hello ◄──
    IDLE ──────────────► CONNECTING ────────────────────► GREETING ────────────► READY
     ▲                       │                               │                     │  disconnected, bad answer, silent
     └──── back-off ─────────┴───────────────────────────────┴─────────────────────┘

Each connection has a socket of its own: what a former one left behind, in either direction, ends with it, and every request
that waits fails at once. One request is one future with a deadline. An answer after that is dropped, and the chunks of a late
pull are released. A peer whose incarnation differs from that of the last connection has begun a new life.

A silent peer is pinged: ZMQ's heartbeat finds a dead network, the ping a hung loop. Loop thread only. Bounds: `LinkSettings`.
Invariant: `_waiting` is empty unless the link is READY.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpool.clock import NS_PER_S, Clock
from kvpool.config.curve_keys import KeyPair
from kvpool.errors import PeerNotAsked, PeerUnreachable, Refused
from kvpool.peers.back_off import BackOff, BackOffSettings, Uniform
from kvpool.peers.control import records as r
from kvpool.peers.control import wire
from kvpool.peers.control.identity import NodeIdentity, PeerLife
from kvpool.peers.control.listener import ZMQ_MESSAGE_BYTES_MAX
from kvpool.peers.link_state import REFUSED, LinkState
from kvpool.peers.loop_share import LoopShare
from kvpool.peers.loop_socket import LoopSocket
from kvpool.peers.members.member import Member
from kvpool.peers.token_bucket import TokenBucket
from kvpool.peers.unread_bytes import UnreadBytes, wire_bytes

# Without EVENT_HANDSHAKE_FAILED_PROTOCOL, which DISCONNECTED follows: as libzmq 4.3.5 writes it, a message's fault is lost.
_FAILED_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENTS = _FAILED_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED
# Of a smoothed round trip, the weight of the latest one: TCP's.
_RTT_WEIGHT = 0.125
# Answers that nobody waits for, at once and then in each UNASKED_S, before the link ends: twice as many as can be late.
UNASKED_MAX = 32
UNASKED_S = 10.0
# The fault of a handshake that the peer has ended.
WRONG_KEYS = "it cannot be connected: the keys are not each other's"


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds of a link. `connect_s`: for a Hello, a pong or a heartbeat of the peer. `ping_s`: of silence before a ping."""

    waiting_max: int = 16
    connect_s: float = 3.0
    ping_s: float = 5.0
    back_off: BackOffSettings = field(default_factory=BackOffSettings)


@dataclass(slots=True)
class _Waiting:
    request: r.Asked
    answer: "asyncio.Future[Any]"
    timer: asyncio.TimerHandle
    sent_ns: int


class PeerLink:
    """See the module. `life`: the peer's, while the link is ready; `last_life`: the latest one. `rtt_s`: a smoothed round trip
    of pings; 0 before the first. `fault`: why the last connection ended."""

    def __init__(
        self,
        member: Member,
        *,
        identity: NodeIdentity,
        keys: KeyPair | None,
        settings: LinkSettings,
        context: "zmq.Context[zmq.Socket[bytes]]",
        clock: Clock,
        random: Uniform,
        loop: asyncio.AbstractEventLoop,
        counts: Counter[str],
        share: LoopShare,
        on_change: "Callable[[PeerLink], None]",
    ) -> None:
        """`share`: of the loop, for all answers. `on_change` is called as READY begins or ends, and as an attempt fails; it
        never waits."""
        self.member = member
        self._identity = identity
        self._keys = keys
        self._settings = settings
        self._context = context
        self._clock = clock
        self._loop = loop
        self._counts = counts
        self._share = share
        self._unasked = TokenBucket(UNASKED_MAX / UNASKED_S, UNASKED_MAX, clock)
        self._on_change = on_change
        self._back_off = BackOff(settings.back_off, random)
        self._dealer: LoopSocket | None = None
        self._monitor: LoopSocket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[int, _Waiting] = {}
        # All answers that a link waits for.
        most = (settings.waiting_max + 2) * ZMQ_MESSAGE_BYTES_MAX
        self._unread = UnreadBytes(most, lambda: self._end("it has sent more bytes than this node waits for"), loop)
        self._sequence = 0
        self._pull = 0
        self._has_spoken = False
        self.state = LinkState.IDLE
        self.life: PeerLife | None = None
        self.last_life: PeerLife | None = None
        self._lost_ns = 0
        self.rtt_s = 0.0
        self.fault = ""
        self.same_faults = 0  # ends of attempts in a row that had this fault
        self._call_later(0, self._connect)

    def __repr__(self) -> str:
        return f"<PeerLink {self.member.endpoint} {self.state.value}, {len(self._waiting)} waiting>"

    @property
    def away_s(self) -> float | None:
        """How long ago the link was ready; None while it is, and where it never was."""
        if self.life is not None or self.last_life is None:
            return None
        return (self._clock.now_ns() - self._lost_ns) / NS_PER_S

    def next_pull(self) -> int:
        """A number for a Pull, used by no other on this link."""
        self._pull += 1
        return self._pull

    def request(self, request: r.Asked, timeout_s: float) -> "asyncio.Future[Any]":
        """Ask the peer. The future has the answer, or raises Refused or PeerUnreachable, by the deadline at the latest. One
        that is cancelled releases its pull."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self.state is not LinkState.READY:
            answer.set_exception(
                PeerNotAsked(f"{self.member.endpoint} is not connected: {self.fault or self.state.value}")
            )
        elif self._is_full_for(request):
            self._counts["full"] += 1
            _fail(answer, PeerNotAsked(f"{self.member.endpoint}: {len(self._waiting)} requests without an answer"))
        elif (sequence := self._send(request)) is None:
            _fail(answer, PeerNotAsked(f"{self.member.endpoint} does not read"))
        else:
            timer = self._loop.call_later(timeout_s, self._expire, sequence)
            self._waiting[sequence] = _Waiting(request, answer, timer, self._clock.now_ns())
            answer.add_done_callback(lambda _: self._give_up(sequence))
        return answer

    def _is_full_for(self, request: r.Asked) -> bool:
        """Whether too many requests wait. Following the peer's keys has a place of its own, and takes none of the others'."""
        follows = sum(isinstance(one.request, r.AskFollow) for one in self._waiting.values())
        if isinstance(request, r.AskFollow):
            return follows >= 1
        return len(self._waiting) - follows >= self._settings.waiting_max

    def release(self, pull: int) -> None:
        """The chunks of a pull are needed no longer. Where the link has ended, the peer releases them by itself."""
        if self.state is LinkState.READY:
            self._send(r.Release(pull))

    def report_wrong(self, wrong: r.Wrong) -> None:
        """A chunk of the peer came with wrong bytes. Nothing where the link has ended."""
        if self.state is LinkState.READY:
            self._send(wrong)

    def hurry(self) -> None:
        """Connect without waiting for the back-off: the peer is known to have begun a new life."""
        if self.state is LinkState.IDLE and self._timer is not None:
            self._call_later(0, self._connect)

    def close(self) -> None:
        """End the link for good; what waits fails."""
        self._end("it is no member any more at this address", LinkState.CLOSED)

    def _connect(self) -> None:
        self.state = LinkState.CONNECTING
        self._counts["connects"] += 1
        self._call_later(self._settings.connect_s, self._end, "no answer to the handshake in time")
        try:
            self._open()
        except zmq.ZMQError as error:
            self._end(f"cannot be connected: {error.strerror}")

    def _open(self) -> None:
        """Make the sockets and begin to connect. Raises ZMQError, as where the process has no more descriptors."""
        dealer = self._context.socket(zmq.DEALER)
        self._dealer = LoopSocket(dealer, self._loop, self._take, share=self._share)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        # ZMQ notes what was sent in steps of half of it: room for a request and a Release of each that waits, and one of each.
        dealer.setsockopt(zmq.SNDHWM, 4 * (self._settings.waiting_max + 1))
        dealer.setsockopt(zmq.RCVHWM, 0)  # bounded by `unread_bytes.py`, which says why
        dealer.setsockopt(zmq.MAXMSGSIZE, ZMQ_MESSAGE_BYTES_MAX)
        dealer.setsockopt(zmq.IPV6, int("[" in self.member.endpoint))
        dealer.setsockopt(zmq.HANDSHAKE_IVL, int(self._settings.connect_s * 1000))
        dealer.setsockopt(zmq.HEARTBEAT_IVL, int(self._settings.ping_s * 1000))
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._settings.connect_s * 1000))
        if self._keys is not None:
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self.member.public_key or self._keys.public)
        self._monitor = LoopSocket(dealer.get_monitor_socket(_EVENTS), self._loop, self._take_event)
        dealer.connect(self.member.endpoint)

    def _take_event(self, parts: list[zmq.Frame]) -> None:
        found = parse_monitor_message([part.bytes for part in parts])
        if (event := found["event"]) == zmq.EVENT_CONNECTED:
            self._unread.watch(found["value"], self.member.endpoint)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self.state is LinkState.CONNECTING:
            self.state = LinkState.GREETING
            if self._send(self._identity.hello()) is None:
                self._end("the peer does not read")
        elif event & _FAILED_EVENTS:
            is_handshake = self.state is LinkState.CONNECTING
            self._counts["failed_handshakes"] += is_handshake and event != zmq.EVENT_CLOSED
            refused = "it cannot be connected: nobody listens there" if event == zmq.EVENT_CLOSED else WRONG_KEYS
            self._end(refused if is_handshake else "the connection ended")

    def _take(self, parts: list[zmq.Frame]) -> None:
        self._has_spoken = True
        self._unread.note_read(wire_bytes(map(len, parts), is_encrypted=self._keys is not None))
        try:
            sequence, answer = wire.decode_answer([part.buffer for part in parts])
            if isinstance(answer, r.Refused) and self._is_of_link(sequence, answer):
                self._end(f"{REFUSED}{answer.code}: {answer.text}")
            elif self.state is LinkState.GREETING:
                self._take_hello(answer)
            elif self.state is LinkState.READY:
                self._take_answer(sequence, answer)
        except wire.WireFault as fault:
            self._counts["bad_answers"] += 1
            is_refused = self.state is LinkState.GREETING and fault.code != r.RefusalCode.PROTOCOL
            self._end(f"{REFUSED}{fault.code}: {fault}" if is_refused else f"bad answer: {fault}")

    def _is_of_link(self, sequence: int, answer: r.Refused) -> bool:
        """Whether a refusal ends the connection: one of no request, of the Hello, or because the Hello was forgotten."""
        return not sequence or self.state is LinkState.GREETING or answer.code == r.RefusalCode.HELLO

    def _take_hello(self, answer: Any) -> None:
        if not isinstance(answer, r.Hello):
            raise wire.WireFault(r.RefusalCode.PROTOCOL, f"{type(answer).__name__} before Hello")
        self._identity.accept(answer)
        if self.member.node and answer.node != self.member.node:
            raise wire.WireFault(r.RefusalCode.PROTOCOL, f"node {answer.node!r} answers, expected {self.member.node!r}")
        is_new = self.last_life is not None and answer.incarnation != self.last_life.incarnation
        self._counts["new_lives"] += is_new
        self.life = self.last_life = PeerLife(answer.node, answer.incarnation, answer.stream, is_new, answer.version)
        self.state, self.fault = LinkState.READY, ""
        self._await_silence()
        self._on_change(self)

    def _take_answer(self, sequence: int, answer: Any) -> None:
        waiting = self._waiting.get(sequence)
        if waiting is None:
            self._counts["late_answers"] += 1
            if not self._unasked.take_tokens():
                raise wire.WireFault(r.RefusalCode.PROTOCOL, "answers to nothing, again and again")
            if isinstance(answer, r.Offer) and answer.chunks:
                self.release(answer.pull)
            return
        if isinstance(answer, r.Refused):
            self._finish(sequence)
            self._counts["refused"] += 1
            _fail(waiting.answer, Refused(answer.code, answer.text))
            return
        self._check(waiting.request, answer)
        self._finish(sequence)
        if isinstance(answer, r.Pong):
            took_s = (self._clock.now_ns() - waiting.sent_ns) / NS_PER_S
            self.rtt_s += _RTT_WEIGHT * (took_s - self.rtt_s) if self.rtt_s else took_s
        if not waiting.answer.done():
            waiting.answer.set_result(answer)
        elif isinstance(request := waiting.request, r.Pull):
            self.release(request.pull)  # cancelled a moment ago

    def _check(self, request: r.Asked, answer: Any) -> None:
        """Raises WireFault for an answer that is none to this request."""
        if isinstance(request, r.AskFollow):
            wire.check_follow(request, answer)
        elif isinstance(request, r.Pull) and isinstance(answer, r.Offer):
            wire.check_offer(request, answer)
        elif isinstance(request, r.AnyStage) and isinstance(answer, r.Staged):
            wire.check_staged(request, answer)
        elif isinstance(request, r.AskNear) and isinstance(answer, r.Near):
            wire.check_near(request, answer)
        elif not (isinstance(request, r.Ping) and isinstance(answer, r.Pong)):
            raise wire.WireFault(r.RefusalCode.PROTOCOL, f"{type(answer).__name__} answers {type(request).__name__}")
        elif self.life is not None and answer.incarnation != self.life.incarnation:
            raise wire.WireFault(r.RefusalCode.PROTOCOL, "another life answers than greeted")

    def _send(self, record: r.Request) -> int | None:
        """The sequence number of a message that has gone to ZMQ, None where it has no room."""
        assert self._dealer is not None
        self._sequence += 1
        try:
            self._dealer.send([wire.encode_message(record, self._sequence)])
        except zmq.ZMQError:
            self._counts["unsent"] += 1
            return None
        return self._sequence

    def _finish(self, sequence: int) -> _Waiting | None:
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None:
            waiting.timer.cancel()
        return waiting

    def _expire(self, sequence: int) -> None:
        waiting = self._finish(sequence)
        if waiting is None:
            return
        self._counts["timeouts"] += 1
        if isinstance(waiting.request, r.Pull):
            self.release(waiting.request.pull)
        _fail(waiting.answer, PeerUnreachable(f"{self.member.endpoint} did not answer in time"))

    def _give_up(self, sequence: int) -> None:
        """A future is done: where its owner has cancelled it, the request still waits."""
        waiting = self._finish(sequence)
        if waiting is not None and isinstance(waiting.request, r.Pull):
            self.release(waiting.request.pull)

    def _await_silence(self) -> None:
        self._has_spoken = False
        self._call_later(self._settings.ping_s, self._break_silence)

    def _break_silence(self) -> None:
        # Here and not at its Hello: a peer that greets and hangs up is not asked at the shortest interval for ever.
        self._back_off.succeed()
        if self._has_spoken or (pong := self.request(r.Ping(), self._settings.connect_s)).done():
            self._await_silence()
            return
        self._timer = None
        pong.add_done_callback(self._take_pong)

    def _take_pong(self, pong: "asyncio.Future[Any]") -> None:
        if self.state is not LinkState.READY or self._timer is not None:
            return  # that connection has ended
        if pong.exception() is None:
            self._await_silence()
        else:
            self._end("no answer to a ping")

    def _call_later(self, delay_s: float, call: Callable[..., None], *arguments: str) -> None:
        """The one thing that the link does next by itself, instead of the former one."""
        self._cancel_timer()
        self._timer = self._loop.call_later(delay_s, call, *arguments)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, fault: str, state: LinkState = LinkState.IDLE) -> None:
        """End the connection, and make another one after the back-off. Once for each connection."""
        if self.state is LinkState.CLOSED:
            return
        was_ready = self.state is LinkState.READY
        self.state, self.life = state, None
        if was_ready:
            self._lost_ns = self._clock.now_ns()
        if was_ready or state is LinkState.IDLE:
            self.same_faults = self.same_faults + 1 if fault == self.fault else 1
            self.fault = fault
        self._cancel_timer()
        self._unread.close()
        if self._dealer is not None:
            self._dealer.disable_monitor()
        for made in (self._monitor, self._dealer):
            if made is not None:
                made.close()
        self._monitor = self._dealer = None
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one.timer.cancel()
            _fail(one.answer, PeerUnreachable(f"{self.member.endpoint}: {fault}"))
        if state is LinkState.IDLE:
            self._call_later(self._back_off.fail(), self._connect)
        if was_ready:
            self._counts["disconnects"] += 1
        if was_ready or state is LinkState.IDLE:
            self._on_change(self)


def _fail(answer: "asyncio.Future[Any]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # counts as seen: nobody may be waiting for it any more
