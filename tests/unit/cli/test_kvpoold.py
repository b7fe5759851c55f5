"""The daemon's command line: the options that reach `serve`, and exits without serving."""

import resource
import subprocess
import sys

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


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), OSError(12, "cannot map"), MemoryError("bad_alloc"), MemoryError()],
)
def test_a_start_that_fails_for_lack_of_address_space_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(serving, "_serve", fail)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512 << 20, 512 << 20))
    assert run([]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"cannot serve: {str(error) or 'out of memory'}; " in lines[0]
    assert "; the process may have 512.0 MiB of address space: raise or remove the limit (ulimit -v" in lines[0]


def test_a_start_without_memory_for_the_libraries_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == serving.__name__:
                raise MemoryError

    monkeypatch.delitem(sys.modules, serving.__name__)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512 << 20, 512 << 20))
    assert run([]) == 1
    assert capfd.readouterr().err.startswith("Error: cannot serve: out of memory; the process may have 512.0 MiB of ")


@pytest.mark.parametrize("error", [RuntimeError("a mistake in the program"), ZeroDivisionError()])
def test_a_start_that_fails_by_a_mistake_keeps_its_trace(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(serving, "_serve", fail)
    with pytest.raises(type(error)):
        run([])


@pytest.mark.parametrize("limit_mib", [48, 64])
def test_too_little_address_space_for_the_libraries_ends_the_start_without_a_trace(limit_mib: int) -> None:
    command = [
        "sh",
        "-c",
        'ulimit -v "$1" && exec "$2" -m kvpool.cli.kvpoold',
        "sh",
        str(limit_mib << 10),
        sys.executable,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "cannot serve: " in ended.stderr
    assert f"the process may have {limit_mib}.0 MiB of address space" in ended.stderr


def test_a_start_without_peers_imports_nothing_of_them_and_collects_no_garbage() -> None:
    code = """
import gc, sys
from kvpool.cli import kvpoold, serving
serving.serve = lambda *_: print(gc.isenabled(), *sorted({"zmq", "kvpool.server.peers.fleet"} & set(sys.modules))) or 0
sys.argv = ["kvpoold"]
kvpoold.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "False\n"


def test_help_and_version_are_printed_and_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvpoold {__version__}\n"
    assert run(["--help"]) == 0
    output = capsys.readouterr().out
    assert "--set SECTION.KEY=VALUE" in output
    assert "0  stopped by SIGTERM or SIGINT" in output
