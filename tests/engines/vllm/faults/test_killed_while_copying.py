"""Kills (-9) of the daemon while the layers of a load are copied, in both ways of loading: the same tokens.

From DRAM it dies when the copy has just begun, or between two layers of the model; from a slow disk when only a part of the
chunks has landed.
"""

import signal
from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import Plain, Survivor, counted, wait_restored, wait_stored
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, tokens_of_answer
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.faults.rigs.fault_filesystem import FaultFilesystem
from tests.rigs.daemon import Daemon, wait_until

ASKED = [prompt(1300, 1500), prompt(1301, 700)]
# A read of this time leaves a test time to poll, and all of them together stay below the limit without progress.
READ_US = 50_000


@pytest.fixture(scope="module")
def expected(plain: Plain) -> list[list[int]]:
    return plain(GROUPED).tokens(ASKED, 16)


@pytest.fixture(params=["async", "sync"])
def engine(request: pytest.FixtureRequest) -> Survivor:
    survivor: Survivor = request.getfixturevalue("survivor" if request.param == "async" else "sync_survivor")
    return survivor


def _must_work_as_ever(survivor: Survivor, daemon: Daemon, expected: list[list[int]]) -> None:
    assert daemon.process is not None
    assert daemon.process.wait(10.0) == -signal.SIGKILL, daemon.log()
    daemon.start()
    survivor.wait_served(daemon)
    assert survivor.engine.tokens(ASKED, 16) == expected
    before = counted(survivor.engine, "loaded_chunks")
    assert survivor.engine.tokens(ASKED, 16) == expected
    assert (counted(survivor.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(ASKED)
    assert not daemon.problems()


@pytest.mark.parametrize(
    ("way", "layer"),
    [("async", -1), ("sync", 0), ("sync", 2)],
    ids=["async-copying", "sync-first-layer", "sync-third-layer"],
)
def test_daemon_is_killed_while_a_load_copies_from_dram(
    way: str, layer: int, request: pytest.FixtureRequest, expected: list[list[int]]
) -> None:
    survivor: Survivor = request.getfixturevalue("survivor" if way == "async" else "sync_survivor")
    with survivor.daemon() as daemon:
        assert survivor.engine.tokens(ASKED, 16) == expected
        wait_stored(daemon, loadable_tokens(ASKED))
        assert daemon.process is not None
        survivor.engine.ask("strike", pid=daemon.process.pid, layer=layer)
        assert survivor.engine.tokens(ASKED, 16) == expected
        assert survivor.engine.ask("has_struck")["struck"]
        _must_work_as_ever(survivor, daemon, expected)


def test_daemon_is_killed_while_layers_come_from_a_slow_disk(
    engine: Survivor, slow_disk: FaultFilesystem, expected: list[list[int]], report: Callable[[str], None]
) -> None:
    options = {"ssd.path": str(slow_disk.path / "ssd"), "ssd.capacity": "64MiB", "ssd.threads": "1"}
    with engine.daemon(**options) as daemon:
        assert engine.engine.tokens(ASKED, 16) == expected
        wait_stored(daemon, loadable_tokens(ASKED))
        chunks = int(daemon.stats()["dram.chunks"])
        assert daemon.stop() == 0
        daemon.start()
        wait_restored(daemon, chunks)
        engine.wait_served(daemon)
        slow_disk.set(match="segment-", delay_us=READ_US)
        engine.engine.forget()
        engine.engine.send("generate", prompts=ASKED, tokens=16)
        wait_until(lambda: int(daemon.stats()["ssd.promoted_chunks"]) >= 3, "some chunks have come")
        landed = int(daemon.stats()["ssd.promoted_chunks"])
        daemon.kill()
        slow_disk.clear()
        assert tokens_of_answer(engine.engine.answer()) == expected
        report(f"{landed} of {chunks} chunks had come")
        assert landed < chunks
        _must_work_as_ever(engine, daemon, expected)
