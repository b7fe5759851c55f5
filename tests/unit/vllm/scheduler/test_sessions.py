"""Streaming sessions: a request whose prompt grows with each input, and goes on from what it has generated."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.scheduler.requests import rehashes_sessions
from tests.rigs.daemon import Daemon
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, prompt


def run_session(engine: ScriptedEngine, *inputs: tuple[int, int], **more: object) -> Request:
    """A session of inputs of so many tokens, after each of which it generates so many."""
    engine.forget()
    session = Request("session", prompt(1, inputs[0][0]), new_tokens=inputs[0][1], is_session=True, **more)  # type: ignore[arg-type]
    engine.run(session)
    for number, (tokens, generated) in enumerate(inputs[1:], start=2):
        engine.give_input(session, prompt(number, tokens), new_tokens=generated)
    return session


@pytest.mark.parametrize("save", ["prompt", "all"])
def test_every_input_of_a_session_is_saved(start: StartEngine, daemon: Daemon, save: str) -> None:
    engine = start(kvpool__save=save)
    session = run_session(engine, (2 * CHUNK, 1), (3 * CHUNK + 1, CHUNK + 3), (2 * CHUNK, 3 * CHUNK))
    stored = (session.num_computed if save == "all" else session.num_prompt_tokens) // CHUNK
    engine.end_session(session)
    assert int(daemon.stats()["dram.chunks"]) == stored
    assert ask(start(), "fresh", [*session.tokens[: stored * CHUNK], 1]).external == stored * CHUNK


@pytest.mark.parametrize("is_rehashed", [True, False])
def test_a_token_that_a_session_drops_stands_for_no_chunk(start: StartEngine, is_rehashed: bool) -> None:
    """The last token before an input ends a chunk, and was hashed; the chunk that is saved has the input's token there."""
    engine = start(kvpool__save="all")
    engine.scheduler._scheduler._is_rehashed = is_rehashed
    engine.forget()
    session = Request("session", prompt(1, 2 * CHUNK - 1), is_session=True, is_rehashed=is_rehashed)
    engine.run(session)
    engine.scheduler._scheduler._requests["session"].extend_keys()  # as a step that is scheduled ahead does
    dropped = list(session.tokens)
    assert len(dropped) == 2 * CHUNK
    given = [(dropped[-1] + 1) % 997, *prompt(2, CHUNK)]
    engine.give_input(session, given)
    engine.end_session(session)
    assert ask(start(), "dropped", [*dropped, *prompt(2, 1)]).external == CHUNK
    # Where vLLM keeps the wrong hash, nothing from there on has a key.
    found = 3 if is_rehashed else 1
    assert ask(start(), "given", [*dropped[:-1], *given, 1]).external == found * CHUNK


@pytest.mark.parametrize(
    ("update", "is_rehashed"),
    [
        (lambda session: session.update_block_hashes(), False),
        (lambda session: (session.block_hashes.clear(), session.update_block_hashes()), True),
        (None, True),
    ],
)
def test_what_vllm_does_with_the_hash_is_seen_in_its_code(
    monkeypatch: pytest.MonkeyPatch, update: Any, is_rehashed: bool
) -> None:
    class Scheduler:
        pass

    if update is not None:
        Scheduler._update_request_as_session = update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.scheduler", SimpleNamespace(Scheduler=Scheduler))
    assert rehashes_sessions() == is_rehashed


def test_what_a_session_was_given_is_not_decoded(start: StartEngine) -> None:
    """Retention for decoded tokens counts from the end of the last input."""
    engine = start()
    session = run_session(
        engine, (CHUNK, 1), (4 * CHUNK, 1), kv_transfer_params={"decode_priority": 90, "decode_duration_s": 60.0}
    )
    hints = engine.scheduler._scheduler._requests["session"].hints
    assert hints.prompt_tokens == session.num_prompt_tokens == 5 * CHUNK
    kept = hints.retention_of(5 * CHUNK, 6 * CHUNK)
    assert kept is not None
    assert (kept.prompt_tokens, kept.decode_priority) == (5 * CHUNK, 90)
    assert hints.retention_of(4 * CHUNK, 5 * CHUNK) is None
    engine.end_session(session)
