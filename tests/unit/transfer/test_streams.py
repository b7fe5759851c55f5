"""Chunks between two nodes through the bindings: what arrives, what is refused, and what ends."""

import random
import select
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from kvpool_native import ExtentServer, NearQueue, OfferOutcome, PullOutcome, PullQueue, Reserved, crc32c
from tests.unit.native.test_directory import CHUNK, EXTENTS, RESERVED, Store

EXTENT_BYTES = 1000
LONG_S = 30.0
HOST = "127.0.0.1"
DONE, BAD_SOURCE, FAILED, CANCELLED = range(4)
T = TypeVar("T")


def payload(name: int) -> bytes:
    return random.Random(name).randbytes(EXTENTS * EXTENT_BYTES)


class Node:
    """A node with slots for some chunks, reserved and, of an owner, filled and committed."""

    def __init__(self, chunks: int, *, is_owner: bool) -> None:
        self.store = Store(16 * CHUNK)
        self.slots: Reserved = self.store.reserve(range(chunks))
        assert list(self.slots.states) == [RESERVED] * chunks
        if is_owner:
            self._commit()

    def _commit(self) -> None:
        sums = []
        for name, offset in enumerate(self.offsets):
            chunk = payload(name)
            self.store.arena.view()[offset : offset + len(chunk)] = memoryview(chunk)
            sums += [crc32c(chunk[at : at + EXTENT_BYTES]) for at in range(0, len(chunk), EXTENT_BYTES)]
        self.store.directory.commit(self.slots.id, 0, struct.pack(f"<{len(sums)}I", *sums))

    @property
    def offsets(self) -> Sequence[int]:
        return memoryview(self.slots.offsets).cast("Q")

    def chunk(self, name: int) -> bytes:
        offset = self.offsets[name]
        return bytes(self.store.arena.view()[offset : offset + EXTENTS * EXTENT_BYTES])

    def serve(self, *, address: str = HOST, threads: int = 2) -> ExtentServer:
        return ExtentServer(
            self.store.arena,
            self.store.index,
            address,
            0,
            threads=threads,
            offers_max=4,
            strangers_max=4,
            connections_max=8,
            hello_timeout_s=LONG_S,
            stall_s=LONG_S,
        )

    def offer(
        self, server: ExtentServer, ticket: bytes, *, connections: int = 1, timeout_s: float = LONG_S
    ) -> tuple[int, int]:
        return server.offer(
            ticket,
            self.store.view,
            self.slots.offsets,
            self.slots.slots,
            self.slots.generations,
            extents=EXTENTS,
            extent_bytes=EXTENT_BYTES,
            connections=connections,
            peer=1,
            timeout_s=timeout_s,
        )

    def queue(self) -> PullQueue:
        return PullQueue(self.store.arena, self.store.index, threads=2, jobs_max=2)

    def pull(self, queue: PullQueue, port: int, ticket: bytes, *, connections: int = 1, extents: int = EXTENTS) -> int:
        return queue.pull(
            HOST,
            port,
            ticket,
            self.store.view,
            self.slots.offsets,
            self.slots.slots,
            extents=extents,
            extent_bytes=EXTENT_BYTES,
            connections=connections,
            stall_s=LONG_S,
            timeout_s=LONG_S,
        )


def collected(source: ExtentServer | PullQueue | NearQueue, take: Callable[[], list[T]], count: int) -> list[T]:
    found: list[T] = []
    while len(found) < count:
        assert select.select([source], [], [], LONG_S)[0], "nothing has ended"
        found += take()
    assert len(found) == count
    return found


def ends(queue: PullQueue, count: int) -> list[PullOutcome]:
    return sorted(collected(queue, queue.take_outcomes, count), key=lambda outcome: outcome.chunk)


def offers(server: ExtentServer, count: int) -> list[OfferOutcome]:
    return collected(server, server.take_outcomes, count)


@pytest.mark.parametrize("connections", [1, 2])
def test_chunks_arrive_with_their_bytes(connections: int) -> None:
    owner, puller = Node(5, is_owner=True), Node(5, is_owner=False)
    server, queue = owner.serve(), puller.queue()
    number, refusal = owner.offer(server, bytes(32), connections=connections)
    job = puller.pull(queue, server.port, bytes(32), connections=connections)
    assert (number > 0, refusal, job > 0) == (True, 0, True)
    for name, outcome in enumerate(ends(queue, 5)):
        assert (outcome.job, outcome.chunk, outcome.status, outcome.fault) == (job, name, DONE, "")
        assert outcome.received_bytes == EXTENTS * EXTENT_BYTES
        assert 0 < outcome.first_extent_us <= outcome.elapsed_us
        assert puller.chunk(name) == payload(name)
    (ended,) = offers(server, 1)
    assert (ended.offer, ended.end, ended.sent_bytes) == (number, 0, 5 * EXTENTS * EXTENT_BYTES)
    assert server.stats()["connections"] == connections
    assert queue.stats()["pulled_chunks"] == 5
    assert server.stop(LONG_S)
    assert queue.stop(LONG_S)


def test_what_cannot_be_is_refused() -> None:
    node = Node(2, is_owner=True)
    server, queue = node.serve(), node.queue()
    with pytest.raises(ValueError, match="32 bytes"):
        node.offer(server, bytes(31))
    with pytest.raises(ValueError, match="at most one for each chunk"):
        node.offer(server, bytes(32), connections=3)
    with pytest.raises(ValueError, match="timeout_s"):
        node.offer(server, bytes(32), timeout_s=0)
    with pytest.raises(ValueError, match="positive"):
        node.pull(queue, server.port, bytes(32), extents=0)
    with pytest.raises(ValueError, match="outside the arena"):
        node.pull(queue, server.port, bytes(32), extents=1 << 31)
    with pytest.raises(ValueError, match="threads"):
        node.serve(threads=0)
    with pytest.raises(OSError, match="numeric"):
        node.serve(address="localhost")
