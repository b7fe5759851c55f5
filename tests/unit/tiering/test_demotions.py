"""Demotions of one chain: what is visible below while chunks of it are written, in whatever order they end and fail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool_native
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.tiering.admission import make_admission
from kvpool.tiering.demotions import PUBLISHED_AT_ONCE, STARTED_AT_ONCE, Demotions
from kvpool.types import EPOCH_BYTES, KEY_BYTES, SizeClassId

CHUNKS = STARTED_AT_ONCE
LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
SLOT_BYTES = LAYOUT.chunk_bytes + kvpool_native.SSD_HEADER_BYTES
EPOCH = bytes(EPOCH_BYTES)


class Slower:
    """A slower tier whose writes end when the test says so. `remembered`: keys that a restart would find, in their order."""

    can_read = can_write = True

    def __init__(self) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan_files(4 * CHUNKS * SLOT_BYTES, 1, 4 * CHUNKS)
        self.directory = kvpool_native.Directory.of_files(geometry)
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
        assert parent in (b"", *self.remembered[-1:])
        self.remembered.append(key)

    def touch(self, key: bytes) -> None:
        raise AssertionError("nothing is used here")


class Chain:
    """A chain in DRAM, being written down; one of CHUNKS chunks as one job."""

    def __init__(self, chunks: int = CHUNKS) -> None:
        capacity = chunks * LAYOUT.chunk_bytes
        geometry = kvpool_native.DirectoryGeometry.plan(capacity, capacity, chunks, 2 * chunks)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(None, index, geometry, EPOCH)
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        self.slower = Slower()
        namespaces = Namespaces(self.directory)
        namespaces.lower_tier = self.slower.directory
        self.tiers = kvpool_native.TierSet((self.directory, self.slower.directory))
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
        self.keys = np.random.default_rng(5).bytes(chunks * KEY_BYTES)
        reservation, _, _, _ = self.directory.reserve(self.namespace.id, self.namespace.size_class, b"", self.keys, 1)
        self.directory.commit(reservation, 0, bytes(4 * LAYOUT.layers * chunks))
        self.directory.end_reservation(reservation, 1)
        self.demotions.run_all(2)
        assert self.slower.jobs == [CHUNKS]

    def end(self, chunk: int, *, job: int = 1, is_good: bool = True) -> None:
        assert self.demotions.settle(job, chunk, is_good=is_good, is_bad_here=False, now_ns=3)

    @property
    def visible(self) -> int:
        """Leading chunks that are found below."""
        chunks, hold = self.slower.directory.acquire(self.namespace.id, self.keys)
        if hold:
            self.slower.directory.release(hold, 3)
        return chunks

    def expect_ended(self, good: int) -> None:
        """The job is over, with so many leading chunks on disk."""
        assert (len(self.demotions), self.demotions.pins) == (0, 0)
        assert self.visible == good
        assert (self.demotions.demoted_chunks, self.demotions.failed_chunks) == (good, CHUNKS - good)
        assert b"".join(self.slower.remembered) == self.keys[: good * KEY_BYTES]
        assert self.directory.stats()["pins"] == self.slower.directory.stats()["holds"] == 0
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


def test_a_chunk_dropped_while_it_is_written_does_not_become_visible_below(chain: Chain) -> None:
    bad = PUBLISHED_AT_ONCE + 4
    for chunk in range(PUBLISHED_AT_ONCE):
        chain.end(chunk)
    at = bad * KEY_BYTES
    dropped = chain.keys[at : at + KEY_BYTES]
    assert chain.directory.drop(dropped, chain.directory.place_of(dropped)[1]) == CHUNKS - bad
    for chunk in range(PUBLISHED_AT_ONCE, CHUNKS):
        chain.end(chunk)
    chain.expect_ended(bad)


def test_a_long_chain_is_written_part_by_part_and_keeps_its_pin() -> None:
    chain = Chain(2 * CHUNKS + 5)
    for job, chunks in enumerate([CHUNKS, CHUNKS, 5], 1):
        assert chain.slower.jobs[job - 1 :] == [chunks]
        assert not chain.demotions.run_all(3), "what follows waits for what is being written"
        for chunk in range(chunks):
            chain.end(chunk, job=job)
        chain.demotions.run_all(4)
    assert chain.visible == 2 * CHUNKS + 5
    assert (len(chain.demotions), chain.directory.stats()["pins"], chain.directory.count_unsaved()) == (0, 0, 0)
    assert chain.directory.verify() == chain.slower.directory.verify() == []


def test_a_part_that_fails_ends_the_chain() -> None:
    chain = Chain(2 * CHUNKS)
    for chunk in range(CHUNKS):
        chain.end(chunk, is_good=chunk != 3)
    assert (len(chain.demotions), chain.visible, chain.directory.stats()["pins"]) == (0, 3, 0)
    chain.demotions.run_all(4)
    assert chain.slower.jobs == [CHUNKS, CHUNKS], "the rest is tried again"
    assert chain.directory.verify() == chain.slower.directory.verify() == []


def test_a_chain_that_the_tier_refuses_does_not_hold_up_those_behind_it(chain: Chain) -> None:
    for chunk in range(CHUNKS):
        chain.end(chunk)
    below, namespace = chain.slower.directory, chain.namespace
    first, second = (np.random.default_rng(seed).bytes(KEY_BYTES) for seed in (6, 7))
    pending, _, _, _ = below.reserve(namespace.id, chain.slower.size_class_of(namespace), b"", first, 3)
    for now_ns, key in ((4, first), (5, second)):
        reservation, _, _, _ = chain.directory.reserve(namespace.id, namespace.size_class, b"", key, now_ns)
        chain.directory.commit(reservation, 0, bytes(4 * LAYOUT.layers))
        chain.directory.end_reservation(reservation, now_ns)
    chain.demotions.run(6)
    assert chain.slower.jobs == [CHUNKS, 1], "the colder one is refused, and tried again in another turn"
    chain.end(0, job=2)
    assert below.acquire(namespace.id, second)[0] == 1
    assert (chain.directory.count_unsaved(), chain.demotions.pins, chain.directory.stats()["pins"]) == (1, 0, 0)
    below.end_reservation(pending, 7)
    assert not chain.demotions.run_all(8)
    assert chain.slower.jobs == [CHUNKS, 1, 1]
    chain.end(0, job=3)
    assert chain.directory.count_unsaved() == 0
    assert chain.directory.verify() == []
