"""Measure a step of vLLM in which the pool has nothing to do: `python -m tests.unit.vllm.measure_steps [REQUESTS STEPS]`.

The scripted engine calls the connector in vLLM's order, of a model of three layers on one rank: it is no vLLM, and what vLLM
itself does for a connector is not in it. Requests decode; all of their prompts are saved. Counted are the seconds and, in every
other step, the CPU seconds of this thread within the connector's calls of a step, both halves together, of steps that no save
ends in. Reading the clock costs as much as many of these calls, and is reported beside them. Bar: 30 µs.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.rigs.daemon import Daemon
from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.engine import ScriptedEngine
from tests.unit.vllm.test_steps import calls_without_work, decoding

REQUESTS = 32
STEPS = 400
BLOCKS = 32_768
BAR_US = 30


class Timed:
    """A connector whose calls are timed by `clock`: `seconds` of so many `calls`."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self.clock: Callable[[], float] = time.perf_counter
        self.seconds, self.calls = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connector, name)
        if name.startswith("_") or not callable(found):
            return found
        timed = self._timed(found)
        setattr(self, name, timed)
        return timed

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any, **named: Any) -> Any:
            clock = self.clock
            begun = clock()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += clock() - begun
                self.calls += 1

        return timed_call


def measure(engine: ScriptedEngine, requests: int, steps: int) -> tuple[list[float], list[float], float]:
    """Microseconds of each step, CPU microseconds of others, and what of the former reading the clock has cost, by calls that
    do nothing between the layers."""
    running = decoding(engine, 0, requests)
    calls_without_work(engine)
    halves = engine.scheduler, *engine.workers = Timed(engine.scheduler), *map(Timed, engine.workers)
    empty = Timed(SimpleNamespace(call=lambda: None))
    times_us: list[float] = []
    cpu_us: list[float] = []
    empty_us: list[float] = []
    engine.on_layer = lambda _layer: empty.call()
    for _ in range(steps):
        for clock, found_us in ((time.perf_counter, times_us), (time.thread_time, cpu_us)):
            for half in halves:
                half.clock, half.seconds, half.calls = clock, 0.0, 0
            empty.seconds, empty.calls = 0.0, 0
            engine.step()
            if clock is time.perf_counter:
                empty_us.append(1e6 * empty.seconds / empty.calls)
            for half in halves:
                half.get_kv_connector_stats()  # as vLLM does
            found_us.append(1e6 * sum(half.seconds for half in halves))
    for request in running:
        engine.abort(request)
    return times_us, cpu_us, statistics.median(empty_us) * sum(half.calls for half in halves)


def main() -> None:
    """Print one line."""
    requests, steps = (int(word) for word in (sys.argv[1:] or (REQUESTS, STEPS)))
    with tempfile.TemporaryDirectory() as directory, fake_vllm.installed():
        from kvpool_client.vllm import connector

        daemon = Daemon(Path(directory))
        daemon.start()
        try:
            options: dict[str, Any] = {"kvpool__save": "prompt", "kvpool__load": "async", "kvpool__wait_s": 60.0}
            engine = ScriptedEngine(connector.KVPoolConnector, daemon.socket, blocks=BLOCKS, **options)
            times_us, cpu_us, clock_us = measure(engine, requests, steps)
            engine.close()
        finally:
            daemon.stop()
    low, high = (statistics.quantiles(times_us, n=10)[place] for place in (0, -1))
    print(
        f"{requests} requests, {steps} steps without work: {statistics.median(times_us):.0f} us [{low:.0f}, {high:.0f}] of the "
        f"connector's calls, {clock_us:.0f} us of them to read the clock; {statistics.median(cpu_us):.0f} us of CPU "
        f"(bar {BAR_US} us)"
    )


if __name__ == "__main__":
    main()
