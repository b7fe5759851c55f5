"""Fixtures that every test may use, and what a run prints at its end."""

import gc
import logging
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from heapq import nlargest
from operator import itemgetter
from pathlib import Path

import hypothesis
import pytest

from tests.rigs.daemon import WRITE_MODES, Daemon
from tests.rigs.runs.forking import Starts

pytest_plugins = ["tests.rigs.runs.sampling", "tests.rigs.runs.time_limit", "tests.rigs.runs.verdicts"]

# A test's property whose value is one line of the section `campaigns`. Properties reach the end of a run from every worker.
CAMPAIGN_LINE = "campaign"
SLOWEST_MODULES = 10
ROOT = Path(__file__).parent
# Directories and files whose tests are about a daemon's process: its start by a shell, its memory, its host.
EXECUTED = ("nodes", "test_hang_ups.py", "test_bench_footprint.py", "test_short_of_memory.py")
# A shorter run lists no slow modules.
SLOW_RUN_S = 30.0
# No example has a bound on its time.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_collection() -> None:
    """Collect without the collector: next to nothing of it is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what every test meets from costing each of them: what is collected lives to the end, and pytest attaches handlers
    to every logger that does not propagate, three times a test; torch has forty."""
    gc.enable()
    gc.freeze()
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_configure() -> None:
    """Restores SIGINT: a shell's background run ignores it, and so would every process that a test starts and ends by it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long campaigns to their own targets; with KVPOOL_CAMPAIGN=only leave out what `make test` runs."""
    wanted = os.environ.get("KVPOOL_CAMPAIGN", "")
    if wanted not in ("", "0", "only"):
        return
    is_only = wanted == "only"
    left_out = [item for item in items if _is_campaign(item, with_counts=is_only) is not is_only]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let daemons be executed where their start is what is tested, and forked elsewhere."""
    is_of_starts = any(part in EXECUTED for part in item.path.relative_to(ROOT).parts)
    Starts.are_executed = is_of_starts or item.get_closest_marker("timed") is not None


def _is_campaign(item: pytest.Item, *, with_counts: bool) -> bool:
    """Whether a test belongs to a campaign alone; with `with_counts` also whether it does more there, or is slow."""
    does_more = with_counts and (
        "campaign" in getattr(item, "fixturenames", ()) or item.get_closest_marker("slow") is not None
    )
    return does_more or item.get_closest_marker("campaign") is not None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines of the campaigns and the modules that took the most time."""
    reports = [
        report for found in terminalreporter.stats.values() for report in found if isinstance(report, pytest.TestReport)
    ]
    lines = [
        value
        for report in reports
        for name, value in report.user_properties
        if name == CAMPAIGN_LINE and report.when == "call"
    ]
    if lines:
        terminalreporter.section("campaigns")
        for line in lines:
            terminalreporter.write_line(str(line))
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > SLOW_RUN_S and len(seconds) > 1:
        terminalreporter.section(f"slowest {SLOWEST_MODULES} modules")
        for module, taken_s in nlargest(SLOWEST_MODULES, seconds.items(), key=itemgetter(1)):
            terminalreporter.write_line(f"{taken_s:7.1f} s  {module}")


@pytest.fixture
def write_mode(request: pytest.FixtureRequest) -> str:
    """The write mode of saves: a test that is marked `in_both_write_modes` runs twice."""
    return str(getattr(request, "param", "in-place"))


@pytest.fixture
def start_daemon(tmp_path: Path, write_mode: str) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons that end with the test. Options are `section__key="value"`."""
    with ExitStack() as stack:

        def start(**options: str) -> Daemon:
            directory = tmp_path / f"daemon-{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            named = {**WRITE_MODES[write_mode], **{name.replace("__", "."): value for name, value in options.items()}}
            return stack.enter_context(Daemon(directory, **named))

        yield start


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon with 16 MiB of DRAM."""
    return start_daemon()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for tests that leave nothing behind."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
        assert daemon.problems() == []


@pytest.fixture
def seed() -> int:
    """A seed, printed; KVPOOL_SEED replays it."""
    value = int(os.environ.get("KVPOOL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVPOOL_SEED={value}")
    return value
