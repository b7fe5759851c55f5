"""Lines of the log: priorities for the journal, times elsewhere, exactly one line for any message."""

import io
import logging
import os
from pathlib import Path

import pytest

from kvpool.server.connections.audit import audit
from kvpool.server.connections.local_socket import Peer
from kvpool.server.logs import JournalFormatter, begin_logging, is_journal


def _record(level: int, message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("kvpool.x", level, "x.py", 1, message, arguments, None)


def test_nothing_in_a_message_makes_a_second_line_or_moves_the_cursor() -> None:
    name = "model\n<3>kvpoold forged\r\x1b[2J\x85\u2028\t\x00é"
    line = JournalFormatter().format(_record(logging.INFO, "model %s", name))
    assert line == "<6>kvpool.x model model\\n<3>kvpoold forged\\r\\x1b[2J\\x85\\u2028\\t\\x00é"


def test_each_line_of_a_traceback_has_the_priority_and_looks_like_no_message() -> None:
    record = _record(logging.ERROR, "failed")
    try:
        raise ValueError("two\nkvpool.audit lines\r\x1b[2J\u2028\x85")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    lines = JournalFormatter().format(record).splitlines()
    assert lines[0] == "<3>kvpool.x failed"
    assert lines[-1] == r"<3>  kvpool.audit lines\r\x1b[2J\u2028\x85"
    assert all(line.startswith("<3>") for line in lines)


def test_the_journal_is_known_by_device_and_inode(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        assert is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
        assert not is_journal(stream, {})
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_logging_begins_anew_with_one_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    before, stream = root.level, io.StringIO()
    try:
        begin_logging("warning", stream, {})
        logging.getLogger("kvpool.x").info("not shown")
        audit(Peer(1, 2, 3), "flush", model="m\n")
        logging.getLogger("kvpool.x").warning("shown")
    finally:
        root.setLevel(before)
    lines = stream.getvalue().splitlines()
    assert [line.partition(" kvpool.")[2] for line in lines] == ["audit flush by pid 1 uid 2: model='m\\n'", "x shown"]
