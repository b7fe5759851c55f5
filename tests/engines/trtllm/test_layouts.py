"""TensorRT-LLM's connector over a real daemon, for engines of every layout: one pool tensor, pages, layer groups with windows.

What is claimed and stored is the same for all of them. A scripted executor checks all KV that it reads (`standin`).
"""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.trtllm.saves import save_room
from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from tests.engines.trtllm.standin import Executor  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = np.random.default_rng(5).integers(0, 900, 30).tolist()
BLOCK, CHUNKS = 4, 7
FULL, WINDOW = 0, 1
Start = Callable[..., Any]
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"kind": "windowed"},  # a full group, and one with a window of 8 tokens
}
of_every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def _windowed(*windows: int | None, ranks: int = 1, planes: int = 2) -> dict[str, Any]:
    return {"kind": "windowed", "windows": windows, "ranks": ranks, "planes": planes}


def _paged(manager: str, ranks: int, planes: int) -> dict[str, Any]:
    return {"manager": manager, "ranks": ranks, "planes": planes}


ENGINES: list[dict[str, Any]] = [
    _paged("v1", 2, 2),
    _paged("v1", 2, 1),
    _paged("v2", 2, 2),
    _paged("v2-apart", 1, 2),
    _paged("v2-apart", 2, 1),
    _windowed(8, None, ranks=2),
    _windowed(None, 6, 13, ranks=2, planes=1),
    _windowed(8),
    _windowed(5, 12),
    _windowed(None, 1),
]
SLOW_ENGINES: list[dict[str, Any]] = [
    _paged("v1", 1, 2),
    _paged("v2", 1, 2),
    _paged("v2", 2, 1),
    _paged("v2-apart", 2, 2),
    _windowed(None, 8),
    _windowed(None, 9),
    _windowed(None, 100, ranks=2),
]


@pytest.fixture
def start(start_trtllm: Start) -> Start:
    """Starts engines of any layout."""
    return start_trtllm


def _stats(engine: Executor) -> dict[str, Any]:
    return {**engine.scheduler.half.stats(), **engine.workers[0].half.stats()}


def _flip(engine: Executor, group: int, chunk: int, rank: int = 0, prompt: Sequence[int] = PROMPT) -> None:
    """Flip a bit of what the pool has of a chunk in a group, where the hit of the prompt needs it."""
    pool = engine.workers[rank].half._pool
    with pool.acquire(pool.lookup(pool.keys(prompt), chunks_max=len(prompt) // BLOCK)) as lease:
        rows = lease.hold.rows_from(0)[group]
        lease.hold.session.arena.view()[int(rows.offsets[chunk - lease.ranges[group].start]) + 5] ^= 1


@pytest.mark.parametrize("step_tokens", [1 << 20, 8])
@pytest.mark.parametrize("engine", [*ENGINES, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_ENGINES)])
def test_a_second_engine_claims_what_the_first_computed(
    shared_daemon: Daemon, start: Start, engine: dict[str, Any], step_tokens: int
) -> None:
    first = start(shared_daemon, step_tokens=step_tokens, **engine)
    cold = first.answer(PROMPT, 6)
    assert cold[0] == 0
    second = start(shared_daemon, **engine)
    assert second.answer(PROMPT, 6) == (28, cold[1])
    assert first.answer(PROMPT, 6) == (28, cold[1])
    attended = [window - 1 if window else 28 for window in engine.get("windows", (None,))]
    assert _stats(second)["loaded_blocks"] == sum(min(CHUNKS, -(-tokens // BLOCK)) for tokens in attended)
    wait_until(lambda: shared_daemon.stats()["leases"] == 0, "no leases are left")
    wait_until(lambda: shared_daemon.stats()["reservations"] == 0, "no reservations are left")
    assert shared_daemon.problems() == []


@pytest.mark.parametrize(
    ("layout", "shows_matched", "claimed"),
    [
        ("plain", True, [48, 48]),
        ("plain", False, [28, 48]),  # the next step catches up
        ("windows", True, [48, 48]),
        ("windows", False, [28, 28]),  # what the windows have passed by then is not stored
    ],
)
def test_what_is_computed_behind_a_claim_is_stored(
    shared_daemon: Daemon, start: Start, *, layout: str, shows_matched: bool, claimed: list[int]
) -> None:
    engine = start(shared_daemon, shows_matched=shows_matched, **LAYOUTS[layout])
    engine.answer(PROMPT)
    longer = [*PROMPT, *range(40, 60)]
    assert engine.answer(longer)[0] == 28
    assert [engine.answer([*longer, 1, 2], 3)[0] for _ in range(2)] == claimed


@pytest.mark.parametrize("engine", [{}, _windowed(None, 6, 13)])
def test_decoded_kv_is_stored_for_the_next_turn(shared_daemon: Daemon, start: Start, engine: dict[str, Any]) -> None:
    served = start(shared_daemon, **engine)
    _, generated = served.answer(PROMPT, 15)
    claimed, _ = served.answer([*PROMPT, *generated, 5, 6])
    assert claimed == (30 + 14) // BLOCK * BLOCK


@of_every_layout
def test_one_token_is_always_left_to_compute(shared_daemon: Daemon, start: Start, layout: dict[str, Any]) -> None:
    engine = start(shared_daemon, **layout)
    engine.answer(PROMPT[:24])
    engine.answer(PROMPT[:28])
    assert engine.answer(PROMPT[:28])[0] == 24
    assert engine.answer(PROMPT[:29])[0] == 28


@pytest.mark.parametrize(("held", "claimed"), [(0, 28), (8, 20), (20, 8), (24, 4), (28, 0), (6, 0)])
@pytest.mark.parametrize("engine", [{}, _windowed(None, 8, 14)])
def test_only_what_the_engine_does_not_hold_is_claimed(
    shared_daemon: Daemon, start: Start, engine: dict[str, Any], *, held: int, claimed: int
) -> None:
    served = start(shared_daemon, **engine)
    served.answer(PROMPT)
    assert served.answer(PROMPT, 4, held=held)[0] == claimed
    assert served.answer(PROMPT, 4)[0] == 28


@pytest.mark.parametrize("engine", [_paged("v1", 2, 2), _windowed(None, 6, ranks=2)])
def test_many_requests_at_once(shared_daemon: Daemon, start: Start, engine: dict[str, Any]) -> None:
    served = start(shared_daemon, blocks=128, step_tokens=7, **engine)
    prompts = [[number, *PROMPT[: 10 + number], *range(number)] for number in range(8)]
    cold = [served.ask(prompt, 4 + number) for number, prompt in enumerate(prompts)]
    served.run()
    warm = [served.ask(prompt, 4 + number) for number, prompt in enumerate(prompts)]
    served.run()
    assert [request.tokens for request in warm] == [request.tokens for request in cold]
    assert [request.claimed for request in warm] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    assert _stats(served)["staging_slots_free"] > 0


@of_every_layout
@pytest.mark.parametrize("bound", ["SAVES_MAX", "SAVE_BYTES_MAX"])
def test_prompts_that_end_in_one_step_are_all_saved_where_few_have_room_at_once(
    shared_daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch, *, layout: dict[str, Any], bound: str
) -> None:
    monkeypatch.setattr(save_room, bound, 1)
    engine = start(shared_daemon, blocks=128, **layout)
    prompts = [[number, *PROMPT[:13]] for number in range(8)]
    for prompt in prompts:
        engine.ask(prompt)
    engine.run()
    assert [engine.ask(prompt).claimed for prompt in prompts] == [12] * 8
    engine.run()
    stats = _stats(engine)
    assert stats["declined_blocks"] == 0
    assert 1 <= stats["deferred_saves"] <= 7, (
        "those that find no room: a save may have ended before the next one is asked for"
    )


@of_every_layout
@pytest.mark.parametrize("is_behind", [False, True])
def test_of_a_step_whose_forward_pass_fails_nothing_is_stored(
    shared_daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch, *, layout: dict[str, Any], is_behind: bool
) -> None:
    """Nor is it where an earlier save of its request was not done yet."""
    engine = start(shared_daemon, step_tokens=8, **layout)
    for steps in range(3):
        prompt = [steps, *PROMPT]
        engine.ask(prompt, 3)
        with monkeypatch.context() as patch:
            if is_behind:
                patch.setattr(kv.Save, "done", lambda self: False)
            for _ in range(steps):
                engine.step()
            engine.fail_step()
        engine.run()
        claimed, cold = engine.answer(prompt, 3)
        assert claimed == 8 * steps
        assert engine.answer(prompt, 3) == (28, cold)
    wait_until(lambda: shared_daemon.stats()["reservations"] == 0, "no reservations are left")
    assert shared_daemon.problems() == []


@of_every_layout
def test_a_request_that_runs_again_without_its_claim_stores_what_it_has_computed(
    shared_daemon: Daemon, start: Start, layout: dict[str, Any]
) -> None:
    """Its number of tokens that were taken of the promise stands as it was."""
    engine, longer = start(shared_daemon, step_tokens=BLOCK, **layout), [*PROMPT, *range(40, 60)]
    engine.answer(PROMPT)
    request = engine.ask(longer)
    assert request.claimed == 28
    engine.abort(request)
    engine.run()
    assert engine.answer([*longer, 1, 2])[0] == 48


@of_every_layout
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_daemon_that_dies_costs_claims_and_nothing_else(
    daemon: Daemon, start: Start, layout: dict[str, Any], moment: str
) -> None:
    engine = start(daemon, ranks=2, **layout)
    cold = engine.answer(PROMPT, 5)[1]
    if moment == "before":
        daemon.kill()
    if moment == "after":
        engine.after_match = daemon.kill
    claimed, generated = engine.answer(PROMPT, 5)
    engine.after_match = lambda: None
    assert generated == cold
    assert claimed == {"before": 0, "after": 28}[moment]
    daemon.start()
    engine.warm_up()
    engine.answer(PROMPT, 5)
    assert engine.answer(PROMPT, 5) == (28, cold)


@of_every_layout
def test_a_daemon_that_hangs_costs_claims_and_nothing_else(
    daemon: Daemon, start: Start, layout: dict[str, Any]
) -> None:
    engine = start(daemon, ranks=2, settings={"TIMEOUT_S": "0.5", "CLAIM_TIMEOUT_S": "0.5"}, **layout)
    cold = engine.answer(PROMPT, 5)[1]
    daemon.signal(signal.SIGSTOP)
    assert engine.answer(PROMPT, 5) == (0, cold)
    daemon.signal(signal.SIGCONT)
    engine.warm_up()
    wait_until(lambda: engine.answer(PROMPT, 5) == (28, cold), "the prompt is claimed")


@of_every_layout
def test_chunks_on_ssd_alone_are_claimed_once_they_are_in_dram(
    start_daemon: Callable[..., Daemon], start: Start, tmp_path: Path, layout: dict[str, Any]
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    engine = start(daemon, **layout)
    cold = engine.answer(PROMPT, 5)[1]
    assert daemon.stop() == 0
    daemon.start()
    engine.warm_up()
    pool = engine.workers[0].half._pool
    wait_until(lambda: pool.lookup(pool.keys(PROMPT)).chunks == CHUNKS, "the chunks are found again")
    assert engine.answer(PROMPT, 5) == (0, cold)
    wait_until(lambda: (pool.lookup(pool.keys(PROMPT)).tiers <= kv.Level.DRAM).all(), "they are in DRAM")
    assert engine.answer(PROMPT, 5) == (28, cold)


@pytest.mark.parametrize(
    ("layout", "rank", "group", "chunk"),
    [
        ("plain", 0, FULL, 4),
        ("plain", 1, FULL, 4),
        ("windows", 0, FULL, 4),
        ("windows", 1, WINDOW, 6),
        ("windows", 0, WINDOW, 5),
        *(
            pytest.param("windows", *case, marks=pytest.mark.slow)
            for case in [(1, FULL, 4), (0, WINDOW, 6), (1, WINDOW, 5)]
        ),
    ],
)
def test_a_flipped_bit_of_any_group_on_any_rank_is_never_claimed(
    shared_daemon: Daemon, start: Start, *, layout: str, rank: int, group: int, chunk: int
) -> None:
    engine = start(shared_daemon, ranks=2, step_tokens=16, **LAYOUTS[layout])  # whose first step ends at chunk 4
    cold = engine.answer(PROMPT, 5)[1]
    _flip(engine, group, chunk, rank)
    assert engine.answer(PROMPT, 5) == (16, cold)
    assert engine.answer(PROMPT, 5) == (28, cold)


@of_every_layout
def test_two_salts_two_adapters_and_two_models_never_share(
    shared_daemon: Daemon, start: Start, layout: dict[str, Any]
) -> None:
    engine = start(shared_daemon, **layout)
    assert engine.answer(PROMPT, cache_salt="a")[0] == 0
    assert engine.answer(PROMPT, cache_salt="b")[0] == 0
    assert engine.answer(PROMPT)[0] == 0
    lora: dict[str, Any] = {"lora_task_id": 3, "lora_weights": np.arange(64, dtype=np.float32)}
    assert engine.answer(PROMPT, **lora)[0] == 0
    assert engine.answer(PROMPT, cache_salt="a", **lora)[0] == 0
    assert engine.answer(PROMPT, cache_salt="a")[0] == 28
    for fields in ({"model": "other"}, {"settings": {"REVISION": "2"}}, {"attn_backend": "FLASHINFER"}, {"ranks": 2}):
        assert start(shared_daemon, **fields, **layout).answer(PROMPT, cache_salt="a")[0] == 0, fields


@pytest.mark.parametrize("layout", [{"manager": "v2"}, {"kind": "windowed"}])
def test_owners_of_attention_data_parallelism_share_what_each_computed(
    shared_daemon: Daemon, start: Start, layout: dict[str, Any]
) -> None:
    owners = [start(shared_daemon, owner=rank, tensor_parallel_size=2, **layout) for rank in range(2)]
    claimed, cold = owners[1].answer(PROMPT, 6)
    assert claimed == 0
    assert owners[0].answer(PROMPT, 6) == (28, cold)
    assert owners[1].answer(PROMPT, 6) == (28, cold)
    paths = {owner.scheduler.half._board.path for owner in owners}
    assert len(paths) == 2, "each owner has a board of its own"
    assert shared_daemon.problems() == []
