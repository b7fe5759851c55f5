"""Death and return of the daemon at every moment of a request: the same tokens, and the engine lives on."""

import signal
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, Survivor, counted, wait_restored, wait_stored
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, tokens_of_answer
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import Daemon, wait_until

ASKED = prompts(first=800)
# Long enough that a test which polls every few milliseconds hits it.
PAUSE = "delay(1500ms)"


@pytest.fixture(scope="module")
def expected(plain: Plain) -> list[list[int]]:
    return plain(GROUPED).tokens(ASKED, 16)


def _must_be_dead(daemon: Daemon) -> None:
    assert daemon.process is not None
    assert daemon.process.wait(10.0) == -signal.SIGKILL, daemon.log()


def _must_work_as_ever(survivor: Survivor, daemon: Daemon, expected: list[list[int]]) -> None:
    """A new life of the daemon serves the engine: right tokens, chunks stored or there already, and loaded."""
    daemon.environment = {}
    daemon.start()
    survivor.wait_served(daemon)
    assert survivor.engine.tokens(ASKED, 16) == expected
    before = counted(survivor.engine, "loaded_chunks")
    assert survivor.engine.tokens(ASKED, 16) == expected
    assert (counted(survivor.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(ASKED)
    assert not daemon.problems()


def _begin(survivor: Survivor) -> None:
    survivor.engine.forget()
    survivor.engine.send("generate", prompts=ASKED, tokens=16)


def test_engine_started_without_a_daemon_works_and_picks_it_up(
    survivor: Survivor, tmp_path: Path, plain: Plain, expected: list[list[int]]
) -> None:
    assert survivor.tokens_without_daemon == plain(GROUPED).tokens(survivor.asked_without_daemon, 16)
    with survivor.daemon() as daemon:
        assert survivor.engine.tokens(ASKED, 16) == expected
        wait_stored(daemon, loadable_tokens(ASKED))
        before = counted(survivor.engine, "loaded_chunks")
        assert survivor.engine.tokens(ASKED, 16) == expected
        assert (counted(survivor.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(ASKED)


@pytest.mark.parametrize("point", ["daemon.acquire.before_hold", "daemon.acquire.after_grant"])
def test_daemon_dies_between_lookup_and_lease(point: str, survivor: Survivor, expected: list[list[int]]) -> None:
    with survivor.daemon(failpoint=f"{point}:1:crash") as daemon:
        assert survivor.engine.tokens(ASKED, 16) == expected
        wait_stored(daemon, loadable_tokens(ASKED))
        assert survivor.engine.tokens(ASKED, 16) == expected
        _must_be_dead(daemon)
        _must_work_as_ever(survivor, daemon, expected)


@pytest.mark.parametrize("point", ["client.load.before", "client.load.before_result"])
def test_daemon_is_killed_while_a_load_has_its_lease(point: str, survivor: Survivor, expected: list[list[int]]) -> None:
    with survivor.daemon() as daemon:
        assert survivor.engine.tokens(ASKED, 16) == expected
        wait_stored(daemon, loadable_tokens(ASKED))
        survivor.engine.ask("arm", points=f"{point}:1:{PAUSE}")
        _begin(survivor)
        wait_until(lambda: int(daemon.stats()["leases"]) > 0, "a lease is held")
        daemon.kill()
        assert tokens_of_answer(survivor.engine.answer()) == expected
        survivor.engine.ask("arm", points="")
        _must_work_as_ever(survivor, daemon, expected)


@pytest.mark.parametrize(
    "point",
    [
        "daemon.promote.before_read:1",
        "daemon.promote.landed:1",
        "daemon.promote.landed:3",
        "daemon.promote.landed:9",
    ],
)
def test_daemon_dies_in_the_middle_of_a_load_from_ssd(
    point: str, survivor: Survivor, tmp_path: Path, expected: list[list[int]]
) -> None:
    options = {"ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "64MiB"}
    with survivor.daemon(**options) as daemon:
        assert survivor.engine.tokens(ASKED, 16) == expected
        wait_stored(daemon, loadable_tokens(ASKED))
        chunks = int(daemon.stats()["dram.chunks"])
        assert daemon.stop() == 0
        daemon.environment = {"KVPOOL_FAILPOINT": f"{point}:crash"}
        daemon.start()
        wait_restored(daemon, chunks)
        survivor.wait_served(daemon)
        assert survivor.engine.tokens(ASKED, 16) == expected
        _must_be_dead(daemon)
        _must_work_as_ever(survivor, daemon, expected)


@pytest.mark.parametrize(
    "point",
    [
        "daemon.reserve.before:1",
        "daemon.reserve.after:2",
        "daemon.commit.before_publish:1",
        "daemon.commit.before_publish:3",
        "daemon.commit.after_publish:2",
    ],
)
def test_daemon_dies_while_saving(point: str, survivor: Survivor, expected: list[list[int]]) -> None:
    with survivor.daemon(failpoint=f"{point}:crash") as daemon:
        assert survivor.engine.tokens(ASKED, 16) == expected
        _must_be_dead(daemon)
        _must_work_as_ever(survivor, daemon, expected)


def test_a_hung_daemon_delays_the_engine_and_changes_no_token(survivor: Survivor, expected: list[list[int]]) -> None:
    with survivor.daemon() as daemon:
        assert survivor.engine.tokens(ASKED, 16) == expected
        wait_stored(daemon, loadable_tokens(ASKED))
        daemon.signal(signal.SIGSTOP)
        assert survivor.engine.tokens(ASKED, 16) == expected
        daemon.signal(signal.SIGCONT)
        survivor.wait_served(daemon)
        assert survivor.engine.tokens(ASKED, 16) == expected
