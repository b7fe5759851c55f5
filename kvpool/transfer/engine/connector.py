"""Connector: connections of the library to nodes, made before chunks are wanted from them.

    met ──asked for its address──► a small read ──► connected
              └──serves not yet──► asked again after each of AGAIN_S

The library connects to a node at the first move from it. That takes milliseconds, and a second over emulated RDMA: as long as a
load waits for its first extent. One node at a time, in the background; a node that is being connected to is pulled from by the
stream. What came is not looked at. Loop thread only. Invariant: a node is queued, or has a timer, or neither.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from kvpool.errors import KVPoolError, Refused
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.transfer.engine.engine import BounceRange, Half, MoveEnd
from kvpool.transfer.engine.job import PartFailed, Surroundings, Wanted, ask_to_write, check_server

# To a node whose TransferEngine does not serve yet: the emulated one needs twenty seconds to start.
AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
ANSWER_S = 5.0
# Longer than the process lets the library begin a read.
READ_S = 10.0
READ_BYTES = 4096
NODES_MAX = 2048

# Node, its life, and whether it is connected.
OnEnd = Callable[[str, bytes, bool], None]


class Connector:
    """See the module. `on_end`: called after each read."""

    def __init__(self, around: Surroundings, on_end: OnEnd) -> None:
        self._around = around
        self._engine = engine = around.engine
        self._asking = around.asking
        self._on_end = on_end
        self._met: OrderedDict[str, PeerLink] = OrderedDict()
        self._queued: OrderedDict[str, int] = OrderedDict()  # nodes, with how often each was asked
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        self._reading = ""
        self._is_closed = False
        engine.on_change.append(self._note_change)

    def __repr__(self) -> str:
        return f"<Connector {len(self._met)} nodes met, {len(self._queued)} queued>"

    def meet(self, node: str, link: PeerLink) -> None:
        """A node can be asked. It is connected to, once this node's TransferEngine serves."""
        self._met[node] = link
        self._met.move_to_end(node)
        if len(self._met) > NODES_MAX:
            former, _ = self._met.popitem(last=False)
            self._drop(former)
        self._queue(node, 0)

    def is_connecting(self, node: str) -> bool:
        """Whether the library is about to connect to this node."""
        return self._reading == node

    async def close(self) -> None:
        """End what is under way."""
        self._is_closed = True
        for node in list(self._timers):
            self._drop(node)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _note_change(self) -> None:
        """A new life of the process has no connections."""
        for node in self._met if self._engine.is_serving else ():
            self._queue(node, 0)

    def _queue(self, node: str, asked: int) -> None:
        self._drop(node)
        self._queued[node] = asked
        if self._task is None and self._engine.is_serving and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._connect_all())

    def _drop(self, node: str) -> None:
        self._queued.pop(node, None)
        if (timer := self._timers.pop(node, None)) is not None:
            timer.cancel()

    async def _connect_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queued and self._engine.is_serving:
                node, asked = self._queued.popitem(last=False)
                is_over = await self._connect(node, self._met[node])
                if not is_over and asked < len(AGAIN_S) and node in self._met and node not in self._queued:
                    self._timers[node] = loop.call_later(AGAIN_S[asked], self._queue, node, asked + 1)
        finally:
            self._task = None

    async def _connect(self, node: str, link: PeerLink) -> bool:
        """False where it may succeed later."""
        engine, life = self._engine, link.life
        if life is None or engine.blames(node):
            return True

        def question() -> r.Stage:
            return r.Stage(link.next_pull(), 0, b"", 0, 0, engine.settings.way, 0)

        try:
            staged: r.Staged = await self._asking.ask_node(link, node, question, ANSWER_S)
            if not engine.writes:
                check_server(node, link.member.endpoint, staged, engine)
        except Refused as refused:
            return refused.code != r.RefusalCode.TRANSPORT
        except KVPoolError:
            return False
        if not staged.address:
            return True
        into = engine.reserve_range(Half.READ, READ_BYTES, node)
        if into is None:
            return False
        self._reading = node
        try:
            is_connected = await self._has_moved(node, link, staged, into)
        finally:
            self._reading = ""
            engine.give(into)
        engine.counts["connections"] += is_connected
        self._on_end(node, life.incarnation, is_connected)
        return True

    async def _has_moved(self, node: str, link: PeerLink, staged: r.Staged, into: BounceRange) -> bool:
        engine = self._engine
        if not engine.writes:
            end = await engine.read(into, staged.server, staged.address, size=READ_BYTES, timeout_s=READ_S)
            return end is MoveEnd.DONE
        stage = r.Stage(link.next_pull(), 0, b"", 0, 0, engine.settings.way, 0)
        try:
            written = await ask_to_write(self._around, Wanted(link, node, stage, into), READ_S)
        except PartFailed:
            return False
        return bool(written.address)
