"""Engines of the stand-ins, for every test of an adapter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool_client.lmcache import model_weights
from tests.engines.lmcache import standin as lmcache_standin
from tests.engines.sglang import standin as sglang_standin
from tests.rigs.daemon import Daemon, wait_until

# No deadline that a busy machine passes: a test of one sets its own.
TIMEOUT_S = 60
SETTINGS = {"STAGING_MIB": "1", "WINDOW_MIB": "1", "TIMEOUT_S": f"{TIMEOUT_S}", "CLAIM_TIMEOUT_S": f"{TIMEOUT_S}"}


@pytest.fixture
def weights(request: pytest.FixtureRequest) -> str:
    """The test's own name for its weights: it shares a daemon with others, and no chunk."""
    return str(request.node.nodeid)


@pytest.fixture
def start_trtllm(monkeypatch: pytest.MonkeyPatch, weights: str) -> Iterator[Callable[..., Any]]:
    """Starts TensorRT-LLM's executors on a daemon; `warm=False` leaves out the engine's own warm-up, `kind="windowed"` has
    layer groups."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from tests.engines.trtllm.interface import installed
    from tests.engines.trtllm.standin import Executor

    engines = []
    with installed() as tools:

        def make(
            daemon: Daemon,
            *,
            warm: bool = True,
            settings: dict[str, str] | None = None,
            kind: str = "plain",
            **args: Any,
        ) -> Executor:
            fields = {"plain": {}, "windowed": {"manager": "v2", "windows": (None, 8)}}[kind]
            given = {**SETTINGS, "SOCKET": daemon.socket, "REVISION": weights, **(settings or {})}
            with monkeypatch.context() as patch:
                for name, value in given.items():
                    patch.setenv(f"TLLM_KVPOOL_{name}", value)
                engines.append(Executor(tools, **{**fields, **args}))
            if warm:
                engines[-1].warm_up()
            return engines[-1]

        yield make
        for engine in engines:
            engine.close()


@pytest.fixture
def start_sglang(weights: str) -> Iterator[Callable[..., Any]]:
    """Makes a backend as SGLang's factory does, registers a pool and hands both to a controller."""
    made = []
    with sglang_standin.installed():

        def make(
            daemon: Daemon, pool: sglang_standin.HostPool | None = None, *, waits: bool = True, **fields: Any
        ) -> sglang_standin.Controller:
            from kvpool_client.sglang import KVPoolStorage

            extra = {"interface_v1": 1, "socket": daemon.socket, "revision": weights}
            extra |= {"timeout_s": TIMEOUT_S, "batch_timeout_s": TIMEOUT_S}
            extra |= fields.pop("extra", {})
            config = sglang_standin.StorageConfig(extra_config=extra, **fields)
            backend = KVPoolStorage(config, {})  # type: ignore[operator]
            made.append(backend)
            controller = sglang_standin.Controller(backend, pool or sglang_standin.HostPool())
            backend.register_mem_pool_host(controller.pool)
            backend.on_host_pools_registered()
            if waits:
                wait_until(lambda: backend.counters().get("connected") == 1, "the backend is connected")
            return controller

        yield make
        for backend in made:
            backend.close()


@pytest.fixture
def start_lmcache(weights: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes an adapter as LMCache's factory does, and a controller of it."""
    monkeypatch.setattr(model_weights, "LOOK_WAIT_S", TIMEOUT_S)
    made = []
    with lmcache_standin.installed():

        def make(daemon: Daemon, **params: object) -> lmcache_standin.Controller:
            from kvpool_client.lmcache import KVPoolAdapter

            given = {"socket": daemon.socket, "timeout_s": TIMEOUT_S, "task_timeout_s": TIMEOUT_S, "revision": weights}
            adapter = KVPoolAdapter(given | params, l1_memory_desc=None)  # type: ignore[operator]
            made.append(adapter)
            return lmcache_standin.Controller(adapter)

        yield make
        for adapter in made:
            adapter.close()
