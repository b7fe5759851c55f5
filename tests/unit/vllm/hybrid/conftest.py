"""Scripted engines of hybrid models on a test's daemon."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.rigs.daemon import Daemon

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.hybrid_engine import HybridEngine
from tests.rigs.vllm.setting import StillClock

StartEngine = Callable[..., Any]


@pytest.fixture
def start(daemon: Daemon) -> Iterator[StartEngine]:
    """Starts engines on the test's daemon; none of them has attended to a wrong byte at its end."""
    engines: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(fake_vllm.installed())
        from kvpool_client.vllm import connector

        def start_engine(**options: Any) -> Any:
            settings = {"kvpool__always_load": True, "kvpool__wait_s": 60.0, "kvpool__timeout_s": 60.0, **options}
            engine = HybridEngine(connector.KVPoolConnector, settings.pop("socket", daemon.socket), **settings)
            if engine.scheduler._scheduler is not None:
                engine.scheduler._scheduler._offers._clock = StillClock()
            stack.callback(engine.close)
            engines.append(engine)
            return engine

        yield start_engine
        assert [engine.wrong_reads for engine in engines] == [0] * len(engines)
