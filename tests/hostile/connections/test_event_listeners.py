"""Hostile and stopped subscribers of events: their cost, their effect on others, and where they are accepted."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hostile.rigs.daemon_watch import open_fds, private_bytes
from tests.rigs.daemon import SMALL, Daemon, spawn, wait_until
from tests.rigs.events.publishing import connected, expected, known, local_events, router_of
from tests.rigs.payload import store, tokens_of

CHUNK = SMALL.chunk_tokens
SLEEPERS = 8
# Of each peer 8 messages of 64 KiB may wait; what ZMQ keeps for each connection comes on top. Unbounded: ten times that.
SLEEPERS_BYTES_MAX = 10 << 20

# Both sockets' connections with their duplicates, and what ZMQ accepts before it waits for the loop.
CROWD_FDS_MAX = 2 * 2 * (64 + 256 + 600)
# While the flood lasts; ZMQ alone takes as much in a few seconds, and goes on.
SUBSCRIBED_BYTES_MAX = 2 << 30
TCP = {"events__publish": "tcp://127.0.0.1:0", "events__replay": "tcp://127.0.0.1:0", "events__insecure": "true"}

# Connects to both sockets without end, and says nothing.
STRANGER = """
import socket, sys
opened = []
print("begun")
while True:
    for place in sys.argv[1:]:
        one = socket.socket(socket.AF_UNIX if place.startswith("ipc") else socket.AF_INET)
        one.setblocking(False)
        if place.startswith("ipc"):
            one.connect_ex(place.removeprefix("ipc://"))
        else:
            one.bind(("127.0.0.2", 0))
            one.connect_ex(("127.0.0.1", int(place.rpartition(":")[2])))
        opened.append(one)
    if len(opened) > 3000:
        for each in opened[:1000]:
            each.close()
        del opened[:1000]
"""

# Subscribes to topics without end.
SUBSCRIBER = """
import os, sys
import zmq
subscriber = zmq.Context().socket(zmq.XSUB)
subscriber.connect(sys.argv[1])
print("begun")
while True:
    subscriber.send(b"\\1" + os.urandom(3500))
"""

LONG_TOPIC = "x" * 2000

Start = Callable[..., Daemon]


def test_peers_that_do_not_read_replays_are_bounded_in_bytes_and_starve_nobody(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(**local_events(tmp_path), events__republish_interval="0s", dram__token_ids="64MiB")
    tokens = SMALL.chunk_tokens * 20
    with daemon.connect() as pool, ExitStack() as stack:
        for number in range(100):
            store(pool, pool.keys(tokens_of(number, tokens)))
        wait_until(lambda: int(daemon.stats()["events.published"]) >= 100, "they are published")
        sleepers = [stack.enter_context(router_of(daemon, "none", hwm=1)) for _ in range(SLEEPERS)]
        before = private_bytes(daemon)
        for sleeper in sleepers:
            for _ in range(50):
                sleeper.send_raw([b"", struct.pack(">Q", 0)])
        with router_of(daemon) as router:
            router.index.is_strict = False
            (topic, *_) = {topic for topic, _, _ in router.replay(0)}
            router.catch_up(topic)
            assert known(router) == expected(daemon)
        grown = private_bytes(daemon) - before
        print(f"{SLEEPERS} peers that do not read: {grown >> 10} KiB")
        assert grown < SLEEPERS_BYTES_MAX
    assert daemon.problems() == []


def test_a_request_for_lost_messages_republishes_to_all_only_once(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(**local_events(tmp_path), events__replay_messages="1")
    with daemon.connect() as pool, router_of(daemon, "none") as hostile:
        store(pool, pool.keys(tokens_of(1, CHUNK * 4)))
        wait_until(lambda: int(daemon.stats()["events.published_messages"]) == 2, "it is published")
        for _ in range(40):
            hostile.replay(0)
        wait_until(lambda: int(daemon.stats()["events.published_snapshots"]) == 1, "everything is republished once")
        for _ in range(20):
            hostile.replay(0)
        assert daemon.stats()["events.published_snapshots"] == 1


@pytest.mark.parametrize("rights", [0o1777, 0o775])
def test_a_directory_where_others_may_write_is_refused_for_events(tmp_path: Path, rights: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(rights)
    daemon = Daemon(tmp_path, **{"events.publish": f"ipc://{place}/events"})
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(60.0) == 2
    assert f"events.publish is ipc://{place}/events" in daemon.log()
    assert f"{place} has rights {rights:04o}, expected no more than 0755: " in daemon.log()
    assert not (place / "events").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_who_may_not_open_the_pool_cannot_subscribe(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(**local_events(tmp_path), server__socket_mode="0660")
    with daemon.connect() as pool, router_of(daemon) as friend:
        for name in ("events", "events-replay"):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o660
        code = f"""
import os, socket, sys
os.setgid(65534); os.setgroups([]); os.setuid(65534)
for name in ("events", "events-replay"):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        try:
            one.connect({str(tmp_path)!r} + "/" + name)
        except PermissionError:
            print("refused")
"""
        for path in (tmp_path, *tmp_path.parents[:2]):
            path.chmod(path.stat().st_mode | 0o011)
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
        assert done.stdout.split() == ["refused", "refused"], done.stderr
        store(pool, pool.keys(tokens_of(1, CHUNK)))
        friend.receive_until(lambda: known(friend) == expected(daemon), "who may, does")


def test_a_publisher_replaces_only_a_dead_socket(tmp_path: Path) -> None:
    precious = tmp_path / "precious.db"
    precious.write_text("kept")
    refused = Daemon(tmp_path / "one", **{"events.publish": f"ipc://{precious}"})
    (tmp_path / "one").mkdir()
    refused.launch()
    assert refused.process is not None
    assert refused.process.wait(60.0) != 0
    assert "exists and is no socket" in refused.log()
    assert precious.read_text() == "kept"
    (tmp_path / "two").mkdir()
    (tmp_path / "three").mkdir()
    place = f"ipc://{tmp_path}/events"
    with Daemon(tmp_path / "two", **{"events.publish": place}) as first:
        second = Daemon(tmp_path / "three", **{"events.publish": place})
        second.launch()
        assert second.process is not None
        assert second.process.wait(60.0) != 0
        assert "is served by another process" in second.log()
        first.kill()
        first.start()  # what a killed one has left is taken
        assert first.problems() == []


@pytest.fixture(params=["tcp", "ipc"])
def publishing(request: pytest.FixtureRequest, start_daemon: Start, tmp_path: Path) -> Daemon:
    """A daemon that publishes to this machine, in either way."""
    return start_daemon(**(TCP if request.param == "tcp" else local_events(tmp_path)))


def _places(daemon: Daemon) -> list[str]:
    with daemon.admin() as admin:
        info = admin.info()
    return [info["events"], info["events_replay"]]


def _hears(daemon: Daemon) -> None:
    """A router that connects now hears of a chunk."""
    with daemon.connect() as pool, router_of(daemon) as router:
        connected(daemon, router, pool)
        wait_until(lambda: known(router) == expected(daemon) or not router.receive(0.05), "it is heard")
        assert known(router) == expected(daemon)


@pytest.mark.slow
def test_who_connects_without_end_takes_a_bounded_number_of_descriptors(publishing: Daemon) -> None:
    daemon = publishing
    at_rest = open_fds(daemon)
    with spawn(STRANGER, *_places(daemon)) as stranger:
        fds: list[int] = []

        def is_kept_away() -> bool:
            fds.append(open_fds(daemon))
            return int(daemon.stats()["events.ended_connections"]) >= 400

        wait_until(is_kept_away, "its connections are shut down", 60.0)
        if not _places(daemon)[0].startswith("ipc"):  # there its connections fill the kernel's backlog, too
            _hears(daemon)
        stranger.kill()
    print(f"descriptors {at_rest} + {max(fds) - at_rest}")
    assert max(fds) - at_rest <= CROWD_FDS_MAX
    wait_until(lambda: open_fds(daemon) <= at_rest + 4, "what it opened is closed again")
    _hears(daemon)


@pytest.mark.slow
@pytest.mark.parametrize("subscribers", [1, 4])
def test_a_router_that_subscribes_without_end_is_disconnected_and_takes_bounded_memory(
    publishing: Daemon, subscribers: int
) -> None:
    daemon, grown = publishing, 0
    before = private_bytes(daemon)
    with ExitStack() as stack:
        for _ in range(subscribers):
            stack.callback(stack.enter_context(spawn(SUBSCRIBER, _places(daemon)[0])).kill)

        def is_disconnected() -> bool:
            nonlocal grown
            grown = max(grown, private_bytes(daemon) - before)
            return int(daemon.stats()["events.ended_connections"]) >= 8 * subscribers

        wait_until(is_disconnected, "all are disconnected each time", 60.0)
    print(f"subscriptions without end: {grown >> 20} MiB")
    assert grown <= SUBSCRIBED_BYTES_MAX
    _hears(daemon)
    assert daemon.problems() == []


def test_a_router_that_asks_often_in_whole_requests_stays_connected(publishing: Daemon) -> None:
    daemon = publishing
    with daemon.connect() as pool, router_of(daemon, "none") as router:
        store(pool, pool.keys(tokens_of(1, CHUNK * 4)))
        wait_until(lambda: int(daemon.stats()["events.published_messages"]) >= 1, "it is published")
        for _ in range(60):  # more bytes than one unfinished request may have, by half
            assert router.replay(0, LONG_TOPIC) == []
            assert len(router.replay(0)) >= 1
        assert daemon.stats()["events.ended_connections"] == 0
