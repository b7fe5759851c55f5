"""TensorRT-LLM's layer groups over a real daemon, driven by an executor that takes window pages back after every step."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from kvpool_client.trtllm.claims.claim import BrokenClaim  # noqa: E402
from tests.engines.trtllm.standin import Executor  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = np.random.default_rng(5).integers(0, 900, 30).tolist()
FULL, WINDOW = 0, 1
Start = Callable[..., Executor]


@pytest.fixture
def start(start_trtllm: Callable[..., Any]) -> Start:
    """Starts engines with layer groups."""
    return lambda daemon, **args: start_trtllm(daemon, kind="windowed", **args)


def _stats(engine: Executor) -> dict[str, Any]:
    return {**engine.scheduler.half.stats(), **engine.workers[0].half.stats()}


@pytest.mark.parametrize("step_tokens", [5, 8, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (4, 13))])
def test_steps_of_a_prompt_end_where_later_prompts_go_on(shared_daemon: Daemon, start: Start, step_tokens: int) -> None:
    engine = start(shared_daemon, windows=(None, 6, 11), step_tokens=step_tokens)
    cold = engine.answer(PROMPT, 6)[1]
    assert engine.answer(PROMPT, 6) == (28, cold)
    for end in range(step_tokens, 30, step_tokens):
        other = [*PROMPT[:end], *[7] * 9]
        assert engine.answer(other)[0] == end // 4 * 4, end


def test_few_chunks_of_windows_are_stored_and_all_of_full_groups(shared_daemon: Daemon, start: Start) -> None:
    engine, before = start(shared_daemon, windows=(None, 8)), shared_daemon.stats()["saved_chunks"]
    engine.answer(PROMPT)
    assert shared_daemon.stats()["saved_chunks"] - before == 7 + 2
    other = start(shared_daemon, windows=(8,), attn_backend="FLASHINFER")
    other.answer(PROMPT)
    assert shared_daemon.stats()["saved_chunks"] - before == 7 + 2 + 2


def test_a_page_that_a_window_has_passed_is_not_read_where_the_position_came_late(
    shared_daemon: Daemon, start: Start
) -> None:
    """The first step behind a claim stores nothing, and in the second one the window has passed block 10."""
    engine = start(shared_daemon, windows=(None, 6), shows_matched=False)
    engine.answer(PROMPT)
    longer = [*PROMPT, *range(40, 60)]
    assert engine.answer(longer, 2)[0] == 28
    other = [*longer, 1, 2]
    assert engine.answer(other, 3)[0] == 28
    assert shared_daemon.problems() == []


def test_a_page_that_a_window_has_passed_is_not_read_where_decoding_is_scheduled_early(
    shared_daemon: Daemon, start: Start
) -> None:
    """The first step behind a claim stores nothing. The second one decodes, and its position is one token late: by that the
    window would still have block 7, which the end at block 9 needs, where others have left this prompt's way."""
    engine = start(shared_daemon, windows=(None, 9), shows_matched=False, overlaps=True)
    engine.answer(PROMPT)
    longer = [*PROMPT[:28], *range(40, 60)]
    assert engine.answer(longer, 2)[0] == 28
    beginning = longer[:36]
    assert engine.answer([*beginning, 1, 2, 3, 4], 3)[0] == 28
    assert engine.answer([*beginning, 5, 6, 7, 8], 3)[0] == 28, "what the end needs was not stored"
    assert shared_daemon.problems() == []


def test_where_prompts_part_is_an_end_after_the_second_one(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, blocks=128)
    shared = PROMPT[:16]
    assert engine.answer([*shared, *range(30)])[0] == 0
    assert engine.answer([*shared, *range(100, 130)])[0] == 0, "full groups alone have the shared beginning"
    assert engine.answer([*shared, *range(200, 230)])[0] == 16


def test_a_copy_of_a_window_that_came_after_the_step_would_be_noticed(
    shared_daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this executor is for: a page that a window has passed is overwritten before the next step."""
    from kvpool_client.trtllm.saves.window_memory import WindowMemory

    engine = start(shared_daemon)
    copy_out: Any = WindowMemory.copy_out
    late: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(WindowMemory, "copy_out", lambda *given: late.extend([given]) or [])  # type: ignore[func-returns-value]
        request = engine.ask(PROMPT, 9)
        saves = engine.workers[0].half._saves
        patch.setattr(type(saves), "advance_saves", lambda self: None)
        while request.to_generate:
            engine.step()
    for given in late:
        copy_out(*given)
    engine.run()
    with pytest.raises(AssertionError, match="group 1"):
        engine.answer(PROMPT, 9)
    engine._active.clear()


def test_an_aborted_and_a_replayed_request_never_save_from_others_pages(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, step_tokens=8)
    request = engine.ask(PROMPT, 3)
    engine.step()
    engine.abort(request)
    engine.step()
    engine.replay(request)
    engine.step()
    engine.replay(request)
    engine.run()
    assert engine.answer(PROMPT, 3)[0] == 28
    assert shared_daemon.problems() == []


def test_full_groups_without_their_windows_are_no_hit(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon)
    pool = engine.workers[0].half._pool
    keys, rows = pool.keys(PROMPT), [np.zeros((7, pool.layout.of_group(0).chunk_bytes), np.uint8)]
    rows.append(np.zeros((0, pool.layout.of_group(1).chunk_bytes), np.uint8))
    pool.save(keys, from_=rows, chosen=(range(7), ())).commit()
    assert pool.lookup(keys, chunks_max=7).full_chunks == 7
    assert engine.answer(PROMPT, 5)[0] == 0


def test_two_divisions_of_the_layers_never_share(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon, layer_groups=[[0, 2], [1, 3]])
    engine.answer(PROMPT)
    for divided in ([[0, 1], [2, 3]], [[1, 3], [0, 2]]):
        assert start(shared_daemon, layer_groups=divided).answer(PROMPT)[0] == 0
    assert start(shared_daemon, windows=(None, 12), layer_groups=[[0, 2], [1, 3]]).answer(PROMPT)[0] == 0
    assert start(shared_daemon, layer_groups=[[0, 2], [1, 3]]).answer(PROMPT)[0] == 28


def test_scratch_pages_are_refused_in_one_line(
    shared_daemon: Daemon, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    before = shared_daemon.stats()["saved_chunks"]
    with caplog.at_level(logging.WARNING):
        engine = start(shared_daemon, warm=False, enable_swa_scratch_reuse=True)
        assert [engine.answer(PROMPT, 9)[0] for _ in range(2)] == [0, 0]
    logged = [record.message for record in caplog.records if "shares nothing" in record.message]
    assert len(logged) == 1
    assert "enable_swa_scratch_reuse" in logged[0]
    assert shared_daemon.stats()["saved_chunks"] == before


@pytest.mark.parametrize(("setting", "counter"), [("STAGING_MIB", "failed_claims"), ("WINDOW_MIB", "refused_layout")])
def test_memory_too_small_for_a_window_is_refused_by_name(
    shared_daemon: Daemon, start: Start, caplog: pytest.LogCaptureFixture, setting: str, counter: str
) -> None:
    """Two blocks of 8192 tokens of a window, 2 layers of K and V of 16 bytes: 1 MiB."""
    with caplog.at_level(logging.WARNING):
        engine = start(
            shared_daemon,
            warm=False,
            windows=(None, 16400),
            blocks=4,
            tokens_per_block=8192,
            settings={"STAGING_MIB": "64", "WINDOW_MIB": "64", setting: "1"},
        )
        for _ in range(3):
            engine.answer(PROMPT)
    assert _stats(engine)[counter] == 1
    assert any(f"TLLM_KVPOOL_{setting}" in record.message for record in caplog.records)


def test_windows_without_room_are_declined_and_cost_a_hit_alone(shared_daemon: Daemon, start: Start) -> None:
    engine = start(shared_daemon)
    memory = engine.workers[0].half._saves._source.memory
    free = memory._windows[WINDOW].free
    taken = [free.pop() for _ in range(len(free) - 1)]
    cold = engine.answer(PROMPT, 2)[1]
    assert _stats(engine)["declined_blocks"] == 2
    free.extend(taken)
    assert engine.answer(PROMPT, 2) == (0, cold)
    assert engine.answer(PROMPT, 2) == (28, cold)
    wait_until(lambda: len(free) == len(taken) + 1, "all slots are given back")


HANDED_BACK = [(0, 8), (0, 10), (0, 24), (0, 28), (8, 28), (20, 28), (27, 28)]


@pytest.mark.parametrize(
    ("start_at", "end", "shows_matched"),
    [
        *((start_at, end, number % 2 == 0) for number, (start_at, end) in enumerate(HANDED_BACK)),
        *(
            pytest.param(start_at, end, number % 2 == 1, marks=pytest.mark.slow)
            for number, (start_at, end) in enumerate(HANDED_BACK)
        ),
    ],
)
def test_parts_that_the_runtime_hands_back(
    shared_daemon: Daemon, start: Start, *, start_at: int, end: int, shows_matched: bool
) -> None:
    engine = start(shared_daemon, windows=(None, 9), shows_matched=shows_matched)
    cold = engine.answer(PROMPT, 6)[1]
    free = _stats(engine)["staging_slots_free"]
    request = engine.ask(PROMPT, 6)
    assert request.claimed == 28
    if start_at:
        with pytest.raises(BrokenClaim, match=f"request {request.request_id}: tokens {start_at} to {end} .* expected"):
            engine.hand_back(request, start_at, end)
        with pytest.raises(BrokenClaim, match=f"request {request.request_id}"):
            engine.step()  # the engine that goes on all the same is stopped
        engine._active.remove(request)
        engine._take_pages(request)
        engine.scheduler.request_finished_by_layer_group(request, [])
    else:
        engine.hand_back(request, start_at, end)
        engine.run()
        assert request.tokens[len(PROMPT) :] == cold
    assert engine.answer(PROMPT, 6) == (28, cold)
    wait_until(lambda: engine._nothing_is_saved() and _stats(engine)["staging_slots_free"] >= free, "slots are back")


@pytest.mark.parametrize(
    ("window", "start_at"),
    [
        (40, 8),
        (40, 27),
        (8, 27),
        (10, 27),
        *(pytest.param(40, start_at, marks=pytest.mark.slow) for start_at in (4, 20)),
    ],
)
def test_an_end_that_has_its_windows_is_served(shared_daemon: Daemon, start: Start, window: int, start_at: int) -> None:
    engine, end = start(shared_daemon, windows=(None, window)), 28
    cold = engine.answer(PROMPT, 6)[1]
    request = engine.ask(PROMPT, 6)
    engine.hand_back(request, start_at, end)
    engine.run()
    assert request.tokens[len(PROMPT) :] == cold
    assert engine.answer(PROMPT, 6) == (28, cold)
    assert shared_daemon.problems() == []


@pytest.mark.parametrize("taken", [0, 12])
def test_a_promise_that_is_not_taken_whole_without_a_call(shared_daemon: Daemon, start: Start, taken: int) -> None:
    """As the runtime did before it had `cancel_load`: nothing of it is served, a part of it ends the step."""
    engine = start(shared_daemon, windows=(None, 8))
    cold = engine.answer(PROMPT, 6)[1]
    cancel = engine.scheduler.cancel_load
    engine.scheduler.cancel_load = lambda request, start, end: None
    request = engine.ask(PROMPT, 6)
    engine.hand_back(request, taken, 28)
    engine.scheduler.cancel_load = cancel
    if taken:
        with pytest.raises(BrokenClaim, match=f"request {request.request_id}"):
            engine.step()
        engine._active.clear()
    else:
        engine.run()
        assert request.tokens[len(PROMPT) :] == cold
        assert engine.answer(PROMPT, 6) == (28, cold)
