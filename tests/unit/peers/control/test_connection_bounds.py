"""Tests of connections to a control server that say nothing: each ends, few are there, and admitted nodes get through."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from kvpool.clock import MonotonicClock
from kvpool.peers.control import records as r
from kvpool.peers.control.accept_gate import CLOSED_MAX, KNOWN_MAX, AcceptGate, filter_of, source_of
from kvpool.peers.control.guarded_connection import GuardSettings
from kvpool.peers.control.listener import UNREAD_BYTES_MAX, ListenerSettings
from kvpool.peers.control.server import ControlServer, ControlServerSettings
from tests.rigs.nodes.peers import LINK, Owner, fast, fleet, identity_of, key_pairs, pull_of, until

STRANGER, OTHER_STRANGER = "127.0.0.2", "127.0.0.3"


def bounded(**options: float) -> ControlServerSettings:
    """Settings with these bounds of connections."""
    guard = GuardSettings(UNREAD_BYTES_MAX, **options)  # type: ignore[arg-type]
    return fast(ControlServerSettings(), listener=ListenerSettings(guard=guard))


class Dialler:
    """Bare connections from addresses of this host."""

    def __init__(self) -> None:
        self.made: list[socket.socket] = []

    def begin(self, server: ControlServer, host: str = STRANGER) -> socket.socket:
        """A connection that begins; `is_through` says whether it has."""
        address, _, port = server.endpoints[0].removeprefix("tcp://").rpartition(":")
        one = socket.socket()
        self.made.append(one)
        one.setblocking(False)
        one.bind((host, 0))
        assert one.connect_ex((address, int(port))) in (0, errno.EINPROGRESS)
        return one

    def close(self) -> None:
        """End all."""
        for one in self.made:
            one.close()


def is_through(one: socket.socket) -> bool:
    """Whether the other side has accepted it, and has not ended it."""
    with contextlib.suppress(BlockingIOError):
        return bool(one.recv(1, socket.MSG_PEEK))
    return False


def has_ended(one: socket.socket) -> bool:
    """Whether the other side has ended it."""
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.fixture
def dialler() -> Iterator[Dialler]:
    made = Dialler()
    yield made
    made.close()


@pytest.mark.asyncio
async def test_a_connection_without_a_hello_ends_whatever_it_does_before(dialler: Dialler) -> None:
    here, there = key_pairs(2)
    with fleet() as nodes:
        server = nodes.serve(Owner(), keys=there, allowed=frozenset({here.public_bytes}), settings=bounded(hello_s=0.4))
        honest = await nodes.watch(keys=here, link=LINK).ready(server, there.public)
        silent = dialler.begin(server)
        greeting = dialler.begin(server)
        await until(lambda: is_through(greeting), "it is accepted")
        greeting.send(b"\xff" + bytes(8) + b"\x7f")
        shaken = nodes.raw(server, keys=here, server_key=there.public)  # with the handshake, and no Hello
        await until(lambda: server.stats()["silent_connections"] >= 3, "all three are shut down")
        assert has_ended(silent)
        assert has_ended(greeting)
        shaken.close()
        await until(lambda: server.stats()["connections"] == 1, "the honest one is left")
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2


@pytest.mark.asyncio
async def test_a_connection_that_is_replaced_or_refused_ends_and_takes_no_descriptor() -> None:
    here, there = key_pairs(2)
    with fleet() as nodes:
        settings = fast(ControlServerSettings(), connections_per_peer=2)
        server = nodes.serve(Owner(), keys=there, allowed=frozenset({here.public_bytes}), settings=settings)
        raws = [nodes.raw(server, keys=here, server_key=there.public) for _ in range(5)]
        for number, raw in enumerate(raws):
            assert isinstance(await raw.ask(identity_of(f"raw-{number}").hello(), 1), r.Hello)
        await until(lambda: server.stats()["ended_connections"] >= 3, "three are shut down, and not only forgotten")


@pytest.mark.asyncio
async def test_what_a_connection_held_is_released_when_it_ends() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        server = nodes.serve(owner)
        raw = nodes.raw(server)
        assert isinstance(await raw.ask(identity_of("raw").hello(), 1), r.Hello)
        raw.say(pull_of(1), 2)
        await until(lambda: owner.pulls, "the pull has come")
        raw.close()
        await until(lambda: [one.node for one in owner.forgotten] == ["raw"], "at once, not after its silence", 5.0)
        assert server.stats()["pullers"] == 0


@pytest.mark.asyncio
async def test_strangers_take_a_bounded_number_and_the_latest_have_room(dialler: Dialler) -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner(), settings=bounded(strangers_max=16, accepts_per_s_of_source=1000.0))
        honest = await nodes.watch().ready(server)
        for host in (STRANGER, OTHER_STRANGER):
            for _ in range(60):
                dialler.begin(server, host)
        await until(lambda: server.stats()["crowded_connections"] >= 120 - 16, "most are shut down")
        await until(lambda: server.stats()["connections"] <= 1 + 16, "few are left")
        assert (await nodes.watch(node=identity_of("second")).ready(server)).life is not None, "an honest one has room"
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2
        assert honest.fault == ""


@pytest.mark.asyncio
async def test_a_source_that_connects_without_end_is_kept_away_and_others_are_not(dialler: Dialler) -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner(), settings=bounded(accepts_per_s_of_source=4.0))
        for _ in range(40):
            dialler.begin(server)
            await asyncio.sleep(0)
        await until(lambda: server.stats()["accept_closures"] >= 1, "the gate is closed for it")
        late = dialler.begin(server)
        honest = await nodes.watch().ready(server)
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2
        assert not is_through(late)
        await until(lambda: server._listener._gate.is_open, "its time is over", 10.0)
        await until(lambda: is_through(late) or has_ended(late), "it gets through by its own repetition", 20.0)


@pytest.mark.asyncio
async def test_many_sources_together_leave_known_ones_their_way(dialler: Dialler) -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner(), settings=bounded(accepts_per_s=5.0))
        honest = await nodes.watch().ready(server)
        for number in range(40):
            dialler.begin(server, f"127.0.1.{number + 1}")
            await asyncio.sleep(0)
        await until(lambda: server.stats()["accept_closures"] >= 1, "the gate is closed for strangers")
        late = dialler.begin(server, "127.0.2.1")
        second = await nodes.watch(node=identity_of("second")).ready(server)
        assert (await second.request(pull_of(1), 60.0)).chunks == 2
        assert (await honest.request(pull_of(2), 60.0)).chunks == 2
        assert not is_through(late)


@pytest.mark.asyncio
async def test_without_descriptors_for_duplicates_connections_end(
    dialler: Dialler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        honest = await nodes.watch().ready(server)

        def none_left(_: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "dup", none_left)
        one = dialler.begin(server)
        await until(lambda: has_ended(one), "it is not kept without a bound")
        assert (await honest.request(pull_of(1), 60.0)).chunks == 2


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.7", bytes([192, 0, 2, 7])),
        ("::ffff:192.0.2.7", bytes([192, 0, 2, 7])),
        ("2001:db8:1:2:3:4:5:6", bytes.fromhex("20010db800010002")),
        ("fe80::1%eth0", bytes.fromhex("fe80000000000000")),
    ],
)
def test_a_source_is_an_address_or_half_of_a_long_one(host: str, source: bytes) -> None:
    assert source_of(host) == source


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("is_known", [True, False])
def test_the_filter_judges_by_the_source(host: str, is_known: bool, opened: Callable[[str], socket.socket]) -> None:
    listener = opened(host)
    gate = AcceptGate([listener], MonotonicClock())
    if is_known:
        gate.note_known(source_of(host))
    gate.close_strangers(60.0)
    gate.close(source_of("192.0.2.7"), 60.0)
    gate.close(source_of("2001:db8::1"), 60.0)
    assert _connects(listener) == is_known
    gate.close(source_of(host), 60.0)
    assert not _connects(listener), "one that is closed is, though it is known"


def test_a_full_list_of_closed_sources_closes_for_all_strangers(opened: Callable[[str], socket.socket]) -> None:
    listener = opened("127.0.0.1")
    gate = AcceptGate([listener], MonotonicClock())
    for number in range(KNOWN_MAX + 10):
        gate.note_known(source_of(f"10.{number // 250}.1.{number % 250}"))
    for number in range(CLOSED_MAX):
        gate.close(source_of(f"10.9.{number // 250}.{number % 250}"), 60.0)
    assert _connects(listener)
    gate.close(source_of("10.8.0.1"), 60.0)
    assert not _connects(listener)
    assert len(filter_of([], None)) < 8


@pytest.fixture
def opened() -> Iterator[Callable[[str], socket.socket]]:
    """Listening sockets."""
    made: list[socket.socket] = []

    def listen(host: str) -> socket.socket:
        one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        made.append(one)
        one.bind((host, 0))
        one.listen(8)
        return one

    yield listen
    for one in made:
        one.close()


def _connects(listener: socket.socket) -> bool:
    with socket.socket(listener.family) as one:
        one.settimeout(0.3)
        try:
            one.connect(listener.getsockname()[:2])
        except TimeoutError:
            return False
    listener.accept()[0].close()
    return True
