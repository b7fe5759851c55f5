"""Samples of long suites: of the cases of each parametrised test, one in KVPOOL_SAMPLE runs, drawn by a printed seed.

Continuous integration has a bound on its time. Each test keeps one case at least, so what a sample leaves out is a repetition
with other parameters. Of tests that hold a bound on time, which run one at a time, each file keeps one at least.
KVPOOL_SEED draws the same sample again; without KVPOOL_SAMPLE everything runs. The workers of one run draw the same sample.
"""

import os
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

SAMPLE_SEED = pytest.StashKey[int]()
# What a worker gets from the process that started it: xdist's name of the dictionary, and the seed's in it.
FROM_CONTROLLER = "workerinput"
SEED_NAME = "kvpool_sample_seed"


def drawn(names: Sequence[str], one_in: int, seed: int, timed: Collection[str] = ()) -> set[str]:
    """Which of these test names run: of those that differ in their parameters alone, or are timed and of one file, one in
    `one_in`, rounded up."""
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        cases[name.partition("::" if name in timed else "[")[0]].append(name)
    draw = random.Random(seed)
    return {name for found in cases.values() for name in draw.sample(found, -(-len(found) // one_in))}


def _one_in() -> int:
    text = os.environ.get("KVPOOL_SAMPLE", "") or "1"
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise pytest.UsageError(f"KVPOOL_SAMPLE={text}: expected a whole number from 1 on")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed, or take the run's, and refuse a sample that is no number."""
    _one_in()
    given: Mapping[str, int] = getattr(config, FROM_CONTROLLER, {})
    own = os.environ.get("KVPOOL_SEED") or random.SystemRandom().randrange(1 << 32)
    config.stash[SAMPLE_SEED] = int(given.get(SEED_NAME, own))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a worker."""
    getattr(node, FROM_CONTROLLER)[SEED_NAME] = node.config.stash[SAMPLE_SEED]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the sample, and how to draw it again."""
    if _one_in() > 1:
        terminalreporter.section("sample")
        terminalreporter.write_line(
            f"one case in {_one_in()} of each test; the same again: KVPOOL_SEED={config.stash[SAMPLE_SEED]}"
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the other cases out."""
    if _one_in() == 1:
        return
    timed = {item.nodeid for item in items if item.get_closest_marker("timed")}
    chosen = drawn([item.nodeid for item in items], _one_in(), config.stash[SAMPLE_SEED], timed)
    left_out = [item for item in items if item.nodeid not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]
