"""Members by etcd: against a real one, and against a server that drips."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.curve_keys import make_key_pair
from kvpool.errors import InvalidArgument
from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.members.etcd_address import EtcdTls, parse_etcd
from kvpool.peers.members.etcd_gateway import EtcdEntry, EtcdGateway
from kvpool.peers.members.etcd_members import EtcdMembers, EtcdSettings, member_in, record_of
from kvpool.peers.members.member import BookSettings, Member, MembersChange, MembersUnavailable
from kvpool.peers.members.member_watch import WatchSettings
from tests.rigs.daemon import wait_until
from tests.rigs.runs.etcd import Etcd, dripping

WATCH = WatchSettings(refresh_s=0.05, look_s=1.0, back_off=BackOffSettings(first_s=0.02, most_s=0.1))


def _own(node: str, life: int = 1) -> Member:
    number = sum(node.encode()) % 250 + 1
    return Member(f"tcp://10.0.0.{number}:5600", b"", node, bytes([life]) * 16)


class _Node:
    """One node's source of members, and what it has reported."""

    def __init__(self, url: str, own: Member, *, prefix: str, **book: Any) -> None:
        self.changes: list[MembersChange] = []
        self.members = EtcdMembers(
            f"etcd:{url}/{prefix}",
            own,
            self.changes.append,
            etcd=EtcdSettings(ttl_s=2),
            book=BookSettings(own=frozenset({own.node, own.endpoint}), **{"linger_s": 0.0, **book}),
            watch=WATCH,
            clock=MonotonicClock(),
            random=random.Random(1),
        )

    def names(self) -> set[str]:
        return {one.node for one in self.members.current()}


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One etcd for tests that leave nothing behind."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """The prefix of one test's members."""
    return f"fleet/{request.node.name}"


@pytest.fixture
def join(prefix: str) -> Iterator[Callable[..., _Node]]:
    """Starts nodes that end with the test."""
    with ExitStack() as stack:

        def start(url: str, own: Member, **book: Any) -> _Node:
            node = _Node(url, own, prefix=prefix, **book)
            stack.callback(node.members.stop)
            node.members.start()
            return node

        yield start


def _gateway(url: str, timeout_s: float = 2.0) -> EtcdGateway:
    return EtcdGateway((url,), EtcdTls(), timeout_s=timeout_s)


def test_nodes_see_each_other_join_and_leave(shared_etcd: Etcd, join: Callable[..., _Node]) -> None:
    nodes = [join(shared_etcd.url, _own(name)) for name in ("a", "b", "c/d é")]
    for node in nodes:
        others = {"a", "b", "c/d é"} - {node.members._own.node}
        wait_until(lambda node=node, others=others: node.names() == others, f"{node.members} knows {others}")  # type: ignore[misc]
    assert set(nodes[0].members.current()) == {_own("b"), _own("c/d é")}
    nodes[2].members.stop()
    wait_until(lambda: nodes[0].names() == {"b"}, "it has left, at once")
    assert nodes[0].members.stats()["changes"] >= 2
    assert nodes[0].members.problem() == ""


def test_a_node_that_dies_leaves_with_its_lease(shared_etcd: Etcd, join: Callable[..., _Node], prefix: str) -> None:
    node = join(shared_etcd.url, _own("a"))
    gateway = _gateway(shared_etcd.url)
    lease = gateway.grant(1)
    gateway.put(f"{prefix}/b".encode(), record_of(_own("b")), lease)
    wait_until(lambda: node.names() == {"b"}, "it has joined")
    wait_until(lambda: node.names() == set(), "it has left")
    assert not gateway.keep_alive(lease)


def test_a_new_life_is_reported(shared_etcd: Etcd, join: Callable[..., _Node]) -> None:
    node, first = join(shared_etcd.url, _own("a")), join(shared_etcd.url, _own("b"))
    wait_until(lambda: node.names() == {"b"}, "it has joined")
    second = join(shared_etcd.url, _own("b", life=2))
    wait_until(lambda: node.members.current() == (_own("b", life=2),), "the new life is known")
    assert node.changes[-1] == MembersChange(renewed=(_own("b", life=2),))
    wait_until(lambda: "another node registers as 'b'" in first.members.problem(), "the other one reports it")
    assert second.members.problem() == ""


def test_a_second_node_of_a_name_leaves_the_first_ones_registration(
    shared_etcd: Etcd, join: Callable[..., _Node]
) -> None:
    first, watcher = join(shared_etcd.url, _own("twin")), join(shared_etcd.url, _own("watcher"))
    wait_until(lambda: watcher.names() == {"twin"}, "the first one is registered")
    elsewhere = replace(_own("twin", life=2), endpoint="tcp://10.9.9.9:5600")
    second = join(shared_etcd.url, elsewhere)
    wait_until(
        lambda: "another node registers as 'twin', at " in second.members.problem(), "the second one has noticed"
    )
    assert [one.endpoint for one in watcher.members.current()] == [_own("twin").endpoint]
    first.members.stop()
    wait_until(
        lambda: [one.endpoint for one in watcher.members.current()] == [elsewhere.endpoint], "it has the name now"
    )
    wait_until(lambda: second.members.problem() == "", "nothing is wrong any more")


def test_a_removed_registration_is_written_again(shared_etcd: Etcd, join: Callable[..., _Node], prefix: str) -> None:
    node, other = join(shared_etcd.url, _own("a")), join(shared_etcd.url, _own("b"))
    wait_until(lambda: node.names() == {"b"} and other.names() == {"a"}, "both are known")
    gateway = _gateway(shared_etcd.url)

    def is_registered() -> bool:
        return [one.value for one in gateway.read(f"{prefix}/b".encode(), limit=1).entries] == [record_of(_own("b"))]

    gateway.revoke(other.members._lease)
    wait_until(is_registered, "it is registered with a new lease")
    gateway.put(f"{prefix}/b".encode(), b"damaged", gateway.grant(60))
    wait_until(is_registered, "it is written again")
    wait_until(lambda: node.names() == {"b"}, "it is known")


def test_garbage_is_counted_and_left_out(shared_etcd: Etcd, join: Callable[..., _Node], prefix: str, seed: int) -> None:
    chance = random.Random(seed)
    gateway = _gateway(shared_etcd.url)
    lease = gateway.grant(60)
    good, keyed = _own("good"), replace(_own("keyed"), public_key=make_key_pair().public)
    values = [b"", b"\xff" * 100, b"[]", b"{}", b"null", b"[" * 500, chance.randbytes(200), b'"' + b"x" * 2000 + b'"']
    for number, value in enumerate(values):
        gateway.put(f"{prefix}/garbage-{number}".encode(), value, lease)
    gateway.put(f"{prefix}/another-name".encode(), record_of(_own("mallory")), lease)
    gateway.put(f"{prefix}/keyed".encode(), record_of(keyed), lease)
    gateway.put(f"{prefix}/good".encode(), record_of(good), lease)
    node = join(shared_etcd.url, _own("a"), allowed=frozenset())
    wait_until(lambda: node.names() == {"good"}, "the good one is known")
    assert node.members.stats()["garbage"] == len(values) + 1
    assert node.members.stats()["refused"] == 1
    gateway.revoke(lease)
    wait_until(lambda: node.names() == set(), "all have left")


def test_looks_without_changes_read_no_members(
    shared_etcd: Etcd, join: Callable[..., _Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, _ = join(shared_etcd.url, _own("a")), join(shared_etcd.url, _own("b"))
    wait_until(lambda: node.names() == {"b"}, "both are known")
    whole: list[int] = []
    monkeypatch.setattr(node.members, "_read_all", lambda: whole.append(1))
    looks = node.members.stats()["refreshes"]
    wait_until(lambda: node.members.stats()["refreshes"] > looks + 4, "it goes on to look")
    assert whole == []


def test_etcd_is_asked_over_tls_and_its_certificate_is_checked(tmp_path: Path, join: Callable[..., _Node]) -> None:
    with Etcd(tmp_path, is_tls=True) as etcd:
        trusted = EtcdGateway((etcd.url,), EtcdTls(ca_file=str(etcd.certificate)), timeout_s=5.0)
        assert trusted.keep_alive(trusted.grant(5))
        trusted.close()
        for url in (etcd.url, etcd.url.replace("https", "http")):
            gateway = _gateway(url)
            with pytest.raises(MembersUnavailable):
                gateway.grant(5)
            gateway.close()


def test_while_etcd_is_away_the_last_known_members_stay(tmp_path: Path, join: Callable[..., _Node]) -> None:
    with Etcd(tmp_path) as etcd:
        node, other = join(etcd.url, _own("a")), join(etcd.url, _own("b"))
        wait_until(lambda: node.names() == {"b"} and other.names() == {"a"}, "both are known")
        etcd.pause()
        wait_until(lambda: "1 known ones stay" in node.members.problem(), "a look has failed in its time")
        etcd.resume()
        wait_until(lambda: node.members.problem() == "", "it is there again")
        etcd.kill()
        wait_until(lambda: bool(node.members.problem() and other.members.problem()), "both have noticed")
        failed = node.members.stats()["failed_refreshes"]
        wait_until(lambda: node.members.stats()["failed_refreshes"] > failed + 2, "they go on to try")
        assert node.names() == {"b"}
        etcd.forget()
        etcd.start()
        wait_until(lambda: not node.members.problem() and not other.members.problem(), "they are registered anew")
        wait_until(lambda: node.names() == {"b"} and other.names() == {"a"}, "both are known again")


def test_members_are_watched_on_behind_a_server_that_drips(join: Callable[..., _Node]) -> None:
    with dripping(b"HTTP/1.1 200 OK\r\n") as url:
        node = join(url, _own("a"))
        wait_until(lambda: node.members.stats()["failed_refreshes"] >= 2, "looks end and are begun again")
        assert "0 known ones stay" in node.members.problem()
        assert "no whole answer within 1 s" in node.members.problem()


def test_addresses_are_urls_and_a_prefix() -> None:
    assert parse_etcd("etcd:http://127.0.0.1:2379").prefix == "kvpool/members/"
    found = parse_etcd("etcd:https://a:1,https://[fd00::1]:2/x/y/")
    assert (found.servers, found.prefix) == (("https://a:1", "https://[fd00::1]:2"), "x/y/")
    for text in (
        "etcd:",
        "etcd:a:1",
        "etcd:http://a",
        "etcd:ftp://a:1",
        "etcd:http://a:1/x,http://b:1",
        "dns:a:1",
        "etcd:http://a:1?x",
    ):
        with pytest.raises(InvalidArgument, match="expected etcd:"):
            parse_etcd(text)
    with pytest.raises(InvalidArgument, match="password") as refusal:
        parse_etcd("etcd:http://user:hunter2@a:1")
    assert "hunter2" not in str(refusal.value)


def test_only_records_of_members_are_members() -> None:
    own = replace(_own("a b"), public_key=make_key_pair().public)
    found: dict[str, Any] = json.loads(record_of(own))

    def entry(**changes: Any) -> Member | None:
        return member_in(EtcdEntry(b"p/a%20b", json.dumps({**found, **changes}).encode()), b"p/")

    assert entry() == own
    bad: list[dict[str, Any]] = [
        {"node": "b"},
        {"node": 5},
        {"endpoint": "tcp://name:1"},
        {"endpoint": "off"},
        {"endpoint": "tcp://10.0.0.1:0"},
        {"endpoint": "tcp://[fe80::1%\ud800]:1"},  # no text that a socket or a log takes
        {"endpoint": "tcp://[fe80::1%eth0\n]:1"},
        {"endpoint": "tcp://[fe80::1%" + "e" * 16 + "]:1"},
        {"public_key": "short"},
        {"public_key": "\ud800" * 40},
        {"incarnation": "xy" * 16},
        {"incarnation": ""},
        {"incarnation": " " * 32},
        {"extra": "x"},
    ]
    for changes in bad:
        assert entry(**changes) is None, changes
