"""Mover bindings: jobs, outcomes and refusals. What fails how: native/tests/mover."""

import select
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.packed_rows import DEVICE_MOVE_ROW
from kvpool.tiers.base import Outcome
from kvpool_native import (
    DEVICE_RING_BYTES_MIN,
    Device,
    DeviceMover,
    Directory,
    DirectoryGeometry,
    IndexView,
    Mapping,
    extent_checksums,
)
from tests.rigs.daemon import wait_until
from tests.rigs.device import emulated

UNIT = 2 << 20
CHUNKS, EXTENTS, EXTENT_BYTES = 4, 2, 5000
CHUNK_BYTES = EXTENTS * EXTENT_BYTES
WAIT_MS = 60_000


class Rig:
    """Committed chunks of a directory, and a mover from their arena to a device."""

    def __init__(self) -> None:
        self.device = Device(emulated.driver_path(), 0)
        self.memory = self.device.allocate(UNIT)
        geometry = DirectoryGeometry.plan(64 << 10, 64 << 20, 16)
        self.arena = Mapping.create("arena", geometry.arena_bytes)
        index = Mapping.create("index", geometry.index_bytes)
        self._directory = directory = Directory(self.arena, index, geometry, bytes(16))
        namespace, size_class = directory.add_namespace(), directory.add_class(CHUNK_BYTES, EXTENTS)
        for segment in range(geometry.segments):
            directory.mark_segment_ready(segment)
        keys = b"".join(bytes([number]) * 32 for number in range(1, CHUNKS + 1))
        reserved = directory.reserve(namespace, size_class, b"", keys, 1)
        offsets = struct.unpack(f"<{CHUNKS}Q", reserved.offsets)
        payload = np.random.default_rng(3).integers(0, 256, (CHUNKS, CHUNK_BYTES), dtype=np.uint8)
        for offset, chunk in zip(offsets, payload, strict=True):
            self.arena.view()[offset : offset + CHUNK_BYTES] = chunk
        sums = b"".join(extent_checksums(self.arena, offset, EXTENT_BYTES, EXTENTS) for offset in offsets)
        directory.commit(reserved.id, 0, sums)
        self.rows = np.zeros(CHUNKS, dtype=DEVICE_MOVE_ROW)
        self.rows["arena_offset"] = offsets
        self.rows["arena_slot"] = np.frombuffer(reserved.slots, dtype=np.uint64)
        self.rows["generation"] = np.frombuffer(reserved.generations, dtype=np.uint64)
        self.rows["device_offset"] = np.arange(CHUNKS) * CHUNK_BYTES
        self.rows["chunk_bytes"] = CHUNK_BYTES
        self.rows["extents"] = EXTENTS
        self.view = IndexView(index)
        self.mover = DeviceMover(self.device, self.memory, self.arena, self.view, DEVICE_RING_BYTES_MIN)

    def ends(self, job: int) -> list[Outcome]:
        """The outcome of each chunk of the only job under way."""
        ends: dict[int, Outcome] = {}
        while len(ends) < CHUNKS:
            poll = select.poll()
            poll.register(self.mover.fileno(), select.POLLIN)
            assert poll.poll(WAIT_MS)
            for of, chunk, outcome in self.mover.take_outcomes():
                assert of == job
                assert chunk not in ends
                ends[chunk] = Outcome(outcome)
        return [ends[chunk] for chunk in range(CHUNKS)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    emulated.order("clear 1")
    rig.mover.stop(60.0)


def test_chunks_are_promoted_and_pass_their_check(rig: Rig) -> None:
    assert set(rig.ends(rig.mover.promote(rig.rows.tobytes()))) == {Outcome.DONE}
    assert set(rig.ends(rig.mover.check(rig.rows.tobytes()))) == {Outcome.DONE}
    stats = rig.mover.stats()
    assert (stats["promoted_bytes"], stats["checked_bytes"]) == (CHUNKS * CHUNK_BYTES, CHUNKS * CHUNK_BYTES)
    assert (stats["promotions"], stats["checks"], stats["is_unresponsive"]) == (0, 0, False)
    assert stats["cpu_seconds"] >= 0
    assert rig.mover.take_outcomes() == []


def test_a_stop_cancels_what_is_left_though_the_device_hangs(rig: Rig) -> None:
    emulated.order("hang 1")
    before = emulated.calls("cuEventRecord")
    job = rig.mover.promote(rig.rows.tobytes())
    wait_until(lambda: emulated.calls("cuEventRecord") > before, "a piece is in flight")
    assert rig.mover.stop(0.05) is False
    assert rig.ends(job) == [Outcome.CANCELLED] * CHUNKS
    assert rig.mover.promote(rig.rows.tobytes()) == 0


def test_what_lies_outside_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="48 bytes"):
        rig.mover.promote(bytes(47))
    with pytest.raises(ValueError, match="one row at least"):
        rig.mover.check(b"")
    for field, value, fault in (
        ("arena_offset", 1 << 60, "outside the arena"),
        ("device_offset", UNIT, "outside the device's memory"),
        ("arena_slot", 1 << 40, "no words"),
        ("extents", 0, "extents must be positive"),
        ("extents", 3, "multiple"),
        ("generation", 0, "no generation"),
    ):
        rows = rig.rows.copy()
        rows[field][3] = value
        with pytest.raises(ValueError, match=fault):
            rig.mover.promote(rows.tobytes())


def test_a_mover_needs_memory_of_its_own_device_and_room(rig: Rig) -> None:
    emulated.require_two_devices()
    other = Device(emulated.driver_path(), 1)
    with pytest.raises(ValueError, match="this device"):
        DeviceMover(other, rig.memory, rig.arena, rig.view, DEVICE_RING_BYTES_MIN)
    with pytest.raises(ValueError, match="ring_bytes"):
        DeviceMover(rig.device, rig.memory, rig.arena, rig.view, DEVICE_RING_BYTES_MIN - 1)
    emulated.order("fail cuMemHostAlloc 1 2")
    with pytest.raises(RuntimeError, match=r"cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        DeviceMover(rig.device, rig.memory, rig.arena, rig.view, DEVICE_RING_BYTES_MIN)
