"""`bench peer`: each size, number of streams and way has a row with its floor, and every byte is compared."""

import json
import subprocess
import sys

import kvpool_native
from kvpool.bench.peer import ENCRYPTED, QUICK_SIZES, SHARED, SOCKET, STREAM, STREAMS


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvpool.cli.kvpoolctl", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)


def test_each_way_has_a_row_with_its_floor() -> None:
    finished = run("--json", "bench", "peer", "--quick")
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(finished.stdout)["rows"]
    ways = [SOCKET, STREAM, *([ENCRYPTED] if kvpool_native.HAS_TLS else []), SHARED]
    expected = [(streams, size, way) for streams in STREAMS for size in QUICK_SIZES for way in ways]
    assert [(row["streams"], row["chunk"], row["way"]) for row in rows] == expected
    for row in rows:
        assert row["gb_per_s"] > 0
        assert row["memcpy_gb_per_s"] > 0
        assert row["cpu_seconds_per_gb"] > 0
        assert row["ratio"] == 1 if row["way"] == SOCKET else row["first_layer_us"] > 0


def test_a_daemon_is_not_what_it_measures() -> None:
    finished = run("--socket", "/tmp/none.sock", "bench", "peer")
    assert finished.returncode == 2
    assert "peer uses no daemon" in finished.stderr
