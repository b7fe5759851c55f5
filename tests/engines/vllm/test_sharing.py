"""Several engines on one daemon: engines with equal KV share it, and others never do."""

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, counted, wait_stored
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine, tokens_of_answer
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, STRANGER
from tests.rigs.daemon import Daemon

ROUNDS = 4


@pytest.fixture(scope="module")
def engines(start_engine: StartEngine, module_daemon: Daemon) -> tuple[Engine, Engine]:
    return start_engine(GROUPED, socket=module_daemon.socket), start_engine(GROUPED, socket=module_daemon.socket)


def test_two_engines_work_at_once_on_the_same_and_on_other_prompts(
    engines: tuple[Engine, Engine], module_daemon: Daemon, plain: Plain
) -> None:
    for number in range(ROUNDS):
        common = prompts(first=200 + 20 * number)
        asked = [[*common, prompt(300 + 2 * number + index, 400)] for index in range(2)]
        expected = [plain(GROUPED).tokens(each, 16) for each in asked]
        for _ in range(2):
            for engine, each in zip(engines, asked, strict=True):
                engine.forget()
                engine.send("generate", prompts=each, tokens=16)
            assert [tokens_of_answer(engine.answer()) for engine in engines] == expected
        wait_stored(module_daemon, loadable_tokens(asked[0]))
        for engine, each, right in zip(engines, reversed(asked), reversed(expected), strict=True):
            before = counted(engine, "loaded_chunks")
            assert engine.tokens(each, 16) == right
            assert (counted(engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(each)
    assert not module_daemon.problems()


def test_two_salts_never_share(engines: tuple[Engine, Engine], plain: Plain) -> None:
    asked = prompts(first=400)
    expected = plain(GROUPED).tokens(asked, 16)
    one, other = engines
    for salt in ("red", "blue", None):
        before = counted(other, "loaded_chunks")
        assert other.tokens(asked, 16, salt) == expected
        assert counted(other, "loaded_chunks") == before, f"salt {salt} was given what another salt has stored"
        assert one.tokens(asked, 16, salt) == expected
        assert other.tokens(asked, 16, salt) == expected
        assert (counted(other, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(asked)


def test_an_engine_that_serves_shorter_sequences_loads_what_another_stored(
    engines: tuple[Engine, Engine], module_daemon: Daemon, start_engine: StartEngine, plain: Plain
) -> None:
    asked = prompts(first=560)
    expected = plain(GROUPED).tokens(asked, 16)
    assert engines[0].tokens(asked, 16) == expected
    wait_stored(module_daemon, loadable_tokens(asked))
    shorter = start_engine(GROUPED, socket=module_daemon.socket, max_model_len=1024)
    assert shorter.tokens(asked, 16) == expected
    assert counted(shorter, "loaded_chunks") * CHUNK_TOKENS >= loadable_tokens(asked)


def test_a_model_of_the_same_shape_with_other_weights_finds_nothing(
    engines: tuple[Engine, Engine], module_daemon: Daemon, start_engine: StartEngine, plain: Plain
) -> None:
    asked = prompts(first=500)
    assert engines[0].tokens(asked, 16) == plain(GROUPED).tokens(asked, 16)
    stranger = start_engine(STRANGER, socket=module_daemon.socket)
    generated = stranger.tokens(asked, 16)
    assert counted(stranger, "loaded_chunks") == 0
    assert generated != plain(GROUPED).tokens(asked, 16)
    assert stranger.tokens(asked, 16) == generated
    assert counted(stranger, "loaded_chunks") * CHUNK_TOKENS >= loadable_tokens(asked)
