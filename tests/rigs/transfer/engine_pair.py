"""An owner and a puller on one loop, with an engine each: chunks go from slots to slots, without daemons and control plane."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, cast

from kvpool.clock import MonotonicClock
from kvpool.errors import Refused
from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.control import records as r
from kvpool.peers.control.identity import PeerLife
from kvpool.peers.control.link import PeerLink
from kvpool.peers.members.member import Member
from kvpool.transfer.engine.engine import COMMAND, Engine, EngineSettings, PullingNode
from kvpool.transfer.engine.engine_transport import EngineTransport
from kvpool.transfer.engine.served_parts import OfferedChunks, ServedParts
from kvpool.transfer.stream_address import StreamAddress
from kvpool.transfer.transport import ChunkEnd, Order, Region
from tests.rigs.native_directory import EXTENTS
from tests.rigs.nodes import peers
from tests.rigs.transfer.engine_daemons import DEVICES, HOST, PATIENCE, PROTOCOL
from tests.rigs.transfer.scripted_engine import Script
from tests.rigs.transfer.stream_node import EXTENT_BYTES, LONG_S, Node

SCRIPTED = (sys.executable, "-m", "tests.rigs.transfer.scripted_engine")
MEMBER = Member(f"tcp://{f'[{HOST}]' if ':' in HOST else HOST}:9", b"", "owner")
PULLER = PullingNode("here", "key of here", HOST)
OFFER = 1
PULL = 7
# No rate makes a part late.
PATIENT_S = 1e9
CHUNKS = 5


async def until(condition: Callable[[], object], what: str) -> None:
    """Until the condition holds, as long as it takes with this protocol."""
    await peers.until(condition, what, 180.0 * PATIENCE)


@dataclass
class Link:
    """In a link's place: the owner's parts answer. `change`: what is done to each answer on its way, `ask`: to each question.
    `puller`: whose they are, as the owner knows."""

    parts: ServedParts
    change: Callable[[r.Staged], r.Staged | None] = lambda staged: staged
    ask: Callable[[r.AnyStage], r.AnyStage] = lambda stage: stage
    puller: PullingNode = PULLER
    asked: list[r.AnyStage] = field(default_factory=list)
    member: Member = MEMBER
    pulls: int = PULL
    life: PeerLife = field(default_factory=lambda: PeerLife("owner", bytes(16), "", is_new=False))

    def next_pull(self) -> int:
        """See `PeerLink`."""
        self.pulls += 1
        return self.pulls

    def request(self, stage: r.AnyStage, timeout_s: float) -> "asyncio.Future[Any]":
        """See `PeerLink`."""
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        stage = self.ask(stage)
        self.asked.append(stage)

        def answer(found: r.Staged | r.Refused) -> bool:
            if answered.done():
                return False
            if isinstance(found, r.Refused):
                answered.set_exception(Refused(found.code, found.text))
            elif (changed := self.change(found)) is not None:
                answered.set_result(changed)
            return True

        self.parts.serve(OFFER if stage.pull == PULL else None, stage, answer, puller=self.puller)
        return answered


@dataclass
class Side:
    """A node: its slots, its engine, and what it does with both."""

    node: Node
    engine: Engine
    parts: ServedParts
    transport: EngineTransport
    directory: Path

    def follow(self, script: Script) -> None:
        """From now on the scripted library does this."""
        script.write(self.directory)


@dataclass
class Pair:
    """Both sides, and the link from puller to owner."""

    owner: Side
    here: Side
    link: Link
    checks: bytes

    @property
    def mover(self) -> Side:
        """The side whose library moves the bytes."""
        return self.owner if self.owner.engine.writes else self.here

    def stage(self, part: int, first: int, rows: int, ended: bytes = b"", wait_ms: int = 100) -> r.AnyStage:
        """The question for a part, in the library's form."""
        stage = r.Stage(PULL, part, ended, first, rows, self.owner.engine.settings.way, wait_ms)
        if not self.owner.engine.writes:
            return stage
        base = int(self.here.engine.process.facts["base"])
        return r.StageInto(*(*astuple(stage), self.here.engine.agent, base, bytes(r.MARK_BYTES)))

    def order(self, *, timeout_s: float = LONG_S, stall_s: float = LONG_S, has_checks: bool = True) -> Order:
        """The order of all chunks of the owner."""
        slots = self.here.node.slots
        checks = self.checks if has_checks else b""
        offer = r.Offer(PULL, CHUNKS, bytes(32), 1, f"tcp://{HOST}:9", checks, b"")
        return Order(
            node="owner",
            link=cast(PeerLink, self.link),
            offer=offer,
            address=StreamAddress(HOST, 9),
            into=Region(slots.offsets, slots.slots),
            extents=EXTENTS,
            extent_bytes=EXTENT_BYTES,
            stall_s=stall_s,
            timeout_s=timeout_s,
        )

    async def pull(self, order: Order) -> list[ChunkEnd]:
        """Submit an order; the ends of its chunks, in their order, once the job itself has ended."""
        assert self.here.transport.submit(order)
        ends = await self.ends()
        await until(lambda: not self.here.transport._running, "the job has ended")
        return ends

    async def ends(self) -> list[ChunkEnd]:
        """The ends of all chunks."""
        found: list[ChunkEnd] = []

        def has_all() -> bool:
            found.extend(self.here.transport.completed())
            return len(found) >= CHUNKS

        await until(has_all, "every chunk has ended")
        return sorted(found, key=lambda one: one.chunk)


def _engine(directory: Path, library: str, *, is_real: bool, buffer_bytes: int) -> Engine:
    directory.mkdir()
    Script().write(directory)
    return Engine(
        EngineSettings(
            host=HOST,
            protocol=PROTOCOL if is_real else "tcp",
            devices=DEVICES if is_real else str(directory),
            ports=(15000, 15999),
            buffer_bytes=buffer_bytes,
            library=library,
            node=directory.name,
            command=COMMAND if is_real else SCRIPTED,
            back_off=BackOffSettings(first_s=0.05, most_s=0.1),
        ),
        random.Random(1),
    )


def _side(directory: Path, engine: Engine, *, is_owner: bool, rate: int = 0, stall_s: float = PATIENT_S) -> Side:
    node, clock = Node(CHUNKS, is_owner=is_owner), MonotonicClock()
    server = node.serve()

    def checks_of(offered: OfferedChunks) -> bytes:
        return server.checks(
            node.store.view, *offered.columns, extents=offered.extents, extent_bytes=offered.extent_bytes
        )

    arena, index = node.store.arena, node.store.index
    view = node.store.view
    parts = ServedParts(engine, arena, view, checks_of, threads=1, bytes_per_s=rate, stall_s=stall_s, clock=clock)
    if stall_s == PATIENT_S:
        parts._pace_s = PATIENT_S  # no rate is refused
    if is_owner:
        slots = node.slots
        offered = OfferedChunks((slots.offsets, slots.slots, slots.generations), EXTENTS, EXTENT_BYTES)
        parts.add_offer(OFFER, PULLER.peer, offered, checks_of(offered))
    transport = EngineTransport(engine, arena, index, threads=1, jobs_max=4, clock=clock)
    return Side(node, engine, parts, transport, directory)


def _pair(owner: Side, here: Side) -> Pair:
    slots = owner.node.slots
    server = owner.node.serve()
    checks = server.checks(
        owner.node.store.view, slots.offsets, slots.slots, slots.generations, extents=EXTENTS, extent_bytes=EXTENT_BYTES
    )
    return Pair(owner, here, Link(owner.parts), checks)


@asynccontextmanager
async def engine_pair(
    directory: Path, library: str = "mooncake", *, is_real: bool = False, buffer_bytes: int = 128 << 10
) -> AsyncIterator[Pair]:
    """A pair whose engines serve. `is_real`: with the library itself."""
    owner, here = (
        _side(
            directory / name,
            _engine(directory / name, library, is_real=is_real, buffer_bytes=buffer_bytes),
            is_owner=name == "owner",
        )
        for name in ("owner", "here")
    )
    pair = _pair(owner, here)
    try:
        for side in (owner, here):
            side.transport.start(lambda: None)
        await until(lambda: owner.engine.is_serving and here.engine.is_serving, "both engines serve")
        yield pair
        for side in (owner, here):
            assert side.engine.verify() == []
    finally:
        for side in (here, owner):
            side.follow(Script())
            assert await side.transport.close()
        if OFFER in owner.parts._offers:
            owner.parts.drop(OFFER)
        for side in (here, owner):
            side.parts.close()


@asynccontextmanager
async def on_engines_of(serving: Pair, *, rate: int = 0, stall_s: float = PATIENT_S) -> AsyncIterator[Pair]:
    """A pair with nodes, parts and transports of its own on the engines of one that goes on to serve."""
    for former in (serving.owner, serving.here):
        assert former.engine.is_serving, "a test has ended the process of engines that others share"
        former.engine.counts.clear()
    owner, here = (
        _side(former.directory, former.engine, is_owner=former is serving.owner, rate=rate, stall_s=stall_s)
        for former in (serving.owner, serving.here)
    )
    try:
        yield _pair(owner, here)
    finally:
        for side in (here, owner):
            side.follow(Script())
            await side.transport._connector.close()
            side.engine.on_change.remove(side.transport._connector._note_change)
            await until(lambda side=side: not side.transport._running, "no job is left")  # type: ignore[misc]  # bound now
        if OFFER in owner.parts._offers:
            owner.parts.drop(OFFER)
        for side in (here, owner):
            side.parts.close()
            side.transport._threads.shutdown()
            await until(lambda side=side: side.engine.quarantined_bytes == 0, "all reads have ended")  # type: ignore[misc]
            assert side.engine.verify() == []
