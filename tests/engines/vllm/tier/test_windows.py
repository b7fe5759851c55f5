"""A hybrid model: each of its groups has chunks of its own, and of a window only its end is loaded."""

from tests.engines.vllm.conftest import Plain, StartEngine
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, tiering
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import HYBRID
from tests.engines.vllm.tier.conftest import TOKENS, answers, connected, hit_tokens, loaded, pool_tier, settle
from tests.rigs.daemon import Daemon, wait_until

ASKED = [prompt(5700, 700), prompt(5701, 333), prompt(5702, 256)]
# Beside windows vLLM leaves the chunk of a prompt's last token to compute.
HIT_TOKENS = sum((len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for ids in ASKED)


def test_a_model_with_windows_is_served_after_a_restart_of_its_engine(
    start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    expected = plain(HYBRID).tokens(ASKED, TOKENS)
    first = connected(start_engine(HYBRID, transfer=tiering(pool_tier(module_daemon.socket))), module_daemon)
    assert first.tokens(ASKED, TOKENS) == expected
    settle(first)
    first.close()
    second = connected(start_engine(HYBRID, transfer=tiering(pool_tier(module_daemon.socket))), module_daemon)
    assert second.tokens(ASKED, TOKENS) == expected
    assert hit_tokens(second) == HIT_TOKENS
    assert loaded(second) > HIT_TOKENS // BLOCK_TOKENS, "of the full group, and of windows"
    turn_bits(module_daemon)
    for _ in range(2):
        assert answers(second, ASKED) == expected, "with flipped bits in chunks of any group"
    before = hit_tokens(second)
    assert answers(second, ASKED) == expected
    assert hit_tokens(second) - before == HIT_TOKENS, "computed instead, stored and loaded"
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "no lease is left")
    assert not module_daemon.problems(deep=False), "nobody reads the windows that no end needs, flipped bits or not"
