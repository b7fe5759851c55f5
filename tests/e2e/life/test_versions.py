"""Two versions of the local protocol at once: this one, and a made-up next one."""

import socket
import sys
from collections.abc import Iterator

import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol import frames, versions
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from tests.rigs import version_two
from tests.rigs.daemon import PROGRAM, SMALL, Daemon, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

CHUNKS = 4


class LaterDaemon(Daemon):
    """A kvpoold of version 2."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.rigs.version_two", *super().command()[len(PROGRAM) :]]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with LaterDaemon(tmp_path_factory.mktemp("later")) as daemon:
        yield daemon


def save_and_load(daemon: Daemon, seed: int) -> int:
    """The version that a Pool speaks which has saved chunks and loaded them."""
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(seed, CHUNKS * SMALL.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        result, into = load_all(pool, keys)
        assert result == kv.LoadResult(CHUNKS, keys.tokens, "complete")
        assert_right_bytes(keys, SMALL, result, into)
        session = pool._link.session
        assert session is not None
        return session.welcome.protocol


def test_this_version_is_served_by_a_later_daemon(later: Daemon) -> None:
    assert save_and_load(later, 1) == 1
    with BlockingConnection.admin(later.socket, 60.0) as operator:
        assert operator.welcome.protocol == 1
        assert operator.stats()["dram"]["dram.chunks"] == CHUNKS


def test_a_later_version_is_spoken_where_both_sides_know_it(later: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    version_two.apply(monkeypatch.setattr)
    assert save_and_load(later, 11) == 2


def test_a_later_client_is_served_in_this_version(shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    version_two.apply(monkeypatch.setattr)
    assert save_and_load(shared_daemon, 21) == 1
    with BlockingConnection.admin(shared_daemon.socket, 60.0) as operator:
        with pytest.raises(Refused, match=r"version: the daemon is kvpoold .*, which cannot do this yet: update it"):
            operator.call(version_two.AskRack(), m.Report)
        assert operator.welcome.protocol == 1


def test_a_client_and_a_daemon_without_a_common_version_refuse_by_name(daemon: Daemon) -> None:
    hello = m.Hello(m.MAGIC, versions.NEWEST + 3, m.ROLE_ADMIN, "", [], versions.NEWEST + 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(60.0)
        client.connect(daemon.socket)
        client.sendall(m.encode(hello, 0))
        length = frames.LENGTH.unpack(client.recv(frames.LENGTH.size, socket.MSG_WAITALL))[0]
        kind, _, values = frames.decode(client.recv(length, socket.MSG_WAITALL))
        assert (kind, values[0]) == (m.Failure.KIND, "version")
        assert values[1] == "client speaks protocol 3 to 4, this daemon 1 to 1: update the daemon"
    wait_until(lambda: daemon.stats()["connections"] == 1, "it has gone")


@pytest.mark.parametrize(("oldest", "newest", "chosen"), [(1, 1, 1), (1, 99, 1), (-5, 1, 1)])
def test_the_newest_version_that_both_speak_is_chosen(oldest: int, newest: int, chosen: int) -> None:
    assert versions.choose(oldest, newest) == chosen


@pytest.mark.parametrize(
    ("oldest", "newest", "remedy"), [(0, 0, "client"), (2, 9, "daemon"), (1, -1, "client"), (2, 1, "daemon")]
)
def test_the_side_to_update_is_named_where_there_is_none(oldest: int, newest: int, remedy: str) -> None:
    with pytest.raises(Refused, match=f"version: client speaks protocol .*: update the {remedy}"):
        versions.choose(oldest, newest)
