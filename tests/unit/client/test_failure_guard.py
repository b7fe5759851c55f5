"""The failure guard around an engine's calls: failures become misses, are counted by call, and are logged once."""

import logging

import pytest

from kvpool_client.engines.failure_guard import REASONS_MAX, FailureGuard

LOG = logging.getLogger("tests.guard")


def failing() -> int:
    raise ValueError("the cause")


def test_a_failure_is_a_miss_for_the_caller_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = FailureGuard(LOG)
    assert guard.call("lookup", 7, lambda: 3) == 3
    for _ in range(3):
        assert guard.call("lookup", 7, failing) == 7
    guard.miss("save", "no room")
    guard.miss("save", "no room")
    assert guard.failures == 5
    assert guard.counts() == {"failed_lookup": 3, "failed_save": 2}
    assert [record.message.partition(":")[0] for record in caplog.records] == ["kvpool", "save missed"]
    assert "the cause" in caplog.text


def test_a_keyboard_interrupt_is_no_miss() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    guard = FailureGuard(LOG)
    with pytest.raises(KeyboardInterrupt):
        guard.call("lookup", 0, interrupted)
    assert guard.failures == 0


def test_reasons_that_differ_every_time_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    guard = FailureGuard(LOG)
    for number in range(REASONS_MAX + 50):
        guard.warn_once(f"reason {number}")
    assert len(caplog.records) == REASONS_MAX
