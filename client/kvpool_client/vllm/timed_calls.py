"""Timed calls: what a connector does for vLLM, guarded and with its time counted. The thread that calls."""

import logging
from collections.abc import Callable
from typing import TypeVar

from kvpool.clock import MonotonicClock
from kvpool_client.engines.failure_guard import FailureGuard

Answer = TypeVar("Answer")
Argument = TypeVar("Argument")

# A child of vLLM's logger, because vLLM configures no other.
LOG = logging.getLogger("vllm.kvpool")


class TimedCalls:
    """See the module. Invariant: no failure reaches the engine. `_inside_ns`: time since it was last reported."""

    def __init__(self, **of_engine: object) -> None:
        super().__init__(**of_engine)  # vLLM's base
        self._guard = FailureGuard(LOG)
        self._clock = MonotonicClock()
        self._inside_ns = 0

    def _timed(self, what: str, default: Answer, ask: Callable[[Argument], Answer], argument: Argument) -> Answer:
        now_ns = self._clock.now_ns
        begun_ns = now_ns()
        answer = self._guard.call(what, default, ask, argument)
        self._inside_ns += now_ns() - begun_ns
        return answer
