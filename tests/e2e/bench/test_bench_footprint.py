"""Memory cost of chunks on disk: the bound that `bench footprint --ssd-chunks` measures."""

import json

from kvpool_tools.bench.ssd.footprint import BYTES_BAR
from tests.rigs.kvpoolctl import ctl, execute


def test_a_chunk_on_disk_takes_no_more_memory_than_promised() -> None:
    run = execute("--json", "bench", "footprint", "--ssd-chunks", "512K")
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(run.stdout)["rows"]
    assert row["chunks"] == 512 << 10
    assert 0 < row["bytes_per_chunk"] <= BYTES_BAR


def test_an_invalid_count_is_wrong_usage() -> None:
    run = ctl(None, "bench", "footprint", "--ssd-chunks", "4X")
    assert run.exit_code == 2
    assert "4X" in run.stderr
