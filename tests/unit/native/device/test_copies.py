"""Directories of copies through the native module: what is refused, where copies are, and how long each directory lives."""

import gc

import pytest

import kvpool_native
from kvpool.states import Level, SaveState
from tests.rigs.tiers.device_world import DEVICE_SEGMENT, DeviceWorld, key_of, words_in

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


def test_a_directory_lives_as_long_as_its_copies_and_loses_them_when_they_end() -> None:
    world = world_of()
    world.save(0, CHAIN)
    copied(world, CHAIN)
    device, view = world.device, world.view
    assert view.lookup(b"".join(CHAIN)) == bytes([Level.HBM] * 4)
    del world
    gc.collect()
    assert device.verify() == []
    del device
    gc.collect()
    assert view.lookup(b"".join(CHAIN)) == bytes([Level.DRAM] * 4)
