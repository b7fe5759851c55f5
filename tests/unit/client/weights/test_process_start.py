"""The time at which a process began, by the clock that dates files."""

import os
import subprocess
import sys
from pathlib import Path

from kvpool.clock import NS_PER_S, process_began_ns

SHOW = "from kvpool.clock import process_began_ns; print(process_began_ns())"


def test_a_process_begins_between_the_files_before_it_and_those_after_it(tmp_path: Path) -> None:
    tick_ns = NS_PER_S // os.sysconf("SC_CLK_TCK")
    (tmp_path / "before").touch()
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, check=True, text=True).stdout
    (tmp_path / "after").touch()
    before_ns, after_ns = ((tmp_path / name).stat().st_ctime_ns for name in ("before", "after"))
    assert before_ns - tick_ns <= int(shown) <= after_ns + tick_ns
    assert process_began_ns() < before_ns
