"""Engines of the stand-ins, for every test of an adapter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.daemon import Daemon


@pytest.fixture
def start_trtllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts TensorRT-LLM's executors on a daemon; `warm=False` leaves out the engine's own warm-up."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from tests.engines.trtllm_interface import installed
    from tests.engines.trtllm_standin import Executor

    engines = []
    with installed() as tools:

        def make(daemon: Daemon, *, warm: bool = True, settings: dict[str, str] | None = None, **args: Any) -> Executor:
            given = {"SOCKET": daemon.socket, "STAGING_MIB": "1", "TIMEOUT_S": "0.5", **(settings or {})}
            with monkeypatch.context() as patch:
                for name, value in given.items():
                    patch.setenv(f"TLLM_KVPOOL_{name}", value)
                engines.append(Executor(tools, **args))
            if warm:
                engines[-1].warm_up()
            return engines[-1]

        yield make
        for engine in engines:
            engine.close()
