"""Nodes of streams through the bindings: slots that an owner has filled, and slots into which they are pulled."""

import random
import select
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvpool_native import ExtentServer, NearQueue, PullQueue, Reserved, crc32c
from tests.rigs.native_directory import CHUNK, EXTENTS, RESERVED, Store

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
