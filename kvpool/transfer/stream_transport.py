"""Native TCP stream behind the interface of a transport: threads receive straight into the slots. Always there."""

import asyncio
from collections.abc import Callable

import kvpool_native
from kvpool.peers.control.link import PeerLink
from kvpool.transfer.coming_turns import ComingTurns
from kvpool.transfer.stream_address import stream_of
from kvpool.transfer.transport import Capabilities, ChunkEnd, Ending, Order

STOP_TIMEOUT_S = 10.0


class StreamTransport:
    """See the module, and `Transport`."""

    name = "tcp"
    capabilities = Capabilities(is_encrypted=True, extent_bytes_max=1 << 62)

    def __init__(
        self,
        arena: kvpool_native.Mapping,
        index: kvpool_native.Mapping,
        *,
        threads: int,
        jobs_max: int,
        connections: int,
    ) -> None:
        """`connections`: that a node's offer has, as far as is known before it comes."""
        self._connections = connections
        self._index = kvpool_native.IndexView(index)
        self._queue = kvpool_native.PullQueue(arena, index, threads, jobs_max)
        self._pulls = 0
        self._coming = ComingTurns()
        self._of_coming: dict[
            int, tuple[str, int]
        ] = {}  # jobs that have a turn: the node, and chunks that have not ended
        self._on_completed: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<StreamTransport {self._queue.stats()['running']} connections>"

    def start(self, on_completed: Callable[[], None]) -> None:
        """See `Transport`."""
        self._on_completed = on_completed
        asyncio.get_running_loop().add_reader(self._queue.fileno(), on_completed)

    async def close(self) -> bool:
        """See `Transport`."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._queue.fileno())
        has_ended = await loop.run_in_executor(None, self._queue.stop, STOP_TIMEOUT_S)
        self._on_completed()
        return has_ended

    def meet(self, node: str, link: PeerLink) -> None:
        """See `Transport`. Each offer has connections of its own."""

    def expect(self, node: str, link: PeerLink, chunks: int) -> bool:  # noqa: ARG002 - the link is to that node
        """See `Transport`. Connects while the node makes its offer: they are used by it, or end soon."""
        address = None if link.life is None else stream_of(link.member.endpoint, link.life.stream)
        if address is not None:
            self._queue.connect_ahead(address.host, address.port, min(self._connections, chunks))
        return True

    async def accepts(self, order: Order) -> bool:
        """See `Transport`. Every offer names a stream; one of chunks that are on their way waits for its turn."""
        if order.is_coming:
            return await self._coming.take_turn(order.node, order.timeout_s)
        return bool(order.offer.chunks)

    def submit(self, order: Order) -> int:
        """See `Transport`."""
        offer, address = order.offer, order.address
        number = self._queue.pull(
            address.host,
            address.port,
            offer.ticket,
            self._index,
            order.into.arena_offsets,
            order.into.arena_slots,
            extents=order.extents,
            extent_bytes=order.extent_bytes,
            connections=min(offer.connections, offer.chunks),
            stall_s=order.stall_s,
            timeout_s=order.timeout_s,
            checks=offer.checks,
            encrypted=address.is_encrypted,
        )
        self._pulls += bool(number)
        if order.is_coming and number:
            self._of_coming[number] = (order.node, offer.chunks)
        elif order.is_coming:
            self._coming.end_turn(order.node)
        return number

    def completed(self) -> list[ChunkEnd]:
        """See `Transport`."""
        ended = [
            ChunkEnd(one.job, one.chunk, Ending(one.status), one.fault, one.is_unmarked)
            for one in self._queue.take_outcomes()
        ]
        for job in (one.job for one in ended if one.job in self._of_coming):
            node, left = self._of_coming[job]
            self._of_coming[job] = (node, left - 1)
            if left == 1:
                del self._of_coming[job]
                self._coming.end_turn(node)
        return ended

    def stats(self) -> dict[str, int]:
        """See `Transport`."""
        return {"pulls": self._pulls}

    def info(self) -> dict[str, int | str]:
        """See `Transport`."""
        return {}

    def verify(self) -> list[str]:
        """See `Transport`."""
        return []
