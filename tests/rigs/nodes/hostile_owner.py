"""A node that lies: an honest control server whose answers and stream the test replaces, on a host of its own.

It has keys that count, says Hello, and has its keys followed; what it offers and sends is up to the test.
"""

import asyncio
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import kvpool_native
from kvpool.ids import TICKET_BYTES
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.peers.control import records as r
from kvpool.peers.control.identity import NodeIdentity
from kvpool.peers.control.pullers import Puller
from tests.rigs.nodes.following import Book
from tests.rigs.nodes.network import CONTROL_PORT, STREAM_PORT, Node
from tests.rigs.nodes.peers import identity_of, serve
from tests.rigs.payload import chunk_bytes_of

_MARK = struct.Struct("<4sIIIQI")
_HELLO = struct.Struct("<8sII32s16s")
_RUN = struct.Struct("<III")
EXTENT, WAITING, GONE = 1, 2, 3


def mark(kind: int, chunk: int = 0, extent: int = 0, size: int = 0, crc: int = 0) -> bytes:
    """A mark of one extent, of none any more of a chunk, or of a wait, with right checksums of its own, whatever its numbers
    are."""
    table = b""
    if kind == EXTENT:
        table = _RUN.pack(chunk, extent, 1) + crc.to_bytes(4, "little")
    elif kind == GONE:
        table = _RUN.pack(chunk, 0, 0)
    extents, of_table = int(kind == EXTENT), kvpool_native.crc32c(table) if table else 0
    fields = _MARK.pack(b"KVPM", WAITING if kind == WAITING else EXTENT, bool(table), extents, size, of_table)
    return fields + kvpool_native.crc32c(fields).to_bytes(4, "little") + table


@dataclass(frozen=True, slots=True)
class Asked:
    """What one connection of a stream is asked for: these chunks of the pull, by their numbers."""

    keys: KeyColumn
    layout: Layout
    numbers: range

    def extents(self) -> Iterator[tuple[int, int, bytes]]:
        """Every extent that an honest owner would send, in order: number of the chunk, extent, bytes."""
        size = self.layout.chunk_bytes // self.layout.extents
        for extent in range(self.layout.extents):
            for number in self.numbers:
                whole = chunk_bytes_of(self.keys[number], self.layout.chunk_bytes).tobytes()
                yield number, extent, whole[extent * size : (extent + 1) * size]


Stream = Callable[[Asked], AsyncIterator[bytes]]


async def honest(asked: Asked) -> AsyncIterator[bytes]:
    """What was asked for."""
    for number, extent, data in asked.extents():
        yield mark(EXTENT, number, extent, len(data), kvpool_native.crc32c(data)) + data


@dataclass
class Liar:
    """A pull service. `twist`: what becomes of an honest offer; `stream`: what is sent; `offers`: made until now."""

    address: str
    twist: Callable[[r.Offer], r.Offer] = lambda offer: offer
    stream: Stream = honest
    offers: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _tasks: set["asyncio.Task[Any] | None"] = field(default_factory=set)
    _last: r.Pull | None = None

    def serve(self, puller: Puller, pull: r.Pull, answer: Callable[[r.Offer | r.Refused], bool]) -> None:
        """Offers everything."""
        self._last = pull
        self.offers += 1
        chunks = len(KeyColumn(pull.keys)) - pull.first
        ticket = self.offers.to_bytes(TICKET_BYTES, "little")
        address, present = f"tcp://{self.address}:{STREAM_PORT}", b"\1" * chunks if pull.are_alone else b""
        answer(self.twist(r.Offer(pull.pull, chunks, ticket, 2, address, b"", present)))

    def release(self, puller: Puller, pull: int) -> None:
        """Counts."""
        self.counts["released"] += 1

    def forget(self, puller: Puller) -> None:
        """Nothing is held."""

    async def send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a stream."""
        self.counts["streams"] += 1
        self._tasks.add(asyncio.current_task())  # nobody else keeps it
        try:
            _, connection, connections, _, _ = _HELLO.unpack(await reader.readexactly(_HELLO.size))
            assert self._last is not None
            keys = KeyColumn(self._last.keys)[self._last.first :]
            layout = Layout.from_wire(self._last.layout)
            async for piece in self.stream(Asked(keys, layout, range(connection, len(keys), connections))):
                writer.write(piece)
                self.counts["sent_bytes"] += len(piece)
                await writer.drain()
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            self.counts["streams_ended"] += 1
        finally:
            writer.transport.abort()


class HostileOwner:
    """A liar on the host of a node, in a thread of its own until the end of the block."""

    def __init__(self, node: Node, allowed: frozenset[bytes], *, identity: NodeIdentity | None = None) -> None:
        self._node = node
        self._allowed = allowed
        self._identity = identity or identity_of(node.name)
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="hostile owner")
        self._begun: Future[None] = Future()
        self.liar = Liar(node.host.address)
        self.server: Any = None

    def do(self, act: Callable[[], Any]) -> Any:
        """Call something on its loop."""

        async def call() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10.0)

    def announce(self, keys: KeyColumn) -> None:
        """Claim to have these chunks."""
        self.do(lambda: self._book.write(keys))

    def __enter__(self) -> "HostileOwner":
        self._thread.start()
        self._begun.result(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with self._node.host.entered():
            try:
                self._loop.run_until_complete(self._serve())
            finally:
                self._loop.close()

    async def _serve(self) -> None:
        try:
            self._book = Book()
            endpoint = f"tcp://{self._node.host.address}:{CONTROL_PORT}"
            self.server = serve(
                self.liar,  # type: ignore[arg-type]
                follows=self._book,
                node=replace(self._identity, stream=f"tcp://{self._node.host.address}:{STREAM_PORT}"),
                keys=self._node.pair,
                allowed=self._allowed,
                address=endpoint,
            )
            streams = await asyncio.start_server(self.liar.send, self._node.host.address, STREAM_PORT)
        except BaseException as error:
            self._begun.set_exception(error)
            raise
        self._begun.set_result(None)
        await self._stop.wait()
        streams.close()
        self.server.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@contextmanager
def hostile_owner(node: Node, *others: Node, identity: NodeIdentity | None = None) -> Iterator[HostileOwner]:
    """A liar in place of a node's daemon, whom these others may ask."""
    with HostileOwner(node, frozenset(other.pair.public_bytes for other in others), identity=identity) as owner:
        yield owner
