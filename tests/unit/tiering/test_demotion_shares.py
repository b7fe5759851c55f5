"""Shares of a slow disk: two models of the same traffic, of which the disk takes half.

Chunks come at random, the same bytes of each model. Where what only DRAM has is protected, a model whose chunks cannot be
stored yet asks again, as an engine does. The seed is fixed; another one changes a share by about two percent.
"""

import random
from collections import deque

import pytest

import kvpool_native
from kvpool.config.config import load_config
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.tiering.link import ArenaSide
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiers.base import Finished, JobId, Moves, Outcome
from kvpool.types import EPOCH_BYTES, KEY_BYTES, SaveState
from kvpool_tools.sim.metadata_tier import MetadataTier
from kvpool_tools.sim.node import SimulatedArena, VirtualClock

CAPACITY = 4 << 20
SEGMENT_BYTES = 128 << 10
MAX_CHUNKS = CAPACITY // 4096
EPOCH = bytes(EPOCH_BYTES)
SMALL = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
AS_LARGE = Layout(layers=4, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=16)
LARGER = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=128)
SEGMENT_BLOCKS = (1 << 20) // (SMALL.chunk_bytes + kvpool_native.SSD_HEADER_BYTES)
TICKS = 4000
TICK_NS = 10_000_000
BYTES_PER_TICK = 0.8 * SMALL.chunk_bytes  # of both models together


class SlowDisk(MetadataTier):
    """A lower tier that writes a given number of bytes in each tick, in the order in which they were asked for."""

    def __init__(self, *, is_write_through: bool) -> None:
        options = ["ssd.watermark=0.5", f"ssd.write_through={str(is_write_through).lower()}", "dram.retained_quota=1"]
        super().__init__(load_config(None, options), blocks=SEGMENT_BLOCKS, chunk_bytes=SMALL.chunk_bytes, segments=64)
        self.waiting: deque[tuple[JobId, int, Namespace]] = deque()
        self._started = 0

    def read(self, namespace: Namespace, moves: Moves, *, is_urgent: bool) -> JobId:
        raise AssertionError("nothing is read here")

    def write(self, namespace: Namespace, moves: Moves) -> JobId:
        self._started += 1
        self.waiting += [(JobId(self._started), chunk, namespace) for chunk in range(len(moves))]
        return JobId(self._started)

    def touch(self, key: bytes) -> None:
        raise AssertionError("nothing is used here")


class TwoModels:
    """Two models over one DRAM and one slow disk. `written`: bytes of each that the disk has taken."""

    def __init__(self, layouts: tuple[Layout, Layout], *, is_write_through: bool, is_protected: bool) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan(CAPACITY, SEGMENT_BYTES, MAX_CHUNKS, 16 * MAX_CHUNKS)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(None, index, geometry, EPOCH, "class-queues")
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        self.disk = SlowDisk(is_write_through=is_write_through)
        namespaces = Namespaces(self.directory)
        arena = SimulatedArena(self.directory, CAPACITY, MAX_CHUNKS)
        self.link = LowerLink(ArenaSide(arena, namespaces, VirtualClock()), self.disk)
        self.tiers = kvpool_native.TierSet((self.directory, self.disk.slots.directory))
        self.demotions = self.link.demotions
        self.models = [namespaces.open_ranks(name, layout)[0] for name, layout in zip("ab", layouts, strict=True)]
        self.written = [0, 0]
        self.now_ns = 0
        self._is_protected = is_protected
        self._draws = random.Random(5)
        self._asking = [0, 0]
        self._budget = 0.0

    def live(self, ticks: int) -> None:
        draws = self._draws
        for _ in range(ticks):
            self.now_ns += TICK_NS
            for number, model in enumerate(self.models):
                rate = BYTES_PER_TICK / 2 / model.layout.chunk_bytes
                self._asking[number] = min(4, self._asking[number] + (draws.random() < rate))
            for number in draws.sample((0, 1), 2):
                if self._asking[number]:
                    self._asking[number] -= self._save(self.models[number], draws.randbytes(KEY_BYTES))
            self._write(BYTES_PER_TICK / 2)

    def _save(self, model: Namespace, key: bytes) -> bool:
        self.directory.protect_unsaved(self._is_protected and self.demotions.may_write(self.now_ns))
        reserved = self.directory.reserve(model.id, model.size_class, b"", key, self.now_ns)
        self.directory.protect_unsaved(False)
        if reserved.id:
            self.directory.commit(reserved.id, 0, bytes(4 * model.layout.extents), self.now_ns)
            self.directory.end_reservation(reserved.id, self.now_ns)
        self.demotions.run(self.now_ns, is_urgent=not reserved.id)
        assert reserved.id or set(reserved.states) == {SaveState.NOT_READY}
        return bool(reserved.id)

    def _write(self, budget: float) -> None:
        self._budget = min(0.0, self._budget) + budget
        while self._budget > 0 and self.disk.waiting:
            job, chunk, model = self.disk.waiting.popleft()
            self._budget -= model.layout.chunk_bytes
            self.written[self.models.index(model)] += model.layout.chunk_bytes
            self.link._jobs.settle_chunk(Finished(job, chunk, Outcome.DONE), self.now_ns)
            self.demotions.run(self.now_ns)


@pytest.mark.parametrize(
    ("layouts", "is_write_through", "is_protected"),
    [
        pytest.param((SMALL, LARGER), False, False, marks=pytest.mark.slow),
        ((SMALL, LARGER), True, False),
        ((SMALL, AS_LARGE), False, False),
        ((SMALL, AS_LARGE), False, True),
    ],
)
def test_two_models_get_the_same_share_of_a_disk_that_takes_half(
    layouts: tuple[Layout, Layout], is_write_through: bool, is_protected: bool
) -> None:
    pool = TwoModels(layouts, is_write_through=is_write_through, is_protected=is_protected)
    pool.live(TICKS)
    before = list(pool.written)
    pool.live(TICKS)
    written = [now - then for now, then in zip(pool.written, before, strict=True)]
    half = sum(written) / 2
    assert half > TICKS * BYTES_PER_TICK / 5
    assert written == pytest.approx([half, half], rel=0.1)
    assert pool.directory.verify() == pool.disk.slots.directory.verify() == []
