"""Demotions of one chain: what is visible below while chunks of it are written, in whatever order they end and fail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool_native
from kvpool.index.admission import make_admission
from kvpool.index.demotions import PUBLISHED_AT_ONCE, Demotions
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.types import EPOCH_BYTES, KEY_BYTES, SizeClassId

CHUNKS = 40
LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
SLOT_BYTES = LAYOUT.chunk_bytes + kvpool_native.SSD_HEADER_BYTES
EPOCH = bytes(EPOCH_BYTES)


class Slower:
    """A slower tier whose writes end when the test says so. `remembered`: keys that a restart would find, in their order."""

    can_read = can_write = True

    def __init__(self) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan_files(2 * CHUNKS * SLOT_BYTES, 1, 2 * CHUNKS)
        index = kvpool_native.Mapping.create("below", geometry.index_bytes)
        self.directory = kvpool_native.Directory.of_files(index, geometry, EPOCH)
        self.directory.mark_segment_ready(0)
        self.jobs: list[int] = []
        self.remembered: list[bytes] = []
        self._size_class = SizeClassId(self.directory.add_class(SLOT_BYTES, LAYOUT.layers))

    def size_class_of(self, namespace: Namespace) -> SizeClassId:
        return self._size_class

    def read(self, namespace: Namespace, rows: bytes, *, is_urgent: bool) -> int:
        raise AssertionError("nothing is read here")

    def write(self, namespace: Namespace, rows: bytes, tokens: list[bytes]) -> int:
        self.jobs.append(len(tokens))
        return len(self.jobs)

    def compare(self, namespace: Namespace, rows: bytes) -> int:
        raise AssertionError("nothing is compared here")

    def remember(self, namespace: Namespace, key: bytes, parent: bytes, offset: int, generation: int) -> None:
        assert parent == (self.remembered[-1] if self.remembered else b"")
        self.remembered.append(key)

    def touch(self, key: bytes) -> None:
        raise AssertionError("nothing is used here")


class Chain:
    """A chain of CHUNKS chunks in DRAM, being written down as one job."""

    def __init__(self) -> None:
        capacity = CHUNKS * LAYOUT.chunk_bytes
        geometry = kvpool_native.DirectoryGeometry.plan(capacity, capacity, CHUNKS, 2 * CHUNKS)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(None, index, geometry, EPOCH)
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        self.slower = Slower()
        namespaces = Namespaces(self.directory)
        namespaces.below = self.slower.directory
        self.directory.attach_slower(self.slower.directory)
        self.namespace = namespaces.open_ranks("m", LAYOUT)[0]
        self.demotions = Demotions(
            self.directory,
            self.slower,
            namespaces,
            watermark_bytes=0,
            bytes_max=capacity,
            is_write_through=False,
            admission=make_admission("all", 0, 0, lambda: False),
        )
        self.keys = np.random.default_rng(5).bytes(CHUNKS * KEY_BYTES)
        reservation, _, _, _ = self.directory.reserve(self.namespace.id, self.namespace.size_class, b"", self.keys, 1)
        self.directory.commit(reservation, 0, bytes(4 * LAYOUT.layers * CHUNKS))
        self.directory.end_reservation(reservation, 1)
        self.demotions.run_all(2)
        assert self.slower.jobs == [CHUNKS]

    def end(self, chunk: int, *, is_good: bool = True) -> None:
        assert self.demotions.settle(1, chunk, is_good=is_good, is_bad_here=False, now_ns=3)

    @property
    def visible(self) -> int:
        """Leading chunks that are found below."""
        chunks, hold = self.slower.directory.acquire(self.namespace.id, self.keys)
        if hold:
            self.slower.directory.release_untouched(hold)
        return chunks

    def expect_ended(self, good: int) -> None:
        """The job is over, with so many leading chunks on disk."""
        assert (len(self.demotions), self.demotions.holds) == (0, 0)
        assert self.visible == good
        assert (self.demotions.demoted_chunks, self.demotions.failed_chunks) == (good, CHUNKS - good)
        assert b"".join(self.slower.remembered) == self.keys[: good * KEY_BYTES]
        assert self.directory.stats()["holds"] == self.slower.directory.stats()["holds"] == 0
        assert self.directory.verify() == self.slower.directory.verify() == []


@pytest.fixture
def chain() -> Chain:
    return Chain()


def test_leading_chunks_become_visible_while_others_are_written(chain: Chain) -> None:
    for chunk in range(PUBLISHED_AT_ONCE - 1):
        chain.end(chunk)
    assert chain.visible == 0
    chain.end(PUBLISHED_AT_ONCE - 1)
    assert chain.visible == PUBLISHED_AT_ONCE
    for chunk in range(PUBLISHED_AT_ONCE, CHUNKS):
        chain.end(chunk)
    chain.expect_ended(CHUNKS)


def test_nothing_becomes_visible_before_what_it_follows(chain: Chain) -> None:
    for chunk in range(1, CHUNKS):
        chain.end(chunk)
    assert chain.visible == 0
    chain.end(0)
    chain.expect_ended(CHUNKS)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(CHUNKS)), st.sets(st.integers(0, CHUNKS - 1), max_size=3))
def test_whatever_fails_a_whole_prefix_is_visible_and_no_more(order: list[int], failing: set[int]) -> None:
    chain = Chain()
    written: set[int] = set()
    for chunk in order:
        chain.end(chunk, is_good=chunk not in failing)
        written |= {chunk} - failing
        leading = next(number for number in range(CHUNKS + 1) if number not in written)
        assert chain.visible <= leading
        assert leading - chain.visible < PUBLISHED_AT_ONCE
    chain.expect_ended(min(failing, default=CHUNKS))
