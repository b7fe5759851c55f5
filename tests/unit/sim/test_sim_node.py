"""The simulated node: the daemon's own classes against the oracles, and two tiers against their invariants."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.config.config import load_config
from kvpool.key_column import KeyColumn
from kvpool_tools.sim.cells import Cell, Outcome, run_cell, simulated_config
from kvpool_tools.sim.node import SimulatedNode
from kvpool_tools.sim.oracles import belady_hits, lru_hits
from kvpool_tools.sim.pool import CHUNK_BYTES, POLICIES
from kvpool_tools.sim.workload import Workload
from tests.rigs.real_traces import real_trace
from tests.rigs.simulations import load, random_prompts, workload_of


def _run(workload: Workload, dram: int, ssd: int = 0, policy: str = "lru", *overrides: str) -> Outcome:
    outcome = run_cell(workload, Cell(policy, dram, ssd), load_config(None, overrides))
    assert outcome.holes == 0
    return outcome


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_the_pools_lru_equals_the_simple_one(seed: int, capacity: int) -> None:
    workload = workload_of(random_prompts(seed, 40))
    assert _run(workload, capacity).hits_dram == lru_hits(workload, capacity)


@settings(max_examples=25, deadline=None)
@given(policy=st.sampled_from(list(POLICIES)), seed=st.integers(0, 2**32), capacity=st.integers(1, 60))
def test_no_policy_beats_the_optimum(policy: str, seed: int, capacity: int) -> None:
    workload = workload_of(random_prompts(seed, 40))
    assert _run(workload, capacity, 0, policy).hits_dram <= belady_hits(workload, capacity)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 100))
def test_two_tiers_pass_every_check_and_never_beat_the_optimum_of_both(seed: int, dram: int, more: int) -> None:
    workload = workload_of(random_prompts(seed, 40))
    outcome = _run(workload, dram, dram + more)
    assert outcome.hits_dram + outcome.hits_ssd <= belady_hits(workload, 2 * dram + more)
    again = _run(workload, dram, dram + more)
    assert (outcome.hits_dram, outcome.hits_ssd) == (again.hits_dram, again.hits_ssd)


def test_a_large_lower_tier_loses_no_chunk() -> None:
    workload = workload_of(random_prompts(7, 200))
    outcome = _run(workload, 24, 4 * workload.unique)
    assert outcome.hits_dram + outcome.hits_ssd == belady_hits(workload, workload.unique)
    assert outcome.hits_ssd > 0
    assert 0 < outcome.ssd_blocks_written <= workload.unique


def test_a_write_budget_counts_real_bytes() -> None:
    # A budget of 240 real blocks a day, with one hour accumulated: ten blocks, the first half for every chunk.
    block_bytes = 1 << 20
    config = simulated_config(load_config(None, [f"ssd.write_budget={240 * block_bytes}B"]), block_bytes)
    assert config.ssd.write_budget.size == 240 * block_bytes * 2 * CHUNK_BYTES // (block_bytes + 4096), (
        "headers are written too"
    )
    workload = workload_of([[f"{number}.{depth}" for depth in range(4)] for number in range(100)])
    outcome = run_cell(workload, Cell("lru", 16, 1000), config)
    assert 0 < outcome.ssd_blocks_written < 20
    assert simulated_config(load_config(None, []), block_bytes).ssd.write_budget_bytes == 0


def test_drive_writes_are_those_of_the_simulated_tier() -> None:
    config = simulated_config(load_config(None, ["ssd.write_budget=0.24 DWPD"]), 1 << 20)
    workload = workload_of([[f"{number}.{depth}" for depth in range(4)] for number in range(100)])
    outcome = run_cell(workload, Cell("lru", 16, 1000), config)
    assert 0 < outcome.ssd_blocks_written < 20, "an hour of 240 blocks a day"


def test_nothing_is_held_between_requests() -> None:
    workload = workload_of(random_prompts(3, 50))
    node = SimulatedNode(dram_blocks=20, ssd_blocks=40, policy="lru", config=load_config())
    keys = workload.keys()
    for second, chain in enumerate(workload.chains()):
        hits = node.serve(KeyColumn(keys[chain].tobytes()), second)
        assert hits.dram + hits.ssd <= len(chain)
        assert node.verify() == []
    with pytest.raises(AssertionError):
        node.serve(KeyColumn(keys[[0]].tobytes()), 0)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dram=st.integers(1, 30),
    ssd=st.sampled_from([0, 40]),
    hbm=st.integers(1, 40),
    policy=st.sampled_from(POLICIES),
)
def test_device_memory_costs_no_hit_and_moves_no_more_than_it_serves(
    seed: int, dram: int, ssd: int, hbm: int, policy: str
) -> None:
    workload = workload_of(random_prompts(seed, 40))
    two, three = (run_cell(workload, Cell(policy, dram, ssd, above), load_config()) for above in (0, hbm))
    assert (two.holes, three.holes) == (0, 0)
    assert three.hits == two.hits
    assert three.hits <= belady_hits(workload, dram + ssd)
    assert three.hits_hbm <= three.hits
    assert three.hbm_blocks_promoted <= hbm + 1.5 * three.hits_hbm + 0.1 * min(1.0, hbm / dram) * three.hits
    assert (three.ssd_blocks_read, three.ssd_blocks_written) == (two.ssd_blocks_read, two.ssd_blocks_written)


def test_device_memory_that_serves_nothing_takes_little_more() -> None:
    # Each prompt comes twice, one after the other, and never again: what goes up with the second is not used there. A tenth of
    # what is used is tried, in proportion to the room.
    prompts = [[f"{number // 2}.{depth}" for depth in range(20)] for number in range(400)]
    outcome = run_cell(workload_of(prompts), Cell("class-queues", 1000, 0, 10), load_config())
    assert outcome.hits == 200 * 20
    assert outcome.hits_hbm == 0
    assert 10 < outcome.hbm_blocks_promoted <= 10 + outcome.hits // 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("mooncake_conversation_trace.jsonl.gz", (0.001, 0.005, 0.02)),
        ("mooncake_synthetic_trace.jsonl.gz", (0.005, 0.02)),  # 0.001 of it is 43 blocks: docs/sizing.md
        ("agentic_cc_512.npz", (0.005,)),  # half a minute each
    ],
)
def test_device_memory_does_not_thrash_on_published_traces(name: str, shares: tuple[float, ...]) -> None:
    workload = load(real_trace(name))
    dram = int(0.05 * workload.unique)
    two = run_cell(workload, Cell("class-queues", dram, 8 * dram), load_config())
    for share in shares:
        three = run_cell(workload, Cell("class-queues", dram, 8 * dram, int(share * workload.unique)), load_config())
        assert three.hits == two.hits
        assert 0 < three.hbm_blocks_promoted <= 2 * three.hits_hbm


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake_conversation_trace.jsonl.gz", "mooncake_synthetic_trace.jsonl.gz"])
def test_the_pools_lru_equals_the_simple_one_on_published_traces(name: str) -> None:
    workload = load(real_trace(name))
    for share in (0.01, 0.05):
        blocks = int(share * workload.unique)
        assert _run(workload, blocks).hits_dram == lru_hits(workload, blocks)


@pytest.mark.slow
def test_two_tiers_on_a_published_trace() -> None:
    workload = load(real_trace("mooncake_conversation_trace.jsonl.gz"))
    dram = int(0.02 * workload.unique)
    outcome = _run(workload, dram, 8 * dram)
    # Published for LRU in both tiers, all that is demoted being written: 7.9 + 25.0 of 100 references.
    assert 100 * outcome.hits_dram / workload.references == pytest.approx(7.9, abs=0.1)
    assert 100 * outcome.hits_ssd / workload.references == pytest.approx(25.0, abs=0.5)
