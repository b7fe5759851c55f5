"""`bench turns --count`: instructions of an engine's requests, on the daemon's side and the client's, by valgrind's callgrind.

Instructions are much the same on any machine, however busy, where times are not: a request that needs more of them than the
number that was written down has become slower. They count neither the kernel's work nor waiting, and callgrind knows AVX2, not
AVX-512. What is counted is a fixed script (`count_script`), each request several times. The lower quartile counts: other
threads of the process add to some of them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgument, KVPoolError
from kvpool_tools.bench.daemon import own_daemon
from kvpool_tools.bench.machine import describe_machine
from kvpool_tools.bench.measure import percentile

# Callgrind's own marks: they do nothing where it does not run.
MARKS_SOURCE = """
#include <valgrind/callgrind.h>
void begin_count(void) { CALLGRIND_ZERO_STATS; }
void end_count(void) { CALLGRIND_DUMP_STATS; }
"""
SCRIPT = "kvpool_tools.bench.count_script"
DAEMON_BYTES = 64 << 20
LIMIT_S = 900
# How much more a request may need than was written down: two runs differ by one or two in a hundred.
RATIO_MAX = 1.05
TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


def bench_counts(advance: Callable[[int], None], against: Mapping[str, int]) -> list[dict[str, object]]:
    """Rows: the instructions of each request, and their ratio to what `against` has under its name. Raises KVPoolError where
    valgrind or a compiler is missing, or the script fails."""
    valgrind, compiler = _command("valgrind"), _command("cc")
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        own_daemon(DAEMON_BYTES) as daemon,
    ):
        marks = _compile_marks(compiler, Path(folder))
        advance(2)
        counted = Path(folder, "counted")
        names = _run(
            [valgrind, "--tool=callgrind", f"--callgrind-out-file={counted}"], [str(marks), daemon.socket], folder
        )
        advance(2)
        counts: dict[str, list[float]] = {}
        for number, name in enumerate(names, 1):
            counts.setdefault(name, []).append(_total(Path(f"{counted}.{number}")))
    return [
        _row(name, taken) | (_compared(taken, against.get(name)) if against else {}) for name, taken in counts.items()
    ]


def read_counts(path: str) -> dict[str, int]:
    """The instructions by name that an earlier document of `bench turns --count` has. None of them where it is of another
    Python or architecture: then they say nothing. Raises InvalidArgument."""
    try:
        document = json.loads(Path(path).read_text())
        rows = {row["name"]: int(row["instructions"]) for row in document["rows"]}
        kind = _kind(document["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"--against is {path}, expected a document of bench turns --count: {error}") from error
    return rows if kind == _kind(describe_machine()) else {}


def _kind(machine: Mapping[str, Any]) -> tuple[str, str]:
    """The architecture, and the version of Python without its patch."""
    return machine["architecture"], machine["python"].rpartition(".")[0]


def _row(name: str, taken: list[float]) -> dict[str, object]:
    return {"name": name, "instructions": _count(taken), "spread": [min(taken), max(taken)], "samples": len(taken)}


def _compared(taken: list[float], before: int | None) -> dict[str, object]:
    """Columns of a comparison; `before` None: the earlier document has no such row."""
    ratio = None if before is None else round(_count(taken) / before, 3)
    return {"before": before, "ratio": ratio, "bar_ratio": RATIO_MAX}


def _count(taken: list[float]) -> int:
    return round(percentile(taken, 0.25))


def _command(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise KVPoolError(
            f"{name} is not installed: --count needs valgrind with its headers (Debian: valgrind) and a C compiler"
        )
    return found


def _compile_marks(compiler: str, folder: Path) -> Path:
    source, library = folder / "marks.c", folder / "marks.so"
    source.write_text(MARKS_SOURCE)
    built = subprocess.run(  # noqa: S603 - our own source
        [compiler, "-O1", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True, check=False
    )
    if built.returncode:
        raise KVPoolError(
            f"callgrind's marks cannot be compiled, is valgrind's header installed? {built.stderr.strip()}"
        )
    return library


def _run(valgrind: list[str], arguments: list[str], folder: str) -> list[str]:
    """Names of the counted requests, in their order. Strings have the same hashes, and memory the same addresses, each time."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*fixed, *valgrind, sys.executable, "-m", SCRIPT, *arguments]
    try:
        ran = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=folder, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise KVPoolError(f"the counted script has not ended within {LIMIT_S} s: it takes about a minute") from error
    if ran.returncode:
        raise KVPoolError(f"the counted script ended with {ran.returncode}: {ran.stderr.strip()[-2000:]}")
    return ran.stdout.split("\n")[:-1]


def _total(path: Path) -> float:
    found = TOTAL.findall(path.read_text(errors="replace"))
    if not found:
        raise KVPoolError(f"callgrind wrote no total to {path.name}: it cannot be read")
    return float(found[-1])


def slower(rows: list[dict[str, Any]]) -> list[str]:
    """What needs more than it may, a line each."""
    return [
        f"{row['name']}: {row['instructions']:,} instructions, {row['ratio']} x the {row['before']:,} before"
        for row in rows
        if (row.get("ratio") or 0) > RATIO_MAX
    ]
