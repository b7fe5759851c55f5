"""Answers of the native module: structs with names, never tuples of more than two values."""

import re
from pathlib import Path

import pytest

import kvpool_native

STUBS = (Path(__file__).parents[3] / "typings" / "kvpool_native.pyi").read_text()
ANSWERS = (
    "ChangeRun",
    "ChunkOutcome",
    "FlushResult",
    "Held",
    "HeldHit",
    "HoldColumns",
    "HolderUse",
    "MoveEnd",
    "NamespaceUse",
    "Pinned",
    "PinnedRecords",
    "Reserved",
    "RowLayout",
    "ServedFrames",
    "SlotHeader",
    "StoredRecord",
)


def test_no_answer_is_a_tuple_of_more_than_two_things() -> None:
    found = re.findall(r"tuple\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]", STUBS)
    assert found, "there are pairs, so the pattern sees tuples"
    assert [fields for fields in found if len(re.sub(r"\[.*?\]", "", fields).split(",")) > 2] == []


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_a_repr_and_cannot_be_changed(name: str) -> None:
    answer = getattr(kvpool_native, name)
    assert answer.__doc__
    fields = [field for field in vars(answer) if not field.startswith("_")]
    assert fields
    assert all(vars(answer)[field].fset is None for field in fields)


def test_a_field_that_is_unknown_or_set_is_refused() -> None:
    row = kvpool_native.MOVE_ROW
    with pytest.raises(AttributeError):
        row.bytes = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        row.size  # type: ignore[attr-defined]  # noqa: B018
