"""Measure a step of vLLM in which the pool has nothing to do: `python -m tests.unit.vllm.measure_steps [REQUESTS STEPS]`.

The scripted engine calls the connector in vLLM's order, of a model of three layers on one rank: it is no vLLM, and what vLLM
itself does for a connector is not in it. Requests decode; all of their prompts are saved. Counted are the seconds and the CPU
seconds of this thread within the connector's calls of a step, both halves together, of steps that no save ends in. Bar: 30 µs.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
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
    """A connector whose calls are timed: seconds, and CPU seconds of the calling thread."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self.seconds = self.cpu_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connector, name)
        if name.startswith("_") or not callable(found):
            return found
        return self._timed(found)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any, **named: Any) -> Any:
            cpu_s, begun = time.thread_time(), time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - begun
                self.cpu_seconds += time.thread_time() - cpu_s

        return timed_call


def measure(engine: ScriptedEngine, requests: int, steps: int) -> tuple[list[float], list[float]]:
    """Microseconds and CPU microseconds of each step."""
    running = decoding(engine, 0, requests)
    calls_without_work(engine)
    halves = engine.scheduler, *engine.workers = Timed(engine.scheduler), *map(Timed, engine.workers)
    times_us, cpu_us = [], []
    for _ in range(steps):
        for half in halves:
            half.seconds = half.cpu_seconds = 0.0
        engine.step()
        times_us.append(1e6 * sum(half.seconds for half in halves))
        cpu_us.append(1e6 * sum(half.cpu_seconds for half in halves))
    for request in running:
        engine.abort(request)
    return times_us, cpu_us


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
            times_us, cpu_us = measure(engine, requests, steps)
            engine.close()
        finally:
            daemon.stop()
    low, high = (statistics.quantiles(times_us, n=10)[place] for place in (0, -1))
    print(
        f"{requests} requests, {steps} steps without work: {statistics.median(times_us):.0f} us [{low:.0f}, {high:.0f}] of the "
        f"connector's calls, {statistics.median(cpu_us):.0f} us of CPU (bar {BAR_US} us)"
    )


if __name__ == "__main__":
    main()
