"""Rehearsal of the GPU run: every part's own code on the emulated driver, and runs that are cut, fail or lack something."""

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.gpu import __main__ as run
from tests.gpu import needs
from tests.gpu.parts import PARTS, Part
from tests.gpu.results import FILE_NAME
from tests.rigs.daemon import wait_until
from tests.rigs.runs.processes import is_running

ROOT = Path(__file__).parents[2]
SPREAD = {"median": 2.0, "least": 1.0, "most": 3.0, "rounds": 3}
FIGURE = json.dumps({"figure": {"name": "a figure", **SPREAD, "unit": "GB/s", "ratio": 0.5, "bar": 0.9}})
PRINTS = f"import time, sys; print({FIGURE!r}, flush=True); "
MACHINE = {"card": "a card"}


def _part(name: str, code: str, limit_s: float = 60.0) -> Part:
    return Part(name, "a part", limit_s, ("-c", code), ("-c", code))


@pytest.fixture
def run_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """A run of these parts on a machine that has all; its exit code."""
    monkeypatch.setattr(run, "missing", lambda **_: [])
    monkeypatch.setattr(run, "_held_context", contextlib.nullcontext)

    def start(parts: list[Part], *arguments: str, machine: dict[str, str] = MACHINE) -> int:
        monkeypatch.setattr(run, "machine", lambda: machine)
        monkeypatch.setattr(run, "PARTS", parts)
        return run.main(["--out", str(tmp_path), *arguments])

    return start


def _found(tmp_path: Path) -> dict[str, dict[str, object]]:
    parts: dict[str, dict[str, object]] = json.loads((tmp_path / FILE_NAME).read_text())["parts"]
    return parts


MEASURED = [part.name for part in PARTS if part.arguments[1].startswith("tests.gpu.")]


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "engine" else ()) for name in MEASURED]
)
def test_a_part_measures_on_the_emulated_driver(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ):
        importlib.import_module(f"tests.gpu.{name}").main()
    figures = [json.loads(line)["figure"] for line in capsys.readouterr().out.splitlines()]
    assert len(figures) >= 2
    for figure in figures:
        assert 0 < figure["least"] <= figure["median"] <= figure["most"]
        assert figure["unit"] in ("GB/s", "ms", "s")


@pytest.mark.slow
def test_parts_run_as_programs_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KVPOOL_CAMPAIGN", "KVPOOL_SAMPLE", "KVPOOL_TIME_S"):
        monkeypatch.delenv(name, raising=False)  # of a sample of campaigns, which the part is none of
    assert run.main(["--rehearse", "--part", "device", "--part", "copies", "--out", str(tmp_path)]) == 0
    found = _found(tmp_path)
    assert {name: part["verdict"] for name, part in found.items()} == {"device": "ok", "copies": "ok"}
    assert " passed" in str(found["device"]["why"])
    assert found["copies"]["figures"]


def test_suites_that_parts_name_are_there() -> None:
    named = [word for part in PARTS for word in (*part.arguments, *part.rehearsed) if word.startswith("tests/")]
    assert len(named) > 8
    assert [word for word in named if not (ROOT / word).exists()] == []


def test_a_part_that_is_cut_keeps_what_it_has(
    run_parts: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class UntilItIsKept:
        """A deadline that has passed when a figure is in the results."""

        def __init__(self, limit_s: float) -> None:
            self._limit_s = limit_s

        def remaining_s(self) -> float:
            return 0.0 if "a figure" in (tmp_path / FILE_NAME).read_text() else self._limit_s

    monkeypatch.setattr("tests.gpu.parts.Deadline", UntilItIsKept)
    assert run_parts([_part("hangs", f"{PRINTS}time.sleep(600)")], "--rehearse") == 1
    assert _found(tmp_path)["hangs"]["verdict"] == "cut"
    assert _found(tmp_path)["hangs"]["figures"] == [json.loads(FIGURE)["figure"]]
    assert "hangs: cut: not done after 60 s" in capsys.readouterr().out


def test_a_run_goes_on_where_the_last_one_ended(run_parts: Callable[..., int], tmp_path: Path) -> None:
    counts = "open(sys.argv[1], 'a').write('x')"
    flag, once = tmp_path / "flag", tmp_path / "once"
    parts = [
        Part("first", "", 60.0, (), ("-c", f"import sys; {counts}", str(once))),
        Part("second", "", 60.0, (), ("-c", "import os, sys; sys.exit(not os.path.exists(sys.argv[1]))", str(flag))),
    ]
    assert run_parts(parts, "--rehearse") == 1
    flag.touch()
    assert run_parts(parts, "--rehearse") == 0
    assert once.read_text() == "x", "what has ended well is not run again"
    assert run_parts(parts, "--rehearse", machine={"card": "another"}) == 0
    assert once.read_text() == "xx", "but on another machine it is"


def test_a_failure_is_explained_and_no_part_begins_without_time(
    run_parts: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [_part("fails", "raise SystemExit('no such thing')"), _part("late", "pass")]
    assert run_parts(parts, "--rehearse") == 1
    assert _found(tmp_path)["fails"]["why"] == "no such thing"
    assert run_parts(parts, "--rehearse", "--limit", "5") == 1
    assert "fails: not begun, 5 s are over: make test-gpu PART=fails" in capsys.readouterr().out


LEAVES = """
import os, signal, subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({file!r}, "w").write(str(left.pid))
"""


def test_who_has_the_output_of_a_part_that_has_ended_delays_nobody(
    run_parts: Callable[..., int], tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    assert run_parts([_part("leaves", LEAVES.format(file=str(file)))], "--rehearse") == 0
    os.kill(int(file.read_text()), signal.SIGKILL)


def test_an_interrupt_ends_the_part_with_its_daemons_and_keeps_what_it_has(
    run_parts: Callable[..., int], tmp_path: Path
) -> None:
    """Daemons have sessions of their own."""
    file = tmp_path / "pid"
    code = f"{PRINTS}{LEAVES.format(file=str(file))}os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)"
    assert run_parts([_part("hangs", code), _part("later", "pass")], "--rehearse") == 130
    wait_until(lambda: not is_running(int(file.read_text())), "it has ended")
    found = _found(tmp_path)
    assert list(found) == ["hangs"]
    assert (found["hangs"]["verdict"], found["hangs"]["why"]) == ("cut", "interrupted")
    assert found["hangs"]["figures"]


def test_a_suite_that_skips_everything_is_no_success_on_a_device(run_parts: Callable[..., int], tmp_path: Path) -> None:
    parts = [_part("skips", "print('3 skipped in 0.1s')")]
    assert run_parts(parts, "--rehearse") == 0
    assert run_parts(parts) == 1
    assert _found(tmp_path)["skips"]["why"] == "no test has run: 3 skipped in 0.1s"


def test_a_figure_below_its_bar_fails_the_run_but_no_rehearsal(
    run_parts: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [_part("slow", PRINTS)]
    assert run_parts(parts, "--rehearse") == 0
    assert run_parts(parts) == 1
    assert "below its bar: slow: a figure: 0.50, expected 0.9" in capsys.readouterr().out


def test_what_a_machine_lacks_is_named_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert needs.main() == 2
    errors = capsys.readouterr().err
    assert "packages: numpy msgpack " in errors
    assert "the native module, without g++, cmake, ninja, nanobind: install these" in errors
    assert run.main(["--part", "copies"]) == 2


def test_a_machine_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "machine", lambda: {"torch": "2.9"})
    assert needs.missing(is_rehearsal=False) == ["a CUDA device that torch sees: nvidia-smi lists those there are"]
    assert needs.missing(is_rehearsal=True) == []


def test_the_machine_is_described() -> None:
    found = needs.machine()
    assert {"torch", "Python", "processor", "cores"} <= set(found)
    assert sys.version.startswith(str(found["Python"]))
