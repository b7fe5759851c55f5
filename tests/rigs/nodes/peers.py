"""Rig of the control plane: two nodes on one event loop, raw ZMQ peers beside them, and waiting for conditions."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from kvpool.clock import MonotonicClock
from kvpool.config.addresses import parse_zmq
from kvpool.config.curve_keys import KeyPair, make_key_pair
from kvpool.ids import TICKET_BYTES
from kvpool.keys import DEFAULT_DOMAIN, domain_tag
from kvpool.layout import Layout
from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.control import records as r
from kvpool.peers.control import wire
from kvpool.peers.control.client import ControlClient
from kvpool.peers.control.identity import NodeIdentity
from kvpool.peers.control.link import LinkSettings, PeerLink
from kvpool.peers.control.pullers import Puller
from kvpool.peers.control.server import ControlServer, ControlServerSettings
from kvpool.peers.control.services import FollowService
from kvpool.peers.link_state import LinkState
from kvpool.peers.members.member import Member

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=8, chunk_tokens=16)
LINK = LinkSettings(connect_s=5.0, ping_s=10.0, back_off=BackOffSettings(first_s=0.02, most_s=0.1))
TICKET = bytes(range(TICKET_BYTES))


async def until(condition: Callable[[], object], what: str, timeout_s: float = 180.0) -> None:
    """Until the condition holds; fails with `what` after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.002)


def identity_of(node: str, life: int = 1, *, domain: bytes = DEFAULT_DOMAIN) -> NodeIdentity:
    """A node, in one of its lives."""
    return NodeIdentity(node, life.to_bytes(r.INCARNATION_BYTES, "big"), domain_tag(domain), "tcp://127.0.0.1:9")


def pull_of(number: int, chunks: int = 2, deadline_ms: int = r.DEADLINE_MS_MAX) -> r.Pull:
    """A pull of keys that derive from its number; its deadline comes in no test that does not say so."""
    keys = b"".join((number << 16 | at).to_bytes(32, "big") for at in range(chunks))
    return r.Pull(number, "llama", LAYOUT.to_wire(), b"", 0, keys, deadline_ms, False)


def offer_to(pull: r.Pull, chunks: int | None = None) -> r.Offer:
    """An offer of all chunks of a pull, or of so many."""
    count = len(pull.keys) // 32 if chunks is None else chunks
    if not count:
        return r.Offer(pull.pull, 0, b"", 0, "", b"", b"")
    present = b"\1" * count if pull.are_alone else b""
    return r.Offer(pull.pull, count, TICKET, 2, "tcp://127.0.0.1:9", bytes(4 * LAYOUT.extents * count), present)


def stage_of(pull: int, rows: int = 2, part: int = 1) -> r.Stage:
    """A Stage of the first rows of a pull."""
    return r.Stage(pull, part, b"", 0, rows, "tcp", 100)


def staged_of(stage: r.AnyStage, rows: int | None = None) -> r.Staged:
    """All rows that were asked for, or so many."""
    count = stage.rows if rows is None else rows
    return r.Staged(stage.pull, stage.part, "127.0.0.1:9", bytes(8), 1 << 40, bytes(4 * count), bytes(count))


@dataclass
class Owner:
    """A pull service that offers everything at once, or keeps pulls for later (`is_slow`)."""

    is_slow: bool = False
    error: Exception | None = None
    pulls: list[tuple[Puller, r.Pull, Callable[[r.Offer | r.Refused], bool]]] = field(default_factory=list)
    stages: list[tuple[Puller, r.AnyStage, Callable[[r.Staged | r.Refused], bool]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    forgotten: list[Puller] = field(default_factory=list)
    doubted: list[bytes] = field(default_factory=list)

    def serve(self, puller: Puller, pull: r.Pull, answer: Callable[[r.Offer | r.Refused], bool]) -> None:
        self.pulls.append((puller, pull, answer))
        if self.error is not None:
            raise self.error
        if not self.is_slow:
            answer(offer_to(pull))

    def stage(self, puller: Puller, stage: r.AnyStage, answer: Callable[[r.Staged | r.Refused], bool]) -> None:
        self.stages.append((puller, stage, answer))
        if not self.is_slow:
            answer(staged_of(stage))

    def near(self, puller: Puller, ask: r.AskNear) -> r.Near | r.Refused:
        return r.Refused(r.RefusalCode.TRANSPORT, "this node has no memory")

    def check(self, puller: Puller, wrong: r.Wrong) -> None:
        self.doubted.append(wrong.key)

    def release(self, puller: Puller, pull: int) -> None:
        self.released.append(pull)

    def forget(self, puller: Puller) -> None:
        self.forgotten.append(puller)


@dataclass
class KeyOwner:
    """A follow service that answers each request as the test has it, or keeps it for later (`waiting`)."""

    reply: Callable[[r.AskFollow], r.FollowAnswer | r.Refused | None] = lambda ask: None
    asked: list[tuple[Puller, r.AskFollow, Callable[[Any], bool]]] = field(default_factory=list)
    waiting: list[tuple[Puller, r.AskFollow, Callable[[Any], bool]]] = field(default_factory=list)
    forgotten: list[Puller] = field(default_factory=list)

    def changes(self, puller: Puller, ask: r.AskChanges, answer: Callable[[r.Changes | r.Refused], bool]) -> None:
        self._take(puller, ask, answer)

    def keys(self, puller: Puller, ask: r.AskKeys, answer: Callable[[r.Keys | r.Refused], bool]) -> None:
        self._take(puller, ask, answer)

    def forget(self, puller: Puller) -> None:
        self.forgotten.append(puller)

    def _take(self, puller: Puller, ask: r.AskFollow, answer: Callable[[Any], bool]) -> None:
        self.asked.append((puller, ask, answer))
        found = self.reply(ask)
        if found is None:
            self.waiting.append((puller, ask, answer))
        else:
            answer(found)


def serve(
    owner: Owner,
    *,
    follows: FollowService | None = None,
    node: NodeIdentity | None = None,
    keys: KeyPair | None = None,
    allowed: frozenset[bytes] = frozenset(),
    settings: ControlServerSettings | None = None,
    address: str = "tcp://127.0.0.1:0",
) -> ControlServer:
    """A server on the running loop."""
    parsed = parse_zmq(address)
    assert parsed is not None
    return ControlServer(
        (parsed,),
        owner,
        follows=follows or KeyOwner(),
        identity=node or identity_of("owner"),
        keys=keys,
        allowed=allowed,
        settings=settings or ControlServerSettings(),
        clock=MonotonicClock(),
        loop=asyncio.get_running_loop(),
    )


@dataclass
class Watcher:
    """A client of one or more links, and what it was notified of."""

    changes: list[tuple[str, bool]] = field(default_factory=list)
    node: NodeIdentity = field(default_factory=lambda: identity_of("puller"))
    keys: KeyPair | None = None
    link: LinkSettings = LINK
    seed: int = 1
    on_change: Callable[[PeerLink], None] = lambda link: None

    def __post_init__(self) -> None:
        self.client = ControlClient(
            self._note,
            identity=self.node,
            keys=self.keys,
            settings=self.link,
            clock=MonotonicClock(),
            random=random.Random(self.seed),
            loop=asyncio.get_running_loop(),
        )

    def _note(self, link: PeerLink) -> None:
        self.changes.append((link.member.identity, link.life is not None))
        self.on_change(link)

    def link_to(self, server: ControlServer, key: bytes = b"", node: str = "") -> PeerLink:
        """A link to a server, which may not be ready yet."""
        return self.link_at(server.endpoints[0], key, node)

    def link_at(self, endpoint: str, key: bytes = b"", node: str = "") -> PeerLink:
        """A link to an endpoint."""
        made = self.client.add_member(Member(endpoint, key, node))
        assert made is not None
        return made

    def link_named(self, node: str) -> PeerLink:
        """The link to a node that is a member."""
        found = self.client.link_to(node)
        assert found is not None
        return found

    async def ready(self, server: ControlServer, key: bytes = b"") -> PeerLink:
        """A ready link to a server."""
        link = self.link_to(server, key)
        await until(lambda: link.state is LinkState.READY, f"{link} is ready: {link.fault}")
        return link


class RawPeer:
    """A DEALER without any manners, on its own context."""

    def __init__(
        self, endpoint: str, keys: KeyPair | None = None, server_key: bytes = b"", routing_id: bytes = b""
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        self.socket.connect(endpoint)

    def send(self, *parts: bytes) -> bool:
        """Whether ZMQ had room for a message."""
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def say(self, record: Any, sequence: int) -> bool:
        """Send a record."""
        return self.send(wire.encode_message(record, sequence))

    async def answer(self, timeout_s: float = 180.0) -> wire.Message:
        """The next answer."""
        await until(lambda: self.socket.poll(0), "an answer has come", timeout_s)
        return wire.decode_answer([memoryview(part) for part in self.socket.recv_multipart()])

    async def ask(self, record: Any, sequence: int) -> Any:
        """The answer to a record."""
        self.say(record, sequence)
        return (await self.answer()).record

    def has_answer(self) -> bool:
        """Whether anything can be read now."""
        return bool(self.socket.poll(0))

    def close(self) -> None:
        """End it at once."""
        self.context.destroy(linger=0)


@dataclass
class Fleet:
    """Everything that a test starts, and its end."""

    ends: list[Callable[[], None]] = field(default_factory=list)

    def serve(self, owner: Owner, **options: Any) -> ControlServer:
        """See the function."""
        made = serve(owner, **options)
        self.ends.append(made.close)
        return made

    def watch(self, **options: Any) -> Watcher:
        """A client."""
        made = Watcher(**options)
        self.ends.append(made.client.close)
        return made

    def raw(self, server: ControlServer, **options: Any) -> RawPeer:
        """A raw peer of a server."""
        made = RawPeer(server.endpoints[0], **options)
        self.ends.append(made.close)
        return made


@contextmanager
def fleet() -> Iterator[Fleet]:
    """A fleet that ends with the block."""
    made = Fleet()
    try:
        yield made
    finally:
        for end in reversed(made.ends):
            end()


def fast(settings: ControlServerSettings, **options: Any) -> ControlServerSettings:
    """The same settings with some of them changed."""
    return replace(settings, **options)


def key_pairs(count: int) -> list[KeyPair]:
    """Pairs of keys."""
    return [make_key_pair() for _ in range(count)]
