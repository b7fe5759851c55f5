"""TensorRT-LLM's connector over a real daemon, driven by a scripted executor that checks all KV it reads (`standin`)."""

import multiprocessing
import re
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.trtllm import Settings
from kvpool_client.trtllm.shared import Board
from tests.rigs.daemon import Daemon

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from tests.engines.trtllm.interface import llm_args  # noqa: E402
from tests.engines.trtllm.standin import Executor, Request  # noqa: E402

pytestmark = pytest.mark.torch

DOCUMENT = Path(__file__).parents[3] / "docs" / "engines.md"
PROMPT = np.random.default_rng(5).integers(0, 900, 30).tolist()
Start = Callable[..., Executor]


@pytest.fixture
def start(start_trtllm: Start) -> Start:
    """Starts engines with the first cache manager."""
    return start_trtllm


def _stats(engine: Executor) -> dict[str, Any]:
    return {**engine.scheduler.half.stats(), **engine.workers[0].half.stats()}


@pytest.mark.gpu
def test_kv_on_a_gpu_comes_back(shared_daemon: Daemon, start: Start) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    engine = start(shared_daemon, device="cuda", step_tokens=8)
    cold = engine.answer(PROMPT, 6)[1]
    assert engine.answer(PROMPT, 6) == (28, cold)


@pytest.mark.parametrize("numbered", [lambda layer: 2 * layer, lambda layer: layer + 1])
def test_layers_without_kv_do_not_shift_the_others(
    shared_daemon: Daemon, start: Start, numbered: Callable[[int], int]
) -> None:
    engine = start(shared_daemon, warm=False)
    engine.layer_number = numbered
    engine.warm_up()
    cold = engine.answer(PROMPT, 6)[1]
    assert engine.answer(PROMPT, 6) == (28, cold)


def test_a_model_whose_hooks_are_skipped_is_served_step_by_step(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, cuda_graph_config=object())
    cold = engine.answer(PROMPT, 6)[1]
    assert engine.answer(PROMPT, 6) == (28, cold)


def test_a_shared_prefix_is_claimed_and_the_rest_computed_in_steps(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, step_tokens=5)
    engine.answer(PROMPT, 3)
    other = [*PROMPT[:14], *range(20)]
    assert engine.answer(other, 3)[0] == 12
    assert engine.answer(other, 3)[0] == 32


def test_a_small_staging_cuts_claims_and_gets_its_room_back(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, ranks=2, warm=False)
    half = engine.scheduler.half
    chunk_bytes = 3 * 2 * 4 * 16
    half._settings = replace(half._settings, staging_bytes=10 * 2 * chunk_bytes)
    engine.warm_up()
    engine.answer(PROMPT)
    for _ in range(3):
        assert engine.answer(PROMPT)[0] == 28
    first, second = engine.ask(PROMPT), engine.ask(PROMPT)
    engine.run()
    assert (first.claimed, second.claimed) == (28, 12)
    assert _stats(engine)["staging_slots_free"] == 10 - 7 - 3
    assert engine.answer(PROMPT)[0] == 28


def test_a_daemon_that_dies_between_the_steps_of_a_prompt(daemon: Daemon, start: Start) -> None:
    engine = start(daemon, step_tokens=8)
    request = engine.ask(PROMPT, 5)
    engine.step()
    daemon.kill()
    engine.run()
    tokens = request.tokens
    daemon.start()
    engine.warm_up()
    assert engine.answer(PROMPT, 5)[1] == tokens[30:]
    assert engine.answer(PROMPT, 5) == (28, tokens[30:])


def test_chunks_too_large_for_the_daemon_are_never_claimed(start_daemon: Callable[..., Daemon], start: Start) -> None:
    engine = start(start_daemon(dram__capacity="1MiB"), warm=False, tokens_per_block=32768, blocks=8)
    for _ in range(3):
        assert engine.answer(PROMPT)[0] == 0
    assert engine.workers[0].half.stats()["failed_register_kv_caches"] == 1


def test_an_engine_without_a_daemon_runs_and_finds_it_when_it_comes(
    start_daemon: Callable[..., Daemon], start: Start
) -> None:
    daemon = start_daemon()
    daemon.kill()
    engine = start(daemon, warm=False)
    assert engine.answer(PROMPT, 5)[0] == 0
    daemon.start()
    engine.warm_up()
    cold = engine.answer(PROMPT, 5)
    assert engine.answer(PROMPT, 5) == (28, cold[1])


def test_a_prefix_is_as_long_as_every_rank_has_it(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, ranks=2)
    cold = engine.answer(PROMPT, 5)[1]
    pool = engine.workers[1].half._pool
    with pool.acquire(pool.lookup(pool.keys(PROMPT))) as lease:
        lease.hold.session.arena.view()[int(lease.hold.rows.offsets[2])] ^= 1
        assert pool.load(lease, into=np.zeros((lease.chunks, pool.layout.chunk_bytes), np.uint8)).wait().chunks == 2
    assert pool.lookup(pool.keys(PROMPT)).chunks == 2
    assert engine.answer(PROMPT, 5) == (8, cold)


def test_multimodal_prompts_are_not_served(shared_daemon: Daemon, start: Start) -> None:
    engine, before = start(shared_daemon), shared_daemon.stats()["saved_chunks"]
    for _ in range(2):
        assert engine.answer(PROMPT, multimodal_hashes=[[1, 2]])[0] == 0
    assert shared_daemon.stats()["saved_chunks"] == before
    assert _stats(engine)["refused_requests"] >= 2


def test_a_request_without_its_salt_is_not_served(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon)
    engine.answer(PROMPT)
    silent = types.SimpleNamespace(request_id=900, get_tokens=lambda _beam: PROMPT)
    assert engine.scheduler.get_num_new_matched_tokens(silent, 0) == (0, False)
    numbered = types.SimpleNamespace(request_id=901, get_tokens=lambda _beam: PROMPT, cache_salt_id=7)
    assert engine.scheduler.get_num_new_matched_tokens(numbered, 0) == (0, False)
    unsalted = types.SimpleNamespace(request_id=902, get_tokens=lambda _beam: PROMPT, cache_salt_id=None)
    assert engine.scheduler.get_num_new_matched_tokens(unsalted, 0) == (28, False)
    engine.scheduler.request_finished(unsalted, [])


def test_a_claim_that_the_runtime_does_not_use_is_released(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon)
    engine.answer(PROMPT)
    free = _stats(engine)["staging_slots_free"]
    ends: tuple[Callable[[Request], object], ...] = (
        lambda it: engine.scheduler.cancel_load(it, 0, 28),
        lambda it: engine.scheduler.request_finished(it, []),
    )
    for end in ends:
        request = Request(1000, list(PROMPT), 1)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (28, False)
        assert _stats(engine)["staging_slots_free"] == free - 7
        end(request)
        assert _stats(engine)["staging_slots_free"] == free
    request = Request(1001, list(PROMPT), 1)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.scheduler.cancel_load(request, 12, 28)
    assert _stats(engine)["staging_slots_free"] == free - 3
    engine.scheduler.request_reset(request)
    assert _stats(engine)["staging_slots_free"] == free


def test_a_request_that_runs_again_saves_from_its_new_blocks(
    shared_daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(shared_daemon, step_tokens=8)
    engine.layer_number = lambda layer: layer + 1  # so that nothing is copied before the commit
    engine.answer([1, 2, 3])
    request = engine.ask(PROMPT, 3)
    with monkeypatch.context() as patch:
        patch.setattr(kv.Save, "commit", lambda self, wait=True: None)
        engine.step()
    engine.abort(request)
    engine.run()
    assert engine.answer(PROMPT, 3)[0] == 28
    assert shared_daemon.problems() == []


def test_a_full_pool_declines_saves_and_does_not_stop_the_engine(
    start_daemon: Callable[..., Daemon], start: Start
) -> None:
    engine = start(start_daemon(dram__capacity="2MiB"), tokens_per_block=512, settings={"STAGING_MIB": "8"})
    for seed in range(6):
        engine.answer(np.random.default_rng(seed).integers(0, 900, 2048).tolist(), 2)
    stats = _stats(engine)
    assert stats["saved_blocks"] > 0


@pytest.mark.parametrize(
    "fields", [{"pipeline_parallel_size": 2}, {"kv_dtype": "int8"}, {"speculative_config": object()}]
)
def test_engines_that_are_not_served_share_nothing(shared_daemon: Daemon, start: Start, fields: dict[str, Any]) -> None:
    engine, before = start(shared_daemon, warm=False, **fields), shared_daemon.stats()["saved_chunks"]
    assert [engine.answer(PROMPT)[0] for _ in range(2)] == [0, 0]
    assert shared_daemon.stats()["saved_chunks"] == before


def test_kv_with_separate_scales_is_not_stored(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, warm=False)
    worker = type(engine.workers[0])(llm_args())
    worker.register_kv_caches(torch.zeros(4, 3, 2, 32, dtype=torch.uint8))
    assert worker.half.stats() == {**worker.half.stats(), "failed_register_kv_caches": 1}
    worker.half.close()


def test_nothing_is_claimed_for_a_rank_that_cannot_map_the_staging(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, ranks=2, warm=False)
    engine.workers[1].half._geometry = None
    for _ in range(3):
        assert engine.answer(PROMPT)[0] == 0
    assert not engine.scheduler.half.is_serving


def test_the_board_is_open_to_another_process_of_the_user() -> None:
    board = Board.create(2)
    other = multiprocessing.get_context("fork").Process(target=lambda: Board.attach(board.path, 2).set_done(1, 7))
    other.start()
    other.join()
    assert other.exitcode == 0
    board.set_done(0, 9)
    assert board.done(range(2)) == 7
    with pytest.raises(OSError, match="smaller"):
        Board.attach(board.path, 3)
    board.close()


@pytest.mark.parametrize("step_tokens", [1 << 20, 5])
def test_the_engines_priorities_reach_the_pool(shared_daemon: Daemon, start: Start, step_tokens: int) -> None:
    engine, before = start(shared_daemon, step_tokens=step_tokens), shared_daemon.stats()["dram.retained_chunks"]
    engine.answer(PROMPT, 8, priorities=[100, 100, 100])
    assert shared_daemon.stats()["dram.retained_chunks"] - before == 3
    engine.answer(PROMPT, 8, priorities=[35, 35, 35])
    engine.answer(PROMPT, 8)
    assert shared_daemon.stats()["dram.retained_chunks"] - before == 3, "what nobody speaks of is left as it is"
    assert _stats(engine)["clipped_blocks"] == 0


def test_priorities_of_another_form_are_left_out(shared_daemon: Daemon, start: Start) -> None:
    engine, before = start(shared_daemon), shared_daemon.stats()
    engine._priorities = lambda request: [100] * 99  # type: ignore[method-assign]  # not one for each new block
    engine.answer(PROMPT, 8)
    after = shared_daemon.stats()
    assert [after[name] - before[name] for name in ("dram.retained_chunks", "saved_chunks")] == [0, 9]


def test_priorities_beyond_the_share_are_clipped_and_counted(start_daemon: Callable[..., Daemon], start: Start) -> None:
    engine = start(start_daemon(dram__retained_quota="0"))
    engine.answer(PROMPT, 4, priorities=[90, 90])
    assert _stats(engine)["clipped_blocks"] == 2


def test_the_settings_in_the_document_are_accepted() -> None:
    text = DOCUMENT.read_text()
    given = dict(re.findall(r"^export (TLLM_KVPOOL_\w+)=(\S+)", text, re.MULTILINE))
    assert given
    assert Settings.read(llm_args(), given, "1").socket == "/run/kvpool/kvpool.sock"
    assert 'connector_module="kvpool_client.trtllm"' in text
