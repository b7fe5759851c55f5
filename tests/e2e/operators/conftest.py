"""Operators' tests fork their daemons: only commands and answers are tested here, and no start."""

import pytest

from tests.rigs.runs.forking import Starts


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let daemons be forked, but for bounds on time."""
    Starts.are_executed = item.get_closest_marker("timed") is not None
