"""`kvpoolctl bench ssd` on the disk of the tests: its output, its refusals, and nothing left behind."""

import json
import math
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpool_tools.bench.disk import file_system, has_disk
from tests.rigs.daemon import wait_until
from tests.rigs.kvpoolctl import PROGRAM, ctl, execute

BOTH = ("demote", "promote")
RATES = {f"{raw}{way}_gb_per_s" for way in BOTH for raw in ("", "raw_")} | {f"{way}_ratio" for way in BOTH} | {"ratio"}
COSTS = {f"{way}_cpu_seconds_per_gb" for way in BOTH}
MEMORY = Path("/dev/shm")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if not has_disk(str(tmp_path)):
        pytest.skip("the folder for temporary files is on no disk")
    return tmp_path


@pytest.mark.slow
def test_every_part_is_measured_with_no_wrong_byte(disk: Path) -> None:
    run = execute("bench", "ssd", "--quick", "--json", "--path", disk)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["command"] == "bench ssd"
    rows: list[dict[str, Any]] = document["rows"]
    assert [row["part"] for row in rows] == ["queue"] * 3 + ["tail"] * 2 + ["wait"] * 2 + ["daemon"] * 3 + ["reopen"]
    assert [row["wrong_bytes"] for row in rows] == [0] * len(rows)
    for row in rows[:3]:
        _assert_positive(row, RATES | COSTS | {"demote_one_p50_us", "raw_promote_one_p99_us"})
        assert row["is_direct"] is True
    for row in rows[3:5]:
        _assert_positive(row, {"p99_ratio", "raw_p99_ratio", "idle_p99_us", "busy_p99_us", "written_gb_per_s"})
    for row in rows[5:7]:
        _assert_positive(row, {"threads", "piece_us", "busy_p99_us", "written_gb_per_s"})
    for row in rows[7:10]:
        _assert_positive(row, RATES | COSTS | {"first_layer_ms", "whole_ms"})
        assert 0 < row["first_layer_share"] <= 1
        assert row["ssd_io"].find("direct") > 0
    _assert_positive(rows[10], {"ready_s", "open_s", "open_empty_s", "cpu_seconds"})
    assert rows[10]["restored_chunks"] == 1024
    assert math.isfinite(rows[10]["open_s_per_million_chunks"])
    assert list(disk.iterdir()) == []


def _assert_positive(row: dict[str, Any], names: set[str]) -> None:
    bad = {name: row.get(name) for name in names if not (math.isfinite(row.get(name, math.nan)) and row[name] > 0)}
    assert bad == {}


def test_wrong_usage_is_refused_with_a_remedy(disk: Path) -> None:
    for arguments, message in (
        (("--size", "1MiB"), "--size is 1.0 MiB, expected 8.0 MiB or more"),
        (("--path", disk / "absent"), "is no folder that can be written"),
        (("--socket", "/nowhere/kvpool.sock"), "ssd starts daemons of its own"),
    ):
        refused = ctl(None, "bench", "ssd", "--quick", *arguments)
        assert (refused.exit_code, refused.stdout) == (2, ""), refused.stderr
        assert message in refused.stderr


@pytest.mark.skipif(not MEMORY.is_dir() or file_system(MEMORY) != "tmpfs", reason="/dev/shm is no tmpfs here")
def test_a_file_system_in_memory_is_refused() -> None:
    refused = ctl(None, "bench", "ssd", "--quick", "--path", MEMORY)
    assert refused.exit_code == 2
    assert "/dev/shm is on tmpfs, which is memory and no disk" in refused.stderr


def test_a_terminated_command_leaves_no_folder(disk: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "bench", "ssd", "--path", str(disk)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: any(disk.glob("*/queue/raw-*")), "it has begun", 120.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120.0) == 1
        assert os.listdir(disk) == []
    finally:
        process.kill()
        process.wait()
