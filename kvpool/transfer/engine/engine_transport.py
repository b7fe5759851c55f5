"""TransferEngine or NIXL behind the interface of a transport: one of several ways that an offer's bytes can come.

It is not used for a node whose library is away, is another one, has another protocol, or has failed a moment ago; then the
bytes come over the stream. Loop thread only, but for the copies.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kvpool_native
from kvpool.clock import Clock, Deadline
from kvpool.peers.asking import STAGES, Asking
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.transfer.engine.connector import Connector
from kvpool.transfer.engine.engine import Engine
from kvpool.transfer.engine.job import EngineJob, PartFailed, Surroundings, ask_stage
from kvpool.transfer.recent_nodes import RecentNodes
from kvpool.transfer.transport import Capabilities, ChunkEnd, Order

log = logging.getLogger(__name__)

# A node that refused, or from which nothing could be read, is not asked for so long.
REFUSED_S = 30.0
CLOSE_S = 5.0
# Faults of the path to a node, not of the chunks.
PATH_FAULTS = ("late", "broken", "other_transport", "foreign", "stale", "away", "unreachable")


class EngineTransport:
    """See the module, and `Transport`."""

    name = "rdma"

    def __init__(
        self,
        engine: Engine,
        arena: kvpool_native.Mapping,
        index: kvpool_native.Mapping,
        *,
        threads: int,
        jobs_max: int,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._jobs_max = jobs_max
        self._threads = ThreadPoolExecutor(threads, "kvpool-bounce")
        self._around = Surroundings(
            engine,
            Asking(clock, STAGES),
            arena,
            kvpool_native.LandingBoard(index),
            self._threads,
            clock,
            report=self._report,
        )
        self._connector = Connector(self._around, self._note_connection)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._numbers = 0
        self._ended: list[ChunkEnd] = []
        self._accepted: RecentNodes[bytes] = RecentNodes()  # lives of nodes that have accepted
        self._named: RecentNodes[bytes] = RecentNodes()  # lives of nodes whose refusal is in the log
        self._refused: RecentNodes[Deadline] = RecentNodes()
        self._on_completed: Callable[[], None] = lambda: None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<EngineTransport {len(self._running)} jobs, {self._engine!r}>"

    @property
    def capabilities(self) -> Capabilities:
        """See `Transport`."""
        return Capabilities(is_encrypted=False, extent_bytes_max=self._engine.extent_bytes_max)

    def start(self, on_completed: Callable[[], None]) -> None:
        """See `Transport`."""
        self._on_completed = on_completed
        self._engine.process.start()

    async def close(self) -> bool:
        """See `Transport`."""
        self._is_closed = True
        await self._connector.close()
        tasks: list[asyncio.Task[Any]] = [*self._running.values(), *self._around.asked]
        for task in tasks:
            task.cancel()
        left: set[asyncio.Task[Any]] = set()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CLOSE_S)
        has_ended = await self._engine.process.close()
        self._threads.shutdown(wait=not left)
        self._on_completed()
        return has_ended and not left

    def meet(self, node: str, link: PeerLink) -> None:
        """See `Transport`."""
        self._connector.meet(node, link)

    def expect(self, node: str, link: PeerLink, chunks: int) -> bool:  # noqa: ARG002 - the same for any number
        """See `Transport`. Connections are made when nodes meet."""
        return link.life is not None and self._accepted.get(node) == link.life.incarnation

    async def accepts(self, order: Order) -> bool:
        """See `Transport`."""
        life = order.link.life
        refused = self._refused.get(order.node)
        is_fit = order.extent_bytes <= self.capabilities.extent_bytes_max and len(self._running) < self._jobs_max
        if life is None or not is_fit or not self._engine.is_serving:
            return False
        if self._engine.blames(order.node) or (refused is not None and not refused.has_passed()):
            return False
        if self._connector.is_connecting(order.node):
            return False
        if self._accepted.get(order.node) == life.incarnation:
            return True
        question = r.Stage(order.offer.pull, 0, b"", 0, 0, self._engine.settings.way, 0)
        try:
            await ask_stage(self._around.asking, order, question, Deadline(order.stall_s, self._clock))
        except PartFailed as failed:
            self._engine.counts["refused"] += 1
            if failed.fault == "other_transport" and self._named.get(order.node) != life.incarnation:
                self._named.remember(order.node, life.incarnation)
                log.info("chunks of %s come over the stream: %s", order.node, failed)
            self._refuse(order.node, failed.fault)
            return False
        self._accepted.remember(order.node, life.incarnation)
        return True

    def submit(self, order: Order) -> int:
        """See `Transport`."""
        if self._is_closed or len(self._running) >= self._jobs_max:
            return 0
        self._numbers += 1
        self._engine.counts["pulls"] += 1
        job = EngineJob(self._numbers, order, self._around)
        task = self._running[job.number] = asyncio.get_running_loop().create_task(job.run())
        task.add_done_callback(lambda _: self._end(job))
        return job.number

    def completed(self) -> list[ChunkEnd]:
        """See `Transport`."""
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> dict[str, int]:
        """See `Transport`."""
        return self._engine.stats()

    def info(self) -> dict[str, int | str]:
        """See `Transport`."""
        return self._engine.info()

    def verify(self) -> list[str]:
        """See `Transport`."""
        return self._engine.verify()

    def _report(self, end: ChunkEnd) -> None:
        self._ended.append(end)
        self._on_completed()

    def _end(self, job: EngineJob) -> None:
        del self._running[job.number]
        if job.fault in PATH_FAULTS:
            self._refuse(job.order.node, job.fault)

    def _note_connection(self, node: str, life: bytes, is_connected: bool) -> None:
        if is_connected:
            self._accepted.remember(node, life)
        else:
            self._refuse(node, "broken")

    def _refuse(self, node: str, fault: str) -> None:
        """A node is not asked for a while."""
        self._accepted.pop(node, None)
        if fault in PATH_FAULTS:
            self._refused.remember(node, Deadline(REFUSED_S, self._clock))
