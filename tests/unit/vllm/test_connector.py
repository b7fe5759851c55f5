"""The vLLM connector in vLLM's order of calls, against a real daemon: what is loaded, saved, separated and left to compute.

Every byte that the scripted engine reads is checked (`wrong_reads`), so each test is one of right bytes too.
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.events import EventKind
from kvpool.keys import salt_tag
from kvpool.router_events.columns import unpack_events
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, prompt


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("length", [CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 1, 5 * CHUNK + BLOCK + 2])
def test_computed_chunks_are_loaded_by_another_engine(start: StartEngine, load: str, length: int) -> None:
    tokens = prompt(1, length)
    first = start(kvpool__load=load)
    assert ask(first, "cold", tokens).external == 0
    usable = min(length // CHUNK * CHUNK, (length - 1) // BLOCK * BLOCK)
    assert ask(first, "again", tokens).external == usable
    assert ask(start(kvpool__load=load), "other", tokens).external == usable
    assert counted(first, "saved_chunks") == length // CHUNK


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_common_prefix_is_loaded_and_the_rest_computed(start: StartEngine, load: str) -> None:
    engine = start(kvpool__load=load)
    ask(engine, "first", prompt(1, 4 * CHUNK) + prompt(2, 30))
    assert ask(engine, "second", prompt(1, 4 * CHUNK) + prompt(3, 50)).external == 4 * CHUNK
    assert ask(engine, "third", prompt(1, 3 * CHUNK + BLOCK) + prompt(4, 50)).external == 3 * CHUNK
    assert ask(engine, "none", prompt(5, 80)).external == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_blocks_that_the_engine_holds_are_not_loaded(start: StartEngine, load: str) -> None:
    tokens = prompt(1, 6 * CHUNK + 3)
    ask(start(), "cold", tokens)
    engine = start(kvpool__load=load)
    engine.run(Request("short", tokens[: 2 * CHUNK + BLOCK + 1]))
    request = Request("long", list(tokens))
    engine.run(request)
    assert (request.held, request.external) == (2 * CHUNK + BLOCK, 4 * CHUNK - BLOCK)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_decoded_chunks_are_loaded_in_the_next_turn(start: StartEngine, load: str) -> None:
    engine = start(kvpool__load=load)
    first = ask(engine, "first", prompt(1, 3 * CHUNK + 1), new_tokens=2 * CHUNK + 2)
    turn = ask(engine, "second", first.tokens + prompt(2, 5))
    assert turn.external == 5 * CHUNK


def test_prefill_in_pieces_saves_each_chunk_once(start: StartEngine) -> None:
    engine = start(budget=CHUNK + 3)
    tokens = prompt(1, 6 * CHUNK + 2)
    ask(engine, "pieces", tokens)
    assert counted(engine, "saved_chunks") == 6
    assert ask(engine, "again", tokens).external == 6 * CHUNK


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_chunk_may_be_any_number_of_blocks(start: StartEngine, blocks: int) -> None:
    engine = start(kvpool__chunk_tokens=blocks * BLOCK)
    tokens = prompt(blocks, 9 * BLOCK + 1)
    ask(engine, "cold", tokens)
    assert ask(engine, "warm", tokens).external == 9 // blocks * blocks * BLOCK


def test_many_requests_at_once_are_each_right(start: StartEngine) -> None:
    engine = start(blocks=256, budget=64)
    prompts = [prompt(1, CHUNK * 2) + prompt(number, 20 + 7 * number) for number in range(8)]
    engine.run(*(Request(f"cold-{number}", list(tokens), new_tokens=4) for number, tokens in enumerate(prompts)))
    engine.forget()
    warm = [Request(f"warm-{number}", list(tokens), new_tokens=4) for number, tokens in enumerate(prompts)]
    engine.run(*warm)
    # A request with a late answer may find the common prefix already computed by another one.
    assert all(request.held + request.external >= 2 * CHUNK for request in warm)


def test_salts_never_share(start: StartEngine) -> None:
    engine = start()
    tokens = prompt(1, 4 * CHUNK + 1)
    ask(engine, "a", tokens, cache_salt="a")
    assert ask(engine, "b", tokens, cache_salt="b").external == 0
    assert ask(engine, "none", tokens).external == 0
    assert ask(engine, "odd", tokens, cache_salt="\udc80\x00ö").external == 0
    assert ask(engine, "a again", tokens, cache_salt="a").external == 4 * CHUNK


def test_adapters_share_neither_with_the_base_nor_with_others_of_their_name(start: StartEngine) -> None:
    engine = start()
    tokens = prompt(1, 4 * CHUNK + 1)
    here, there = (SimpleNamespace(lora_name="tuned", lora_path=path) for path in ("/here", "/there"))
    ask(engine, "tuned", tokens, lora_request=here)
    assert ask(engine, "base", tokens).external == 0
    assert ask(engine, "same name", tokens, lora_request=there).external == 0
    assert ask(engine, "tuned again", tokens, lora_request=here).external == 4 * CHUNK
    # An adapter's name in the place of a salt is still a salt.
    assert ask(engine, "salt", tokens, cache_salt="tuned").external == 0


def test_saved_chunks_are_published_with_token_ids_adapter_and_salt(start: StartEngine, new_daemon: Daemon) -> None:
    engine = start(budget=2 * CHUNK + 3)
    tokens = prompt(1, 4 * CHUNK + 1)
    lora = SimpleNamespace(lora_name="tuned", lora_path="/here")
    ask(engine, "all", tokens, lora_request=lora, cache_salt="tenant")
    ask(engine, "seen", tokens, mm_features=["an image"])
    with new_daemon.admin() as admin:
        chunks = [event for event in unpack_events(admin.events(b"", 0).events) if event.kind == EventKind.STORED]
    with_ids = [event for event in chunks if event.tokens]
    published = np.frombuffer(b"".join(event.tokens for event in with_ids), "<i4").tolist()
    assert published == tokens[: 4 * CHUNK]
    assert len(with_ids) > 1, "saved in pieces"
    assert {(event.adapter, event.salt_tag) for event in with_ids} == {("tuned", salt_tag(b"tenant"))}
    without = [event for event in chunks if not event.tokens]
    assert sum(len(event.chunks) for event in without) == 4, "an image's KV comes of more than its token ids"


def test_other_weights_share_nothing(start: StartEngine) -> None:
    tokens = prompt(1, 4 * CHUNK + 1)
    ask(start(weights="seven"), "seven", tokens)
    assert ask(start(weights="eight"), "eight", tokens).external == 0
    assert ask(start(weights="seven"), "seven again", tokens).external == 4 * CHUNK


def test_two_shards_store_their_own_and_a_prefix_is_as_long_as_both_have_it(start: StartEngine) -> None:
    tokens = prompt(1, 5 * CHUNK + 1)
    first = start(ranks=2)
    ask(first, "cold", tokens)
    assert counted(first, "saved_chunks") == 10
    assert ask(start(ranks=2), "warm", tokens).external == 5 * CHUNK
    longer = tokens + prompt(2, 3 * CHUNK)
    first.workers[1]._worker.pool.close()
    ask(first, "one shard alone", longer)
    fresh = start(ranks=2)
    assert ask(fresh, "half", longer).external == 5 * CHUNK
    assert counted(fresh, "saved_chunks") == 3  # chunks that the other shard had missed
    assert counted(fresh, "present_chunks") == 3


@pytest.mark.parametrize("load", ["async", "sync"])
def test_shards_load_in_both_ways(start: StartEngine, load: str) -> None:
    tokens = prompt(1, 5 * CHUNK + 1)
    engine = start(ranks=2, kvpool__load=load)
    ask(engine, "cold", tokens)
    assert ask(engine, "warm", tokens, new_tokens=CHUNK).external == 5 * CHUNK


def test_shards_of_another_number_share_nothing(start: StartEngine) -> None:
    tokens = prompt(1, 3 * CHUNK + 1)
    ask(start(ranks=2), "two", tokens)
    assert ask(start(), "one", tokens).external == 0


def test_replicated_kv_is_stored_once_and_loaded_by_every_rank(start: StartEngine) -> None:
    tokens = prompt(1, 3 * CHUNK + 1)
    engine = start(ranks=2, replicas=2)
    ask(engine, "cold", tokens)
    assert counted(engine, "saved_chunks") == 3
    assert ask(engine, "warm", tokens).external == 3 * CHUNK
    assert counted(engine, "loaded_chunks") == 6


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_preempted_request_comes_back_through_the_pool(start: StartEngine, load: str) -> None:
    engine = start(kvpool__load=load)
    request = Request("preempted", prompt(1, 4 * CHUNK + 1), new_tokens=200)
    engine.requests.append(request)
    engine.step_until(lambda: counted(engine, "saved_chunks") == 5, "a decoded chunk is stored")
    engine.preempt(request)
    engine.step_until(lambda: len(request.offers) > 1, "it is taken up again")
    assert request.external >= 5 * CHUNK
    engine.abort(request)


def test_an_aborted_load_frees_its_blocks_once_it_has_ended(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    tokens = prompt(1, 4 * CHUNK + 1)
    ask(engine, "cold", tokens)
    engine.forget()
    request = Request("aborted", list(tokens))
    engine.requests.append(request)
    while request.state == "waiting":
        engine.step()
    engine.abort(request)
    engine.step_until(lambda: request not in engine.requests, "the load has ended")
    assert ask(engine, "warm", tokens).external == 4 * CHUNK
    wait_until(lambda: daemon.stats()["leases"] == 0, "no lease is left")


def test_requests_end_with_nothing_left_behind(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    tokens = prompt(1, 4 * CHUNK + 1)
    ask(engine, "cold", tokens)
    ask(engine, "warm", tokens)
    assert engine.scheduler._scheduler._requests == {}
    wait_until(
        lambda: daemon.stats()["leases"] == daemon.stats()["reservations"] == 0, "no lease or reservation is left"
    )
    assert not daemon.problems()


def test_hits_are_reported_by_tier(start: StartEngine) -> None:
    engine = start()
    tokens = prompt(1, 4 * CHUNK + 1)
    ask(engine, "cold", tokens)
    engine.forget()
    sources = {}
    request = Request("warm", list(tokens))

    def note() -> None:
        sources.update(engine.scheduler.get_external_cache_hit_sources(request, request.external))

    engine.on_allocated = note
    engine.run(request)
    assert sources == {fake_vllm.CacheHitSource.HOST: 4 * CHUNK}
    assert engine.scheduler.get_external_cache_hit_sources(request, 3) == {
        fake_vllm.CacheHitSource.EXTERNAL_UNSPECIFIED: 3
    }
    assert engine.scheduler.get_external_cache_hit_sources(request, 0) == {}


def test_statistics_travel_once_and_add_up(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", prompt(1, 4 * CHUNK + 1))
    stats = engine.workers[0].get_kv_connector_stats()
    assert stats.data["saved_chunks"] == 4
    again = engine.workers[0].build_kv_connector_stats(dict(stats.to_dict()))
    assert again.aggregate(stats).data["saved_chunks"] == 8
    assert again.reduce()["kvpool_saved_chunks"] == 8
    assert not again.is_empty()
    again.reset()
    assert again.is_empty()
    assert "saved_chunks" not in (engine.workers[0].get_kv_connector_stats() or again).data


def test_reset_drops_this_model_alone(start: StartEngine) -> None:
    tokens = prompt(1, 4 * CHUNK + 1)
    engine, other = start(), start(weights="eight")
    ask(engine, "cold", tokens)
    ask(other, "other", tokens)
    assert engine.scheduler.reset_cache()
    assert ask(engine, "after", tokens).external == 0
    assert ask(other, "other again", tokens).external == 4 * CHUNK


def test_the_class_is_made_on_first_access_and_derives_from_vllms_base() -> None:
    with fake_vllm.installed():
        from kvpool_client.vllm import connector

        made: Any = connector.KVPoolConnector
        assert made == connector.KVPoolConnector
        assert issubclass(made, (fake_vllm.KVConnectorBase_V1,))
        assert issubclass(made, fake_vllm.SupportsHMA)
        assert not made.__abstractmethods__
        assert made.__module__ == connector.__name__
        assert made.requires_piecewise_for_cudagraph({"kvpool.load": "sync"})
        assert not made.requires_piecewise_for_cudagraph({})
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = connector.Other


def test_importing_the_module_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, kvpool_client.vllm.connector as c; print({'vllm', 'torch'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


def test_a_save_that_is_dropped_needs_no_delivery(start: StartEngine) -> None:
    assert not start().scheduler.requires_kv_delivery
