"""Tables of commands: whole on a narrow terminal, and aligned whatever their first row is."""

import sys

import pytest

from kvpool_tools.cli.output import print_section, print_table

ROWS = [
    {"node": "?", "address": "192.0.2.12:9470", "read": "-"},
    {"node": "n" * 60, "address": "b" * 30, "read": "1 KiB"},
]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_table_is_never_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")  # no colours
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    print_table("nodes", ROWS, words=("node", "address"))
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    assert [line.strip("│ ").split() for line in lines[4:6]] == [
        ["?", "│", "192.0.2.12:9470", "│", "-"],
        ["n" * 60, "│", "b" * 30, "│", "1", "KiB"],
    ]
    assert "│ ? " in lines[4], "to the left"


def test_a_section_names_the_entries_of_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    print_section("events", {"models": {"llama": "ipc:///run/e", "qwen": "ipc:///run/f"}, "tiers": ["dram", "ssd"]})
    assert capsys.readouterr().out == "# Events\nmodels:llama=ipc:///run/e,qwen=ipc:///run/f\ntiers:dram,ssd\n"
