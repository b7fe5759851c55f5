"""A native directory over small regions, as its bindings show it."""

import os
import random
import struct
from collections.abc import Sequence

from kvpool.states import SaveState
from kvpool_native import Directory, DirectoryGeometry, IndexView, Mapping, Reserved

PAGE = 4096
CHUNK = 2 * PAGE
EXTENTS = 3
RESERVED, STORED = SaveState.RESERVED, SaveState.STORED


def key(name: int) -> bytes:
    return random.Random(name).randbytes(32)


def keys(names: Sequence[int]) -> bytes:
    return b"".join(key(name) for name in names)


def sums(chunks: int, extents: int = EXTENTS) -> bytes:
    return struct.pack(f"<{chunks * extents}I", *range(1, chunks * extents + 1))


class Store:
    """A directory over small regions, with a clock that counts calls."""

    def __init__(self, capacity: int, *, max_chunks: int = 1000, segment: int = 64 << 20, ready: bool = True) -> None:
        self.geometry = DirectoryGeometry.plan(capacity, segment, max_chunks)
        self.arena = Mapping.create("arena", self.geometry.arena_bytes)
        self.index = Mapping.create("index", self.geometry.index_bytes)
        self.epoch = os.urandom(16)
        self.directory = Directory(self.arena, self.index, self.geometry, self.epoch)
        self.view = IndexView(Mapping.attach(self.index.fd, self.index.size, writable=False))
        self.namespace = self.directory.add_namespace()
        self.size_class = self.directory.add_class(CHUNK, EXTENTS)
        self.now = 0
        for segment_index in range(self.geometry.segments if ready else 0):
            self.directory.mark_segment_ready(segment_index)

    def tick(self) -> int:
        self.now += 1
        return self.now

    def reserve(self, names: Sequence[int], parent: int | None = None, *, size_class: int | None = None) -> Reserved:
        above = b"" if parent is None else key(parent)
        chosen = self.size_class if size_class is None else size_class
        return self.directory.reserve(self.namespace, chosen, above, keys(names), self.tick())

    def store(self, names: Sequence[int], parent: int | None = None) -> bytes:
        made = self.reserve(names, parent)
        if made.id:
            answers = self.directory.commit(made.id, 0, sums(made.states.count(RESERVED)))
            assert set(answers) == {STORED}
            assert self.directory.end_reservation(made.id, self.tick())
        return made.states

    def find(self, names: Sequence[int]) -> int:
        return len(self.view.lookup(keys(names)))

    def verify(self) -> None:
        assert self.directory.verify() == []
