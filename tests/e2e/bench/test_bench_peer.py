"""`bench peer`: each size, number of streams and way has a row with its floor, and every byte is compared."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import kvpool_native
from kvpool.ids import NIXL_PACKAGES
from kvpool.transfer.child.mooncake import has_rdma_devices
from kvpool_tools.bench.peer.engine_ways import ENGINE_WAYS, KVPOOL
from kvpool_tools.bench.peer.peer import ENCRYPTED, QUICK_SIZES, SHARED, SOCKET, STREAM, STREAMS
from kvpool_tools.bench.peer.round_trips import CHUNKS, FIRST, NEXT
from tests.rigs.kvpoolctl import ctl, execute
from tests.rigs.transfer.engine_daemons import NIXL_REASON, needs_engine

PULLS = tuple(f"{name}, {CHUNKS} chunks" for name in (FIRST, NEXT))
NIXL_WAYS = () if NIXL_REASON else (KVPOOL["nixl"],)
OWN_WAYS = (SOCKET, STREAM, *([ENCRYPTED] if kvpool_native.tls_library() else []), SHARED)


def _without_engine(directory: Path) -> dict[str, str]:
    """An environment in which the packages cannot be imported, whether they are installed or not."""
    for package in ("mooncake", NIXL_PACKAGES[0]):
        (directory / package).mkdir()
        (directory / package / "__init__.py").write_text("raise ImportError('kept away by a test')\n")
    return {"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}


def _assert_shape(every: list[dict[str, Any]], ways: tuple[str, ...]) -> None:
    rows, pulls = every[: -len(PULLS)], every[-len(PULLS) :]
    assert tuple(row["name"] for row in pulls) == PULLS
    assert all(row["round_trips"] > 0 for row in pulls), "a ratio of two times, whatever else the machine does"
    expected = [(streams, size, way) for streams in STREAMS for size in QUICK_SIZES for way in ways]
    assert [(row["streams"], row["chunk"], row["way"]) for row in rows] == expected
    for row in rows:
        assert row["gb_per_s"] > 0
        assert row["memcpy_gb_per_s"] > 0
        assert row["cpu_seconds_per_gb"] > 0
        assert row["ratio"] == 1 if row["way"] == SOCKET else row["ratio"] > 0
        assert (row["first_extent_us"] is not None) == (row["way"] in (STREAM, ENCRYPTED, SHARED, *KVPOOL.values()))
        assert (row["ratio_bar"] is not None) == (row["way"] == STREAM)


def test_without_the_packages_each_other_way_has_a_row_and_a_line_for_each_says_why(tmp_path: Path) -> None:
    finished = execute("--json", "bench", "peer", "--quick", "--rdma-protocol", "tcp", **_without_engine(tmp_path))
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    _assert_shape(document["rows"], OWN_WAYS)
    note, nixl = document["notes"]
    assert note.startswith(
        "rows of TransferEngine are absent: mooncake.engine cannot be imported (kept away by a test)"
    )
    assert "install kvpool[rdma]" in note
    assert nixl.startswith("rows of NIXL are absent: NIXL cannot be imported (kept away by a test)")
    assert "install kvpool[nixl]" in nixl
    assert finished.stderr.strip().splitlines() == [note, nixl]


@needs_engine
def test_with_the_package_its_ways_have_rows_and_its_output_goes_nowhere() -> None:
    finished = execute("--json", "bench", "peer", "--quick", "--rdma-protocol", "tcp")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert len(document["notes"]) == bool(NIXL_REASON)
    _assert_shape(document["rows"], (*OWN_WAYS, *ENGINE_WAYS, *NIXL_WAYS))
    assert finished.stderr.strip().splitlines() == document["notes"]


def test_rdma_without_a_device_is_refused_in_words() -> None:
    if has_rdma_devices():
        pytest.skip("this machine has RDMA")
    finished = ctl(None, "bench", "peer", "--rdma-protocol", "rdma")
    assert finished.exit_code == 2
    assert "--rdma-protocol is rdma, and /sys/class/infiniband has no device" in finished.stderr


def test_a_daemon_is_not_what_it_measures() -> None:
    finished = ctl(None, "--socket", "/tmp/none.sock", "bench", "peer")
    assert finished.exit_code == 2
    assert "peer starts daemons of its own" in finished.stderr
