"""`bench turns --count`: instructions of an engine's requests, on the daemon's side and the client's, by valgrind's callgrind.

Instructions are much the same on any machine, however busy, where times are not: a request that needs more of them than the
number that was written down has become slower. They count neither the kernel's work nor waiting, and callgrind knows AVX2, not
AVX-512. What is counted is a fixed script (`count_script`), each request several times. The lower quartile counts: other
threads of the process add to some of them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvpool.errors import KVPoolError
from kvpool_tools.bench.daemon import own_daemon
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
TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


def bench_counts(advance: Callable[[int], None]) -> list[dict[str, object]]:
    """Rows: the instructions of each request. Raises KVPoolError where valgrind or a compiler is missing, or the script
    fails."""
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
    return [_row(name, taken) for name, taken in counts.items()]


def _row(name: str, taken: list[float]) -> dict[str, object]:
    instructions = round(percentile(taken, 0.25))
    return {"name": name, "instructions": instructions, "spread": [min(taken), max(taken)], "samples": len(taken)}


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
