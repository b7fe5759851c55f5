"""Connections that speak ZMTP by themselves and end early: each ends alone, in bounded memory. No socket that others reach has
a bound on messages."""

import asyncio
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvpool.clock import MonotonicClock
from kvpool.config.addresses import parse_zmq
from kvpool.config.event_options import EVENT_OPTIONS, EventsConfig
from kvpool.peers.control import records as r
from kvpool.peers.control.wire import encode_message
from kvpool.peers.link_state import LinkState
from kvpool.server.events.sockets import EventSockets
from tests.rigs.nodes.peers import Owner, fleet, identity_of, pull_of, until
from tests.rigs.nodes.zmtp import (
    GREETING,
    GREETING_2,
    connection_to,
    greeted,
    message_of,
    ready_of,
)

PONG = message_of(encode_message(r.Pong(bytes(r.INCARNATION_BYTES)), 9))
ASKED = message_of(encode_message(r.Ping(), 9))


def has_no_bound(made: "zmq.Socket[bytes]") -> bool:
    """Whether any number of messages may wait: bytes are bounded instead (`unread_bytes.py`)."""
    return made.getsockopt(zmq.RCVHWM) == 0


@pytest.mark.asyncio
async def test_a_node_that_ends_while_it_asks_ends_alone() -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        honest = await nodes.watch(node=identity_of("honest")).ready(server)
        assert has_no_bound(server._listener._router._socket)
        for number in range(5):
            with greeted(server.endpoints[0], b"DEALER") as early:
                hello = message_of(encode_message(identity_of(f"early-{number}").hello(), 1))
                early.sendall(hello + ASKED * 40)
            assert (await honest.request(pull_of(number + 1), 60.0)).chunks == 2
        await until(lambda: server.stats()["connections"] == 1, "the honest one is left")


@pytest.mark.asyncio
async def test_a_node_that_ends_behind_its_answers_ends_its_link_alone() -> None:
    ends = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal ends
        writer.write(GREETING)
        await reader.readexactly(len(GREETING))
        writer.write(ready_of(b"ROUTER"))
        await reader.readexactly(60)  # its READY, and a part of its Hello
        writer.write(message_of(encode_message(identity_of("early").hello(), 1)) + PONG * 40)
        await writer.drain()
        writer.close()
        ends += 1

    serving = await asyncio.start_server(serve, "127.0.0.1", 0)
    with fleet() as nodes:
        watcher = nodes.watch()
        honest = await nodes.watch(node=identity_of("second")).ready(nodes.serve(Owner()))
        link = watcher.link_at(f"tcp://127.0.0.1:{serving.sockets[0].getsockname()[1]}")
        assert honest._dealer is not None
        assert has_no_bound(honest._dealer._socket)
        for number in range(1, 11):
            await until(lambda number=number: ends >= number and link.state is LinkState.IDLE, "it has ended")  # type: ignore[misc]
            link.hurry()
        serving.close()
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2


def sockets_in(directory: Path, way: str) -> EventSockets:
    """Event sockets without keys."""
    places = ["tcp://127.0.0.1:0" if way == "tcp" else f"ipc://{directory}/{name}" for name in "ab"]
    options = {name: option.parse(option.default) for name, option in EVENT_OPTIONS.items()}
    options |= {"events.publish": parse_zmq(places[0]), "events.replay": parse_zmq(places[1])}
    config = EventsConfig(**{name.removeprefix("events."): value for name, value in options.items()})
    return EventSockets(config, 0o600, MonotonicClock(), asyncio.get_running_loop())


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["tcp", "ipc"])
@pytest.mark.parametrize("kind", ["subscriber", "router"])
async def test_a_router_that_ends_while_it_asks_ends_alone(tmp_path: Path, way: str, kind: str) -> None:
    sockets = sockets_in(tmp_path, way)
    assert sockets._replay is not None
    assert has_no_bound(sockets._publish)
    assert has_no_bound(sockets._replay)
    endpoint = sockets.publish_endpoint if kind == "subscriber" else sockets.replay_endpoint
    message = message_of(b"\1topic") if kind == "subscriber" else message_of(b"", struct.pack(">Q", 0))
    for _ in range(5):
        with greeted(endpoint, b"SUB" if kind == "subscriber" else b"DEALER") as early:
            early.sendall(message * 40)
        await asyncio.sleep(0)
        sockets.serve()
    assert sockets.bad_requests == 0
    sockets.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["tcp", "ipc"])
async def test_a_router_of_an_old_protocol_is_served_like_others(tmp_path: Path, way: str) -> None:
    sockets = sockets_in(tmp_path, way)
    old = connection_to(sockets.replay_endpoint)
    with old:
        old.sendall(GREETING_2 + message_of(b"", struct.pack(">Q", 0)) + message_of(b"none"))
        await until(lambda: sockets.serve() >= 0 and sockets.bad_requests == 1, "its requests were read")
    sockets.close()


@pytest.mark.asyncio
async def test_a_connection_that_claims_a_route_that_is_taken_ends_before_it_takes_memory() -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        endpoint = server.endpoints[0]
        with greeted(endpoint, b"DEALER", b"taken") as first:
            first.sendall(message_of(encode_message(identity_of("first").hello(), 1)))
            await until(lambda: server.stats()["connections"] == 1, "it is connected")
            for number in range(1, 4):
                with suppress(OSError), greeted(endpoint, b"DEALER", b"taken") as second:
                    second.sendall(ASKED * 5000)
                    await until(lambda number=number: server.stats()["ended_connections"] >= number, "it is ended")  # type: ignore[misc]
            assert server.stats()["connections"] >= 1


ROUTES = """
import zmq
from kvpool.peers.guarded_listener import context_for_others
context = context_for_others()
router = context.socket(zmq.ROUTER)
port = router.bind_to_random_port("tcp://127.0.0.1")
dealer = context.socket(zmq.DEALER)
dealer.connect(f"tcp://127.0.0.1:{port}")
dealer.send(b"")
print(router.recv_multipart()[0].hex())
context.destroy(linger=0)
"""


def test_routes_that_zmq_makes_cannot_be_foreseen() -> None:
    routes = set()
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", ROUTES], capture_output=True, text=True, timeout=30, check=True)
        routes.add(run.stdout)
    assert len(routes) == 3


WAITING = """
import socket
from pathlib import Path
import zmq
from kvpool.peers.guarded_listener import context_for_others
from tests.rigs.nodes.zmtp import greeted, message_of, send_until_taken
context = context_for_others()
router = context.socket(zmq.ROUTER)
router.setsockopt(zmq.RCVHWM, 0)
port = router.bind_to_random_port("tcp://127.0.0.1")
with greeted(f"tcp://127.0.0.1:{port}", b"DEALER") as hostile:
    hostile.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    for _ in range(2000):
        send_until_taken(hostile, message_of(bytes(34)))
    print(4096 * (int(Path("/proc/self/statm").read_text().split()[1]) - before) // 2000)
context.destroy(linger=0)
"""


@pytest.mark.slow
def test_a_small_message_that_waits_takes_little_memory() -> None:
    run = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=600, check=True)
    print(f"{run.stdout.strip()} bytes for each message of 36")
    assert int(run.stdout) < 3000  # of which this process's own noise is some hundred
