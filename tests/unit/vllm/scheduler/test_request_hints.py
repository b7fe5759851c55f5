"""Hints of a vLLM request and their effect: in the pool, and in the parameters that come back."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.states import DEFAULT_PRIORITY, Level
from kvpool_client.hint_envelope import ACTIONS_MAX, DIRECTIVES_MAX
from kvpool_client.vllm.scheduler.request_hints import ANSWER, request_hints_of
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, prompt

GARBAGE: list[Any] = [
    {"retention": "high"},
    {"retention": [{"start": -1, "priority": 3}]},
    {"retention": [{"start": 0, "priority": 101}]},
    {"retention": [{"start": 0, "end": 0, "priority": 50}]},
    {"retention": [None, 3]},
    {"retention": {"0": 1}},
    {"decode_priority": "much"},
    {"decode_priority": 20, "decode_duration_s": -1},
    {"decode_duration_s": 5},
    {"decode_duration_s": float("nan"), "decode_priority": 1},
    {"owner": 7},
    {"owner": "x" * 257},
    {"kv_hints": 7},
    {"kv_hints": "{"},
    {"kv_hints": {"protocol_version": "9.0", "message_id": "m", "actions": []}},
    {"kv_hints": {"protocol_version": "1.0", "message_id": "m", "actions": [None]}},
    ["retention"],
    "retention",
]


def envelope(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "protocol_version": "1.0",
        "message_id": "m1",
        "actions": [
            {"action_id": f"a{number}", "action_type": kind, "action_version": "1.0", "payload": payload}
            for number, (kind, payload) in enumerate(actions)
        ],
    }


def stored(engine: ScriptedEngine, rank: int = 0) -> dict[tuple[int, ...], int]:
    """The priority of each chunk that one rank has, by its tokens."""
    pool = engine.scheduler._scheduler.pool
    return {
        tuple(np.frombuffer(chunk.tokens, "<i4").tolist()): chunk.priority
        for part in pool.snapshot()
        for chunk in part.chunks
        if part.namespaces[chunk.namespace][1].rank == rank
    }


def chunks_of(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[first : first + CHUNK]) for first in range(0, len(tokens) // CHUNK * CHUNK, CHUNK)]


def priorities(engine: ScriptedEngine, request: Request, rank: int = 0) -> list[int]:
    """Those of a request's chunks, as far as they are stored; a chunk without the right token ids is not found."""
    found = stored(engine, rank)
    return [found[chunk] for chunk in chunks_of(request.tokens) if chunk in found]


def statuses(request: Request) -> list[tuple[str, str]]:
    return [(entry["action_type"], entry["status"]) for entry in request.answer[ANSWER]["outcomes"]]


def answered(engine: ScriptedEngine, request: Request) -> Callable[[], bool]:
    """True if the daemon has answered a request that has not ended; steps of others go on."""
    return lambda: engine.scheduler._scheduler._requests[request.request_id].hint_reply._answer.done()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranges_and_decode_priority_reach_every_chunk_that_is_saved(start: StartEngine, ranks: int) -> None:
    engine = start(ranks=ranks, budget=2 * CHUNK + 3)
    request = Request(
        "kept",
        prompt(1, 5 * CHUNK + 2),
        new_tokens=3 * CHUNK,
        kv_transfer_params={
            "retention": [
                {"start": 0, "end": CHUNK + 1, "priority": 90},
                {"start": 4 * CHUNK, "priority": 60, "duration": 600},
            ],
            "decode_priority": 5,
            "decode_duration_s": 600.0,
        },
    )
    engine.arrive(request)
    wait_until(answered(engine, request), "the daemon has answered")
    engine.run(request)
    for rank in range(ranks):
        # The chunk in which decoding begins belongs to the prompt.
        assert priorities(engine, request, rank) == [90, 90, DEFAULT_PRIORITY, DEFAULT_PRIORITY, 60, 60, 5, 5]
    assert statuses(request) == [("retention", "accepted")]


def test_stored_chunks_carry_the_prompts_token_ids(start: StartEngine) -> None:
    engine = start(budget=CHUNK + 3)
    tokens = prompt(1, 4 * CHUNK + 1)
    request = ask(engine, "published", tokens, new_tokens=CHUNK)
    assert set(stored(engine)) == set(chunks_of(request.tokens))
    branch = ask(engine, "branch", [*tokens[: 2 * CHUNK], *prompt(2, 2 * CHUNK)])
    assert set(chunks_of(branch.tokens)) <= set(stored(engine))
    assert request.answer is None


@pytest.mark.parametrize("name", ["prompt_embeds", "mm_features"])
def test_tokens_that_do_not_identify_the_kv_are_not_published(start: StartEngine, name: str) -> None:
    engine = start()
    request = Request("seen", prompt(1, 3 * CHUNK + 1))
    setattr(request, name, [1])
    engine.run(request)
    assert stored(engine) == {(): DEFAULT_PRIORITY}
    assert counted(engine, "saved_chunks") == 3


def test_retention_is_set_for_chunks_that_are_stored_already(start: StartEngine) -> None:
    engine = start()
    tokens = prompt(1, 4 * CHUNK + 1)
    ask(engine, "plain", tokens)
    later = ask(engine, "later", tokens, kv_transfer_params={"retention": [{"end": 2 * CHUNK, "priority": 80}]})
    wait_until(lambda: priorities(engine, later) == [80, 80, DEFAULT_PRIORITY, DEFAULT_PRIORITY], "they are kept")
    engine.run(Request("next", prompt(2, 3)))
    engine.step_until(lambda: counted(engine, "hints_accepted") >= 1, "its request is counted")
    assert counted(engine, "retained_chunks") == 2
    assert counted(engine, "hints_accepted") == 1


def test_every_action_of_an_envelope_is_answered_in_order(start: StartEngine) -> None:
    engine = start()
    tokens = prompt(1, 4 * CHUNK)
    ask(engine, "before", tokens)
    request = Request("hinted", list(tokens), new_tokens=CHUNK + 1)
    request.kv_transfer_params = {
        "kv_hints": envelope(
            ("kv.retain", {"directives": [{"end": CHUNK, "priority": 70}, {"covers_output": True, "priority": 10}]}),
            ("kv.demote", {"start": 3 * CHUNK}),
            ("kv.share", {}),
            ("kv.pin", {"start": CHUNK, "end": 2 * CHUNK, "duration": 4000}),
            ("kv.prefetch", {"end": 2 * CHUNK}),
            ("kv.retain", {"priority": 1000}),
        ),
        "retention": [{"start": 0, "end": 1, "priority": 75}],
    }
    engine.forget()
    engine.arrive(request)
    wait_until(answered(engine, request), "the daemon has answered")
    engine.run(request)
    assert statuses(request) == [
        ("kv.retain", "accepted"),
        ("kv.demote", "accepted"),
        ("kv.share", "rejected"),
        ("kv.pin", "clipped"),
        ("kv.prefetch", "accepted"),
        ("kv.retain", "rejected"),
        ("retention", "accepted"),
    ]
    assert request.answer[ANSWER]["message_id"] == "m1"
    assert all(entry["reason"] for entry in request.answer[ANSWER]["outcomes"] if entry["status"] != "accepted")
    # Parameters beside the envelope override those in it. The demotion is executed when the request has ended.
    kept = [75, 100, DEFAULT_PRIORITY, 0, 0]
    wait_until(lambda: priorities(engine, request) == kept, "all of it is carried out")
    engine.run(Request("next", prompt(2, 3)))
    wait_until(lambda: _has_counted(engine, "hints_accepted", 4), "the demotion is counted too")
    assert counted(engine, "hints_rejected") == 2


def _has_counted(engine: ScriptedEngine, name: str, amount: int) -> bool:
    engine.scheduler._scheduler._hint_sender.move_counts()
    return counted(engine, name) == amount


def as_objects(given: dict[str, Any]) -> SimpleNamespace:
    """An envelope as vLLM has it: objects, each payload a map."""
    return SimpleNamespace(**{**given, "actions": [SimpleNamespace(**action) for action in given["actions"]]})


def test_an_envelope_that_vllm_was_given_is_read_before_the_parameters(start: StartEngine) -> None:
    engine = start()
    own = as_objects(envelope(("kv.retain", {"end": CHUNK, "priority": 90}), ("kv.fetch", {"block_hashes": [7]})))
    inside = {"kv_hints": envelope(("kv.retain", {"priority": 10})), "retention": [{"start": CHUNK, "priority": 70}]}
    for number, params in enumerate([None, inside]):
        request = Request(
            f"kept-{number}",
            prompt(1 + number, 2 * CHUNK + 1),
            kv_transfer_params=params,
            kv_hints=own,
            new_tokens=CHUNK,
        )
        engine.arrive(request)
        wait_until(answered(engine, request), "the daemon has answered")
        engine.run(request)
        beside = [("retention", "accepted")] if params else []
        assert statuses(request) == [("kv.retain", "accepted"), ("kv.fetch", "rejected"), *beside]
        assert priorities(engine, request)[:2] == [90, 70 if params else DEFAULT_PRIORITY]


@pytest.mark.parametrize("params", [None, {}, ["retention"], {"kv_hints": envelope(("kv.pin", {}))}], ids=str)
@pytest.mark.parametrize("own", [7, "{", as_objects(envelope()), SimpleNamespace(actions=5), {}], ids=str)
def test_a_bad_envelope_that_vllm_was_given_changes_nothing(start: StartEngine, own: Any, params: Any) -> None:
    engine = start()
    request = ask(engine, "garbage", prompt(1, 2 * CHUNK + 1), kv_transfer_params=params, kv_hints=own)
    assert priorities(engine, request) == [DEFAULT_PRIORITY] * 2
    is_empty = isinstance(own, SimpleNamespace) and own.actions == []
    rejected = [] if is_empty else [("", "rejected")]
    rejected += [("retention", "rejected")] if isinstance(params, list) else []
    assert (statuses(request) if request.answer is not None else []) == rejected


def test_a_demotion_is_carried_out_when_its_request_has_ended(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    ask(engine, "gone", prompt(1, 4 * CHUNK + 1), kv_transfer_params={"kv_hints": envelope(("kv.demote", {}))})
    wait_until(lambda: engine.scheduler._scheduler.pool.stats().get("demoted_chunks") == 4, "its chunks are demoted")


def test_garbage_is_answered_and_logged_once_and_changes_nothing(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    tokens = prompt(1, 3 * CHUNK + 1)
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        for number, params in enumerate(GARBAGE):
            request = ask(engine, f"garbage-{number}", tokens, kv_transfer_params=params)
            assert priorities(engine, request) == [DEFAULT_PRIORITY] * 3, params
            assert {status for _, status in statuses(request)} <= {"rejected", "unknown"}, params
        wait_until(lambda: _has_counted(engine, "hints_rejected", len(GARBAGE)), "all are counted")
    assert len([message for message in caplog.messages if "rejected" in message]) == 1
    assert engine.scheduler._scheduler._guard.failures == 0


def test_parameters_of_other_connectors_are_ignored(start: StartEngine) -> None:
    request = ask(start(), "other", prompt(1, CHUNK), kv_transfer_params={"do_remote_decode": True, "port": 7})
    assert request.answer is None


def test_too_many_directives_are_rejected_and_the_save_goes_on(start: StartEngine) -> None:
    many = [{"start": 0, "end": 1 + place, "priority": 40} for place in range(DIRECTIVES_MAX)]
    hints = envelope(*[("kv.retain", {"directives": many}) for _ in range(ACTIONS_MAX)])
    found = request_hints_of(SimpleNamespace(kv_transfer_params={"kv_hints": hints}, num_prompt_tokens=9))
    assert len(found.ranges) == DIRECTIVES_MAX
    request = ask(start(), "many", prompt(1, 2 * CHUNK + 1), kv_transfer_params={"kv_hints": hints})
    assert [status for _, status in statuses(request)[1:]] == ["rejected"] * (ACTIONS_MAX - 1)


def test_a_save_gets_only_the_ranges_that_touch_it() -> None:
    params = {
        "retention": [
            {"start": 0, "end": 8, "priority": 1},
            {"start": 8, "end": 9, "priority": 2},
            {"start": 30, "priority": 3},
        ],
        "decode_priority": 4,
    }
    hints = request_hints_of(SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=40))
    first, second, last = (hints.retention_of(*span) for span in ((0, 8), (8, 16), (32, 48)))
    assert first is not None
    assert second is not None
    assert last is not None
    assert [entry.priority for retention in (first, second, last) for entry in retention.ranges] == [1, 2, 3]
    assert (first.decode_priority, last.decode_priority) == (None, 4)
    assert hints.retention_of(16, 24) is None


def test_without_a_daemon_hints_cost_nothing_and_are_reported_lost(start: StartEngine, tmp_path: Path) -> None:
    engine = start(socket=str(tmp_path / "nobody"))
    params = {"kv_hints": envelope(("kv.pin", {})), "retention": [{"priority": 50}]}
    request = ask(engine, "alone", prompt(1, 2 * CHUNK + 1), kv_transfer_params=params)
    assert statuses(request)[0][1] in ("rejected", "unknown")


class TestWaiting:
    """Requests that wait, over a disk."""

    @pytest.fixture
    def disk(self, start_daemon: Callable[..., Daemon], tmp_path: Path) -> Daemon:
        daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        return daemon

    def _engine_with_one_that_waits(self, start: StartEngine, disk: Daemon, **options: Any) -> Any:
        """An engine that is busy with one request while another waits, whose chunks are on disk alone."""
        engine = start(socket=disk.socket, **options)
        tokens = prompt(1, 4 * CHUNK + 1)
        ask(engine, "cold", tokens)
        with disk.admin() as admin:
            assert admin.demote_all(60.0)["left"] == 0
            admin.flush(None, None, "dram")
        engine.forget()
        engine.running_max = 1
        busy, waiting = Request("busy", prompt(2, 9), new_tokens=1000), Request("waiting", tokens)
        engine.arrive(busy, waiting)
        assert self._levels(engine, waiting) == [Level.SSD] * 4
        engine.step()
        return engine, busy, waiting

    def _levels(self, engine: ScriptedEngine, request: Request) -> list[int]:
        half = engine.scheduler._scheduler
        levels: list[int] = half.pool.lookup(half._requests[request.request_id].keys).tiers.tolist()
        return levels

    def test_chunks_of_waiting_requests_are_promoted_before_the_request_runs(
        self, start: StartEngine, disk: Daemon
    ) -> None:
        engine, busy, waiting = self._engine_with_one_that_waits(start, disk)
        wait_until(lambda: self._levels(engine, waiting) == [Level.DRAM] * 4, "its chunks are in DRAM")
        engine.step_until(lambda: counted(engine, "announced_chunks") >= 4, "they count as announced")
        assert counted(engine, "announced_chunks") == 4
        assert (waiting.state, waiting.offers) == ("waiting", [])
        engine.running_max = 2
        engine.run(waiting)
        assert waiting.external == 4 * CHUNK
        assert counted(engine, "hit_tokens_dram") == 4 * CHUNK
        engine.abort(busy)

    def test_nothing_is_announced_where_the_option_is_off(self, start: StartEngine, disk: Daemon) -> None:
        engine, busy, waiting = self._engine_with_one_that_waits(start, disk, kvpool__announce=False)
        for _ in range(3):
            engine.step()
        engine.abort(busy)
        engine.run(waiting)
        assert counted(engine, "announced_chunks") == 0
        assert counted(engine, "hit_tokens_ssd") == 4 * CHUNK

    def test_a_request_that_is_gone_is_not_announced(self, start: StartEngine, disk: Daemon) -> None:
        engine = start(socket=disk.socket)
        request = Request("gone", prompt(1, 2 * CHUNK))
        engine.arrive(request)
        engine.abort(request)
        engine.run(Request("other", prompt(2, BLOCK)))
        assert not engine.scheduler._scheduler._waiting
        assert engine.scheduler._scheduler.pool.stats().get("announced_chunks", 0) == 0
