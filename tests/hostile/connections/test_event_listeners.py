"""Hostile and stopped subscribers of events: their cost, their effect on others, and where they are accepted."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hostile.rigs.daemon_watch import private_bytes
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.events.publishing import expected, known, local_events, router_of
from tests.rigs.payload import store, tokens_of

CHUNK = SMALL.chunk_tokens
SLEEPERS = 24
# The bound is 32 peers with 8 messages of 64 KiB; what ZMQ keeps for each connection comes on top.
SLEEPERS_BYTES_MAX = 24 << 20

Start = Callable[..., Daemon]


def test_peers_that_do_not_read_replays_are_bounded_in_bytes_and_starve_nobody(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(**local_events(tmp_path), events__retell_interval="0s", dram__token_ids="64MiB")
    tokens = SMALL.chunk_tokens * 20
    with daemon.connect() as pool, ExitStack() as stack:
        for number in range(300):
            store(pool, pool.keys(tokens_of(number, tokens)))
        wait_until(lambda: int(daemon.stats()["events.published"]) >= 300, "they are published")
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
        for _ in range(200):
            hostile.replay(0)
        wait_until(lambda: int(daemon.stats()["events.resyncs"]) == 1, "everything is republished once")
        for _ in range(20):
            hostile.replay(0)
        assert daemon.stats()["events.resyncs"] == 1


@pytest.mark.parametrize("rights", [0o777, 0o1777, 0o775])
def test_a_directory_where_others_may_write_is_refused_for_events(tmp_path: Path, rights: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(rights)
    daemon = Daemon(tmp_path, **{"events.publish": f"ipc://{place}/events"})
    ended = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert f"events.publish is ipc://{place}/events" in ended.stderr
    assert f"chmod go-w {place}" in ended.stderr
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
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=20, cwd="/")
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
    assert refused.process.wait(20.0) != 0
    assert "exists and is no socket" in refused.log()
    assert precious.read_text() == "kept"
    (tmp_path / "two").mkdir()
    (tmp_path / "three").mkdir()
    place = f"ipc://{tmp_path}/events"
    with Daemon(tmp_path / "two", **{"events.publish": place}) as first:
        second = Daemon(tmp_path / "three", **{"events.publish": place})
        second.launch()
        assert second.process is not None
        assert second.process.wait(20.0) != 0
        assert "is served by another process" in second.log()
        first.kill()
        first.start()  # what a killed one has left is taken
        assert first.problems() == []
