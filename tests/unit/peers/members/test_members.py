"""Members from a list and from DNS, and the book that all sources keep."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from zmq.utils import z85

from kvpool.clock import MonotonicClock
from kvpool.config.curve_keys import make_key_pair
from kvpool.errors import InvalidArgument
from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.members.dns_members import DnsMembers, parse_dns, system_addresses
from kvpool.peers.members.member import (
    BookSettings,
    Member,
    MemberBook,
    MembersChange,
    MembersUnavailable,
    parse_member,
    parse_members,
)
from kvpool.peers.members.member_watch import MemberWatch, WatchSettings
from kvpool.peers.members.static_members import StaticMembers
from tests.rigs.clock import HandClock
from tests.rigs.daemon import wait_until

WATCH = WatchSettings(refresh_s=0.01, look_s=60.0, back_off=BackOffSettings(first_s=0.01, most_s=0.05))


def _member(number: int, life: int = 1) -> Member:
    return Member(f"tcp://10.0.0.{number}:5600", b"", f"node-{number}", bytes([life]) * 16)


def _book(**settings: Any) -> tuple[MemberBook, list[MembersChange], HandClock]:
    changes: list[MembersChange] = []
    clock = HandClock(0)
    return MemberBook(changes.append, BookSettings(**settings), clock), changes, clock


def test_joining_leaving_and_a_new_life_are_reported_once() -> None:
    book, changes, clock = _book(linger_s=10.0)
    one, two = _member(1), _member(2)
    book.replace([one, two])
    book.replace([two, one])
    assert changes == [MembersChange(joined=(one, two))]
    book.replace([_member(1, life=2), two])
    assert changes[1:] == [MembersChange(renewed=(_member(1, life=2),))]
    book.replace([two])
    clock.now_s = 9.9
    book.replace([two])
    assert book.current() == (_member(1, life=2), two)
    clock.now_s = 10.1
    book.replace([two])
    assert changes[2:] == [MembersChange(left=(_member(1, life=2),))]
    assert book.current() == (two,)


def test_a_member_that_comes_and_goes_keeps_its_place() -> None:
    book, changes, clock = _book(linger_s=10.0)
    for turn in range(20):
        book.replace([_member(1), _member(2)] if turn % 2 else [_member(1)])
        clock.advance(6.0)
    assert changes == [MembersChange(joined=(_member(1),)), MembersChange(joined=(_member(2),))]
    book.verify()


def test_a_source_that_was_away_has_time_to_list_its_members_again() -> None:
    book, changes, clock = _book(linger_s=10.0, return_s=45.0)
    book.replace([_member(1), _member(2), _member(3)])
    clock.now_s = 100.0
    book.note_return()
    for now_s in (100.0, 112.0, 130.0):
        clock.now_s = now_s
        book.replace([_member(1)])
    book.replace([_member(1), _member(3)])
    assert book.current() == (_member(1), _member(2), _member(3))
    clock.now_s = 145.1
    book.replace([_member(1), _member(3)])
    assert changes[1:] == [MembersChange(left=(_member(2),))]
    book.replace([_member(1)])
    clock.now_s = 155.2
    book.replace([_member(1)])
    assert changes[2:] == [MembersChange(left=(_member(3),))], "as always, from then on"
    book.verify()


def test_the_time_of_members_does_not_pass_while_their_source_is_away() -> None:
    book, changes, clock = _book(linger_s=10.0, return_s=45.0)
    book.replace([_member(1), _member(2)])
    book.replace([_member(1)])  # it lacks one just before it is away
    for now_s in (100.0, 160.0):
        clock.now_s = now_s
        book.note_return()
        book.replace([_member(1)])
        clock.advance(5)
        book.replace([_member(1)])
    assert len(book.current()) == 2
    clock.now_s = 206.0
    book.replace([_member(1)])
    assert changes[1:] == [MembersChange(left=(_member(2),))]


def test_a_key_that_is_no_longer_allowed_is_out_at_once_and_a_new_one_is_in() -> None:
    mine, other = make_key_pair(), make_key_pair()
    keys = [z85.decode(pair.public) for pair in (mine, other)]
    listed = [Member(f"tcp://10.0.0.{number}:1", pair.public) for number, pair in enumerate((mine, other), start=1)]
    book, changes, _ = _book(allowed=frozenset(keys[:1]))
    book.replace(listed)
    assert book.current() == (listed[0],)
    book.admit(frozenset(keys))
    book.replace(listed)
    assert book.current() == tuple(listed)
    book.admit(frozenset(keys[1:]))
    book.replace(listed)
    assert book.current() == (listed[1],)
    assert changes[-1] == MembersChange(left=(listed[0],))
    book.verify()
    members = StaticMembers(
        listed, changes.append, book=BookSettings(allowed=frozenset(keys[:1])), clock=MonotonicClock()
    )
    members.start()
    members.admit(frozenset(keys[1:]))
    assert members.current() == (listed[1],)


def test_the_node_itself_is_no_member() -> None:
    book, _, _ = _book(own=frozenset({"node-1", "tcp://10.0.0.2:5600"}))
    book.replace([_member(1), _member(2), _member(3)])
    assert book.current() == (_member(3),)


def test_members_are_bounded_and_known_ones_come_first() -> None:
    book, changes, _ = _book(members_max=2)
    book.replace([_member(5), _member(6)])
    book.replace([_member(number) for number in range(1, 8)])
    assert book.current() == (_member(5), _member(6))
    assert (book.left_out, len(changes)) == (5, 1)
    assert book.problem() == "peers: 5 members are too many, 2 are connected"


def test_keys_that_are_not_allowed_are_left_out_whoever_lists_them() -> None:
    mine, other = make_key_pair(), make_key_pair()
    book, _, _ = _book(allowed=frozenset({z85.decode(mine.public)}))
    good = Member("tcp://10.0.0.1:1", mine.public)
    book.replace([good, Member("tcp://10.0.0.2:1", other.public), Member("tcp://10.0.0.3:1")])
    assert book.current() == (good, Member("tcp://10.0.0.3:1"))
    assert book.stats()["refused"] == 1
    assert book.problem() == "peers: the key of 10.0.0.2:1 is not in peer.allow: not connected"
    book.replace([Member(f"tcp://10.0.0.{number}:1", other.public) for number in range(1, 7)])
    assert "the key of 10.0.0.1:1, 10.0.0.2:1, 10.0.0.3:1 and 3 more is not in peer.allow" in book.problem()
    book.replace([good])
    assert book.problem() == ""


def test_random_lists_keep_the_invariants(seed: int) -> None:
    chance = random.Random(seed)
    book, changes, clock = _book(members_max=5, linger_s=3.0, own=frozenset({"node-0"}))
    known: set[str] = set()
    for _ in range(2000):
        clock.advance(chance.random() * 2)
        book.replace([_member(number, chance.randrange(1, 3)) for number in range(10) if chance.random() < 0.4])
        book.verify()
        if changes:
            change = changes.pop()
            joined, left = ({one.identity for one in side} for side in (change.joined, change.left))
            assert not joined & known
            assert left <= known
            known = (known | joined) - left
        assert known == {one.identity for one in book.current()}


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("10.0.0.1:5600", "tcp://10.0.0.1:5600"),
        ("tcp://10.0.0.1:5600", "tcp://10.0.0.1:5600"),
        ("[fd00::1]:5600", "tcp://[fd00::1]:5600"),
        ("tcp://[FD00:0::1]:05600", "tcp://[fd00::1]:5600"),
    ],
)
def test_entries_of_a_list_are_addresses(text: str, endpoint: str) -> None:
    pair = make_key_pair()
    assert parse_member(text) == Member(endpoint)
    assert parse_member(f"{text} {pair.public.decode()}") == Member(endpoint, pair.public)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1",
        "node-1:5600",
        "10.0.0.1:0",
        "10.0.0.1:70000",
        "ipc:///tmp/x",
        "off",
        "10.0.0.1:1 shortkey",
        "::1:5600",
    ],
)
def test_other_entries_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_member(text)


def test_a_list_has_entries_between_commas_and_every_fault_is_named() -> None:
    assert parse_members("10.0.0.1:1,\n10.0.0.2:1 ,") == ([Member("tcp://10.0.0.1:1"), Member("tcp://10.0.0.2:1")], [])
    expected = (
        "expected IP:PORT such as 192.0.2.12:9470, and after a space the node's public key; commas separate nodes "
        "(found otherwise: dns:NAME:PORT, etcd:URL)"
    )
    found, faults = parse_members(
        "10.0.0.1:1,, node-2:9470, 010.0.0.3:1, 10.0.0.1:01, 224.0.0.1:1,tcp://10.0.0.4:1 key"
    )
    assert found == [Member("tcp://10.0.0.1:1")]
    assert faults == [
        f"entry 2 is empty, {expected}",
        f"entry 3: 'node-2:9470' is no address of a node, {expected}",
        f"entry 4: '010.0.0.3:1' is no address of a node, {expected}",
        "entry 5: 10.0.0.1:1 is listed twice, expected each node once",
        f"entry 6: '224.0.0.1:1' is no address of a node, {expected}",
        "entry 7: 'tcp://10.0.0.4:1' is followed by what is no public key of 40 characters (Z85); commas separate nodes",
    ]
    assert parse_members(",,")[1] == [f"entry {number} is empty, {expected}" for number in (1, 2)]


def test_a_static_list_is_reported_once() -> None:
    changes: list[MembersChange] = []
    own = BookSettings(own=frozenset({"tcp://10.0.0.1:5600"}))
    members = StaticMembers(
        parse_members("10.0.0.1:5600, 10.0.0.2:5600")[0], changes.append, book=own, clock=HandClock(0)
    )
    assert members.current() == ()
    members.start()
    assert changes == [MembersChange(joined=(Member("tcp://10.0.0.2:5600"),))]
    assert members.current() == changes[0].joined
    assert members.problem() == ""
    members.stop()


@pytest.fixture
def watch_dns() -> Iterator[Callable[..., tuple[DnsMembers, list[MembersChange]]]]:
    """Watches names with a resolver of the test's own."""
    with ExitStack() as stack:

        def watch(resolve: Callable[[str], list[str]], look_s: float = WATCH.look_s) -> Any:
            changes: list[MembersChange] = []
            members = DnsMembers(
                "dns:kvpool.local:5600",
                changes.append,
                book=BookSettings(linger_s=0.0),
                watch=replace(WATCH, look_s=look_s),
                clock=MonotonicClock(),
                random=random.Random(1),
                resolve=resolve,
            )
            stack.callback(members.stop)
            members.start()
            return members, changes

        yield watch


def test_every_address_of_a_name_is_a_member(watch_dns: Callable[..., Any]) -> None:
    answers = [["10.0.0.1", "fd00::2"], ["10.0.0.1"], ["10.0.0.1", "10.0.0.3"]]
    now = [answers[0]]
    asked: list[str] = []

    def resolve(name: str) -> list[str]:
        asked.append(name)
        return now[0]

    members, changes = watch_dns(resolve)
    wait_until(lambda: len(changes) == 1, "the first answer is reported")
    assert {one.endpoint for one in members.current()} == {"tcp://10.0.0.1:5600", "tcp://[fd00::2]:5600"}
    now[0] = answers[1]
    wait_until(lambda: len(changes) == 2, "one has left")
    now[0] = answers[2]
    wait_until(lambda: len(changes) == 3, "one has joined")
    assert [one.endpoint for one in changes[1].left + changes[2].joined] == [
        "tcp://[fd00::2]:5600",
        "tcp://10.0.0.3:5600",
    ]
    assert set(asked) == {"kvpool.local"}


@pytest.mark.parametrize("fault", ["error", "empty", "garbage", "link-local"])
def test_a_broken_dns_leaves_the_last_known_members(watch_dns: Callable[..., Any], fault: str) -> None:
    is_broken = threading.Event()

    def resolve(name: str) -> list[str]:
        if not is_broken.is_set():
            return ["10.0.0.1"]
        if fault == "error":
            raise OSError("name or service not known")
        return {"empty": [], "garbage": ["localhost"], "link-local": ["fe80::1%eth0"]}[fault]

    members, changes = watch_dns(resolve)
    wait_until(lambda: changes, "they are known")
    is_broken.set()
    wait_until(lambda: members.stats()["failed_refreshes"] >= 3, "it is broken")
    assert "1 known ones stay" in members.problem()
    assert len(members.current()) == len(changes) == 1
    is_broken.clear()
    wait_until(lambda: members.problem() == "", "it is well again")


def test_a_dns_that_comes_back_with_less_leaves_the_others_their_time(watch_dns: Callable[..., Any]) -> None:
    answers: list[list[str]] = [["10.0.0.1", "10.0.0.2"]]

    def resolve(name: str) -> list[str]:
        if not answers[-1]:
            raise OSError("name or service not known")
        return answers[-1]

    members, changes = watch_dns(resolve)
    wait_until(lambda: changes, "they are known")
    answers.append([])
    wait_until(lambda: members.problem() != "", "it is away")
    answers.append(["10.0.0.1"])
    wait_until(lambda: members.problem() == "", "it is back")
    looks = members.stats()["refreshes"]
    wait_until(lambda: members.stats()["refreshes"] > looks + 3, "it is asked on")
    assert len(members.current()) == 2
    assert len(changes) == 1


def test_a_key_that_is_no_longer_allowed_is_out_while_the_source_is_away() -> None:
    pair, is_away = make_key_pair(), threading.Event()
    member, changes = Member("tcp://10.0.0.1:1", pair.public), list[MembersChange]()

    def look() -> list[Member]:
        if is_away.is_set():
            raise MembersUnavailable("no answer")
        return [member]

    book = MemberBook(changes.append, BookSettings(allowed=frozenset({z85.decode(pair.public)})), MonotonicClock())
    watch = MemberWatch("members", look, book, settings=WATCH, random=random.Random(1))
    watch.start()
    try:
        wait_until(lambda: watch.current() == (member,), "it is known")
        is_away.set()
        wait_until(lambda: watch.problem() != "", "the source is away")
        watch.admit(frozenset({bytes(32)}))
        wait_until(lambda: watch.current() == (), "it is out")
        assert changes[-1] == MembersChange(left=(member,))
    finally:
        watch.stop()


def test_a_resolver_that_hangs_is_waited_for_once_and_each_look_ends(watch_dns: Callable[..., Any]) -> None:
    release = threading.Event()
    calls: list[str] = []

    def resolve(name: str) -> list[str]:
        calls.append(name)
        assert release.wait(60)
        return ["10.0.0.1"]

    members, _ = watch_dns(resolve, look_s=0.1)
    wait_until(lambda: members.stats()["failed_refreshes"] >= 2, "looks have failed")
    assert (
        "dns:kvpool.local:5600 gives no members, 0 known ones stay: no whole answer within 0.1 s" in members.problem()
    )
    assert members.stats()["late_refreshes"] == members.stats()["failed_refreshes"]
    assert calls == ["kvpool.local"]
    release.set()
    wait_until(lambda: len(members.current()) == 1, "the late answer counts")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_dies_is_a_problem() -> None:
    def look() -> list[Member]:
        raise ZeroDivisionError

    book, _, _ = _book()
    watch = MemberWatch("dns:a:1", look, book, settings=WATCH, random=random.Random(1))
    assert watch.problem() == ""
    watch.start()
    wait_until(lambda: "has died" in watch.problem(), "it is noticed")
    watch.stop()
    assert watch.problem() == ""


@pytest.mark.parametrize(
    "text", ["dns:", "dns:a", "dns:a:0", "dns:a:99999", "dns:a b:1", "dns::1", "http:a:1", "dns:a..b:1", "dns:é:1"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected dns:NAME:PORT"):
        parse_dns(text)


def test_the_systems_resolver_gives_addresses() -> None:
    assert "127.0.0.1" in system_addresses("localhost")
    assert parse_dns("dns:kvpool-peers.default.svc.cluster.local:5600")[1] == 5600
