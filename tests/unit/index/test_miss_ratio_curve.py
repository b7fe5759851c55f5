"""Sampled reuse distances against the exact hits of LRU, and their bounds."""

import hashlib

import pytest

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.index.miss_ratio_curve import RATE_MAX, SAMPLES
from kvpool.protocol import hit_curve
from kvpool_tools.sim.oracles import lru_hits
from kvpool_tools.sim.workload import Workload
from tests.rigs.real_traces import real_trace
from tests.rigs.simulations import load

BLOCK_BYTES = 2 << 20
CHUNK_BYTES = 16384
FOREVER_NS = 1 << 62


# A little more than one bin of the histogram, a sixteenth of an octave.
def _observed(workload: Workload) -> kvpool_native.ReuseDistances:
    distances = kvpool_native.ReuseDistances(SAMPLES, workload.unique * BLOCK_BYTES, RATE_MAX, FOREVER_NS)
    keys = workload.keys()
    for chain in workload.chains():
        distances.observe(keys[chain].tobytes(), BLOCK_BYTES, 0)
    return distances


def test_constantly_repeated_keys_hit_however_small_the_pool() -> None:
    distances = kvpool_native.ReuseDistances(16, 1 << 40, 1.0, FOREVER_NS)
    assert distances.hit_share(1 << 40) == 0
    for _ in range(100):
        distances.observe(bytes(31) + b"\x01", 4096, 0)
    assert distances.hit_share(8192) == pytest.approx(0.99)
    assert distances.hit_share(2048) == 0


def test_old_references_weigh_less() -> None:
    key, half_life_ns = bytes(31) + b"\x01", 1600
    distances = kvpool_native.ReuseDistances(16, 1 << 40, 1.0, half_life_ns)
    for _ in range(64):
        distances.observe(key, 4096, 1600)
    assert distances.referenced_bytes == 64 * 4096
    distances.observe(key, 4096, 1600 + 3 * half_life_ns)
    assert distances.referenced_bytes == pytest.approx((64 / 8 + 1) * 4096)


def test_wrong_numbers_are_refused() -> None:
    for wrong in ((8, 1, 1.0, 10**9), (16, 0, 1.0, 10**9), (16, 1, 0.0, 10**9), (16, 1, 1.5, 10**9), (16, 1, 1.0, 1)):
        with pytest.raises(ValueError, match="samples must be"):
            kvpool_native.ReuseDistances(*wrong)
    distances = kvpool_native.ReuseDistances(16, 1, 1.0, 10**9)
    with pytest.raises(ValueError, match="chunk_bytes"):
        distances.observe(bytes(32), 0, 0)
    with pytest.raises(ValueError, match="32 bytes"):
        distances.observe(bytes(33), 1, 0)


def test_a_hold_counts_as_its_keys_do() -> None:
    geometry = kvpool_native.DirectoryGeometry.plan(1 << 26, 1 << 26, 1024)
    index = kvpool_native.Mapping.create("index", geometry.index_bytes, False)
    directory = kvpool_native.Directory(None, index, geometry, bytes(16), "lru")
    for segment in range(geometry.segments):
        directory.mark_segment_ready(segment)
    namespace, size_class = directory.add_namespace(), directory.add_class(CHUNK_BYTES, 1)
    by_hold, by_keys = (kvpool_native.ReuseDistances(SAMPLES, 1 << 40, RATE_MAX, FOREVER_NS) for _ in range(2))
    for number in range(60):
        chain = b"".join(hashlib.sha256(bytes([number % 20, depth])).digest() for depth in range(48))
        if number < 20:
            made = directory.reserve(namespace, size_class, b"", chain, number)
            directory.commit(made.id, 0, bytes(4 * 48), number)
            directory.end_reservation(made.id, number)
        held = directory.acquire(namespace, chain, number)
        assert held.chunks == 48
        by_hold.observe_holds(directory, [held.id], CHUNK_BYTES, number)
        by_keys.observe(chain, CHUNK_BYTES, number)
        directory.release(held.id, number)
    assert by_hold.sampled == by_keys.sampled > 20
    for capacity in (1 << 20, 1 << 22, 1 << 24):
        assert by_hold.hit_share(capacity) == by_keys.hit_share(capacity)
    assert by_hold.hit_share(1 << 26) == pytest.approx(2 / 3, abs=0.25)  # the second and the third time
    with pytest.raises(ValueError, match="SAMPLED_SHARE"):
        kvpool_native.ReuseDistances(SAMPLES, 1 << 40, 1.0, FOREVER_NS).observe_holds(
            directory, [held.id], CHUNK_BYTES, 0
        )


def test_a_column_of_capacities_is_whole_and_bounded() -> None:
    assert hit_curve.unpack(hit_curve.pack([0, 5, 1 << 63])) == [0, 5, 1 << 63]
    for column in (bytes(7), bytes(8 * (hit_curve.CAPACITIES_MAX + 1))):
        with pytest.raises(ProtocolError, match="capacities column"):
            hit_curve.unpack(column)


# The sample is random: the beginning of a widely shared prompt is in it or not.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("mooncake_conversation_trace.jsonl.gz", 6.0),
        ("mooncake_synthetic_trace.jsonl.gz", 14.0),
        ("agentic_cc_512.npz", 6.0),
    ],
)
def test_on_published_traces_it_is_near_the_exact_curve(name: str, points: float) -> None:
    workload = load(real_trace(name))
    distances = _observed(workload)
    assert distances.verify() == []
    for share in (0.01, 0.05, 0.4):
        blocks = int(share * workload.unique)
        exact = 100 * lru_hits(workload, blocks) / workload.references
        assert 100 * distances.hit_share(blocks * BLOCK_BYTES) == pytest.approx(exact, abs=points)
