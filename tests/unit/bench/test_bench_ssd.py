"""`bench ssd` in parts: the figures computed from its rounds, the sizes it takes, and where it refuses to measure."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import InvalidArgument
from kvpool_tools.bench import disk as bench_disk
from kvpool_tools.bench.disk import RawFile, aligned_bytes, disk_folder, file_system, fio_gb_per_s, has_disk
from kvpool_tools.bench.replay.client import RequestResult
from kvpool_tools.bench.replay.tally import Tally
from kvpool_tools.bench.ssd.parts import parse_total
from kvpool_tools.bench.ssd.reopen import per_million
from kvpool_tools.bench.ssd.rig import sizes_within
from kvpool_tools.bench.ssd.rounds import Rounds

GB = 10**9
CHUNK = 64 << 10


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if not has_disk(str(tmp_path)):
        pytest.skip("the folder for temporary files is on no disk")
    return tmp_path


def test_a_ratio_is_to_the_raw_passes_around_it_in_the_same_round() -> None:
    rounds = Rounds()
    rounds.add_round(GB, [(1.0, 0.1), (3.0, 0.3)], (2.5, 0.5))
    rounds.add_round(GB, [(1.0, 0.1), (1.0, 0.1)], (1.0, 0.2))
    rounds.add_round(GB, [(2.0, 0.1), (2.0, 0.1)], (4.0, 0.2))
    columns = rounds.columns("demote", 1 << 20)
    assert rounds.ratios == [0.8, 1.0, 0.5]
    assert (columns["demote_ratio"], columns["demote_gb_per_s"], columns["demote_bar"]) == (0.8, 0.4, 0.95)
    assert columns["raw_demote_gb_per_s"] == 0.75
    assert columns["demote_cpu_seconds_per_gb"] == 0.3
    assert columns["raw_demote_cpu_seconds_per_gb"] == pytest.approx(0.4 / 3, abs=1e-3)
    assert "demote_one_p50_us" not in columns


def test_small_chunks_have_no_bar_and_single_moves_their_latencies() -> None:
    rounds = Rounds()
    rounds.add_round(GB, [(1.0, 0.0), (1.0, 0.0)], (1.0, 0.0))
    rounds.add_one(1e-3, 2e-3)
    columns = rounds.columns("promote", 512 << 10)
    assert columns["promote_bar"] is None
    assert (columns["raw_promote_one_p50_us"], columns["promote_one_p50_us"]) == (1000.0, 2000.0)


def test_sizes_are_those_that_a_pass_has_two_chunks_of() -> None:
    assert list(sizes_within(128 << 20)) == ["0.5 MiB", "1 MiB", "4 MiB", "32 MiB"]
    assert list(sizes_within(63 << 20)) == ["0.5 MiB", "1 MiB", "4 MiB"]
    assert parse_total(None, is_quick=False) == 128 << 20
    assert parse_total("8MiB", is_quick=True) == 8 << 20
    with pytest.raises(InvalidArgument, match=r"--size is 7.0 MiB, expected 8.0 MiB or more"):
        parse_total("7MiB", is_quick=False)


def test_seconds_per_million_are_of_the_chunks_alone() -> None:
    assert per_million(0.5, 250_000) == 2.0
    assert per_million(-0.1, 1000) == 0.0


def test_hits_are_counted_by_tier() -> None:
    tally = Tally(CHUNK)
    tally.add_request(
        RequestResult(chunks=5, hit_chunks=4, leased_chunks=4, loaded_chunks=4, loaded_ssd_chunks=3, load_s=1.0)
    )
    columns = tally.by_tier(chunk_tokens=512, input_tokens=5 * 512, ssd_written_bytes=9 * CHUNK)
    assert (columns["hit_tokens_dram"], columns["hit_tokens_ssd"]) == (512, 3 * 512)
    assert (columns["hit_rate_dram"], columns["hit_rate_ssd"]) == (0.2, 0.6)
    assert (columns["ssd_hit_bytes"], columns["ssd_written_per_hit_byte"]) == (3 * CHUNK, 3.0)
    nothing = Tally(CHUNK).by_tier(chunk_tokens=512, input_tokens=1, ssd_written_bytes=9 * CHUNK)
    assert nothing["ssd_written_per_hit_byte"] is None


def test_bytes_written_by_a_raw_pass_are_read_by_another(disk: Path) -> None:
    chunks = 5
    raw = RawFile(disk / "raw", CHUNK, chunks, depth=2)
    source, target = (aligned_bytes(chunks * CHUNK).reshape(chunks, CHUNK) for _ in range(2))
    source[:] = np.random.default_rng(1).integers(0, 256, source.shape, dtype=np.uint8)
    assert raw.write(source, is_synced=True) > 0.0
    assert raw.read(target) > 0.0
    assert np.array_equal(source, target)
    with raw.writing(source, range(1, chunks)):
        target[0] = 0
        raw.read_one(target, 0)
    assert np.array_equal(source[0], target[0])
    raw.close()
    assert not (disk / "raw").exists()


def test_a_file_system_in_memory_is_no_disk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_disk, "MEMORY_FILE_SYSTEMS", {file_system(disk)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    assert not has_disk(None)
    with pytest.raises(InvalidArgument, match="is memory and no disk"), disk_folder(str(disk), 0):
        pass
    with pytest.raises(InvalidArgument, match="there is no disk to measure"), disk_folder(None, 0):
        pass


def test_a_folder_needs_room_and_is_removed(disk: Path) -> None:
    with disk_folder(str(disk), 1 << 20) as folder:
        (folder / "file").write_text("something")
        assert folder.parent == disk
    assert not folder.exists()
    with pytest.raises(InvalidArgument, match="name a disk with more room by --path"), disk_folder(str(disk), 1 << 62):
        pass
    with pytest.raises(InvalidArgument, match="no folder that can be written"), disk_folder("/nowhere", 0):
        pass


def test_fio_is_left_out_where_it_is_not_installed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(disk))
    assert fio_gb_per_s(disk / "raw", is_write=False, chunk_bytes=CHUNK, chunks=1, depth=1) is None
