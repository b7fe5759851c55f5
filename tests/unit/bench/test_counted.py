"""Counts of instructions: what is compared with an earlier document, and what fails."""

import json
from pathlib import Path

import pytest

from kvpool.errors import InvalidArgument
from kvpool_tools.bench.counted import read_counts, slower
from kvpool_tools.bench.machine import describe_machine


def document(path: Path, **machine: object) -> str:
    rows = [{"name": "daemon: acquire, 4 chunks", "instructions": 1000}]
    path.write_text(json.dumps({"machine": {**describe_machine(), **machine}, "rows": rows}))
    return str(path)


def test_only_counts_of_the_same_python_and_architecture_are_compared(tmp_path: Path) -> None:
    assert read_counts(document(tmp_path / "own.json")) == {"daemon: acquire, 4 chunks": 1000}
    assert read_counts(document(tmp_path / "older.json", python="2.7.18")) == {}
    assert read_counts(document(tmp_path / "other.json", architecture="vax")) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"machine": {"python": "3.11.1"}, "rows": [{"name": 1}]}'])
def test_a_file_that_is_no_document_of_counts_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "counts.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"counts\.json, expected a document"):
        read_counts(str(tmp_path / "counts.json"))


def test_a_request_is_slower_beyond_five_hundredths_and_never_without_a_count_before() -> None:
    rows = [
        {"name": "a", "instructions": 1051, "before": 1000, "ratio": 1.051},
        {"name": "b", "instructions": 1050, "before": 1000, "ratio": 1.05},
        {"name": "c", "instructions": 9999, "before": None, "ratio": None},
        {"name": "d", "instructions": 9999},
    ]
    assert slower(rows) == ["a: 1,051 instructions, 1.051 x the 1,000 before"]
