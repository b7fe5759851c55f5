"""Many simulated nodes: one is a simulation of a node, blocks are counted once, peers and stores do what they promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.config.config import load_config
from kvpool_tools.sim.cells import Cell, run_cell
from kvpool_tools.sim.pool import POLICIES
from kvpool_tools.sim.workload import Prompt, make_workload
from studies.fleet.routers import ROUTERS
from tests.rigs.clusters import cluster_cell, run
from tests.rigs.simulations import random_prompts, workload_of

CHAIN = ["a", "b", "c", "d"]


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(list(POLICIES)),
    router=st.sampled_from(list(ROUTERS)),
    seed=st.integers(0, 2**32),
    dram=st.integers(1, 40),
    ssd=st.sampled_from([0, 1, 60]),
)
def test_one_node_is_the_simulation_of_a_node(policy: str, router: str, seed: int, dram: int, ssd: int) -> None:
    workload = workload_of(random_prompts(seed, 40))
    alone = run_cell(workload, Cell(policy, dram, ssd), load_config())
    one = run(workload, cluster_cell(1, dram, ssd, policy, router=router, seed=seed))
    assert (one.hits_dram, one.hits_ssd, one.ssd_blocks_written) == (
        alone.hits_dram,
        alone.hits_ssd,
        alone.ssd_blocks_written,
    )
    assert (one.hits_peer, one.hits_store, one.index_entries) == (0, 0, 0)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(2, 9),
    dram=st.integers(1, 40),
    ssd=st.sampled_from([0, 30]),
    store=st.sampled_from([0, 1, 50]),
    index=st.sampled_from([1, 10, 1000]),
    router=st.sampled_from(ROUTERS),
    published=st.sampled_from(["all", "used-again"]),
)
def test_each_block_is_counted_once_and_every_run_is_the_same(
    seed: int, nodes: int, dram: int, ssd: int, store: int, index: int, router: str, published: str
) -> None:
    workload = workload_of(random_prompts(seed, 40))
    cell = cluster_cell(
        nodes,
        dram,
        ssd,
        router=router,
        seed=seed,
        store_blocks=store,
        index_entries=index,
        published=published,
        event_delay_s=1.5,
    )
    first, again = run(workload, cell), run(workload, cell)
    assert first.index_entries <= index
    first.seconds = again.seconds = 0.0
    assert first == again


def test_a_peer_that_has_evicted_its_blocks_is_a_miss_and_not_asked_again() -> None:
    # The first node stores the chain and evicts it; the event of that is late.
    workload = workload_of([CHAIN, ["x"], ["1", "2", "3", "4"], CHAIN])
    late = run(workload, cluster_cell(2, 4, event_delay_s=1.5))
    assert (late.hits_peer, late.blocks_stale) == (0, 4)
    assert late.saved_s == pytest.approx(-1e-3), "one round trip for nothing"
    assert run(workload, cluster_cell(2, 4)).blocks_stale == 0


def test_what_moves_slower_than_it_is_computed_is_not_moved() -> None:
    workload = workload_of([CHAIN] * 2)
    slow = run(workload, cluster_cell(2, 10, network_bytes_per_s=1e6))
    assert (slow.hits_peer, slow.blocks_slow, slow.missed, slow.saved_s) == (0, 4, 8, 0.0)
    assert run(workload, cluster_cell(2, 10, network_latency_s=0.2)).hits_peer == 0


def test_a_peer_reads_its_disk_for_the_pull() -> None:
    # The first node's chain goes to its disk; the second node pulls it from there.
    workload = workload_of([CHAIN, ["x"], ["1", "2", "3", "4"], CHAIN])
    outcome = run(workload, cluster_cell(2, 4, 40), "ssd.write_through=true")
    assert outcome.hits_peer == 4
    size = 4 * (1 << 20)
    assert outcome.saved_s == pytest.approx(4 * 0.025 - size / 10e9 - 1e-3 - size / 6e9 - 1e-4)


def test_partial_blocks_are_missed_everywhere() -> None:
    workload = make_workload(Prompt(second, (1, 2, 10 + second), has_tail=True) for second in range(4))
    outcome = run(workload, cluster_cell(2, 10, store_blocks=10))
    assert (outcome.hits, outcome.missed) == (6, 6)
