"""The routers' models and the sessions of a trace."""

from dataclasses import replace

import numpy as np
import pytest

from kvpool_tools.sim.runner import SimulationSettings
from kvpool_tools.sim.workload import NO_SESSION, Prompt, make_workload
from studies.fleet.remote_index import BlockChange, RemoteIndex
from studies.fleet.routers import ROUTERS, KvAware, Router, make_router
from studies.fleet.sessions import sessions_of
from tests.rigs.real_traces import real_trace
from tests.rigs.simulations import workload_of


def _router(name: str, nodes: int, seed: int) -> Router:
    return make_router(name, nodes, seed, known=RemoteIndex(None, 0), block_compute_s=1.0)


def test_round_robin_goes_round_from_its_seed() -> None:
    router = _router("round-robin", 3, 4)
    assert [router.choose(0, [1], 0.0) for _ in range(4)] == [1, 2, 0, 1]


def test_a_session_stays_where_it_is_and_sessions_spread() -> None:
    router = _router("session-affine", 8, 0)
    nodes = [router.choose(session, [1], 0.0) for session in range(800)]
    assert nodes == [router.choose(session, [2, 3], 9.0) for session in range(800)]
    assert min(np.bincount(nodes, minlength=8)) > 60
    assert nodes != [_router("session-affine", 8, 1).choose(session, [1], 0.0) for session in range(800)]


@pytest.mark.parametrize("name", ROUTERS)
def test_of_one_node_there_is_no_choice(name: str) -> None:
    router = _router(name, 1, 7)
    assert [router.choose(session, [session], 0.0) for session in range(5)] == [0] * 5


def _knowing(nodes: int) -> tuple[KvAware, RemoteIndex]:
    known = RemoteIndex(None, 0)
    return KvAware(nodes, 0, known, 1.0), known


def test_a_known_prefix_of_half_the_prompt_decides() -> None:
    router, known = _knowing(3)
    known.publish(2, [BlockChange(block, True) for block in (1, 2)], 0)
    known.advance(0)
    router.note_served(2, 1, 0.0)
    assert router.choose(0, [1, 2, 3, 4], 0.0) == 2
    assert router.choose(0, [1, 2, 3, 4, 5], 0.0) != 2, "less than half: a common prompt"


def test_a_busy_node_is_left_alone_if_to_wait_takes_longer_than_to_compute() -> None:
    router, known = _knowing(2)
    known.publish(0, [BlockChange(block, True) for block in (1, 2)], 0)
    known.advance(0)
    router.note_served(0, 3, 0.0)
    assert router.choose(0, [1, 2], 0.0) == 1
    assert router.choose(0, [1, 2], 1.0) == 0, "two seconds of work left, as long as the two blocks take"


def test_without_a_known_prefix_the_work_is_spread() -> None:
    router, _ = _knowing(3)
    chosen = []
    for number in range(6):
        node = router.choose(0, [number], 100.0 * number)
        router.note_served(node, 1, 100.0 * number)
        chosen.append(node)
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2]


def test_turns_of_a_conversation_are_one_session() -> None:
    workload = workload_of([["s", "a"], ["s", "b"], ["s", "a", "a2"], ["s", "b", "b2", "b3"], ["s", "a", "a2", "a3"]])
    assert sessions_of(workload).tolist() == [0, 1, 0, 1, 0]


def test_a_common_prompt_makes_no_session() -> None:
    # Ten conversations begin with the same block, with which a request of its own ends.
    prompts = [["s"], *([["s", str(number)] for number in range(10)]), ["s", "3", "more"]]
    assert sessions_of(workload_of(prompts)).tolist() == [*range(11), 4]


def test_partial_blocks_do_not_hide_the_turn_before() -> None:
    prompts = [
        Prompt(0, (1, 2, 90), has_tail=True),
        Prompt(1, (1, 2, 3, 91), has_tail=True),
        Prompt(2, (92,), has_tail=True),
    ]
    assert sessions_of(make_workload(prompts)).tolist() == [0, 0, 1]


def test_the_traces_own_sessions_are_used_where_all_requests_have_one() -> None:
    prompts = [Prompt(0, (1,), session=7), Prompt(1, (1, 2), session=3), Prompt(2, (1, 2, 3), session=7)]
    assert sessions_of(make_workload(prompts)).tolist() == [0, 1, 0]
    assert sessions_of(make_workload([*prompts, Prompt(3, (1, 2, 3, 4))])).tolist() == [0, 0, 0, 0]


@pytest.mark.slow
def test_derived_sessions_are_the_published_ones() -> None:
    settings = SimulationSettings(str(real_trace("agentic_cc_512.npz")), 3000, "stored", 1 << 26, ())
    workload = settings.workload()
    true, derived = sessions_of(workload), sessions_of(replace(workload, session=np.full(3000, NO_SESSION)))
    pairs = {*zip(derived.tolist(), true.tolist(), strict=True)}
    assert len(pairs) == derived.max() + 1, "no derived session has requests of two"
    assert true.max() < derived.max() < 3 * true.max()
