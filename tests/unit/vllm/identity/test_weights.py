"""Weights that change in place under the vLLM connector: nothing of the old ones is loaded, nothing old is stored as new."""

import pytest

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, load_unreported, prompt

TOKENS = prompt(1, 5 * CHUNK + 1)


def test_a_reset_drops_prefixes_of_this_engine_alone(start: StartEngine, new_daemon: Daemon) -> None:
    engine, other = start(), start()
    ask(engine, "cold", TOKENS)
    assert engine.new_weights()
    assert ask(engine, "after", TOKENS).external == 0
    assert ask(engine, "again", TOKENS).external == 5 * CHUNK
    assert ask(other, "other", TOKENS).external == 5 * CHUNK
    assert counted(engine, "saved_chunks") == 10
    assert new_daemon.stats()["saved_chunks"] == 10


def test_chunks_stored_by_replicas_with_the_old_weights_are_not_found(start: StartEngine) -> None:
    engine, replica = start(), start()
    assert engine.new_weights()
    ask(replica, "late", TOKENS)
    assert ask(engine, "after", TOKENS).external == 0
    assert replica.new_weights()
    assert ask(replica, "other's", TOKENS).external == 0, "nobody says that both have the same new weights"
    assert engine.new_weights()
    assert ask(engine, "once more", TOKENS).external == 0


@pytest.mark.parametrize("reset", ["engine", "node"])
def test_a_reset_needs_no_daemon(start: StartEngine, daemon: Daemon, reset: str) -> None:
    engine = start(kvpool__reset=reset)
    ask(engine, "cold", TOKENS)
    daemon.kill()
    assert engine.new_weights()
    assert ask(engine, "after", TOKENS).external == 0


def test_a_reset_of_the_node_drops_the_models_chunks_for_all(start: StartEngine, daemon: Daemon) -> None:
    engine, other, stranger = start(kvpool__reset="node"), start(), start(weights="eight")
    ask(engine, "cold", TOKENS)
    ask(stranger, "stranger", TOKENS)
    assert engine.new_weights()
    wait_until(lambda: ask(other, "other", TOKENS).offers[0] in (0, 5 * CHUNK), "the flush is known")
    assert counted(other, "saved_chunks") == 5
    assert ask(stranger, "stranger again", TOKENS).external == 5 * CHUNK
    assert ask(engine, "after", TOKENS).external == 0, "what the other engine has stored since is of the old weights"


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_request_that_runs_through_a_reset_is_saved_under_neither(start: StartEngine, load: str) -> None:
    engine = start(budget=CHUNK, kvpool__load=load)
    request = Request("running", list(TOKENS), new_tokens=2)
    engine.arrive(request)
    engine.step()
    assert engine.new_weights()
    engine.run(request)
    engine.step_until(lambda: counted(engine, "saved_chunks") > 0, "what was under way is saved")
    assert counted(engine, "saved_chunks") == 1
    assert ask(engine, "new", TOKENS).external == 0
    assert ask(start(), "old", TOKENS).external == CHUNK


def test_a_request_that_waits_through_a_reset_belongs_to_the_new_weights(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("waiting", list(TOKENS))
    engine.arrive(request)
    assert engine.new_weights()
    engine.run(request)
    assert request.external == 0
    assert counted(engine, "saved_chunks") == 10


def test_a_load_under_way_is_not_used_with_the_new_weights(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("loading", list(TOKENS), new_tokens=2)

    def renew() -> None:
        assert engine.new_weights()

    engine.on_allocated = renew
    engine.run(request)
    assert engine.recomputed == 1
    assert counted(engine, "saved_chunks") == 5
    wait_until(lambda: daemon.stats()["leases"] == 0, "no lease is left")


def test_a_load_that_ended_just_before_is_not_used_with_the_new_weights(start: StartEngine) -> None:
    """vLLM does not know of it yet."""
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("loaded", list(TOKENS), new_tokens=2)
    load_unreported(engine, request)
    assert engine.scheduler.reset_cache()
    engine.run(request)
    assert engine.recomputed == 1


def test_loaded_chunks_that_wait_for_their_turn_are_not_saved_as_new(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    running = Request("running", prompt(2, CHUNK + 1), new_tokens=60)
    engine.arrive(running)
    engine.step()
    engine.step_until(lambda: not engine.blocks.held, "its prompt is saved")
    waiting = Request("waiting", list(TOKENS), new_tokens=2)
    engine.arrive(waiting)
    engine.step_until(lambda: waiting.state == "loading", "it loads")
    engine.running_max = 1
    engine.step_until(lambda: waiting.request_id in engine.arrived_loads, "it has loaded")
    assert not engine.blocks.reset_prefix_cache(), "requests have blocks"
    assert engine.scheduler.reset_cache()
    engine.step_until(lambda: not engine.blocks.held, "what the running one has computed before is saved")
    saved = counted(engine, "saved_chunks")
    engine.running_max = 2
    engine.run(waiting)
    engine.abort(running)
    engine.idle()
    assert waiting.external == 5 * CHUNK, "its KV is of the old weights"
    assert counted(engine, "saved_chunks") == saved
    engine.forget()
    assert ask(engine, "after", TOKENS).external == 0


def test_nothing_is_saved_until_vllm_has_forgotten_its_own_prefixes(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    running = Request("running", prompt(2, CHUNK + 1), new_tokens=60)
    engine.arrive(running)
    engine.step()
    engine.step_until(lambda: not engine.blocks.held, "its prompt is saved")
    saved = counted(engine, "saved_chunks")
    assert not engine.blocks.reset_prefix_cache()
    assert engine.scheduler.reset_cache()
    assert "nothing is saved until reset_prefix_cache succeeds" in caplog.text
    engine.run(Request("may hit old blocks", list(TOKENS), new_tokens=2))
    engine.abort(running)
    engine.step()
    assert counted(engine, "saved_chunks") == saved
    waiting = Request("waits", list(TOKENS), new_tokens=2)
    engine.arrive(waiting)
    assert engine.blocks.reset_prefix_cache()
    engine.run(waiting)
    assert counted(engine, "saved_chunks") == saved + 5
