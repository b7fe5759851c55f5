"""The tutorial's engine of batches: a turn begins where the pool ends, and its logits have the same bits with any daemon."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_connected

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from examples import batch_engine  # noqa: E402 - only where torch is there

pytestmark = pytest.mark.torch

NOBODY = "/nonexistent/kvpool.sock"
ANSWER_TOKENS = 2
KILLS = 50


def _turns(engine: batch_engine.Engine, seed: int = 2) -> Iterator[tuple[list[int], Any]]:
    """Of each turn of four chats: what each prompt reused, and the logits of the first tokens."""
    prompts, questions = batch_engine.chats(seed)
    for turn in questions.tolist():
        for prompt, question in zip(prompts, turn, strict=True):
            prompt += question
        answers, logits = engine.answer(prompts, ANSWER_TOKENS)
        yield engine.reused, logits
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt += answer


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Logits of each turn without a pool."""
    engine = batch_engine.Engine(NOBODY)
    turns = list(_turns(engine))
    assert [reused for reused, _ in turns] == [[0] * 4] * 5
    engine.pool.close()
    return [logits for _, logits in turns]


def test_each_turn_reuses_what_was_stored_before(daemon: Daemon, alone: list[Any]) -> None:
    reused = []
    for _ in range(2):
        engine = batch_engine.Engine(daemon.socket)
        wait_connected(engine.pool)
        for (tokens, logits), expected in zip(_turns(engine), alone, strict=True):
            reused.append(tokens)
            assert torch.equal(logits, expected)
        engine.pool.close()
    stored = [[tokens - tokens % 32] * 4 for tokens in (190, 232, 274, 316, 358)]  # whole chunks of each turn's prompts
    assert reused == [[0] * 4, *stored[:-1], *stored]
    assert daemon.problems() == []


@pytest.mark.slow
def test_the_logits_keep_their_bits_while_the_daemon_is_killed(daemon: Daemon, alone: list[Any], seed: int) -> None:
    dice, over = random.Random(seed), threading.Event()

    def kill() -> None:
        try:
            for _ in range(KILLS):
                threading.Event().wait(dice.uniform(0.05, 0.6))
                daemon.kill()
                threading.Event().wait(dice.uniform(0.0, 0.1))
                daemon.start()
        finally:
            over.set()

    killer = threading.Thread(target=kill)
    engine = batch_engine.Engine(daemon.socket)
    wait_connected(engine.pool)
    killer.start()
    reused = turns = 0
    while not over.is_set():
        for (tokens, logits), expected in zip(_turns(engine), alone, strict=True):
            assert torch.equal(logits, expected), f"after {turns} turns"
            reused, turns = reused + sum(tokens), turns + 1
    killer.join()
    wait_connected(engine.pool)
    for _ in range(2):
        last = [tokens for tokens, _ in _turns(engine)]
    assert last[-1] == [352] * 4, "the daemon's last life serves it"
    print(f"{turns} turns, {reused} tokens reused, {engine.pool.stats()['reconnects']} reconnects")
    engine.pool.close()
    assert daemon.problems() == []
