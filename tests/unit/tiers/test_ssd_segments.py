"""Room for segment files: refusals before a byte is allocated, and their messages."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool.config.config import load_config
from kvpool.tiers.ssd.catalogue.room import provide
from kvpool.tiers.ssd.plan import SsdPlan, plan_ssd
from kvpool.tiers.ssd.segments import check_room, locked, open_segments, remove_segments

MIB = 1 << 20
DISK_BYTES = 640 * MIB


def _plan(path: Path, capacity: str) -> SsdPlan:
    return plan_ssd(load_config(None, [f"ssd.path={path}", f"ssd.capacity={capacity}"]).ssd)


def _say_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int, size_bytes: int = DISK_BYTES) -> None:
    disk = SimpleNamespace(f_blocks=size_bytes // 4096, f_bavail=free_bytes // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)


def test_the_lock_ends_with_its_block_though_a_forked_child_has_it_too(tmp_path: Path) -> None:
    waiting, go_on = os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if not child:
            os.close(go_on)
            os.read(waiting, 1)
            os._exit(0)
        with pytest.raises(OSError, match="another daemon uses this directory"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass
    os.close(go_on)
    assert os.waitpid(child, 0)[1] == 0
    os.close(waiting)


def test_a_capacity_beyond_the_disk_is_refused_with_one_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _say_free(monkeypatch, 100 * MIB)
    with pytest.raises(OSError, match=r"ssd\.capacity is 256\.0 MiB, .*100\.0 MiB free and 10\.0 MiB") as refused:
        check_room(_plan(tmp_path, "256MiB"))
    assert list(tmp_path.iterdir()) == []
    found = re.search(r"set ssd\.capacity to (\d+)MiB at most", str(refused.value))
    assert found is not None
    assert int(found[1]) == 90
    check_room(_plan(tmp_path, "90MiB"))
    with pytest.raises(OSError, match="at most"):
        check_room(_plan(tmp_path, "91MiB"))


def test_files_that_are_there_need_no_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    plan = _plan(tmp_path, "16MiB")
    open_segments(plan)
    _say_free(monkeypatch, 0)
    check_room(plan)
    with pytest.raises(OSError, match=r"ssd\.capacity is 32\.0 MiB"):
        check_room(_plan(tmp_path, "32MiB"))
    remove_segments(tmp_path)
    with pytest.raises(OSError, match=r"ssd\.capacity is 16\.0 MiB"):
        check_room(plan)


def test_what_the_catalogue_has_already_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    plan = _plan(tmp_path, "16MiB")
    open_segments(plan)
    (tmp_path / "segment-000000.kvs").unlink()
    missing = plan.config.capacity - (plan.segments - 1) * plan.segment_bytes
    spared = DISK_BYTES // 64
    _say_free(monkeypatch, missing + spared - plan.catalogue_bytes)
    with pytest.raises(OSError, match=r"ssd\.capacity is 16\.0 MiB"):
        check_room(plan)
    provide(tmp_path / "catalogue", plan.catalogue_bytes)
    check_room(plan)


def test_a_large_disk_keeps_no_more_than_a_gibibyte_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _say_free(monkeypatch, 66 << 40, 66 << 40)
    check_room(_plan(tmp_path, "64TiB"))
    _say_free(monkeypatch, 3 << 30, 66 << 40)
    check_room(_plan(tmp_path, "1950MiB"))


def test_a_file_system_without_a_size_gets_the_allocation_without_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _say_free(monkeypatch, 0, 0)
    check_room(_plan(tmp_path, "256MiB"))
