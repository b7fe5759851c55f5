"""Tools of the tests of the vLLM connector: scripted engines on a daemon, and short functions for their steps."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.rigs.daemon import Daemon
from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import BLOCK, Request

CHUNK = 2 * BLOCK
StartEngine = Callable[..., ScriptedEngine]


@pytest.fixture
def start_engine(daemon: Daemon) -> Iterator[StartEngine]:
    """Starts engines on the test's daemon; at its end none of them has read a wrong byte."""
    engines: list[ScriptedEngine] = []
    with ExitStack() as stack:
        stack.enter_context(fake_vllm.installed())
        from kvpool_client.vllm import connector

        def start(**options: Any) -> ScriptedEngine:
            arguments: dict[str, Any] = {"kvpool__load": "async", "kvpool__always_load": True, "kvpool__wait_s": 5.0}
            arguments.update({"kvpool__save": "all", **options})
            engine = ScriptedEngine(connector.KVPoolConnector, arguments.pop("socket", daemon.socket), **arguments)
            stack.callback(engine.close)
            engines.append(engine)
            return engine

        yield start
        assert [engine.wrong_reads for engine in engines] == [0] * len(engines)


def prompt(first: int, count: int) -> list[int]:
    return [(first * 7919 + 31 * place) % 1000 for place in range(count)]


def counted(engine: ScriptedEngine, name: str) -> float:
    halves = [engine.scheduler._scheduler, *(worker._worker for worker in engine.workers)]
    total: float = sum(half.tally.totals.data.get(name, 0) for half in halves)
    return total


def ask(engine: ScriptedEngine, name: str, tokens: list[int], **more: Any) -> Request:
    """Run one request to its end with nothing in the engine's own cache; the request."""
    engine.forget()
    request = Request(name, list(tokens), **more)
    engine.run(request)
    return request
