"""Node of `bench peer`: its arena and index with chunks of one size, and the server that computes their checksums.

It is no daemon: there are no clients, no tiers and no control plane. Threads: one, and those of the native core.
"""

import os
from typing import Any

import numpy as np

import kvpool_native
from kvpool.errors import KVPoolError

EXTENTS = 32
HOST = "127.0.0.1"
THREADS = 4
SEGMENT_BYTES = 64 << 20
# The one before may not have ended yet when all of its chunks have.
JOBS_MAX = 4
LONG_S = 60.0
# As a daemon has it by default.
STALL_S = 2.0
WORD = 8


class Node:
    """A node's memory with slots for so many chunks, and what refers to them. Of an owner: with bytes."""

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        capacity = chunks * chunk_bytes
        geometry = kvpool_native.DirectoryGeometry.plan(capacity, min(SEGMENT_BYTES, capacity), chunks)
        self.arena = kvpool_native.Mapping.create("bench-arena", geometry.arena_bytes)
        self.index = kvpool_native.Mapping.create("bench-index", geometry.index_bytes)
        self._directory = kvpool_native.Directory(self.arena, self.index, geometry, os.urandom(16))
        self.view = kvpool_native.IndexView(self.index)
        self._namespace = self._directory.add_namespace()
        self._class = self._directory.add_class(chunk_bytes, EXTENTS)
        for segment in range(geometry.segments):
            self._directory.mark_segment_ready(segment)
        self._keys = b"".join(number.to_bytes(32, "little") for number in range(1, chunks + 1))
        self.chunk_bytes = chunk_bytes
        self.slots = self._reserve()

    def _reserve(self) -> kvpool_native.Reserved:
        slots = self._directory.reserve(self._namespace, self._class, b"", self._keys, 1)
        if len(slots.slots) * 4 != len(self._keys):
            raise KVPoolError(f"an arena of {self.arena.size} bytes has no room for {len(self._keys) // 32} chunks")
        return slots

    @property
    def extent_bytes(self) -> int:
        """Of each extent of a chunk."""
        return self.chunk_bytes // EXTENTS

    def renew(self) -> None:
        """Slots in which nothing has landed."""
        self._directory.end_reservation(self.slots.id, 1)
        self.slots = self._reserve()
        for chunk in self.chunks():
            chunk[:] = 0

    def chunks(self) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The bytes of each chunk."""
        arena = np.frombuffer(self.arena.view(), np.uint8)
        offsets = np.frombuffer(self.slots.offsets, "<u8").tolist()
        return [arena[offset : offset + self.chunk_bytes] for offset in offsets]

    def columns(self, first: int, count: int) -> tuple[bytes, bytes, bytes]:
        """Arena offsets, slots and generations of some of the chunks, u64 each."""
        some = slice(first * WORD, (first + count) * WORD)
        return self.slots.offsets[some], self.slots.slots[some], self.slots.generations[some]

    def fill(self) -> None:
        """Random bytes, the same ones for each node, committed as a save does it."""
        random = np.random.default_rng(1)
        for chunk in self.chunks():
            chunk[:] = random.integers(0, 256, len(chunk), np.uint8)
        offsets = np.frombuffer(self.slots.offsets, "<u8").tolist()
        checksums = [kvpool_native.extent_checksums(self.arena, at, self.extent_bytes, EXTENTS) for at in offsets]
        self._directory.commit(self.slots.id, 0, b"".join(checksums))

    def mapped_again(self) -> kvpool_native.NearMemory:
        """Its memory as another process of this host maps it: read-only, with page tables of its own."""
        arena, index = (
            kvpool_native.Mapping.attach(one.fd, one.size, writable=False) for one in (self.arena, self.index)
        )
        return kvpool_native.NearMemory(arena, index)

    def serve(self, *, is_encrypted: bool) -> kvpool_native.ExtentServer:
        """A server of its chunks."""
        return kvpool_native.ExtentServer(
            self.arena,
            self.index,
            HOST,
            0,
            threads=THREADS,
            offers_max=JOBS_MAX,
            strangers_max=16,
            connections_max=16,
            hello_timeout_s=LONG_S,
            stall_s=STALL_S,
            encrypted=is_encrypted,
        )
