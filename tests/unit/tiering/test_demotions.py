"""Demotions of one chain: what is visible in the lower tier while its chunks are written and fail in any order."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool_native
from kvpool.config.config import load_config
from kvpool.ids import EPOCH_BYTES, KEY_BYTES
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.states import WriteOrder
from kvpool.tiering.demotions import PUBLISHED_AT_ONCE, STARTED_AT_ONCE
from kvpool.tiering.link import ArenaSide
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiers.base import Finished, JobId, Moves, Outcome
from kvpool_tools.sim.metadata_tier import MetadataTier
from kvpool_tools.sim.pool import SimulatedArena, VirtualClock

CHUNKS = STARTED_AT_ONCE
LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
EPOCH = bytes(EPOCH_BYTES)
CONFIG = load_config(None, ["ssd.watermark=0"])


class Slower(MetadataTier):
    """A lower tier whose writes end on command. `remembered`: keys that a restart would find, in their order."""

    def __init__(self) -> None:
        super().__init__(CONFIG, blocks=4 * CHUNKS, chunk_bytes=LAYOUT.chunk_bytes)
        self.jobs: list[int] = []
        self.remembered: list[bytes] = []

    def read(self, namespace: Namespace, moves: Moves, *, is_urgent: bool) -> JobId:
        raise AssertionError("nothing is read here")

    def write(self, namespace: Namespace, moves: Moves) -> JobId:
        self.jobs.append(len(moves))
        return JobId(len(self.jobs))

    def remember(self, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            assert moves.parents[chunk] in (b"", *self.remembered[-1:])
            self.remembered.append(moves.keys[chunk])

    def touch(self, key: bytes) -> None:
        raise AssertionError("nothing is used here")


class Chain:
    """A chain in DRAM under demotion; one of CHUNKS chunks as one job."""

    def __init__(self, chunks: int = CHUNKS) -> None:
        capacity = chunks * LAYOUT.chunk_bytes
        geometry = kvpool_native.DirectoryGeometry.plan(capacity, capacity, chunks, 2 * chunks)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(None, index, geometry, EPOCH)
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        self.slower = Slower()
        namespaces = Namespaces(self.directory)
        arena = SimulatedArena(self.directory, capacity, chunks)
        self.link = LowerLink(ArenaSide(arena, namespaces, VirtualClock()), self.slower)
        self.tiers = kvpool_native.TierSet((self.directory, self.slower.slots.directory))
        self.demotions = self.link.demotions
        self.namespace = namespaces.open_ranks("m", LAYOUT)[0]
        self.keys = np.random.default_rng(5).bytes(chunks * KEY_BYTES)
        made = self.directory.reserve(self.namespace.id, self.namespace.size_class, b"", self.keys, 1)
        self.directory.commit(made.id, 0, bytes(4 * LAYOUT.extents * chunks))
        self.directory.end_reservation(made.id, 1)
        self.demotions.run_all(2, WriteOrder.COLDEST)
        assert self.slower.jobs == [CHUNKS]

    def end(self, chunk: int, *, job: int = 1, is_good: bool = True) -> None:
        self.link._jobs.settle_chunk(Finished(JobId(job), chunk, Outcome.DONE if is_good else Outcome.FAILED), 3)
        assert self.link._jobs.strays == 0

    @property
    def visible(self) -> int:
        """The number of leading chunks that are found in the lower tier."""
        held = self.slower.slots.directory.acquire(self.namespace.id, self.keys)
        if held.id:
            self.slower.slots.directory.release(held.id, 3)
        return held.chunks

    def expect_ended(self, good: int) -> None:
        """The job is over, with so many leading chunks on disk."""
        assert (len(self.demotions), self.demotions.pins) == (0, 0)
        assert self.visible == good
        assert (self.demotions.demoted_chunks, self.demotions.failed_chunks) == (good, CHUNKS - good)
        assert b"".join(self.slower.remembered) == self.keys[: good * KEY_BYTES]
        assert self.directory.stats()["pins"] == self.slower.slots.directory.stats()["holds"] == 0
        assert self.directory.verify() == self.slower.slots.directory.verify() == []


@pytest.fixture
def chain() -> Chain:
    return Chain()


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(CHUNKS)), st.sets(st.integers(0, CHUNKS - 1), max_size=3))
def test_after_any_failure_exactly_a_whole_prefix_is_visible(order: list[int], failing: set[int]) -> None:
    chain = Chain()
    written: set[int] = set()
    for chunk in order:
        chain.end(chunk, is_good=chunk not in failing)
        written |= {chunk} - failing
        leading = next(number for number in range(CHUNKS + 1) if number not in written)
        assert chain.visible <= leading
        assert leading - chain.visible < PUBLISHED_AT_ONCE
    chain.expect_ended(min(failing, default=CHUNKS))


def test_a_chunk_dropped_during_its_write_does_not_become_visible_in_the_lower_tier(chain: Chain) -> None:
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
        assert not chain.demotions.run_all(3, WriteOrder.COLDEST), "what follows waits for what is being written"
        for chunk in range(chunks):
            chain.end(chunk, job=job)
        chain.demotions.run_all(4, WriteOrder.COLDEST)
    assert chain.visible == 2 * CHUNKS + 5
    assert (len(chain.demotions), chain.directory.stats()["pins"], chain.directory.count_unsaved()) == (0, 0, 0)
    assert chain.directory.verify() == chain.slower.slots.directory.verify() == []


def test_a_chain_that_the_tier_refuses_does_not_delay_the_next_ones(chain: Chain) -> None:
    for chunk in range(CHUNKS):
        chain.end(chunk)
    below, namespace = chain.slower.slots.directory, chain.namespace
    first, second = (np.random.default_rng(seed).bytes(KEY_BYTES) for seed in (6, 7))
    size_class = chain.slower.slots.size_class_of(LAYOUT)
    assert size_class is not None
    made = below.reserve(namespace.id, size_class, b"", first, 3)
    for now_ns, key in ((4, first), (5, second)):
        reserved = chain.directory.reserve(namespace.id, namespace.size_class, b"", key, now_ns)
        chain.directory.commit(reserved.id, 0, bytes(4 * LAYOUT.extents))
        chain.directory.end_reservation(reserved.id, now_ns)
    chain.demotions.run(6)
    assert chain.slower.jobs == [CHUNKS, 1], "the colder one is refused, and tried again in another turn"
    chain.end(0, job=2)
    assert below.acquire(namespace.id, second).chunks == 1
    assert (chain.directory.count_unsaved(), chain.demotions.pins, chain.directory.stats()["pins"]) == (1, 0, 0)
    below.end_reservation(made.id, 7)
    assert not chain.demotions.run_all(8, WriteOrder.COLDEST)
    assert chain.slower.jobs == [CHUNKS, 1, 1]
    chain.end(0, job=3)
    assert chain.directory.count_unsaved() == 0
    assert chain.directory.verify() == []
