"""Directories of copies through the native module: what is refused, where copies are, and how long each directory lives."""

import gc

import numpy as np
import pytest

import kvpool_native
from kvpool.types import Level, RetainState, SaveState
from tests.rigs.tiers.device_world import CHUNK_BYTES, DEVICE_SEGMENT, EXTENTS, DeviceWorld, key_of, words_in

CHAIN = [key_of(0, number) for number in range(4)]
NO_LEVEL = 255
Geometry = kvpool_native.DirectoryGeometry


def world_of() -> DeviceWorld:
    """Room for all chunks of a test."""
    return DeviceWorld(memory_bytes=16 << 20, device_segments=4, file_chunks=4)


def copied(world: DeviceWorld, keys: list[bytes]) -> bytes:
    """Copy a chain: the states."""
    copying = world.begin_copy(0, keys)
    assert copying is not None
    return world.end_copy(copying, succeeds=True)


def test_a_lease_has_the_places_of_its_copies() -> None:
    world = world_of()
    world.save(0, CHAIN)
    assert copied(world, CHAIN[:2]) == bytes([SaveState.STORED] * 2)
    held = world.memory.acquire(0, b"".join(CHAIN))
    found = world.memory.copies([held.id])
    assert found.levels == bytes([Level.HBM, Level.HBM, NO_LEVEL, NO_LEVEL])
    assert words_in(found.generations)[2:] == words_in(found.offsets)[2:] == [0, 0]
    places = [world.device.place_of(key) for key in CHAIN[:2]]
    assert list(zip(words_in(found.offsets), words_in(found.generations), strict=True))[:2] == places
    assert [world.view.generation_at(slot) for slot in words_in(found.slots)[:2]] == [place[1] for place in places]
    assert [slot >> 32 for slot in words_in(found.slots)[:2]] == [1, 1]
    assert world.memory.columns([held.id]).levels == bytes([Level.HBM, Level.HBM, Level.DRAM, Level.DRAM])
    assert world.memory.release(held.id, world.tick())
    with pytest.raises(KeyError):
        world.memory.copies([held.id])
    assert world.verify() == []


def test_a_directory_without_copies_has_none_of_a_hold() -> None:
    geometry = Geometry.plan(1 << 20, 1 << 20, 10)
    index = kvpool_native.Mapping.create("index", geometry.index_bytes)
    memory = kvpool_native.Directory(None, index, geometry, bytes(16))
    memory.mark_segment_ready(0)
    namespace, size_class = memory.add_namespace(), memory.add_class(4096, 1)
    made = memory.reserve(namespace, size_class, b"", CHAIN[0], 1)
    memory.commit(made.id, 0, bytes(4))
    memory.end_reservation(made.id, 1)
    held = memory.acquire(namespace, CHAIN[0])
    found = memory.copies([held.id])
    assert (found.levels, found.generations) == (bytes([NO_LEVEL]), bytes(8))
    assert memory.columns([held.id]).levels == bytes([Level.DRAM])


def test_copies_leave_with_their_originals_and_are_counted() -> None:
    world = world_of()
    world.save(0, CHAIN)
    copied(world, CHAIN)
    assert world.memory.drop(CHAIN[1], world.memory.place_of(CHAIN[1])[1]) == 3
    counted = world.device.stats()
    assert (counted["chunks"], counted["withdrawn_chunks"], counted["shed_chunks"]) == (1, 3, 0)
    assert world.memory.stats()["withdrawn_chunks"] == 0
    assert world.verify() == []


def test_copies_are_recounted_part_by_part_and_without_what_clients_map() -> None:
    world = world_of()
    world.save(0, CHAIN)
    copied(world, CHAIN[:3])
    for directory in world.directories():
        assert directory.verify(False) == []
        cursor, parts = 0, 0
        lines: list[str] = []
        while cursor or not parts:
            cursor, found = directory.verify_shared(cursor, 2)
            lines += found
            parts += 1
        assert lines == []
        assert parts > 1 or directory is world.files


def test_what_memory_lacks_is_not_copied() -> None:
    world = world_of()
    made = world.device.reserve(0, 0, b"", CHAIN[0], world.tick())
    assert (made.id, made.states) == (0, bytes([SaveState.NO_PARENT]))
    world.save(0, CHAIN)
    assert world.device.reserve(1, 1, b"", CHAIN[0], world.tick()).states == bytes([SaveState.FOREIGN])
    assert world.device.retain(0, CHAIN[0], bytes([80]), bytes(4), world.tick()) == bytes([RetainState.ABSENT])


def test_sources_of_another_generation_or_tier_are_refused() -> None:
    world = world_of()
    world.save(0, CHAIN)
    for source, level in ((1, Level.DRAM), (0, Level.SSD)):
        copying = world.begin_copy(0, CHAIN[:1])
        assert copying is not None
        sources = np.array([copying.generations[0] + source], "<u8").tobytes()
        states = world.device.commit(copying.reservation, 0, bytes(4 * EXTENTS), world.tick(), b"", sources, level)
        assert states == bytes([SaveState.EXPIRED])
        world.device.end_reservation(copying.reservation, world.tick())
    assert world.verify() == []


@pytest.mark.parametrize(
    ("capacity", "segment_bytes", "max_chunks"),
    [(DEVICE_SEGMENT, 4096, 10), (DEVICE_SEGMENT - 1, DEVICE_SEGMENT, 10), (DEVICE_SEGMENT, DEVICE_SEGMENT, 0)],
)
def test_a_device_is_cut_into_whole_segments_of_huge_pages(capacity: int, segment_bytes: int, max_chunks: int) -> None:
    with pytest.raises(ValueError, match="out of range, or segment_bytes"):
        Geometry.plan_device(capacity, segment_bytes, max_chunks)


def test_a_device_takes_its_words_from_the_index_of_memory() -> None:
    device = Geometry.plan_device(5 * DEVICE_SEGMENT + 1, DEVICE_SEGMENT, 10)
    assert (device.segments, device.arena_bytes, device.capacity) == (5, 5 * DEVICE_SEGMENT, 5 * DEVICE_SEGMENT)
    plain, planned = (Geometry.plan(1 << 20, 1 << 20, 10, 0, each) for each in (None, device))
    assert plain.index_bytes < planned.index_bytes
    for geometry, refusal in ((plain, "not planned with a region"), (planned, "already")):
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        memory = kvpool_native.Directory(None, index, geometry, bytes(16))
        copies = kvpool_native.Directory.of_copies(memory, device) if geometry is planned else None
        with pytest.raises(ValueError, match=refusal):
            kvpool_native.Directory.of_copies(memory, device)
        del copies
    files = kvpool_native.Directory.of_files(Geometry.plan_files(4096, 4, 4))
    with pytest.raises(ValueError, match="whose index clients read"):
        kvpool_native.Directory.of_copies(files, device)


def test_a_directory_of_copies_is_in_no_set() -> None:
    world = world_of()
    with pytest.raises(ValueError, match="a directory of copies is in no set"):
        kvpool_native.TierSet((world.device,))


def test_a_directory_lives_as_long_as_its_copies_and_loses_them_when_they_end() -> None:
    world = world_of()
    world.save(0, CHAIN)
    copied(world, CHAIN)
    device, view = world.device, world.view
    assert view.lookup(b"".join(CHAIN)) == (4, bytes([Level.HBM] * 4))
    del world
    gc.collect()
    assert device.verify() == []
    del device
    gc.collect()
    assert view.lookup(b"".join(CHAIN)) == (4, bytes([Level.DRAM] * 4))


def test_chunks_of_a_size_that_spans_segments_have_copies() -> None:
    world = world_of()
    number = len(CHUNK_BYTES) - 1
    assert CHUNK_BYTES[number] > DEVICE_SEGMENT
    world.save(number, CHAIN[:2])
    copying = world.begin_copy(number, CHAIN[:2])
    assert copying is not None
    assert world.end_copy(copying, succeeds=True) == bytes([SaveState.STORED] * 2)
    _, seen = world.lease(number, CHAIN[:2])
    assert [world.read(each) for each in seen] == [True, True]
    assert world.verify() == []
