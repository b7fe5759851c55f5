"""Daemons come, stop, die and return under one engine with the tier: the same tokens, and what is on disk alone is loaded."""

import signal
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, Survivor, wait_on_disk, wait_restored
from tests.engines.vllm.rigs.prompts import prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.engines.vllm.tier.conftest import TOKENS, answers, empty, loaded, wait_kept, whole_chunks
from tests.rigs.daemon import Daemon, wait_until

ASKED = prompts(first=5300)
CHUNKS = whole_chunks(ASKED)
# Long enough that a test on a busy machine looks while it lasts.
PAUSE = "delay(5000ms)"


@pytest.fixture(scope="module")
def expected(plain: Plain) -> list[list[int]]:
    return plain(GROUPED).tokens(ASKED, TOKENS)


def _must_load_all(tiered: Survivor, expected: list[list[int]]) -> None:
    before = loaded(tiered.engine)
    assert answers(tiered.engine, ASKED) == expected
    assert loaded(tiered.engine) - before == CHUNKS


def _must_work_as_ever(tiered: Survivor, daemon: Daemon, expected: list[list[int]]) -> None:
    """A new life of the daemon serves the engine: right tokens, chunks stored or there already, and loaded."""
    daemon.environment = {}
    daemon.start()
    tiered.wait_served(daemon)
    assert answers(tiered.engine, ASKED) == expected
    wait_kept(daemon, CHUNKS)
    _must_load_all(tiered, expected)
    assert not daemon.problems()


def test_an_engine_started_without_a_daemon_works_and_picks_it_up(
    tiered: Survivor, plain: Plain, expected: list[list[int]]
) -> None:
    assert tiered.tokens_without_daemon == plain(GROUPED).tokens(tiered.asked_without_daemon, TOKENS)
    with tiered.daemon() as daemon:
        assert answers(tiered.engine, ASKED) == expected
        wait_kept(daemon, CHUNKS)
        _must_load_all(tiered, expected)


def test_chunks_on_disk_alone_are_loaded(tiered: Survivor, tmp_path: Path, expected: list[list[int]]) -> None:
    options = {"ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "64MiB", "ssd.write_through": "true"}
    with tiered.daemon(**options) as daemon:
        assert answers(tiered.engine, ASKED) == expected
        wait_on_disk(daemon, CHUNKS)
        for end in (daemon.stop, daemon.kill):
            end()
            assert answers(tiered.engine, ASKED) == expected, "without a daemon"
            daemon.start()
            wait_restored(daemon, CHUNKS)
            tiered.wait_served(daemon)
            promoted = int(daemon.stats()["ssd.promoted_chunks"])
            _must_load_all(tiered, expected)
            assert int(daemon.stats()["ssd.promoted_chunks"]) - promoted == CHUNKS
        assert not daemon.problems()


@pytest.mark.parametrize(
    "point",
    [
        "daemon.acquire.before_hold:1",
        "daemon.acquire.after_grant:1",
        "daemon.reserve.before:1",
        "daemon.reserve.after:2",
        "daemon.commit.before_publish:1",
        "daemon.commit.after_publish:2",
    ],
)
def test_a_daemon_that_dies_at_any_point_changes_no_token(
    point: str, tiered: Survivor, expected: list[list[int]]
) -> None:
    with tiered.daemon(failpoint=f"{point}:crash") as daemon:
        for _ in range(3):
            assert answers(tiered.engine, ASKED) == expected
        assert daemon.process is not None
        assert daemon.process.wait(10.0) == -signal.SIGKILL, daemon.log()
        _must_work_as_ever(tiered, daemon, expected)


@pytest.mark.parametrize("point", ["client.load.before", "client.load.before_result", "client.save.before_commit"])
def test_a_daemon_that_is_killed_amid_a_copy_changes_no_token(
    point: str, tiered: Survivor, expected: list[list[int]]
) -> None:
    is_save = point.startswith("client.save")
    with tiered.daemon() as daemon:
        if not is_save:
            assert answers(tiered.engine, ASKED) == expected
            wait_kept(daemon, CHUNKS)
        tiered.engine.ask("arm", points=f"{point}:1:{PAUSE}")
        empty(tiered.engine)
        tiered.engine.send("generate", prompts=ASKED, tokens=TOKENS)
        held = "dram.writing_chunks" if is_save else "leases"
        wait_until(lambda: int(daemon.stats()[held]) > 0, "the copy is under way")
        daemon.kill()
        assert tiered.engine.answer()["tokens"] == expected
        tiered.engine.ask("arm", points="")
        _must_work_as_ever(tiered, daemon, expected)
