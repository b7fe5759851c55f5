"""Tests of a daemon's life execute it where its start or its environment is what is tested, and fork it elsewhere."""

import pytest

from tests.rigs.runs.forking import Starts

EXECUTED = ("test_hang_ups.py",)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let daemons be forked, but for tests of starts and bounds on time."""
    Starts.are_executed = item.path.name in EXECUTED or item.get_closest_marker("timed") is not None
