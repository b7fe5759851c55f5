"""Floods over ZMQ sockets: a live daemon goes on, in bounded memory."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvpool.clock import Deadline, MonotonicClock
from kvpool.peers.control import records as r
from kvpool.peers.control.wire import encode_message
from tests.hostile.connections.test_event_listeners import TCP
from tests.hostile.rigs.daemon_watch import private_bytes
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.events.publishing import connected, local_events, router_of
from tests.rigs.nodes.peers import identity_of
from tests.rigs.nodes.zmtp import greeted, message_of
from tests.rigs.payload import store, tokens_of
from tests.rigs.runs.ports import free_port

Start = Callable[..., Daemon]
KINDS = {"events": b"SUB", "events_replay": b"DEALER"}
CONNECTIONS = 30
# Of one connection at once: more than any bound on messages.
MESSAGES = 3000
GROWN_BYTES_MAX = 64 << 20
FLOOD_BYTES_MAX = 256 << 20


def _attack(daemon: Daemon, endpoint: str, kind: bytes, messages: bytes) -> None:
    before = private_bytes(daemon)
    accepted = 0
    for number in range(CONNECTIONS):
        with suppress(OSError), greeted(endpoint, kind) as hostile:  # it may be shut down, which is as good
            accepted += 1
            hostile.sendall(messages + messages[: 1000 * number])
    assert accepted >= 1  # in the file system nobody is, once it floods
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 8 * SMALL.chunk_tokens))
        assert store(pool, keys).stored == 8
    assert daemon.problems() == []
    assert private_bytes(daemon) - before < GROWN_BYTES_MAX


@pytest.mark.parametrize("way", ["tcp", "ipc"])
@pytest.mark.parametrize("socket", ["events", "events_replay"])
def test_a_router_that_floods_and_ends_ends_alone(start_daemon: Start, tmp_path: Path, way: str, socket: str) -> None:
    daemon = start_daemon(**(TCP if way == "tcp" else local_events(tmp_path)))
    with daemon.admin() as admin:
        endpoint = admin.info()[socket]
    if socket == "events":
        messages = b"".join(message_of(b"\1" + struct.pack(">I", number)) for number in range(MESSAGES))
    else:
        messages = message_of(b"", struct.pack(">Q", 0)) * MESSAGES
    _attack(daemon, endpoint, KINDS[socket], messages)


def test_a_node_that_floods_and_ends_ends_alone(start_daemon: Start) -> None:
    port = free_port()
    daemon = start_daemon(peer__listen=f"tcp://127.0.0.1:{port}", peer__stream="tcp://127.0.0.1:0")
    hello = message_of(encode_message(identity_of("hostile").hello(), 1))
    pings = b"".join(message_of(encode_message(r.Ping(), number)) for number in range(2, MESSAGES))
    _attack(daemon, f"tcp://127.0.0.1:{port}", b"DEALER", hello + pings)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tcp", "ipc"])
@pytest.mark.parametrize("socket", ["events", "events_replay"])
def test_a_router_that_floods_and_connects_again_takes_bounded_memory(
    start_daemon: Start, tmp_path: Path, way: str, socket: str
) -> None:
    daemon = start_daemon(**(TCP if way == "tcp" else local_events(tmp_path)))
    with daemon.admin() as admin:
        endpoint = admin.info()[socket]
    kind = KINDS[socket]
    message = message_of(b"\2words") if socket == "events" else message_of(b"", struct.pack(">Q", 0))
    before, grown, until = private_bytes(daemon), 0, Deadline(5.0, MonotonicClock())
    while not until.has_passed():
        with suppress(OSError):
            hostile = greeted(endpoint, kind)
            with suppress(OSError):
                while not until.has_passed():
                    hostile.sendall(message * 5000)
                    grown = max(grown, private_bytes(daemon) - before)
            hostile.close()
    grown = max(grown, private_bytes(daemon) - before)
    print(f"a flood: {grown >> 20} MiB, {daemon.stats()['events.ended_connections']} ended")
    assert daemon.stats()["events.ended_connections"] >= 1
    assert grown < FLOOD_BYTES_MAX
    wait_until(lambda: is_served(endpoint, kind), "who connects is accepted again")
    with daemon.connect() as pool, router_of(daemon) as router:
        connected(daemon, router, pool)
    assert daemon.problems() == []


def is_served(endpoint: str, kind: bytes) -> bool:
    """Whether connections are accepted."""
    try:
        greeted(endpoint, kind).close()
    except OSError:
        return False
    return True
