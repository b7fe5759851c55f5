"""Fixtures of the engine tests: models, engines without a connector, daemons, one line of figures each at the end.

They need vLLM, which is not in the ordinary environment: `make test-engines` runs them in one of their own. An engine takes ten
seconds to start, so they share engines; each test has a daemon of its own unless it says otherwise.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CAMPAIGN_LINE
from tests.engines.vllm.rigs.engine import Engine
from tests.engines.vllm.rigs.prompts import prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, Geometry, write_model
from tests.faults.rigs import fault_filesystem as faulty
from tests.rigs.daemon import Daemon, wait_until

StartEngine = Callable[..., Engine]
Plain = Callable[[Geometry], Engine]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Everywhere but in `make test-engines` these tests are not collected."""
    return True if os.environ.get("KVPOOL_ENGINES", "") in ("", "0") else None


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line for the end."""

    def take(line: str) -> None:
        request.node.user_properties.append((CAMPAIGN_LINE, f"{request.node.name}: {line}"))

    return take


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Geometry], Path]:
    """The path of a model, which is written at the first use."""
    directory = tmp_path_factory.mktemp("models")
    written: dict[Geometry, Path] = {}

    def path(geometry: Geometry) -> Path:
        if geometry not in written:
            written[geometry] = write_model(geometry, directory)
        return written[geometry]

    return path


def _starter(
    stack: ExitStack, model: Callable[[Geometry], Path], factory: pytest.TempPathFactory
) -> Callable[..., Engine]:
    def start(geometry: Geometry, **options: object) -> Engine:
        log = factory.mktemp("engine") / "engine.log"
        return stack.enter_context(Engine(model(geometry), geometry, log, **options))  # type: ignore[arg-type]

    return start


@pytest.fixture(scope="module")
def start_engine(model: Callable[[Geometry], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Starts engines that end with the test's module."""
    with ExitStack() as stack:
        yield _starter(stack, model, tmp_path_factory)


@pytest.fixture(scope="session")
def plain(model: Callable[[Geometry], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """The engine without a connector, one for each geometry: its tokens are the right ones."""
    engines: dict[Geometry, Engine] = {}
    with ExitStack() as stack:
        start = _starter(stack, model, tmp_path_factory)

        def get(geometry: Geometry) -> Engine:
            if geometry not in engines:
                engines[geometry] = start(geometry)
            return engines[geometry]

        yield get


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that the tests of a module share: for engines that share it too."""
    with Daemon(tmp_path_factory.mktemp("daemon"), **{"dram.capacity": "256MiB"}) as daemon:
        yield daemon


def external_tokens(engine: Engine) -> int:
    """Tokens that vLLM took from the pool so far."""
    shown = engine.ask("counters")
    return int(sum(shown.get(f"kvpool_hit_tokens/{tier}", 0) for tier in ("dram", "ssd")))


def loaded_tokens(daemon: Daemon) -> int:
    """Tokens that engines have loaded from the pool, as they reported so far."""
    return int(daemon.stats()["usage.loaded_tokens"])


def chunks_in_dram(daemon: Daemon) -> int:
    """Chunks of all ranks."""
    return int(daemon.stats()["dram.chunks"])


def wait_loaded(daemon: Daemon, tokens: int) -> None:
    """Until engines have reported that they loaded so many tokens."""
    wait_until(lambda: loaded_tokens(daemon) >= tokens, f"{tokens} tokens are loaded, {loaded_tokens(daemon)} are")


def wait_stored(daemon: Daemon, tokens: int) -> None:
    """Until so many tokens are in the pool."""
    wait_until(lambda: int(daemon.stats()["usage.saved_tokens"]) >= tokens, f"{tokens} tokens are stored")


def wait_on_disk(daemon: Daemon, chunks: int) -> None:
    """Until so many chunks are on disk and in the catalogue, which a kill within 50 ms of a write leaves without it."""
    wait_until(lambda: int(daemon.stats()["ssd.chunks"]) >= chunks, f"{chunks} chunks are on disk")
    with daemon.admin() as admin:
        assert admin.demote_all(30.0)["durable"]


def wait_restored(daemon: Daemon, chunks: int) -> None:
    """Until a new life of the daemon has found so many chunks on disk."""
    wait_until(lambda: int(daemon.stats().get("ssd.chunks", 0)) >= chunks, f"{chunks} chunks are found on disk")


def wait_served(engine: Engine, daemon: Daemon) -> None:
    """Until every Pool of the engine's process is served by this life of the daemon."""
    with daemon.admin() as connection:
        epoch = connection.info()["epoch"]

    def is_served() -> bool:
        pools = engine.ask("pools")["pools"]
        return bool(pools) and all(pool["connected"] and pool["epoch"] == epoch for pool in pools)

    wait_until(is_served, "the engine is served by this daemon")


def counted(engine: Engine, name: str) -> int:
    """A counter of the client library, over all Pools of the engine's process."""
    return sum(int(pool.get(name, 0)) for pool in engine.ask("pools")["pools"])


class Survivor:
    """One engine that outlives many daemons at one socket. It was started while there was none."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        self.asked_without_daemon = prompts(first=780)
        self.tokens_without_daemon = engine.tokens(self.asked_without_daemon, 16)

    @contextmanager
    def daemon(self, failpoint: str = "", **options: str) -> Iterator[Daemon]:
        """A new daemon that serves the engine."""
        daemon = Daemon(self.directory, **options)
        daemon.environment = {"KVPOOL_FAILPOINT": failpoint}
        with daemon:
            self.wait_served(daemon)
            yield daemon

    def wait_served(self, daemon: Daemon) -> None:
        """Until this life of the daemon serves the engine."""
        wait_served(self.engine, daemon)


def _survive(model: Callable[[Geometry], Path], factory: pytest.TempPathFactory, **options: Any) -> Iterator[Survivor]:
    directory = factory.mktemp("daemons")
    log = factory.mktemp("engine") / "engine.log"
    with Engine(model(GROUPED), GROUPED, log, socket=str(directory / "kvpool.sock"), **options) as engine:
        yield Survivor(engine, directory)


@pytest.fixture(scope="session")
def survivor(model: Callable[[Geometry], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    """An engine for tests in which daemons die."""
    yield from _survive(model, tmp_path_factory)


@pytest.fixture(scope="session")
def sync_survivor(model: Callable[[Geometry], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    """The same with loads within the step, and long prompts computed in pieces beside the others."""
    options = {"settings": {"kvpool.load": "sync"}, "long_prefill_token_threshold": 64}
    yield from _survive(model, tmp_path_factory, **options)


@pytest.fixture(scope="session")
def disk_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file system that can be slow, compiled once. Skips where that is not possible."""
    return faulty.build(tmp_path_factory.mktemp("faultfs"))


@pytest.fixture
def slow_disk(disk_program: Path, tmp_path: Path) -> Iterator[faulty.FaultFilesystem]:
    """A mounted file system with adjustable delays."""
    directory = tmp_path / "disk"
    directory.mkdir()
    filesystem = faulty.FaultFilesystem(disk_program, directory)
    try:
        yield filesystem
    finally:
        filesystem.unmount()
