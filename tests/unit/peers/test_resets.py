"""Connections to ZMQ sockets that are reset while their messages wait to be read, with heartbeats behind them.

With a bound on messages (ZMQ_RCVHWM) libzmq 4.3.5 aborts the process there: `Assertion failed: !_io_error`.
"""

import asyncio
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.addresses import parse_zmq
from kvpool.config.event_options import EVENT_OPTIONS, EventsConfig
from kvpool.peers.control import records as r
from kvpool.peers.control.link import LinkState
from kvpool.peers.control.wire import encode_message
from kvpool.server.events.sockets import EventSockets
from tests.rigs.nodes.peers import Owner, fleet, identity_of, pull_of, until
from tests.rigs.nodes.zmtp import GREETING, PING, greeted, message_of, ready_of, reset, send_until_taken

PONG = message_of(encode_message(r.Pong(bytes(r.INCARNATION_BYTES)), 9))
ASKED = message_of(encode_message(r.Ping(), 9))


def with_heartbeats(message: bytes) -> bytes:
    """So many of a message that they wait beyond any bound, with heartbeats between them."""
    return (message * 40 + PING) * 20


@pytest.mark.asyncio
async def test_a_node_that_is_reset_while_it_asks_ends_alone() -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        honest = await nodes.watch(node=identity_of("honest")).ready(server)
        for number in range(5):
            hostile = greeted(server.endpoints[0], b"DEALER")
            hello = message_of(encode_message(identity_of(f"hostile-{number}").hello(), 1))
            send_until_taken(hostile, hello + with_heartbeats(ASKED))
            reset(hostile)
            assert (await honest.request(pull_of(number + 1), 5.0)).chunks == 2
        await until(lambda: server.stats()["connections"] == 1, "the honest one is left")


@pytest.mark.asyncio
async def test_a_node_that_resets_behind_its_answers_ends_its_link_alone() -> None:
    resets = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal resets
        writer.write(GREETING)
        await reader.readexactly(len(GREETING))
        writer.write(ready_of(b"ROUTER"))
        await reader.readexactly(60)  # its READY, and a part of its Hello
        hello = message_of(encode_message(identity_of("hostile").hello(), 1))
        made = writer.get_extra_info("socket")._sock.dup()  # asyncio's own may not be written to
        made.setblocking(True)
        writer.transport.abort()
        send_until_taken(made, hello + with_heartbeats(PONG))
        reset(made)
        resets += 1

    serving = await asyncio.start_server(serve, "127.0.0.1", 0)
    with fleet() as nodes:
        watcher = nodes.watch()
        honest = await nodes.watch(node=identity_of("second")).ready(nodes.serve(Owner()))
        link = watcher.link_at(f"tcp://127.0.0.1:{serving.sockets[0].getsockname()[1]}")
        for number in range(1, 41):
            await until(lambda number=number: resets >= number and link.state is LinkState.IDLE, "it was reset")  # type: ignore[misc]
            link.hurry()
        serving.close()
        assert (await honest.request(pull_of(1), 5.0)).chunks == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["tcp", "ipc"])
@pytest.mark.parametrize("kind", ["subscriber", "router"])
async def test_a_router_that_is_reset_while_it_asks_ends_alone(tmp_path: Path, way: str, kind: str) -> None:
    places = ["tcp://127.0.0.1:0" if way == "tcp" else f"ipc://{tmp_path}/{name}" for name in "ab"]
    options = {name: option.parse(option.default) for name, option in EVENT_OPTIONS.items()}
    options |= {"events.publish": parse_zmq(places[0]), "events.replay": parse_zmq(places[1])}
    config = EventsConfig(**{name.removeprefix("events."): value for name, value in options.items()})
    sockets = EventSockets(config, 0o600, MonotonicClock(), asyncio.get_running_loop())
    endpoint = sockets.publish_endpoint if kind == "subscriber" else sockets.replay_endpoint
    message = message_of(b"\1topic") if kind == "subscriber" else message_of(b"", struct.pack(">Q", 0))
    for _ in range(5):
        hostile = greeted(endpoint, b"SUB" if kind == "subscriber" else b"DEALER")
        send_until_taken(hostile, with_heartbeats(message))
        reset(hostile)
        await asyncio.sleep(0)
        sockets.serve()
    assert sockets.bad_requests == 0
    sockets.close()


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
