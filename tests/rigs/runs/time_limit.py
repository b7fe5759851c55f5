"""A limit on the time of a run: with KVPOOL_TIME_S, tests that have not begun when so many seconds have passed are skipped.

Continuous integration draws what it runs of the long suites; on a slow machine it runs less of them instead of failing. The
files come in an order drawn by the printed seed, so that every file has its turn. What is skipped is counted in the report.
"""

import math
import os
import random
import time

import pytest

from tests.rigs.runs.sampling import SAMPLE_SEED

NAME = "KVPOOL_TIME_S"
DEADLINE_S = pytest.StashKey[float]()


def _limit_s() -> float:
    text = os.environ.get(NAME, "") or "0"
    if not text.isascii() or not text.isdecimal():
        raise pytest.UsageError(f"{NAME}={text}: expected a whole number of seconds, or 0 for no limit")
    return float(text) or math.inf


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Begin the time. Each worker has its own, which begins later than the run's by the start of a process."""
    config.stash[DEADLINE_S] = time.monotonic() + _limit_s()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the order of the files; the tests of one stay together, in their order. Every worker draws the same."""
    if math.isinf(_limit_s()):
        return
    files = list(dict.fromkeys(item.path for item in items))
    random.Random(config.stash[SAMPLE_SEED]).shuffle(files)
    places = {path: place for place, path in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins too late."""
    if time.monotonic() > item.config.stash[DEADLINE_S]:
        pytest.skip(f"not begun within the {_limit_s():.0f} s of this run ({NAME})")
