"""Shares of a slow disk: two models of the same traffic, of which the disk takes half.

Chunks come at random, the same bytes of each model. Where what only DRAM has is protected, a model whose chunks cannot be
stored yet asks again, as an engine does. The seed is fixed; another one changes a share by about two percent.
"""

import random
from collections import deque

import pytest

import kvpool_native
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.tiering.admission import make_admission
from kvpool.tiering.demotions import Demotions
from kvpool.types import EPOCH_BYTES, KEY_BYTES, SaveState, SizeClassId

CAPACITY = 4 << 20
SEGMENT_BYTES = 128 << 10
MAX_CHUNKS = CAPACITY // 4096
EPOCH = bytes(EPOCH_BYTES)
SMALL = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
AS_LARGE = Layout(layers=4, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=16)
LARGER = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=128)
TICKS = 8000
TICK_NS = 10_000_000
BYTES_PER_TICK = 0.8 * SMALL.chunk_bytes  # of both models together


class SlowDisk:
    """A slower tier that writes a given number of bytes in each tick, in the order in which they were asked for."""

    can_read = can_write = True

    def __init__(self) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan_files(1 << 20, 64, 16 * MAX_CHUNKS)
        self.directory = kvpool_native.Directory.of_files(geometry)
        for segment in range(64):
            self.directory.mark_segment_ready(segment)
        self.waiting: deque[tuple[int, int, Namespace]] = deque()
        self._jobs = 0
        self._classes: dict[Layout, SizeClassId] = {}

    def size_class_of(self, namespace: Namespace) -> SizeClassId:
        layout = namespace.layout
        if layout not in self._classes:
            size = layout.chunk_bytes + kvpool_native.SSD_HEADER_BYTES
            self._classes[layout] = SizeClassId(self.directory.add_class(size, layout.layers))
        return self._classes[layout]

    def read(self, namespace: Namespace, rows: bytes, *, is_urgent: bool) -> int:
        raise AssertionError("nothing is read here")

    def write(self, namespace: Namespace, rows: bytes, tokens: list[bytes]) -> int:
        self._jobs += 1
        self.waiting += [(self._jobs, chunk, namespace) for chunk in range(len(tokens))]
        return self._jobs

    def compare(self, namespace: Namespace, rows: bytes) -> int:
        raise AssertionError("nothing is compared here")

    def remember(self, namespace: Namespace, key: bytes, parent: bytes, offset: int, generation: int) -> None:
        """Nothing is to be known after a restart."""

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
        self.disk = SlowDisk()
        namespaces = Namespaces(self.directory)
        namespaces.lower_tier = self.disk.directory
        self.tiers = kvpool_native.TierSet((self.directory, self.disk.directory))
        self.models = [namespaces.open_ranks(name, layout)[0] for name, layout in zip("ab", layouts, strict=True)]
        self.demotions = Demotions(
            self.directory,
            self.disk,
            namespaces,
            watermark_bytes=CAPACITY // 2,
            bytes_max=CAPACITY // 8,
            is_write_through=is_write_through,
            admission=make_admission("all", 0, 0, lambda: False),
        )
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
        made, states, _, _ = self.directory.reserve(model.id, model.size_class, b"", key, self.now_ns)
        self.directory.protect_unsaved(False)
        if made:
            self.directory.commit(made, 0, bytes(4 * model.layout.layers), self.now_ns)
            self.directory.end_reservation(made, self.now_ns)
        self.demotions.run(self.now_ns, is_urgent=not made)
        assert made or set(states) == {SaveState.NOT_READY}
        return bool(made)

    def _write(self, budget: float) -> None:
        self._budget = min(0.0, self._budget) + budget
        while self._budget > 0 and self.disk.waiting:
            job, chunk, model = self.disk.waiting.popleft()
            self._budget -= model.layout.chunk_bytes
            self.written[self.models.index(model)] += model.layout.chunk_bytes
            assert self.demotions.settle(job, chunk, is_good=True, is_bad_here=False, now_ns=self.now_ns)
            self.demotions.run(self.now_ns)


@pytest.mark.parametrize(
    ("layouts", "is_write_through", "is_protected"),
    [
        ((SMALL, LARGER), False, False),
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
    assert pool.directory.verify() == pool.disk.directory.verify() == []
