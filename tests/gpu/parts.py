"""Parts of the GPU run, in order of worth: what each one is, and how long it may take.

A part is a program of its own, ended with all that it has started when its time is over. What it has reported by then stays.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.clock import Deadline

ROOT = Path(__file__).parents[2]
OK, FAILED, CUT = "ok", "failed", "cut"
DEVICE_SUITES = (
    "tests/unit/native/device",
    "tests/unit/client/device",
    "tests/e2e/device",
    "tests/e2e/pool/test_device_copies.py",
    "tests/e2e/pool/test_device_sizes.py",
    "tests/faults/test_device_lives.py",
    "tests/engines/trtllm/test_group_device.py",
)
# Of `pytest -m gpu`: torch tensors of the device in copies, tutorial, sparse sequences.
TORCH_SUITES = ("tests/e2e/pool", "tests/e2e/sparse", "tests/e2e/examples", "tests/engines/trtllm/test_connector.py")
BLOCK_SUITES = ("tests/e2e/blocks",)
# What a rehearsal runs of a suite, which the whole suite runs anyway.
REHEARSED = ("tests/unit/native/device/test_device.py",)
# Packages there are of other versions than here: their warnings are no errors.
_OPTIONS = ("-p", "no:cacheprovider", "-o", "addopts=-ra --strict-markers", "-o", "filterwarnings=default")
_PYTEST = ("-m", "pytest", "-q", *_OPTIONS, "-o", "faulthandler_timeout=40")
# Tests that have not begun after this share of a part's time are skipped, so that those that have are summed up.
BEGUN_SHARE = 0.75
LOOK_S = 0.5
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|errors)\b")


@dataclass(frozen=True, slots=True)
class Part:
    """One part. `arguments`: of Python on the GPU, `rehearsed`: in a rehearsal."""

    name: str
    about: str
    limit_s: float
    arguments: Sequence[str]
    rehearsed: Sequence[str]

    def command(self, *, is_rehearsal: bool) -> list[str]:
        """The command line."""
        return [sys.executable, *(self.rehearsed if is_rehearsal else self.arguments)]


def _suite(name: str, about: str, limit_s: float, arguments: Sequence[str], rehearsed: Sequence[str]) -> Part:
    return Part(name, about, limit_s, (*_PYTEST, *arguments), (*_PYTEST, *rehearsed))


def _measured(name: str, about: str, limit_s: float) -> Part:
    return Part(name, about, limit_s, ("-m", f"tests.gpu.{name}"), ("-m", f"tests.gpu.{name}"))


# The whole run takes no longer than RUN_S: no part begins that has not a fifth of its time left.
RUN_S = 480.0
PARTS = (
    _suite("driver", "what no emulation shows", 60.0, ("tests/gpu/test_driver.py",), ("tests/gpu/test_driver.py",)),
    _suite(
        "device",
        "copies, loads, saves and the device tier",
        150.0,
        ("-n", "8", "-m", "not timed", *DEVICE_SUITES),
        REHEARSED,
    ),
    _suite(
        "torch", "tensors on the device", 90.0, ("-n", "4", "-m", "gpu", *TORCH_SUITES), ("-m", "gpu", "tests/e2e/pool")
    ),
    _suite(
        "blocks",
        "block pool and KVCacheManager on the device",
        60.0,
        ("-n", "4", "-m", "not timed", *BLOCK_SUITES),
        BLOCK_SUITES,
    ),
    _measured("copies", "rates of copies", 60.0),
    _measured("paged", "rates of loads and saves", 90.0),
    _measured("sparse", "decoding by lookup", 100.0),
    _measured("engine", "time to the first token", 120.0),
)


def run_part(
    part: Part,
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    on_figure: Callable[[dict[str, Any]], None],
) -> tuple[str, str]:
    """Run a part for so long at most; its verdict and what explains it. Its other output goes to `log`. An empty environment: a
    rehearsal."""
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command(is_rehearsal=not environment),
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment, "KVPOOL_TIME_S": str(int(BEGUN_SHARE * limit_s))},
            start_new_session=True,
        )
        counts = ""
        try:
            for line in _lines_of(process, Deadline(limit_s)):
                if line is None:
                    return CUT, f"not done after {limit_s:.0f} s"
                if line.startswith('{"figure"'):
                    on_figure(json.loads(line)["figure"])
                else:
                    output.write(line)
                    output.flush()
                    counts = line.strip() if _COUNTS.search(line) else counts
            code = process.wait()
        finally:
            _end(process)
    if environment and counts and " passed" not in counts:
        return FAILED, f"no test has run: {counts}"
    return (OK if code == 0 else FAILED), counts or ("" if code == 0 else _last_line(log))


def _lines_of(process: "subprocess.Popen[str]", deadline: Deadline) -> Iterator[str | None]:
    """The lines that it prints; None when its time is over."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        left_s = deadline.remaining_s()
        try:
            line = lines.get(timeout=max(0.01, min(LOOK_S, left_s)))
        except queue.Empty:
            if process.poll() is not None and lines.empty():
                return  # what it has left behind has its output
            if left_s <= LOOK_S and deadline.remaining_s() <= 0:
                yield None
                return
            continue
        if line is None:
            return
        yield line


def _end(process: "subprocess.Popen[str]") -> None:
    """End it and all that it has started: daemons have sessions of their own."""
    started = _descendants_of(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants_of(pid: int) -> list[int]:
    """Its children, theirs and so on, as long as their parents live."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            after_name = status.read_text().rpartition(")")[2].split()
            parents[int(status.parent.name)] = int(after_name[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
