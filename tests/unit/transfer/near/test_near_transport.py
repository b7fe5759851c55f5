"""Shared memory as a transport: which orders it accepts, how long it passes a node over, and what becomes of its chunks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from kvpool.errors import PeerUnreachable, Refused
from kvpool.peers.control import records as r
from kvpool.peers.control.identity import PeerLife
from kvpool.transfer.near.near_transport import REFUSED_S, NearTransport
from kvpool.transfer.near.owners import NearFailed
from kvpool.transfer.stream_address import StreamAddress
from kvpool.transfer.transport import ChunkEnd, Ending, Order, Region
from tests.rigs.clock import HandClock
from tests.rigs.native_directory import EXTENTS
from tests.rigs.nodes.peers import until
from tests.rigs.transfer.stream_node import EXTENT_BYTES, payload
from tests.unit.transfer.near.test_near_queue import CHUNKS, Pair, checks, with_word

HOST = b"h" * 16


@dataclass
class Link:
    """Of the owner: `answer` has what it answers to AskNear."""

    answer: Callable[[r.AskNear], r.Near]
    life: PeerLife | None
    asked: list[r.AskNear] = field(default_factory=list)
    member: Any = field(default_factory=lambda: SimpleNamespace(endpoint="tcp://127.0.0.1:9"))

    def next_pull(self) -> int:
        return 1000

    def request(self, ask: r.AskNear, _timeout_s: float) -> "asyncio.Future[r.Near]":
        self.asked.append(ask)
        answer: asyncio.Future[r.Near] = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(self.answer(ask))
        except (Refused, PeerUnreachable) as error:
            answer.set_exception(error)
        return answer


class Setting:
    """A transport between the nodes of a pair. `fault`: why the owner's memory cannot be mapped."""

    def __init__(self) -> None:
        self.pair, self.clock, self.fault, self.pull = Pair(), HandClock(), "", 0
        store = self.pair.here.store
        self.transport = NearTransport(
            store.arena, store.index, host=HOST, threads=2, jobs_max=1, clock=self.clock, owners=cast(Any, self)
        )
        self.link = Link(self.honest, PeerLife("node", b"1" * 16, "", False))

    def __len__(self) -> int:
        return 1

    async def open(self, _node: str, _incarnation: bytes, _near: r.Near) -> Any:
        """See `NearOwners`."""
        if self.fault:
            raise NearFailed(self.fault)
        return self.pair.memory

    async def close(self) -> bool:
        """See `NearOwners`."""
        return True

    def honest(self, ask: r.AskNear) -> r.Near:
        slots = self.pair.owner.slots
        return r.Near(ask.pull, "/run/a", b"e" * 16, slots.offsets, slots.slots, slots.generations)

    def order(self, *, promised: bytes | None = None) -> Order:
        self.pull += 1
        promised = checks() if promised is None else promised
        into = self.pair.here.slots
        return Order(
            node="node",
            link=cast(Any, self.link),
            offer=r.Offer(self.pull, CHUNKS, bytes(32), 2, "tcp://127.0.0.1:9", promised, b""),
            address=StreamAddress("127.0.0.1", 9),
            into=Region(into.offsets, into.slots),
            extents=EXTENTS,
            extent_bytes=EXTENT_BYTES,
            stall_s=20.0,
            timeout_s=20.0,
        )

    async def accepts(self) -> bool:
        """Whether it accepts an order now; one that is accepted is received."""
        order = self.order()
        return await self.transport.accepts(order) and self.transport.submit(order) > 0

    async def ends(self) -> list[ChunkEnd]:
        found: list[ChunkEnd] = []

        def take() -> bool:
            found.extend(self.transport.completed())
            return len(found) == CHUNKS

        await until(take, "all chunks have ended")
        return found


@pytest_asyncio.fixture
async def setting() -> AsyncIterator[Setting]:
    made = Setting()
    made.transport.start(lambda: None)
    yield made
    assert await made.transport.close()
    assert made.transport.verify() == []


@pytest.mark.asyncio
async def test_an_order_is_received_and_counted(setting: Setting) -> None:
    assert await setting.accepts()
    assert {(end.ending, end.fault) for end in await setting.ends()} == {(Ending.DONE, "")}
    assert [setting.pair.here.chunk(name) for name in range(CHUNKS)] == [payload(name) for name in range(CHUNKS)]
    assert setting.link.asked == [r.AskNear(1, HOST)]
    copied = CHUNKS * EXTENTS * EXTENT_BYTES
    assert setting.transport.stats() == {"pulls": 1, "refused": 0, "copied_bytes": copied, "owners": 1}


@pytest.mark.asyncio
async def test_an_offer_without_checksums_and_a_peer_that_is_away_are_not_asked(setting: Setting) -> None:
    assert not await setting.transport.accepts(setting.order(promised=b""))
    setting.link.life = None
    assert not await setting.accepts()
    assert setting.link.asked == []


def on_another_host(_ask: r.AskNear) -> r.Near:
    raise Refused(r.RefusalCode.TRANSPORT, "this node is on another host")


@pytest.mark.asyncio
async def test_a_node_that_is_met_is_asked_ahead_whether_it_is_on_this_host(setting: Setting) -> None:
    link = cast(Any, setting.link)
    setting.link.answer = on_another_host
    assert setting.transport.expect("node", link, 1)  # it may be
    for _ in range(2):
        setting.transport.meet("node", link)
        await until(lambda: not setting.transport.expect("node", link, 1), "it is known to be elsewhere")
    assert not await setting.accepts()
    assert setting.link.asked == [r.AskNear(1000, HOST)]
    setting.link.life, setting.link.answer = PeerLife("node", b"2" * 16, "", True), setting.honest
    assert setting.transport.expect("node", link, 1)
    assert await setting.accepts()
    assert len(await setting.ends()) == CHUNKS


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [r.RefusalCode.FAILED, r.RefusalCode.BUSY, ""])
async def test_who_was_met_and_not_found_elsewhere_is_asked_with_its_first_offer(setting: Setting, code: str) -> None:
    def refuse(ask: r.AskNear) -> r.Near:
        if ask.pull != 1000:
            return setting.honest(ask)
        raise Refused(code, "no such pull") if code else PeerUnreachable("no answer in time")

    setting.link.answer = refuse
    setting.transport.meet("node", cast(Any, setting.link))
    await until(lambda: len(setting.link.asked) == 1, "it was asked")
    assert setting.transport.expect("node", cast(Any, setting.link), 1)
    assert await setting.accepts()
    assert len(await setting.ends()) == CHUNKS
    assert setting.transport.stats()["refused"] == 0


def without_answer(_ask: r.AskNear) -> r.Near:
    raise PeerUnreachable("no answer in time")


@pytest.mark.asyncio
async def test_a_node_on_another_host_is_asked_once_in_its_life(setting: Setting) -> None:
    setting.link.answer = on_another_host
    for _ in range(3):
        assert not await setting.accepts()
        setting.clock.advance(2 * REFUSED_S)
    assert len(setting.link.asked) == 1
    assert setting.transport.stats()["refused"] == 0, "there is nothing wrong with it"
    setting.link.life = PeerLife("node", b"2" * 16, "", True)
    setting.link.answer = setting.honest
    assert await setting.accepts()
    await setting.ends()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["no answer", "not mapped", "fewer places", "outside"])
async def test_a_node_whose_memory_cannot_be_used_is_passed_over_for_a_while(setting: Setting, how: str) -> None:
    if how == "no answer":
        setting.link.answer = without_answer
    elif how == "not mapped":
        setting.fault = "nobody answers there"
    else:
        slots = setting.pair.owner.slots
        offsets = slots.offsets[8:] if how == "fewer places" else with_word(slots.offsets, 0, 1 << 62)
        setting.link.answer = lambda ask: r.Near(ask.pull, "/a", bytes(16), offsets, slots.slots, slots.generations)
    assert not await setting.accepts()
    setting.fault, setting.link.answer = "", setting.honest
    assert not await setting.accepts()
    assert len(setting.link.asked) == 1
    setting.clock.advance(REFUSED_S)
    assert await setting.accepts()
    assert setting.transport.stats()["refused"] == 1
    await setting.ends()


@pytest.mark.asyncio
async def test_another_life_of_a_node_is_asked_at_once(setting: Setting) -> None:
    setting.fault = "nobody answers there"
    assert not await setting.accepts()
    setting.fault = ""
    setting.link.life = PeerLife("node", b"2" * 16, "", True)
    assert await setting.accepts()
    await setting.ends()


@pytest.mark.asyncio
async def test_wrong_bytes_are_bad_chunks_and_the_node_is_passed_over(setting: Setting) -> None:
    order = setting.order(promised=bytes(len(checks())))
    assert await setting.transport.accepts(order)
    assert setting.transport.submit(order) > 0
    assert {(end.ending, end.fault) for end in await setting.ends()} == {(Ending.WRONG, "checksum")}
    assert not await setting.accepts()
    assert setting.transport.stats()["refused"] == 1


@pytest.mark.asyncio
async def test_a_chunk_that_has_gone_says_nothing_of_its_node(setting: Setting) -> None:
    slots = setting.pair.owner.slots
    generations = with_word(slots.generations, 2, 1 << 40)
    setting.link.answer = lambda ask: r.Near(ask.pull, "/a", bytes(16), slots.offsets, slots.slots, generations)
    assert await setting.accepts()
    assert sum(end.fault == "gone" for end in await setting.ends()) == 1
    assert setting.transport.stats()["refused"] == 0


@pytest.mark.asyncio
async def test_a_closed_transport_accepts_nothing(setting: Setting) -> None:
    order = setting.order()
    assert await setting.transport.close()
    assert not await setting.transport.accepts(order)
    setting.transport.start(lambda: None)
