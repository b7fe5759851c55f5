"""Weights that change in place under the vLLM connector: nothing of the old ones is loaded, nothing old is stored as new."""

import pytest

from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.request import Request  # noqa: E402 - likewise
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, prompt, start_engine  # noqa: E402 - only where torch is

__all__ = ["start_engine"]
pytestmark = pytest.mark.torch

TOKENS = prompt(1, 5 * CHUNK + 1)


def test_a_reset_forgets_for_this_engine_and_leaves_others_chunks(start_engine: StartEngine, daemon: Daemon) -> None:
    engine, other = start_engine(), start_engine()
    ask(engine, "cold", TOKENS)
    assert engine.scheduler.reset_cache()
    assert ask(engine, "after", TOKENS).external == 0
    assert ask(engine, "again", TOKENS).external == 5 * CHUNK
    assert ask(other, "other", TOKENS).external == 5 * CHUNK
    assert counted(engine, "saved_chunks") == 10
    assert daemon.stats()["stored_chunks"] == 10


def test_what_is_stored_by_replicas_with_the_old_weights_is_not_found(start_engine: StartEngine) -> None:
    engine, replica = start_engine(), start_engine()
    assert engine.scheduler.reset_cache()
    ask(replica, "late", TOKENS)
    assert ask(engine, "after", TOKENS).external == 0
    assert replica.scheduler.reset_cache()
    assert ask(replica, "other's", TOKENS).external == 0, "nobody says that both have the same new weights"
    assert engine.scheduler.reset_cache()
    assert ask(engine, "once more", TOKENS).external == 0


@pytest.mark.parametrize("reset", ["engine", "node"])
def test_a_reset_needs_no_daemon(start_engine: StartEngine, daemon: Daemon, reset: str) -> None:
    engine = start_engine(kvpool__reset=reset, kvpool__timeout_s=0.2)
    ask(engine, "cold", TOKENS)
    daemon.kill()
    assert engine.scheduler.reset_cache()
    assert ask(engine, "after", TOKENS).external == 0


def test_a_reset_of_the_node_drops_the_models_chunks_for_all(start_engine: StartEngine, daemon: Daemon) -> None:
    engine, other, stranger = start_engine(kvpool__reset="node"), start_engine(), start_engine(weights="eight")
    ask(engine, "cold", TOKENS)
    ask(stranger, "stranger", TOKENS)
    assert engine.scheduler.reset_cache()
    wait_until(lambda: ask(other, "other", TOKENS).offers[0] in (0, 5 * CHUNK), "the flush is known")
    assert counted(other, "saved_chunks") == 5
    assert ask(stranger, "stranger again", TOKENS).external == 5 * CHUNK
    assert ask(engine, "after", TOKENS).external == 0, "what the other engine has stored since is of the old weights"


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_request_that_runs_through_a_reset_is_saved_under_neither(start_engine: StartEngine, load: str) -> None:
    engine = start_engine(budget=CHUNK, kvpool__load=load)
    request = Request("running", list(TOKENS), new_tokens=2)
    engine.arrive(request)
    engine.step()
    assert engine.scheduler.reset_cache()
    engine.run(request)
    engine.step_until(lambda: counted(engine, "saved_chunks") > 0, "what was under way is saved")
    assert counted(engine, "saved_chunks") == 1
    assert ask(engine, "new", TOKENS).external == 0
    assert ask(start_engine(), "old", TOKENS).external == CHUNK


def test_a_request_that_waits_through_a_reset_belongs_to_the_new_weights(start_engine: StartEngine) -> None:
    engine = start_engine()
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("waiting", list(TOKENS))
    engine.arrive(request)
    assert engine.scheduler.reset_cache()
    engine.run(request)
    assert request.external == 0
    assert counted(engine, "saved_chunks") == 10


def test_a_load_under_way_does_not_come_to_the_new_weights(start_engine: StartEngine, daemon: Daemon) -> None:
    engine = start_engine()
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("loading", list(TOKENS), new_tokens=2)
    engine.on_allocated = lambda: engine.scheduler.reset_cache() and None
    engine.run(request)
    assert engine.recomputed == 1
    assert counted(engine, "saved_chunks") == 5
    wait_until(lambda: daemon.stats()["leases"] == 0, "no lease is left")
