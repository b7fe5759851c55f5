"""Tests of messages that do not end: a link to a node that sends one ends, and costs no more than comes until it is noticed."""

import asyncio
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from kvpool.peers import unfinished_message
from kvpool.peers.control.wire import encode_message
from kvpool.peers.unfinished_message import UnfinishedMessage
from tests.rigs.nodes.peers import Owner, fleet, identity_of, pull_of, until

PART_BYTES = 1 << 20
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"ROUTER\x08Identity" + struct.pack(">I", 0)


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
            writer.write(_GREETING)
            await reader.readexactly(64)
            await _frame_of(reader)
            writer.write(b"\x04" + bytes([len(_READY)]) + _READY)
            while (await _frame_of(reader))[0] & 4:
                pass
            hello = encode_message(identity_of("endless").hello(), 1)
            writer.write(b"\0" + bytes([len(hello)]) + hello)
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
        await until(lambda: link.fault == "a message without an end", "the link has ended")
        serving.close()
        assert (await honest.request(pull_of(1), 5.0)).chunks == 2
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
async def test_what_comes_in_whole_messages_has_no_bound(
    joined: tuple[socket.socket, socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, endpoint = joined
    monkeypatch.setattr(unfinished_message, "LOOK_S", 0.01)
    ended: list[str] = []
    watch = UnfinishedMessage(1000, lambda: ended.append("ended"), asyncio.get_running_loop())
    watch.watch(near.fileno(), endpoint)
    for _ in range(5):
        far.send(bytes(900))
        watch.has_spoken = True
        await until(lambda: not watch.has_spoken, "it was looked at")
    assert not ended
    far.send(bytes(1001))
    await until(lambda: ended, "too much has come")
    assert ended == ["ended"]
    assert "not watched" in repr(watch)


@pytest.mark.asyncio
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1"])
async def test_another_connection_is_not_watched(
    joined: tuple[socket.socket, socket.socket, str], endpoint: str
) -> None:
    near, _, right = joined
    watch = UnfinishedMessage(1000, lambda: None, asyncio.get_running_loop())
    watch.watch(near.fileno(), endpoint)
    assert "not watched" in repr(watch)
    watch.watch(near.fileno(), right.replace("127.0.0.1", "[::ffff:127.0.0.1]"))
    assert "not watched" not in repr(watch)
    watch.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["unix socket", "unconnected socket", "pipe", "closed"])
async def test_a_number_that_is_something_elses_by_now_is_left_alone(kind: str) -> None:
    ended: list[str] = []
    watch = UnfinishedMessage(1000, lambda: ended.append("ended"), asyncio.get_running_loop())
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
