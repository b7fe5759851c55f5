"""A directory that goes on with the memory of a former life, as the bindings offer it; the C++ tests have what it does."""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvpool_native
from kvpool.server.health.forked_check import check_in_child
from kvpool.states import SaveState

EXTENTS = 3
SIZES = kvpool_native.DirectoryGeometry.plan(4 << 20, 1 << 20, 512)


class Life:
    """A directory whose records are kept, over a new arena or that of a former life."""

    def __init__(self, arena: kvpool_native.Mapping | None = None) -> None:
        self.arena = arena or kvpool_native.Mapping.create("arena", SIZES.arena_bytes)
        self.index = kvpool_native.Mapping.create("index", SIZES.index_bytes)
        self.records = kvpool_native.Mapping.create("records", SIZES.records_bytes)
        self.directory = kvpool_native.Directory(self.arena, self.index, SIZES, bytes(16), records=self.records)
        self.owner = self.directory.add_namespace()
        self.size_class = self.directory.add_class(8192, EXTENTS)

    def make_ready(self) -> None:
        for segment in range(SIZES.segments):
            self.directory.mark_segment_ready(segment)

    def reserve(self, keys: bytes, holder: int | None, *, is_joint: bool = False) -> kvpool_native.Reserved:
        return self.directory.reserve(self.owner, self.size_class, b"", keys, 10, holder, is_joint=is_joint)

    def store(self, keys: bytes, tokens: bytes = b"") -> None:
        made = self.reserve(keys, 5)
        self.directory.commit(made.id, 0, bytes(4 * EXTENTS * (len(keys) // 32)), 20, tokens)
        self.directory.end_reservation(made.id, 30)

    def take_over(self, former: "Life", namespaces: list[int | None] | None = None) -> kvpool_native.FormerCounts:
        return self.directory.restore_former(
            former.index, former.records, [self.owner] if namespaces is None else namespaces, 40
        )


def test_chunks_and_withheld_slots_come_along() -> None:
    former = Life()
    former.make_ready()
    stored = random.randbytes(4 * 32)
    tokens = random.randbytes(4 * 64)
    former.store(stored, tokens)
    former.reserve(random.randbytes(32), 7)
    former.reserve(random.randbytes(2 * 32), 8)
    former.reserve(random.randbytes(32), 8, is_joint=True)
    former.index.seal_read_only()
    former.directory = None  # type: ignore[assignment]  # its process is gone; the memory is not
    arena = former.arena
    index = kvpool_native.Mapping.attach(former.index.fd, SIZES.index_bytes, writable=False)
    records = kvpool_native.Mapping.attach(former.records.fd, SIZES.records_bytes, writable=False)
    assert kvpool_native.why_former_refused(index, records, SIZES) == ""
    life = Life(arena)
    counts = life.directory.restore_former(index, records, [life.owner], 40)
    assert (counts.taken, counts.taken_bytes, counts.withheld, counts.withheld_bytes) == (4, 4 * 8192, 4, 4 * 8192)
    assert (counts.unfinished, counts.damaged, counts.unpublished) == (0, 0, 0)
    assert (counts.unknown, counts.orphaned, counts.unplaced) == (0, 0, 0)
    assert [life.directory.tokens_of(stored[32 * n : 32 * n + 32]) for n in range(4)] == [
        tokens[64 * n : 64 * n + 64] for n in range(4)
    ]
    withheld = [(share.holder, share.slots, share.bytes) for share in life.directory.withheld()]
    assert withheld == [(7, 1, 8192), (8, 2, 16384), (2**32 - 1, 1, 8192)]
    assert (life.directory.stats()["withheld"], life.directory.stats()["withheld_bytes"]) == (4, 4 * 8192)
    assert life.directory.verify() == []
    assert [life.directory.release_withheld(holder) for holder in (8, 8, 9, 7, 2**32 - 1)] == [2, 0, 0, 1, 1]
    assert life.directory.withheld() == []
    life.make_ready()
    again = life.reserve(stored, 9)
    assert again.states == bytes([SaveState.PRESENT] * 4)
    assert life.directory.verify() == []


def test_what_cannot_be_taken_over_is_refused_by_name() -> None:
    former, life = Life(), Life()
    former.make_ready()
    former.store(random.randbytes(32))
    other = kvpool_native.DirectoryGeometry.plan(8 << 20, 1 << 20, 512)
    assert "other sizes" in kvpool_native.why_former_refused(former.index, former.records, other)
    assert "index" in kvpool_native.why_former_refused(former.records, former.records, SIZES)
    with pytest.raises(ValueError, match="other sizes"):
        life.directory.restore_former(former.index, former.index, [life.owner], 40)
    with pytest.raises(IndexError, match="namespace"):
        life.take_over(former, [life.owner + 1])
    assert life.take_over(former, []).unknown == 1
    assert life.take_over(former, [None]).unknown == 1
    life.make_ready()
    life.store(random.randbytes(32))
    with pytest.raises(ValueError, match="empty directory"):
        life.take_over(former)
    with pytest.raises(ValueError, match="in use"):
        kvpool_native.Directory(
            life.arena,
            kvpool_native.Mapping.create("index", SIZES.index_bytes),
            SIZES,
            bytes(16),
            records=former.records,
        )
    with pytest.raises(ValueError, match="smaller than planned"):
        kvpool_native.Directory(
            life.arena,
            kvpool_native.Mapping.create("index", SIZES.index_bytes),
            SIZES,
            bytes(16),
            records=kvpool_native.Mapping.create("records", 4096),
        )


@pytest.mark.parametrize("places", [None, 0, 20, SIZES.max_chunks])
def test_a_forked_child_recounts_a_copy_while_the_parent_goes_on(places: int | None) -> None:
    life = Life()
    life.make_ready()
    life.store(random.randbytes(20 * 32))

    @contextmanager
    def copied() -> Iterator[None]:
        room = None if places is None else kvpool_native.Directory.CopyRoom(SIZES.max_chunks, places)
        life.directory.copy_for_child(room)
        yield
        life.directory.forget_copy()
        life.store(random.randbytes(20 * 32))  # before the child has looked

    def verify() -> dict[str, Any]:
        return {"problems": life.directory.verify(with_shared=False), "pid": os.getpid()}

    report = asyncio.run(check_in_child(verify, copied=copied))
    assert report["problems"] == []
    assert report["pid"] != os.getpid()
    assert life.directory.verify() == []


def test_a_copy_takes_the_room_that_it_needs_where_it_is_given_too_little() -> None:
    life = Life()
    life.make_ready()
    life.store(random.randbytes(20 * 32))
    life.directory.copy_for_child(kvpool_native.Directory.CopyRoom(1, 1))
    life.directory.forget_copy()
    assert life.directory.verify() == []
