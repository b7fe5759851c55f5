"""Memory cost of chunks on disk: the bound that `bench footprint --ssd-chunks` measures."""

import json
import subprocess
import sys

from click.testing import CliRunner

from kvpool_tools.bench.ssd.footprint import BYTES_BAR
from kvpool_tools.cli.kvpoolctl import cli


def test_a_chunk_on_disk_takes_no_more_memory_than_promised() -> None:
    command = [
        sys.executable,
        "-m",
        "kvpool_tools.cli.kvpoolctl",
        "--json",
        "bench",
        "footprint",
        "--ssd-chunks",
        "512K",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600.0, check=False)
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(run.stdout)["rows"]
    assert row["chunks"] == 512 << 10
    assert 0 < row["bytes_per_chunk"] <= BYTES_BAR


def test_an_invalid_count_is_wrong_usage() -> None:
    run = CliRunner().invoke(cli, ["bench", "footprint", "--ssd-chunks", "4X"], catch_exceptions=False)
    assert run.exit_code == 2
    assert "4X" in run.stderr
