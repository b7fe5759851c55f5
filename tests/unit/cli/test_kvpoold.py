"""The daemon's command line: the options that reach `serve`, and exits without serving."""

import pytest

from kvpool import __version__
from kvpool.cli import serving
from kvpool.cli.kvpoold import run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, list[str]]]:
    calls: list[tuple[str | None, list[str]]] = []

    def serve(file: str | None, overrides: list[str]) -> int:
        calls.append((file, overrides))
        return len(calls)

    monkeypatch.setattr(serving, "serve", serve)
    return calls


def test_options_reach_the_daemon_in_their_order_and_its_code_comes_back(
    served: list[tuple[str | None, list[str]]],
) -> None:
    assert run([]) == 1
    assert run(["--set", "a.b=1", "--config", "/etc/x.toml", "--rebuild", "--set=a.b=-2"]) == 2
    assert served == [(None, []), ("/etc/x.toml", ["a.b=1", "a.b=-2", "ssd.rebuild=true"])]


@pytest.mark.parametrize("arguments", [["--confi=x", "--none"], ["serve"], ["--set"]])
def test_wrong_usage_exits_with_2_and_serves_nothing(
    arguments: list[str], served: list[tuple[str | None, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert served == []
    assert "Error: " in capsys.readouterr().err


def test_help_and_version_are_printed_and_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvpoold {__version__}\n"
    assert run(["--help"]) == 0
    output = capsys.readouterr().out
    assert "--set SECTION.KEY=VALUE" in output
    assert "0  stopped by SIGTERM or SIGINT" in output
