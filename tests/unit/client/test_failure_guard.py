"""The border to an engine: failures become misses, are counted by call, and are logged once."""

import logging

import pytest

from kvpool_client.engines.failure_guard import REASONS_MAX, Border

LOG = logging.getLogger("tests.border")


def failing() -> int:
    raise ValueError("the cause")


def test_what_fails_is_the_callers_miss_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    border = Border(LOG)
    assert border.call("lookup", 7, lambda: 3) == 3
    for _ in range(3):
        assert border.call("lookup", 7, failing) == 7
    border.miss("save", "no room")
    border.miss("save", "no room")
    assert border.failures == 5
    assert border.counts() == {"failed_lookup": 3, "failed_save": 2}
    assert [record.message.partition(":")[0] for record in caplog.records] == ["kvpool", "save missed"]
    assert "the cause" in caplog.text


def test_what_a_person_does_is_no_miss() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    border = Border(LOG)
    with pytest.raises(KeyboardInterrupt):
        border.call("lookup", 0, interrupted)
    assert border.failures == 0


def test_reasons_that_differ_every_time_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    border = Border(LOG)
    for number in range(REASONS_MAX + 50):
        border.complain(f"reason {number}")
    assert len(caplog.records) == REASONS_MAX
