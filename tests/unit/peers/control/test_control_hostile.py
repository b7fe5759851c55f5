"""Hostile peers of the control plane: raw sockets that break every rule, beside one that keeps to them."""

import asyncio
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvpool.config.curve_keys import KeyPair
from kvpool.errors import PeerUnreachable, Refused
from kvpool.peers.control import records as r
from kvpool.peers.control import wire
from kvpool.peers.control.link import LinkSettings
from kvpool.peers.control.listener import ListenerSettings
from kvpool.peers.control.server import ControlServerSettings
from kvpool.peers.link_state import LinkState
from tests.rigs.nodes.peers import LINK, Owner, RawPeer, fast, fleet, identity_of, key_pairs, offer_to, pull_of, until

pytestmark = pytest.mark.asyncio

GREETING_BYTES = 64
ENDLESS_BYTES = 1 << 30
# A quarter of what would come, and four times what comes between two looks.
RSS_GROWTH_MAX = 256 << 20


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def _plain_greeting(connected: socket.socket) -> None:
    """ZMTP 3.1's greeting and a DEALER's READY, without keys. Waits for the other side's: ZMQ may end one that does not."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connected, b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    received = b""
    while len(received) < GREETING_BYTES:
        piece = await loop.sock_recv(connected, GREETING_BYTES - len(received))
        if not piece:
            return  # a server with keys ends it
        received += piece
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    await loop.sock_sendall(connected, b"\x04" + bytes([len(ready)]) + ready)


async def _send_parts_without_end(connected: socket.socket) -> None:
    """In pieces with turns of the loop between them: about what a network brings."""
    part = b"\x03" + struct.pack(">Q", 65_536) + bytes(65_536)
    for _ in range(ENDLESS_BYTES // len(part) // 8):
        await asyncio.get_running_loop().sock_sendall(connected, part * 8)
        await asyncio.sleep(0.002)


@pytest.fixture
def dialled() -> Iterator[Callable[[str], socket.socket]]:
    """TCP connections that end with the test."""
    made: list[socket.socket] = []

    def dial(endpoint: str) -> socket.socket:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        made.append(socket.create_connection((host, int(port)), timeout=20))
        made[-1].setblocking(False)
        return made[-1]

    yield dial
    for one in made:
        one.close()


async def test_garbage_is_refused_counted_and_ends_the_connection(seed: int) -> None:
    chance = random.Random(seed)
    owner = Owner()
    with fleet() as nodes:
        server = nodes.serve(owner)
        honest = await nodes.watch().ready(server)
        raw = nodes.raw(server)
        for _ in range(64):
            raw.send(chance.randbytes(chance.randrange(2, 200)))
        await until(lambda: server.stats()["ended_connections"] == 1, "the connection is shut down")
        assert server.counts["refused.protocol"] + server.counts["refused.kind"] >= 16
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2
        assert honest.state is LinkState.READY


async def test_nothing_is_served_before_hello_and_large_messages_are_not_even_decoded() -> None:
    owner = Owner()
    with fleet() as nodes:
        server = nodes.serve(owner)
        raw = nodes.raw(server)
        for record in (pull_of(1), r.Release(1), r.Ping()):
            assert (await raw.ask(record, 1)).code == r.RefusalCode.HELLO
        assert "expected 2..1024" in (await raw.ask(pull_of(1, 100), 1)).text
        assert (await raw.ask(r.Pong(bytes(16)), 1)).code == r.RefusalCode.KIND
        assert owner.pulls == []
        assert owner.released == []


async def test_versions_domains_and_names_are_refused_in_words() -> None:
    with fleet() as nodes:
        raw = nodes.raw(nodes.serve(Owner()))
        newer = identity_of("raw").hello(oldest=7, newest=9)
        assert await raw.ask(newer, 1) == r.Refused(
            "version",
            f"peer speaks versions 7 to 9, this node {r.OLDEST_VERSION} to {r.NEWEST_VERSION}: update this node",
        )
        assert (await raw.ask(identity_of("raw", domain=b"y" * 32).hello(), 2)).code == "domain"
        assert (await raw.ask(identity_of("owner").hello(), 3)).code == "self"
        assert isinstance(await raw.ask(identity_of("raw").hello(), 4), r.Hello)


async def test_replayed_numbers_are_refused() -> None:
    owner = Owner()
    with fleet() as nodes:
        raw = nodes.raw(nodes.serve(owner))
        await raw.ask(identity_of("raw").hello(), 1)
        assert isinstance(await raw.ask(pull_of(5), 2), r.Offer)
        assert (await raw.ask(pull_of(6), 2)).code == r.RefusalCode.REPEATED
        assert (await raw.ask(pull_of(5), 3)).code == r.RefusalCode.REPEATED
        assert (await raw.ask(pull_of(4), 4)).code == r.RefusalCode.REPEATED
        assert isinstance(await raw.ask(pull_of(7), 5), r.Offer)
        assert [pull.pull for _, pull, _ in owner.pulls] == [5, 7]


async def test_messages_of_several_parts_are_refused() -> None:
    with fleet() as nodes:
        raw = nodes.raw(nodes.serve(Owner()))
        hello = wire.encode_message(identity_of("raw").hello(), 1)
        for parts in ((hello, hello), (hello,) * 50, (b"", hello)):
            raw.send(*parts)
            assert "parts" in (await raw.answer()).record.text
        raw.send(hello)
        assert isinstance((await raw.answer()).record, r.Hello)


async def test_a_message_without_end_does_not_fill_the_memory(dialled: Callable[[str], socket.socket]) -> None:
    """Parts of one message, one after the other: ZMQ would read them into memory for as long as they come."""
    with fleet() as nodes:
        server = nodes.serve(Owner())
        honest = await nodes.watch().ready(server)
        peer = dialled(server.endpoints[0])
        await _plain_greeting(peer)
        before = _rss_bytes()
        with pytest.raises(OSError, match=r"reset|pipe"):
            await _send_parts_without_end(peer)
        assert server.stats()["ended_connections"] == 1
        assert _rss_bytes() - before < RSS_GROWTH_MAX
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2


async def test_an_announced_size_is_refused_before_its_bytes_have_come(dialled: Callable[[str], socket.socket]) -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        peer = dialled(server.endpoints[0])
        await _plain_greeting(peer)
        await until(lambda: server.stats()["connections"] == 1, "it is connected")
        peer.sendall(b"\x02" + struct.pack(">Q", 1 << 40) + b"x")
        await until(lambda: server.stats()["connections"] == 0, "it is disconnected")


async def test_half_open_and_foreign_connections_are_harmless(dialled: Callable[[str], socket.socket]) -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        for greeting in (
            b"",
            b"\xff",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE",
            bytes(500),
        ):
            dialled(server.endpoints[0]).send(greeting)
        honest = await nodes.watch().ready(server)
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2


async def test_wrong_keys_and_no_keys_are_not_let_in(dialled: Callable[[str], socket.socket]) -> None:
    here, there, stranger = key_pairs(3)
    owner = Owner()
    with fleet() as nodes:
        server = nodes.serve(owner, keys=there, allowed=frozenset({here.public_bytes}))
        strange = nodes.raw(server, keys=stranger, server_key=there.public)
        # Knows the public key of an admitted node, and not its secret.
        forged = nodes.raw(server, keys=KeyPair(here.public, stranger.secret), server_key=there.public)
        mistaken = nodes.raw(server, keys=here, server_key=stranger.public)
        plain = nodes.raw(server)
        await _plain_greeting(dialled(server.endpoints[0]))
        outsiders = (strange, forged, mistaken, plain)
        for raw in outsiders:
            raw.say(identity_of("raw").hello(), 1)
        honest = await nodes.watch(keys=here).ready(server, there.public)
        await until(lambda: server.stats()["refused_handshakes"] >= 1, "the stranger is refused")
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2
        assert not any(raw.has_answer() for raw in outsiders)
        assert {one.key for one, _, _ in owner.pulls} == {here.public_bytes.hex()}
        assert server.counts["hellos"] == 1


async def test_a_link_to_an_owner_with_another_key_is_never_ready() -> None:
    here, there, other = key_pairs(3)
    with fleet() as nodes:
        server = nodes.serve(Owner(), keys=there, allowed=frozenset({here.public_bytes}))
        link = nodes.watch(keys=here, link=LinkSettings(connect_s=0.3)).link_to(server, other.public)
        await until(lambda: link.fault, "it is refused")
        assert link.life is None
        with pytest.raises(PeerUnreachable):
            await link.request(pull_of(1), 1.0)


async def test_one_key_cannot_shake_hands_without_end() -> None:
    here, there = key_pairs(2)
    with fleet() as nodes:
        settings = fast(ControlServerSettings(), listener=ListenerSettings(handshakes_per_minute=3))
        server = nodes.serve(Owner(), keys=there, allowed=frozenset({here.public_bytes}), settings=settings)
        raws = [nodes.raw(server, keys=here, server_key=there.public) for _ in range(6)]
        await until(lambda: server.stats()["refused_handshakes"] >= 3, "the rest is refused")
        assert server.stats()["connections"] <= 6
        assert raws


async def test_connections_of_one_peer_are_bounded() -> None:
    here, there = key_pairs(2)
    owner = Owner()
    with fleet() as nodes:
        settings = fast(ControlServerSettings(), connections_per_peer=2)
        server = nodes.serve(owner, keys=there, allowed=frozenset({here.public_bytes}), settings=settings)
        for number in range(5):
            raw = nodes.raw(server, keys=here, server_key=there.public)
            assert isinstance(await raw.ask(identity_of(f"raw-{number}").hello(), 1), r.Hello)
        assert server.stats()["pullers"] == 2
        assert [one.node for one in owner.forgotten] == ["raw-0", "raw-1", "raw-2"]


async def test_all_connections_are_bounded() -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner(), settings=fast(ControlServerSettings(), connections_max=2))
        answers = [await nodes.raw(server).ask(identity_of(f"raw-{number}").hello(), 1) for number in range(3)]
        assert [type(one) for one in answers] == [r.Hello, r.Hello, r.Refused]
        assert answers[2].code == r.RefusalCode.BUSY


async def test_a_chosen_routing_id_takes_nobodys_place() -> None:
    """Routing ids of honest peers are ZMQ's own; a peer that chooses the id of another chosen one is ignored."""
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        server = nodes.serve(owner)
        raws: list[RawPeer] = []
        for number in range(2):
            raw = nodes.raw(server, routing_id=b"chosen")
            raws.append(raw)
            raw.say(identity_of(f"raw-{number}").hello(), 1)
            if not number:
                assert isinstance((await raw.answer()).record, r.Hello)
        honest = await nodes.watch().ready(server)
        asked = honest.request(pull_of(1), 60.0)
        await until(lambda: owner.pulls, "the pull has come")
        owner.pulls[0][2](offer_to(owner.pulls[0][1]))
        assert (await asked).chunks == 2
        assert not raws[1].has_answer()


async def test_a_flood_is_bounded_and_others_are_served(seed: int) -> None:
    here, there, hostile = key_pairs(3)
    owner = Owner()
    with fleet() as nodes:
        allowed = frozenset({here.public_bytes, hostile.public_bytes})
        settings = fast(ControlServerSettings(), frames_per_s=50.0)
        server = nodes.serve(owner, keys=there, allowed=allowed, settings=settings)
        honest = await nodes.watch(keys=here).ready(server, there.public)
        raw = nodes.raw(server, keys=hostile, server_key=there.public)
        await raw.ask(identity_of("raw").hello(), 1)
        sequence, sent = 1, 0
        for number in range(1, 41):
            for _ in range(200):
                sequence += 1
                sent += raw.say(r.Ping(), sequence)
            assert (await honest.request(pull_of(number), 60.0)).chunks == 2
        await until(lambda: server.counts["ended_for_messages"] > 0, "the flood is refused, and its connection ended")
        assert server.counts["refused.rate"] > 0
        assert sent > 1000
        assert honest.state is LinkState.READY
        assert honest.fault == ""


async def test_a_peer_that_does_not_read_loses_its_answers_and_what_they_held() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        settings = fast(ControlServerSettings(), waiting_max=2000, frames_per_s=100_000.0)
        server = nodes.serve(owner, settings=settings)
        honest = await nodes.watch().ready(server)
        raw = nodes.raw(server)
        raw.socket.setsockopt(zmq.RCVHWM, 1)
        assert isinstance(await raw.ask(identity_of("raw").hello(), 1), r.Hello)
        large = bytes(4 * 2 * 1000)
        for number in range(1, 1200):
            raw.say(pull_of(number, 1), number + 1)
        await until(lambda: len(owner.pulls) >= 900, "the pulls have come")
        answered = [
            answer(r.Offer(pull.pull, 1, bytes(32), 1, "tcp://127.0.0.1:9", large * 64, b""))
            for _, pull, answer in owner.pulls
        ]
        assert answered[0]
        assert not answered[-1]
        assert [one.node for one in owner.forgotten] == ["raw"]
        asked = honest.request(pull_of(1), 60.0)
        await until(lambda: owner.pulls[-1][0].node == "puller", "the pull has come")
        owner.pulls[-1][2](offer_to(owner.pulls[-1][1]))
        assert (await asked).chunks == 2


async def _owner_that_answers(
    answers: Callable[[wire.Message], list[tuple[Any, int]]],
) -> tuple[str, Callable[[], None]]:
    """A raw owner: greets as one should, then answers as it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def run() -> None:
        while True:
            await until(lambda: router.poll(0), "a message has come", 60.0)
            route, body = router.recv_multipart()
            message = wire.decode_request([body])
            if isinstance(message.record, r.Hello):
                found = [(identity_of("owner").hello(), message.sequence)]
            else:
                found = answers(message)
            for record, sequence in found:
                router.send_multipart(
                    [route, record if isinstance(record, bytes) else wire.encode_message(record, sequence)]
                )

    task = asyncio.get_running_loop().create_task(run())

    def end() -> None:
        task.cancel()
        context.destroy(linger=0)

    return f"tcp://127.0.0.1:{port}", end


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda m: [(b"\xc1garbage", 0)], "bad answer"),
        (lambda m: [(offer_to(pull_of(99)), m.sequence)], "bad answer"),
        (lambda m: [(offer_to(pull_of(1, 5)), m.sequence)], "bad answer"),
        (lambda m: [(r.Pong(bytes(16)), m.sequence)], "bad answer"),
        (lambda m: [(identity_of("owner").hello(), m.sequence)], "bad answer"),
        (lambda m: [(bytes(2 << 20), 0)], "the connection ended"),
        (lambda m: [(r.Refused("rate", "too many"), 0)], "refused: rate"),
    ],
)
async def test_bad_answers_end_the_link_and_fail_what_waits(answer: Any, expected: str) -> None:
    endpoint, end = await _owner_that_answers(answer)
    with fleet() as nodes:
        nodes.ends.append(end)
        watcher = nodes.watch()
        link = watcher.link_at(endpoint)
        await until(lambda: link.state is LinkState.READY, "it is ready")
        with pytest.raises(PeerUnreachable, match=expected):
            await link.request(pull_of(1), 10.0)
        await until(lambda: link.state is LinkState.READY, "it is connected again")


async def test_answers_to_nothing_are_dropped_and_what_they_hold_is_released() -> None:
    released: list[int] = []

    def answer(message: wire.Message) -> list[tuple[Any, int]]:
        if isinstance(message.record, r.Release):
            released.append(message.record.pull)
            return []
        stray = offer_to(pull_of(77))
        return [(stray, message.sequence + 1000), (stray, 3), (offer_to(message.record), message.sequence)] * 2

    endpoint, end = await _owner_that_answers(answer)
    with fleet() as nodes:
        nodes.ends.append(end)
        watcher = nodes.watch(link=LINK)
        link = watcher.link_at(endpoint)
        await until(lambda: link.state is LinkState.READY, "it is ready")
        assert (await link.request(pull_of(1), 10.0)).pull == 1
        await until(lambda: released.count(77) == 4, "strays are released")
        await until(lambda: watcher.client.counts["late_answers"] == 5, "every stray was seen")
        assert link.state is LinkState.READY


async def test_refused_is_a_kind_of_answer() -> None:
    endpoint, end = await _owner_that_answers(lambda m: [(r.Refused("failed", "no"), m.sequence)])
    with fleet() as nodes:
        nodes.ends.append(end)
        link = nodes.watch().link_at(endpoint)
        await until(lambda: link.state is LinkState.READY, "it is ready")
        with pytest.raises(Refused, match="no"):
            await link.request(pull_of(1), 10.0)
