"""The daemon's command line: the options that reach `serve`, and exits without serving."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvpool_native
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


def _in_shell(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = ["sh", "-c", script, "sh", sys.executable]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_file_is_refused_by_name_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    ended = _in_shell('mkdir gone; cd gone; rmdir ../gone; exec "$1" -m kvpool.cli.kvpoold --config a.toml', tmp_path)
    assert ended.returncode == 2
    assert (
        ended.stderr == "kvpoold: config file a.toml has no place: the working directory: No such file or directory\n"
    )


def test_without_standard_error_the_code_is_the_same(tmp_path: Path) -> None:
    assert _in_shell('exec "$1" -m kvpool.cli.kvpoold --set log.level=loud 2>&-', tmp_path).returncode == 2
    assert _in_shell('exec "$1" -m kvpool.cli.kvpoold --check 2>&-', tmp_path).returncode == 0


# What only an option needs, and what no daemon does: together more than a start takes without them.
HEAVY = {
    *("etcd", "lmdb", "prometheus_client", "rich", "torch", "urllib3", "zmq"),
    *("kvpool.pool.sharing.publications", "kvpool.server.events.publisher", "kvpool.server.health.probe"),
    *("kvpool.server.metrics.http", "kvpool.server.peers.fleet"),
    *("kvpool.tiers.hbm.tier", "kvpool.tiers.peer.tier", "kvpool.tiers.ssd.tier", "kvpool.tiers.store.tier"),
}


def test_a_plain_daemon_imports_nothing_that_only_an_option_needs(tmp_path: Path) -> None:
    code = f"""
import gc, os, sys
from kvpool.cli import kvpoold
from kvpool.server.app import App
before = []
App.__init__, made = lambda *given: (before.append(gc.isenabled()), made(*given))[1], App.__init__
App._begin_serving = lambda *_: (print(*before, *sorted({HEAVY!r} & set(sys.modules)), flush=True), os._exit(0))
sys.argv = ["kvpoold", "--set", "server.socket={tmp_path}/s", "--set", "dram.capacity=64MiB", "--set", "dram.prefault=false",
            "--set", "server.keep_memory=off"]
kvpoold.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "False\n"  # and no garbage is collected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_daemon_serves_ends_it_as_signals_do(number: signal.Signals) -> None:
    code = f"""
import os, sys
from kvpool.cli import kvpoold, serving
serving.serve = lambda *_: os.kill(os.getpid(), {number}) or 0
sys.argv = ["kvpoold"]
kvpoold.main()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == -number


def test_help_and_version_are_printed_and_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvpoold {__version__} ({kvpool_native.tls_library()})\n"
    assert run(["--help"]) == 0
    output = capsys.readouterr().out
    assert "--set SECTION.KEY=VALUE" in output
    assert "0  stopped by SIGTERM or SIGINT" in output


def test_the_reference_configuration_is_printed_and_has_no_fault(
    served: list[tuple[str | None, list[str]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["--print-config"]) == 0
    printed = capsys.readouterr().out
    assert printed == (Path(__file__).parents[3] / "configs" / "kvpool.toml").read_text()
    (tmp_path / "kvpool.toml").write_text(printed)
    assert run(["--config", str(tmp_path / "kvpool.toml"), "--check"]) == 0
    assert served == []
