"""Loading against computing through both halves of the vLLM connector: made times of steps and of loads, beside decoding."""

from typing import Any

import pytest

from kvpool.states import Level
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.worker.divided_time import DividedTime
from tests.rigs.clock import HandClock
from tests.rigs.daemon import wait_until
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, prompt

# A model of 128 KiB a token on two processor cores.
CHUNK_BYTES = CHUNK << 17
PREFILL_PER_S, DECODERS, DECODE_S = 1860.0, 64, 0.085 / 64
HITS = 9


class MadeTimes:
    """An engine whose steps take the time of their tokens, and whose loads take `setup_s` and the time of their bytes.

    Steps and loads have clocks of their own, because they run at the same time. No time passes for what waits."""

    def __init__(self, engine: ScriptedEngine, *, bytes_per_s: float, setup_s: float) -> None:
        self.engine = engine
        self.half, worker = engine.scheduler._scheduler, engine.workers[0]._worker
        self.worker = worker
        self._steps, self._loads = HandClock(), HandClock()
        self.half._times._clock, self.half._hits._clock = self._steps, HandClock()
        worker._clock = self._loads
        worker._divided = {level: DividedTime(self._loads) for level in Level}
        forward, load = engine._forward, worker.pool.load

        def timed_forward(plan: bytes, scheduled: dict[Request, int], has_sync: bool) -> list[Any]:
            results = forward(plan, scheduled, has_sync)
            for request, count in scheduled.items():
                is_prefill = request.num_tokens - request.num_computed > 1
                self._steps.advance(count / PREFILL_PER_S if is_prefill else count * DECODE_S)
            return results

        def timed_load(lease: Any, *arguments: Any, first_chunk: int = 0) -> Any:
            self._loads.advance(setup_s + (lease.chunks - first_chunk) * CHUNK_BYTES / bytes_per_s)
            return load(lease, *arguments, first_chunk=first_chunk)

        engine._forward = timed_forward  # type: ignore[method-assign]
        worker.pool.load = timed_load

    def decode(self) -> list[Request]:
        """Requests that decode from now on."""
        requests = [Request(f"decoder-{number}", prompt(500 + number, 9), new_tokens=400) for number in range(DECODERS)]
        self.engine.arrive(*requests)
        self.engine.step_until(lambda: all(request.generated > 3 for request in requests), "they decode")
        return requests

    def ask(self, name: str, tokens: list[int]) -> int:
        """Run a request beside the others; the tokens that it has loaded."""
        request = Request(name, tokens)
        self.engine.arrive(request)

        def has_ended() -> bool:
            self.engine.step()
            running = [future for _, future in self.worker._running]
            wait_until(lambda: all(future.done() for future in running), "the loads have ended")
            return request not in self.engine.requests

        wait_until(has_ended, f"{name} has ended")
        return request.external


def stored_prompts(start: StartEngine, chunks: int) -> list[list[int]]:
    """Prompts that another engine has saved."""
    other = start(blocks=chunks * 4 + 8)
    prompts = [prompt(number, chunks * CHUNK + 1) for number in range(1, HITS + 1)]
    for number, tokens in enumerate(prompts):
        ask(other, f"cold-{number}", tokens)
    return prompts


@pytest.mark.parametrize("is_decoding", [True, False])
@pytest.mark.parametrize(
    ("chunks", "bytes_per_s"),
    [
        (16, 20e6),
        (16, 150e6),  # as fast as 1,140 tokens a second: faster than decoding and slower than prefill
        (1, 120e6),  # a load takes 9 ms, twice as long as computing its tokens
    ],
)
def test_a_slow_tier_is_declined_within_five_loads(
    chunks: int, bytes_per_s: float, *, is_decoding: bool, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Geometry, "chunk_bytes", CHUNK_BYTES)
    prompts = stored_prompts(start, chunks)
    engine = start(kvpool__always_load=False, kvpool__save="prompt", blocks=8000)
    times = MadeTimes(engine, bytes_per_s=bytes_per_s, setup_s=0.0)
    decoders = times.decode() if is_decoding else []
    # It has computed as many tokens of prompts as those that decode have.
    times.ask("own", prompt(400, 2 * CHUNK * 8 + 1))
    loaded = [times.ask(f"hit-{number}", tokens) for number, tokens in enumerate(prompts)]
    assert loaded[0] == chunks * CHUNK, "nothing is known of the tier"
    assert loaded[5:] == [0] * (HITS - 5)
    assert counted(engine, "declined_tokens_slower_than_computing_dram") >= (HITS - 5) * chunks * CHUNK
    assert times.half._rates.rates().prefill_tokens_per_s == pytest.approx(PREFILL_PER_S, rel=0.05)
    for request in decoders:
        engine.abort(request)


def test_small_loads_do_not_decline_a_large_hit(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks take 32 ms, twice as long as computing them, and almost all of it whatever the size: 64 take 63, and are
    computed in 275."""
    monkeypatch.setattr(Geometry, "chunk_bytes", CHUNK_BYTES)
    prompts = stored_prompts(start, 64)
    engine = start(kvpool__always_load=False, kvpool__save="prompt", blocks=8000)
    times = MadeTimes(engine, bytes_per_s=2e9, setup_s=0.03)
    times.ask("own", prompt(400, 2 * CHUNK * 8 + 1))
    small = [times.ask(f"small-{number}", tokens[: 4 * CHUNK + 1]) for number, tokens in enumerate(prompts[:5])]
    assert small == [4 * CHUNK] * 2 + [0] * 3
    assert times.ask("large", prompts[5]) == 64 * CHUNK


@pytest.mark.parametrize("is_decoding", [True, False])
@pytest.mark.parametrize("chunks", [16, 4])
def test_a_fast_tier_is_never_declined(
    chunks: int, *, is_decoding: bool, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 GB/s are as fast as 15,000 tokens a second; four chunks are computed in 17 ms and loaded in 10."""
    monkeypatch.setattr(Geometry, "chunk_bytes", CHUNK_BYTES)
    prompts = stored_prompts(start, chunks)
    engine = start(kvpool__always_load=False, kvpool__save="prompt", blocks=8000)
    times = MadeTimes(engine, bytes_per_s=2e9, setup_s=0.008)
    decoders = times.decode() if is_decoding else []
    times.ask("own", prompt(400, 2 * CHUNK * 8 + 1))
    loaded = [times.ask(f"hit-{number}", tokens) for number, tokens in enumerate(prompts)]
    assert loaded == [chunks * CHUNK] * HITS
    for request in decoders:
        engine.abort(request)
