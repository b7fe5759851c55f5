"""`kvpoolctl mrc` of a live daemon: the miss-ratio curve of its clients' requests."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool_tools.cli.commands import mrc
from tests.rigs.daemon import Daemon, Start
from tests.rigs.kvpoolctl import ctl, ctl_json

LAYOUT = kv.Layout(layers=1, planes=1, kv_heads=1, head_dim=16, dtype="uint8", chunk_tokens=256)
ROOM = 1024
CHUNKS = 64


def _ask_for(pool: kv.Pool, prompt: int) -> None:
    hashes = [kvpool_native.blake3(bytes([prompt % 256, prompt // 256, chunk])) for chunk in range(CHUNKS)]
    keys = pool.keys_from_hashes(hashes, LAYOUT.chunk_tokens)
    with pool.acquire(pool.lookup(keys)) as lease:
        found = lease.chunks
    if found < CHUNKS:
        rows = np.zeros((CHUNKS - found, LAYOUT.chunk_bytes), np.uint8)
        pool.save(keys, from_=rows, first_chunk=found).commit()


@pytest.fixture
def tight(start_daemon: Start) -> Daemon:
    """A daemon with room for 1024 chunks of 4 KiB."""
    return start_daemon(dram__capacity=f"{ROOM * LAYOUT.chunk_bytes}B")


@pytest.mark.slow
def test_the_curve_shows_the_gain_of_more_memory(tight: Daemon, tmp_path: Path) -> None:
    # Rounds over twice as many chunks as fit: LRU hits nothing, and with twice the capacity everything.
    with tight.connect(LAYOUT) as pool:
        for number in range(32 * 20):
            _ask_for(pool, number % 32)
    document: dict[str, Any] = ctl_json(tight, "mrc", "--add", "4MiB,10MiB")
    assert set(document) == {
        *("command", "version", "rows", "dram_capacity_bytes", "ssd_capacity_bytes", "horizon_bytes"),
        *("referenced_bytes", "sampled_chunks", "sample_rate", "error_points"),
    }
    assert document["dram_capacity_bytes"] == ROOM * LAYOUT.chunk_bytes
    assert document["referenced_bytes"] == 32 * 20 * CHUNKS * LAYOUT.chunk_bytes
    assert document["sampled_chunks"] > 0
    named = {row["name"]: row for row in document["rows"] if row["name"]}
    assert set(named) == {"DRAM, now", "DRAM + 4.0 MiB", "DRAM + 10.0 MiB"}
    # One chunk in sixteen is sampled, about 128 of 2048: the curve is coarse, and its two ends are far apart.
    assert named["DRAM + 10.0 MiB"]["hit_rate"] == pytest.approx(0.95, abs=0.05)
    assert named["DRAM + 10.0 MiB"]["delta_points"] > 50
    capacities = [row["capacity_bytes"] for row in document["rows"]]
    rates = [row["hit_rate"] for row in document["rows"]]
    assert capacities == sorted(capacities)
    assert rates == sorted(rates)
    text = ctl(tight, "mrc", "--add", "10MiB")
    assert text.exit_code == 0, text.stderr
    for word in ("LRU over 160.0 MiB asked for", "DRAM, now", "DRAM + 10.0 MiB", "points", "█"):
        assert word in text.stdout
    if importlib.util.find_spec("matplotlib") is not None:
        picture = tmp_path / "curve.png"
        assert ctl(tight, "mrc", "--add", "10MiB", "--png", picture).exit_code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sample_that_is_too_small_is_no_curve(tight: Daemon) -> None:
    with tight.connect(LAYOUT) as pool:
        _ask_for(pool, 1)
    run = ctl(tight, "mrc")
    assert "the sample is too small: what follows is no estimate" in run.stdout
    document = ctl_json(tight, "mrc")
    assert document["error_points"] >= 20.0


@pytest.mark.parametrize(
    ("sampled", "line"),
    [
        (24, "the sample is too small: what follows is no estimate; ask again after more requests"),
        (400, "the sample is small: a rate may be off by 5 points"),
        (2500, "the sample is small: a rate may be off by 2 points"),
        (2600, ""),
    ],
)
def test_a_small_sample_is_named_with_its_error(capsys: pytest.CaptureFixture[str], sampled: int, line: str) -> None:
    mrc._print_rows({"referenced_bytes": 1 << 20, "sampled_chunks": sampled, "sample_rate": 0.0625}, [])
    assert capsys.readouterr().out.splitlines()[1:] == ([line] if line else [])


def test_a_daemon_without_requests_reports_that(tight: Daemon) -> None:
    run = ctl(tight, "mrc")
    assert (run.exit_code, run.stdout) == (0, "nothing was asked for yet\n")


def test_wrong_input_is_named(tight: Daemon) -> None:
    for add, message in (
        ("many", "--add: 'many' is no size"),
        ("1TiB", "--add is 1.0 TiB, expected at most 12.0 MiB"),
    ):
        run = ctl(tight, "mrc", "--add", add)
        assert run.exit_code == 2
        assert message in run.stderr
