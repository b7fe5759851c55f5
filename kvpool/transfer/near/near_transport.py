"""Shared memory of this host behind the interface of a transport: a thread copies offered chunks out of their owner's arena.

The owner names where they are; its memory is mapped read-only, and its lease protects the slots until the pull ends. Bytes
count only with the checksums of the offer, which came over the control plane, and under the generation that the owner named,
read again after the copy. Offers without checksums, whose chunks are still being written, come over the stream; so does what
a node offers that is on another host, or whose memory could not be used a moment ago. Loop thread only, but for the copies.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import kvpool_native
from kvpool.clock import Clock, Deadline
from kvpool.errors import KVPoolError, Refused
from kvpool.peers.asking import Asking, Turns
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.transfer.near.owners import NearFailed, NearOwners
from kvpool.transfer.recent_nodes import RecentNodes
from kvpool.transfer.transport import Capabilities, ChunkEnd, Ending, Order

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
# A node whose memory could not be used is not asked for it for so long.
REFUSED_S = 30.0
# For the owner's answer: an engine may be waiting meanwhile.
ANSWER_S = 1.0
PLACES = Turns(3, 200)
# Faults after which the memory is not what the node offers, or too slow: the stream is used for a while.
PATH_FAULTS = ("checksum", "late")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An order that was accepted: where its chunks are."""

    near: r.Near
    memory: kvpool_native.NearMemory


class NearTransport:
    """See the module, and `Transport`. `host`: the tag of this host."""

    name = "shm"
    # Nobody is on the way: bytes stay in this host's memory.
    capabilities = Capabilities(is_encrypted=True, extent_bytes_max=1 << 62)

    def __init__(
        self,
        arena: kvpool_native.Mapping,
        index: kvpool_native.Mapping,
        *,
        host: bytes,
        threads: int,
        jobs_max: int,
        clock: Clock,
        owners: NearOwners | None = None,
    ) -> None:
        self._index = kvpool_native.IndexView(index)
        self._queue = kvpool_native.NearQueue(arena, index, threads, jobs_max)
        self._threads = threads
        self._host = host
        self._clock = clock
        self._owners = owners or NearOwners()
        self._asking = Asking(clock, PLACES)
        self._prepared: dict[tuple[str, int], _Prepared] = {}
        self._running: dict[int, tuple[str, bytes, int]] = {}  # of each job: node, life, chunks that have not ended
        self._elsewhere: RecentNodes[bytes] = RecentNodes()  # lives of nodes that have no memory for this one
        self._refused: RecentNodes[tuple[bytes, Deadline]] = RecentNodes()
        self._counts: Counter[str] = Counter()
        self._on_completed: Callable[[], None] = lambda: None
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<NearTransport {len(self._running)} jobs, {self._owners!r}>"

    def start(self, on_completed: Callable[[], None]) -> None:
        """See `Transport`."""
        self._on_completed = on_completed
        asyncio.get_running_loop().add_reader(self._queue.fileno(), on_completed)

    async def close(self) -> bool:
        """See `Transport`."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._queue.fileno())
        has_left = await self._owners.close()
        has_ended = await loop.run_in_executor(None, self._queue.stop, STOP_TIMEOUT_S)
        self._on_completed()
        return has_ended and has_left

    def meet(self, node: str, link: PeerLink) -> None:
        """See `Transport`. Whether it is on this host is asked ahead, so that no pull waits for that; its memory is mapped with
        its first offer."""
        if self._is_closed or link.life is None or self._elsewhere.get(node) == link.life.incarnation:
            return
        task = asyncio.get_running_loop().create_task(self._ask_ahead(node, link, link.life.incarnation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_ahead(self, node: str, link: PeerLink, incarnation: bytes) -> None:
        """Note a node that is on another host. One of this host has no offer of that number, and refuses for another reason."""
        question = r.AskNear(link.next_pull(), self._host)
        try:
            await self._asking.ask_node(link, node, lambda: question, ANSWER_S)
        except Refused as refused:
            if refused.code == r.RefusalCode.TRANSPORT:
                self._elsewhere.remember(node, incarnation)
        except KVPoolError as error:  # with its first offer it is asked again
            log.debug("peer %s was not asked whether it is on this host: %s", node, error)

    def expect(self, node: str, link: PeerLink, chunks: int) -> bool:  # noqa: ARG002 - the same for any number
        """See `Transport`. A node's memory is mapped with its first offer."""
        life = link.life
        return (
            life is not None
            and self._elsewhere.get(node) != life.incarnation
            and not self._is_refused(node, life.incarnation)
        )

    async def accepts(self, order: Order) -> bool:
        """See `Transport`."""
        life = order.link.life
        if self._is_closed or life is None or not order.offer.checks:
            return False
        if self._elsewhere.get(order.node) == life.incarnation or self._is_refused(order.node, life.incarnation):
            return False
        question = r.AskNear(order.offer.pull, self._host)
        try:
            near: r.Near = await self._asking.ask_node(
                order.link, order.node, lambda: question, min(ANSWER_S, order.stall_s)
            )
            if len(near.offsets) != r.PLACE_BYTES * order.offer.chunks:
                raise NearFailed(f"{len(near.offsets)} bytes of offsets for {order.offer.chunks} chunks")
            memory = await self._owners.open(order.node, life.incarnation, near)
        except Refused as refused:
            if refused.code != r.RefusalCode.TRANSPORT:
                self._refuse(order.node, life.incarnation, str(refused))
            else:
                self._elsewhere.remember(order.node, life.incarnation)
            return False
        except KVPoolError as error:
            self._refuse(order.node, life.incarnation, str(error))
            return False
        if self._is_closed:
            return False
        self._prepared[order.node, order.offer.pull] = _Prepared(near, memory)
        return True

    def submit(self, order: Order) -> int:
        """See `Transport`. REQUIRES: it was accepted in this turn of the loop."""
        prepared = self._prepared.pop((order.node, order.offer.pull))
        near, life = prepared.near, order.link.life
        incarnation = b"" if life is None else life.incarnation
        try:
            number = self._queue.pull(
                prepared.memory,
                near.offsets,
                near.slots,
                near.generations,
                self._index,
                order.into.arena_offsets,
                order.into.arena_slots,
                extents=order.extents,
                extent_bytes=order.extent_bytes,
                checks=order.offer.checks,
                parts=min(self._threads, order.offer.connections, order.offer.chunks),
                timeout_s=order.timeout_s,
            )
        except ValueError as error:
            self._refuse(order.node, incarnation, f"its chunks cannot be where it names them: {error}")
            return 0
        if number:
            self._counts["pulls"] += 1
            self._running[number] = (order.node, incarnation, order.offer.chunks)
        return number

    def completed(self) -> list[ChunkEnd]:
        """See `Transport`."""
        ended = []
        for one in self._queue.take_outcomes():
            node, incarnation, left = self._running.pop(one.job)
            if left > 1:
                self._running[one.job] = (node, incarnation, left - 1)
            if one.fault in PATH_FAULTS and not self._is_refused(node, incarnation):
                self._refuse(node, incarnation, f"a chunk failed: {one.fault}")
            ended.append(ChunkEnd(one.job, one.chunk, Ending(one.status), one.fault))
        return ended

    def stats(self) -> dict[str, int]:
        """See `Transport`."""
        counts = {name: self._counts[name] for name in ("pulls", "refused")}
        return {**counts, "copied_bytes": self._queue.stats()["copied_bytes"], "owners": len(self._owners)}

    def info(self) -> dict[str, int | str]:
        """See `Transport`."""
        return {"owners": len(self._owners)}

    def verify(self) -> list[str]:
        """See `Transport`."""
        return [f"shm: {len(self._prepared)} accepted orders were not submitted"] if self._prepared else []

    def _is_refused(self, node: str, incarnation: bytes) -> bool:
        life, until = self._refused.get(node, (b"", None))
        return until is not None and life == incarnation and not until.has_passed()

    def _refuse(self, node: str, incarnation: bytes, reason: str) -> None:
        """The memory of this life of a node is not used for a while."""
        self._counts["refused"] += 1
        log.warning("the memory of peer %s is not used for %g s: %s", node, REFUSED_S, reason)
        self._refused.remember(node, (incarnation, Deadline(REFUSED_S, self._clock)))
