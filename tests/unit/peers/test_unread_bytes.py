"""Tests of messages that do not end: a link to a node that sends one ends, and costs no more than comes until it is noticed."""

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from random import Random

import pytest
import zmq

from kvpool.config.curve_keys import make_key_pair
from kvpool.peers import unread_bytes
from kvpool.peers.control.wire import encode_message
from kvpool.peers.unread_bytes import HEARTBEAT_BYTES, UnreadBytes, received_bytes, wire_bytes
from tests.rigs.nodes.peers import Owner, fleet, identity_of, pull_of, until
from tests.rigs.nodes.zmtp import GREETING, message_of, ready_of

PART_BYTES = 1 << 20


async def _frame_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    flags = (await reader.readexactly(1))[0]
    size = struct.unpack(">Q", await reader.readexactly(8))[0] if flags & 2 else (await reader.readexactly(1))[0]
    return flags, await reader.readexactly(size)


class Endless:
    """A node that speaks ZMTP by itself: it greets, and then sends one message whose last part never comes."""

    def __init__(self) -> None:
        self.sent_bytes: list[int] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            writer.write(GREETING)
            await reader.readexactly(64)
            await _frame_of(reader)
            writer.write(ready_of(b"ROUTER"))
            while (await _frame_of(reader))[0] & 4:
                pass
            writer.write(message_of(encode_message(identity_of("endless").hello(), 1)))
            self.sent_bytes.append(0)
            while True:
                writer.write(b"\x03" + struct.pack(">Q", PART_BYTES) + bytes(PART_BYTES))
                await writer.drain()
                self.sent_bytes[-1] += PART_BYTES
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.transport.abort()
            self.connections -= 1


@pytest.mark.asyncio
async def test_a_link_ends_where_a_node_sends_a_message_without_an_end() -> None:
    endless = Endless()
    serving = await asyncio.start_server(endless.serve, "127.0.0.1", 0)
    port = serving.sockets[0].getsockname()[1]
    with fleet() as nodes:
        watcher = nodes.watch()
        honest = await nodes.watch(node=identity_of("second")).ready(nodes.serve(Owner()))
        link = watcher.link_at(f"tcp://127.0.0.1:{port}")
        await until(
            lambda: link.fault == "it has sent more bytes than this node waits for",
            "the link has ended",
        )
        serving.close()
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2
    await until(lambda: not endless.connections, "every connection has ended")
    await asyncio.sleep(0)  # the transports are closed in the next turn


@pytest.fixture
def joined() -> Iterator[tuple[socket.socket, socket.socket, str]]:
    """A connection from both sides, and the address that was connected to."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far = listening.accept()[0]
        yield near, far, f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        near.close()
        far.close()


@pytest.mark.asyncio
async def test_what_was_read_has_no_bound(
    joined: tuple[socket.socket, socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, endpoint = joined
    monkeypatch.setattr(unread_bytes, "LOOK_S", 0.01)
    ended: list[str] = []
    watch = UnreadBytes(1000, lambda: ended.append("ended"), asyncio.get_running_loop())
    watch.watch(near.fileno(), endpoint)
    looks = 0

    def counted(peer: socket.socket) -> int:
        nonlocal looks
        looks += 1
        return received_bytes(peer)

    monkeypatch.setattr(unread_bytes, "received_bytes", counted)
    for number in range(1, 6):
        far.send(bytes(900))
        watch.note_read(900)
        await until(lambda number=number: looks > 2 * number, "it was looked at")  # type: ignore[misc]
    assert not ended
    far.send(bytes(1001 + 2 * looks * HEARTBEAT_BYTES))
    await until(lambda: ended, "too much has come")
    assert ended == ["ended"]
    assert "not watched" in repr(watch)


@pytest.mark.asyncio
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1"])
async def test_another_connection_is_not_watched(
    joined: tuple[socket.socket, socket.socket, str], endpoint: str
) -> None:
    near, _, right = joined
    watch = UnreadBytes(1000, lambda: None, asyncio.get_running_loop())
    watch.watch(near.fileno(), endpoint)
    assert "not watched" in repr(watch)
    watch.watch(near.fileno(), right.replace("127.0.0.1", "[::ffff:127.0.0.1]"))
    assert "not watched" not in repr(watch)
    watch.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["unix socket", "unconnected socket", "pipe", "closed"])
async def test_a_number_that_is_something_elses_by_now_is_left_alone(kind: str) -> None:
    ended: list[str] = []
    watch = UnreadBytes(1000, lambda: ended.append("ended"), asyncio.get_running_loop())
    read_end, write_end = os.pipe()
    one, other = socket.socketpair()
    with one, other, socket.socket() as unconnected:
        if kind == "closed":
            os.close(read_end)
        number = {"unix socket": one.fileno(), "unconnected socket": unconnected.fileno()}.get(kind, read_end)
        before = len(os.listdir("/proc/self/fd"))
        watch.watch(number, "tcp://127.0.0.1:9470")
        assert len(os.listdir("/proc/self/fd")) == before
    os.close(write_end)
    if kind != "closed":
        os.close(read_end)
    assert "not watched" in repr(watch)
    assert not ended


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_message_counts_for_its_bytes_on_the_wire(is_encrypted: bool) -> None:
    context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    keys = make_key_pair()
    if is_encrypted:
        server.curve_server, server.curve_secretkey = True, keys.secret
        own = make_key_pair()
        client.curve_publickey, client.curve_secretkey, client.curve_serverkey = own.public, own.secret, keys.public
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    handshake_bytes = None
    chosen = Random(1)
    edges = (0, 1, 221, 222, 223, 254, 255, 256, 257, 65_536)
    for sizes in [
        (0,),
        *((size,) for size in edges),
        *(chosen.choices(edges, k=chosen.randrange(1, 5)) for _ in range(50)),
    ]:
        client.send_multipart([bytes(size) for size in sizes])
        parts = server.recv_multipart(copy=False)[1:]
        size = wire_bytes(map(len, parts), is_encrypted=is_encrypted)
        with socket.socket(fileno=os.dup(parts[0].get(zmq.SRCFD))) as peer:
            received = received_bytes(peer)
        if handshake_bytes is None:
            handshake_bytes, read = received - size, 0
        read += size
        assert received - handshake_bytes == read, sizes
    context.destroy(linger=0)
