"""Owners on this host: mapped once for each life, let go at its end, and never more than a few."""

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvpool.peers.control import records as r
from kvpool.transfer.near.owners import OWNERS_MAX, NearFailed, NearOwners, map_owner
from tests.rigs.nodes.peers import until

NEAR = r.Near(7, "/run/kvpool.sock", b"e" * 16, bytes(8), bytes(8), bytes(8))
LIFE, NEXT = b"1" * 16, b"2" * 16


@dataclass
class Sockets:
    """Answers each connect with one end of a pair of sockets; `others` has the daemons' ends."""

    others: list[socket.socket] = field(default_factory=list)
    own: list[socket.socket] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)
    fault: str = ""

    def __post_init__(self) -> None:
        self.may_answer.set()

    def connect(self, _path: str, epoch: bytes, _timeout_s: float) -> tuple[Any, Any]:
        assert self.may_answer.wait(60.0)
        if self.fault:
            raise NearFailed(self.fault)
        one, other = socket.socketpair()
        self.own.append(one)
        self.others.append(other)
        return one, cast(Any, Memory(epoch))

    def close(self) -> None:
        for one in self.others:
            one.close()


@dataclass(frozen=True)
class Memory:
    epoch: bytes
    size: int = 4096


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


@pytest.mark.asyncio
async def test_a_life_is_mapped_once_and_its_next_one_anew(sockets: Sockets) -> None:
    owners = NearOwners(sockets.connect)
    first = await owners.open("node", LIFE, NEAR)
    assert await owners.open("node", LIFE, NEAR) is first
    assert await owners.open("node", NEXT, NEAR) is not first
    assert len(owners) == 1
    assert len(sockets.own) == 2
    assert sockets.own[0].fileno() == -1, "the connection of the former life is closed"
    await owners.close()
    assert sockets.own[1].fileno() == -1


@pytest.mark.asyncio
async def test_requests_at_once_wait_for_one_connection(sockets: Sockets) -> None:
    owners = NearOwners(sockets.connect)
    sockets.may_answer.clear()
    asked = [asyncio.ensure_future(owners.open("node", LIFE, NEAR)) for _ in range(3)]
    await asyncio.sleep(0)
    asked[0].cancel()  # whoever gives up takes the connection from nobody else
    sockets.may_answer.set()
    assert await asked[1] is await asked[2]
    assert len(sockets.own) == 1
    await owners.close()


@pytest.mark.asyncio
async def test_a_failure_that_nobody_waits_for_any_more_is_no_error_of_the_loop(sockets: Sockets) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    owners = NearOwners(sockets.connect)
    sockets.may_answer.clear()
    sockets.fault = "refused"
    asked = asyncio.ensure_future(owners.open("node", LIFE, NEAR))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait({asked})
    sockets.may_answer.set()
    await owners.close()
    await until(lambda: len(asyncio.all_tasks()) == 1, "the attempt has ended")
    del asked
    gc.collect()
    assert reported == []


@pytest.mark.asyncio
@pytest.mark.parametrize("says_something", [False, True])
async def test_the_end_of_its_connection_lets_its_memory_go(sockets: Sockets, says_something: bool) -> None:
    owners = NearOwners(sockets.connect)
    await owners.open("node", LIFE, NEAR)
    if says_something:
        sockets.others[0].send(b"?")
    else:
        sockets.others[0].close()
    await until(lambda: not len(owners), "it is let go")
    assert sockets.own[0].fileno() == -1
    await owners.close()


@pytest.mark.asyncio
async def test_another_epoch_than_that_of_the_mapped_memory_is_a_fault(sockets: Sockets) -> None:
    owners = NearOwners(sockets.connect)
    await owners.open("node", LIFE, NEAR)
    with pytest.raises(NearFailed, match="another epoch"):
        await owners.open("node", LIFE, replace(NEAR, epoch=bytes(16)))
    await owners.close()


@pytest.mark.asyncio
async def test_no_more_than_a_few_daemons_are_mapped(sockets: Sockets) -> None:
    owners = NearOwners(sockets.connect)
    for number in range(OWNERS_MAX):
        await owners.open(f"node-{number}", LIFE, NEAR)
    with pytest.raises(NearFailed, match=f"{OWNERS_MAX} at most"):
        await owners.open("further", LIFE, NEAR)
    await owners.close()
    assert len(owners) == 0


@pytest.mark.asyncio
async def test_a_file_system_that_hangs_delays_nobody_for_good(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.transfer.near.owners.OPEN_S", 0.05)
    owners = NearOwners(sockets.connect)
    sockets.may_answer.clear()
    with pytest.raises(NearFailed, match="not mapped within"):
        await owners.open("node", LIFE, NEAR)
    assert not await owners.close(), "a thread is left"
    sockets.may_answer.set()
    await until(lambda: [one.fileno() for one in sockets.own] == [-1], "what comes later is closed")


@pytest.mark.asyncio
async def test_what_is_being_mapped_at_the_end_is_let_go(sockets: Sockets) -> None:
    owners = NearOwners(sockets.connect)
    sockets.may_answer.clear()
    asked = asyncio.ensure_future(owners.open("node", LIFE, NEAR))
    await asyncio.sleep(0)
    ending = asyncio.ensure_future(owners.close())
    await asyncio.sleep(0)
    sockets.may_answer.set()
    assert await ending
    with pytest.raises(NearFailed, match="about to end"):
        await asked
    assert len(owners) == 0
    assert [one.fileno() for one in sockets.own] == [-1]
    with pytest.raises(NearFailed):
        await owners.open("node", LIFE, NEAR)


def test_a_path_where_nobody_listens_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(NearFailed, match="no daemon answers"):
        map_owner(str(tmp_path / "absent"), bytes(16), 5.0)


def test_a_socket_that_hangs_is_a_fault_in_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "socket"))
        silent.listen()
        with pytest.raises(NearFailed, match="has not answered within"):
            map_owner(str(tmp_path / "socket"), bytes(16), 0.05)
