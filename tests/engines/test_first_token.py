"""Time to the first token on a model deep enough to matter: with hits ten times shorter, without hits as good as unchanged.

Time to first token is the wall-clock time of a request for one token. Engines with and without the pool take turns, one after
the other on the same prompt, and each pair is compared with itself: what else the machine does meets both.
"""

import statistics
from collections.abc import Callable

import pytest

from tests.daemon import Daemon
from tests.engines.conftest import StartEngine, counted, wait_stored
from tests.engines.engine import CHUNK_TOKENS, Engine
from tests.engines.prompts import loadable_tokens, prompt
from tests.engines.tiny_models import DEEP

PROMPT_TOKENS = 1500
ROUNDS = 5
SPEEDUP_MIN = 10.0
PAIRS_MIN, PAIRS_MAX = 16, 96
OVERHEAD_MAX = 1.02

Tell = Callable[[str], None]


@pytest.fixture(scope="module")
def pooled(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    engine = start_engine(DEEP, socket=module_daemon.socket, takes_every_hit=False, max_num_batched_tokens=2048)
    engine.ask("generate", prompts=[prompt(2000, PROMPT_TOKENS)], tokens=1)
    return engine


@pytest.fixture(scope="module")
def unpooled(start_engine: StartEngine) -> Engine:
    engine = start_engine(DEEP, max_num_batched_tokens=2048)
    engine.ask("generate", prompts=[prompt(2000, PROMPT_TOKENS)], tokens=1)
    return engine


def _first_token(engine: Engine, ids: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the token."""
    answer = engine.ask("generate", prompts=[ids], tokens=1)
    return answer["seconds"], answer["tokens"][0][0]


def test_first_token_comes_ten_times_sooner_with_hits(
    pooled: Engine, unpooled: Engine, module_daemon: Daemon, tell: Tell
) -> None:
    pooled.ask("watch_connector")
    alone, cold, warm, inside, until_loaded = [], [], [], [], []
    asked = unpooled.clear_prompts([prompt(2100 + number, PROMPT_TOKENS) for number in range(3 * ROUNDS)], 1)
    assert len(asked) >= ROUNDS
    unpooled.forget()
    for ids in asked[:ROUNDS]:
        seconds, expected = _first_token(unpooled, ids)
        alone.append(seconds)
        stored = int(module_daemon.stats()["usage.stored_tokens"])
        seconds, token = _first_token(pooled, ids)
        assert token == expected
        cold.append(seconds)
        wait_stored(module_daemon, stored + loadable_tokens([ids]))
        pooled.forget()
        before = counted(pooled, "loaded_chunks")
        seconds, token = _first_token(pooled, ids)
        assert token == expected
        assert (counted(pooled, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens([ids])
        warm.append(seconds)
        spent = pooled.ask("connector_seconds")
        inside.append(spent["inside"])
        until_loaded.append(spent["until_loaded"])
    ratio = statistics.median(cold) / statistics.median(warm)
    tell(
        f"first token of {PROMPT_TOKENS} tokens, {DEEP.layers} layers: {_ms(alone)} without the pool, {_ms(cold)} cold, "
        f"{_ms(warm)} warm, {ratio:.1f} x sooner; inside the connector {_ms(inside)}, lookup until loaded {_ms(until_loaded)}"
    )
    assert ratio >= SPEEDUP_MIN


def test_first_token_is_no_later_without_hits(pooled: Engine, unpooled: Engine, tell: Tell) -> None:
    """Pairs are added until the machine's noise lets the median be told from the bar, or there are enough of them."""
    ratios: list[float] = []
    while len(ratios) < PAIRS_MAX:
        ids = prompt(3000 + len(ratios), PROMPT_TOKENS)
        engines = (pooled, unpooled) if len(ratios) % 2 else (unpooled, pooled)
        seconds = {engine: _first_token(engine, ids)[0] for engine in engines}
        ratios.append(seconds[pooled] / seconds[unpooled])
        low, high = _median_bounds(ratios)
        if len(ratios) >= PAIRS_MIN and (high <= OVERHEAD_MAX or low > OVERHEAD_MAX):
            break
    median = statistics.median(ratios)
    low, high = _median_bounds(ratios)
    tell(
        f"without hits {median:.4f} x the time without the pool (median of {len(ratios)} pairs, 95 %: {low:.4f} to {high:.4f})"
    )
    assert median <= OVERHEAD_MAX


def _median_bounds(values: list[float]) -> tuple[float, float]:
    """Between which values the true median lies, 95 % of the time: order statistics, by the normal approximation."""
    ordered = sorted(values)
    reach = 0.98 * len(ordered) ** 0.5
    low, high = round(len(ordered) / 2 - reach), round(len(ordered) / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.1f} ms"
