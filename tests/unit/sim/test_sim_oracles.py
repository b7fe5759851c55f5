"""The simulator's oracles: on traces made by hand, against every possible choice, and against slow and obvious models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import InvalidArgument
from kvpool_tools.sim.oracles import belady_hits, lru_hits
from kvpool_tools.sim.workload import Prompt, Workload, make_workload
from tests.rigs.real_traces import real_trace
from tests.rigs.simulations import load, random_prompts, workload_of

# Block hits in % of the references by leaf-first LRU and by the optimum, at shares of the unique blocks. Published figures of
# the same traces by another simulator, to a tenth.
PUBLISHED = {
    "mooncake_conversation_trace.jsonl.gz": {
        0.01: (5.2, 24.6),
        0.02: (7.9, 31.4),
        0.05: (19.6, 36.6),
        0.10: (27.9, 36.6),
        0.20: (34.5, 36.6),
    },
    "mooncake_synthetic_trace.jsonl.gz": {
        0.01: (3.8, 18.5),
        0.02: (7.8, 26.1),
        0.05: (15.7, 39.6),
        0.10: (26.2, 50.6),
        0.20: (39.3, 60.8),
    },
    "agentic_cc_512.npz": {0.01: (33.3, 65.8)},
}


def test_an_id_behind_two_prefixes_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="request 1: block 7 follows another block"):
        make_workload([Prompt(0.0, (1, 7)), Prompt(1.0, (2, 7))])


def test_a_trace_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no block in 2 requests"):
        make_workload([Prompt(0.0, ()), Prompt(1.0, ())])


def _best(chains: list[list[int]], capacity: int) -> int:
    """The most hits of all ways to keep whole prefixes: every choice after every request is tried."""
    states = {frozenset[int](): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = next((depth for depth, block in enumerate(chain) if block not in kept), len(chain))
            for choice in _prefix_sets(kept, chain, capacity):
                after[choice] = max(after.get(choice, 0), hits + found)
        states = after
    return max(states.values())


def _prefix_sets(kept: frozenset[int], chain: list[int], capacity: int) -> set[frozenset[int]]:
    parents = _PARENTS
    blocks = sorted(kept | set(chain), key=lambda block: len(_path(block)))
    choices = {frozenset[int]()}
    for block in blocks:
        parent = parents[block]
        choices |= {
            choice | {block} for choice in choices if (parent < 0 or parent in choice) and len(choice) < capacity
        }
    return choices


_PARENTS: dict[int, int] = {}


def _path(block: int) -> list[int]:
    path = []
    while block >= 0:
        path.append(block)
        block = _PARENTS[block]
    return path


def _note_parents(chains: list[list[int]]) -> None:
    _PARENTS.clear()
    for chain in chains:
        _PARENTS.update(zip(chain, [-1, *chain], strict=False))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "ab", "abc", "abd", "x", "xy", "p", ""]), min_size=2, max_size=7), st.integers(1, 4)
)
def test_no_choice_beats_the_optimum_and_it_can_be_reached(words: list[str], capacity: int) -> None:
    prompts = [[word[: depth + 1] for depth in range(len(word))] for word in words]
    if not any(prompts):
        return
    workload = workload_of(prompts)
    chains = [list(chain) for chain in workload.chains()]
    _note_parents(chains)
    assert belady_hits(workload, capacity) == _best(chains, capacity)


def _slow_lru(workload: Workload, capacity: int) -> int:
    """Each block has the time of its last use; a child's is a little before its parent's. The oldest go."""
    used: dict[int, float] = {}
    hits = 0
    for now, chain in enumerate(workload.chains(), 1):
        hits += next((depth for depth, block in enumerate(chain) if block not in used), len(chain))
        for block in chain:
            used.pop(block, None)
        kept = chain[:capacity]
        others = sorted(used, key=used.__getitem__, reverse=True)[: capacity - len(kept)]
        used = {block: used[block] for block in others} | {
            block: now - depth / (1 + len(kept)) for depth, block in enumerate(kept)
        }
    return hits


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_lru_equals_a_sorted_list(seed: int, capacity: int) -> None:
    workload = workload_of(random_prompts(seed, 40))
    assert lru_hits(workload, capacity) == _slow_lru(workload, capacity)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_both_reproduce_published_figures_of_published_traces(name: str) -> None:
    workload = load(real_trace(name))
    for share, (lru, belady) in PUBLISHED[name].items():
        blocks = int(share * workload.unique)
        assert 100 * lru_hits(workload, blocks) / workload.references == pytest.approx(lru, abs=0.1)
        assert 100 * belady_hits(workload, blocks) / workload.references == pytest.approx(belady, abs=0.1)
