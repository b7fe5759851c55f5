"""Copies out of another daemon's memory through the bindings: what arrives, and what is refused before a byte is read."""

import struct
from typing import Any

import pytest

from kvpool_native import Mapping, NearMemory, NearQueue, crc32c
from tests.rigs.native_directory import EXTENTS
from tests.rigs.transfer.stream_node import DONE, EXTENT_BYTES, LONG_S, Node, collected, payload

CHUNKS = 5


def mapped(mapping: Mapping) -> Mapping:
    """As another process maps it."""
    return Mapping.attach(mapping.fd, mapping.size, writable=False)


def checks(chunks: int = CHUNKS) -> bytes:
    sums = [
        crc32c(payload(name)[extent * EXTENT_BYTES : (extent + 1) * EXTENT_BYTES])
        for name in range(chunks)
        for extent in range(EXTENTS)
    ]
    return struct.pack(f"<{len(sums)}I", *sums)


class Pair:
    """An owner with chunks, and a node with slots for them."""

    def __init__(self) -> None:
        self.owner, self.here = Node(CHUNKS, is_owner=True), Node(CHUNKS, is_owner=False)
        self.memory = NearMemory(mapped(self.owner.store.arena), mapped(self.owner.store.index))
        self.queue = NearQueue(self.here.store.arena, self.here.store.index, threads=2, jobs_max=2)

    def pull(self, **changes: Any) -> int:
        there, here = self.owner.slots, self.here.slots
        arguments: dict[str, Any] = {
            "source": self.memory,
            "source_offsets": there.offsets,
            "source_slots": there.slots,
            "generations": there.generations,
            "index": self.here.store.view,
            "offsets": here.offsets,
            "slots": here.slots,
            "extents": EXTENTS,
            "extent_bytes": EXTENT_BYTES,
            "checks": checks(),
            "parts": 2,
            "timeout_s": LONG_S,
            **changes,
        }
        return self.queue.pull(**arguments)

    def ends(self) -> list[tuple[int, str]]:
        found = collected(self.queue, self.queue.take_outcomes, CHUNKS)
        return [(one.status, one.fault) for one in sorted(found, key=lambda one: one.chunk)]


def with_word(column: bytes, number: int, word: int) -> bytes:
    words = list(memoryview(column).cast("Q"))
    words[number] = word
    return struct.pack(f"<{len(words)}Q", *words)


def test_chunks_arrive_with_their_bytes() -> None:
    pair = Pair()
    assert pair.pull() > 0
    assert pair.ends() == [(DONE, "")] * CHUNKS
    assert [pair.here.chunk(name) for name in range(CHUNKS)] == [payload(name) for name in range(CHUNKS)]
    assert pair.queue.stats() == {"jobs": 0, "copied_bytes": CHUNKS * EXTENTS * EXTENT_BYTES}
    assert pair.memory.epoch == pair.owner.store.epoch


@pytest.mark.parametrize("name", ["source_offsets", "offsets"])
@pytest.mark.parametrize("distance", [0, 1, 1 << 63])
def test_a_chunk_outside_of_either_arena_is_refused(name: str, distance: int) -> None:
    pair = Pair()
    node = pair.owner if name == "source_offsets" else pair.here
    outside = node.store.arena.size - EXTENTS * EXTENT_BYTES + 1 + distance
    with pytest.raises(ValueError, match="outside the arena"):
        pair.pull(**{name: with_word(node.slots.offsets, 4, outside % (1 << 64))})


@pytest.mark.parametrize("name", ["source_slots", "slots"])
@pytest.mark.parametrize("slot", [(1 << 32) - 1, 1 << 32, (1 << 64) - 1])
def test_a_slot_without_words_in_either_index_is_refused(name: str, slot: int) -> None:
    pair = Pair()
    column = (pair.owner if name == "source_slots" else pair.here).slots.slots
    with pytest.raises(ValueError, match="no words in the index"):
        pair.pull(**{name: with_word(column, 0, slot)})


@pytest.mark.parametrize(
    "changes",
    [
        {"extents": 0},
        {"extents": 1 << 31, "extent_bytes": 1 << 40},
        {"extent_bytes": 0},
        {"extent_bytes": 1 << 63},
        {"extents": EXTENTS + 1},
        {"checks": b""},
        {"checks": bytes(4)},
        {"generations": bytes(8 * CHUNKS)},
        {"generations": bytes(8)},
        {"source_offsets": bytes(8)},
        {"source_offsets": bytes(8), "source_slots": bytes(8), "generations": b"g" * 8, "parts": 1},
        {"parts": 0},
        {"parts": CHUNKS + 1},
        {"timeout_s": 0.0},
    ],
    ids=str,
)
def test_impossible_numbers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|no generation|lies outside|no words"):
        Pair().pull(**changes)


def test_memory_that_is_mapped_writable_or_is_no_index_is_refused() -> None:
    store = Node(1, is_owner=True).store
    for arena, index in ((store.arena, mapped(store.index)), (mapped(store.arena), store.index)):
        with pytest.raises(ValueError, match="read-only"):
            NearMemory(arena, index)
    with pytest.raises(ValueError, match="no index"):
        NearMemory(mapped(store.arena), mapped(store.arena))
