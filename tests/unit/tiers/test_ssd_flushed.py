"""Floors of flushed generations by namespace, over damage, full disks and many orders."""

import errno
import os
import threading
from pathlib import Path

import pytest

from kvpool.tiers.ssd.catalogue.identity import FILE_NAME as IDENTITY_NAME
from kvpool.tiers.ssd.catalogue.identity import read_identity
from kvpool.tiers.ssd.flushed import ALL, FILE_NAME, FLOORS_MAX, SLOT_BYTES, FlushFloors, floor_of, read_floors

ONE, OTHER = b"1" * 32, b"2" * 32


def test_floors_rise_and_a_floor_of_all_namespaces_replaces_the_others(tmp_path: Path) -> None:
    floors = FlushFloors(tmp_path)
    assert read_floors(tmp_path) == {}
    assert floors.note_flush([ONE], 7)
    assert floors.note_flush([ONE, OTHER], 5)
    found = read_floors(tmp_path)
    assert [floor_of(found, name) for name in (ONE, OTHER, b"3" * 32)] == [7, 5, 0]
    assert floors.note_flush(None, 9)
    assert read_floors(tmp_path) == {ALL: 9}
    assert FlushFloors(tmp_path).note_flush([OTHER], 11)
    found = read_floors(tmp_path)
    assert [floor_of(found, name) for name in (ONE, OTHER)] == [9, 11]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_removed_or_replaced_by_a_link_is_made_again(tmp_path: Path) -> None:
    floors = FlushFloors(tmp_path)
    assert floors.note_flush([ONE], 7)
    file = tmp_path / FILE_NAME
    file.unlink()
    assert floors.write(), "nothing is due but the file"
    assert read_floors(tmp_path) == {ONE: 7}
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert floors.note_flush([OTHER], 8)
    assert not file.is_symlink()
    assert read_floors(tmp_path) == {ONE: 7, OTHER: 8}
    file.unlink()
    file.mkdir()
    assert not floors.note_flush([OTHER], 9)
    assert "Is a directory" in floors.failure
    file.rmdir()
    assert floors.write()
    assert floors.failure == ""
    assert read_floors(tmp_path) == {ONE: 7, OTHER: 9}


def test_a_flush_does_not_wait_for_another_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.tiers.ssd.flushed.NOTE_TIMEOUT_S", 0.05)
    floors, hangs, answers = FlushFloors(tmp_path), threading.Event(), threading.Event()
    sync = os.fsync

    def wait(fd: int) -> None:
        hangs.set()
        answers.wait()
        sync(fd)

    monkeypatch.setattr(os, "fsync", wait)
    first = threading.Thread(target=floors.note_flush, args=([ONE], 7))
    first.start()
    hangs.wait()
    assert not floors.note_flush([OTHER], 8)
    answers.set()
    first.join()
    assert floors.write()
    assert read_floors(tmp_path) == {ONE: 7, OTHER: 8}


def test_a_directory_in_a_files_place_leaves_no_descriptor(tmp_path: Path) -> None:
    for name in (FILE_NAME, IDENTITY_NAME):
        (tmp_path / name).mkdir()
    before = os.listdir("/proc/self/fd")
    assert read_floors(tmp_path) == {}
    assert read_identity(tmp_path) is None
    assert os.listdir("/proc/self/fd") == before


def test_the_slot_before_counts_where_the_newer_one_is_damaged(tmp_path: Path) -> None:
    floors = FlushFloors(tmp_path)
    assert floors.note_flush([ONE], 7)  # in the second slot
    assert floors.note_flush([ONE], 8)
    whole = (tmp_path / FILE_NAME).read_bytes()
    assert len(whole) == 2 * SLOT_BYTES
    for at in range(len(whole[:SLOT_BYTES].rstrip(b"\0"))):
        (tmp_path / FILE_NAME).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_floors(tmp_path) == {ONE: 7}
    (tmp_path / FILE_NAME).write_bytes(bytes(2 * SLOT_BYTES))
    assert read_floors(tmp_path) == {}
    assert FlushFloors(tmp_path).note_flush([ONE], 3)
    assert read_floors(tmp_path) == {ONE: 3}


def test_of_more_floors_than_a_slot_holds_the_lowest_become_one(tmp_path: Path) -> None:
    names = [number.to_bytes(32, "little") for number in range(1, FLOORS_MAX + 11)]
    floors = FlushFloors(tmp_path)
    for height, name in enumerate(names, 1):
        assert floors.note_flush([name], (1 << 61) + height)
    found = read_floors(tmp_path)
    assert len(found) == FLOORS_MAX
    for height, name in enumerate(names, 1):
        assert floor_of(found, name) == (1 << 61) + max(height, 11)


def test_a_flush_needs_no_room_of_a_full_disk(tmp_path: Path) -> None:
    floors = FlushFloors(tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_blocks * 512 >= 2 * SLOT_BYTES
    before = (tmp_path / FILE_NAME).stat().st_ino
    for generation in range(1, 6):
        assert floors.note_flush(None, generation)
        assert read_floors(tmp_path) == {ALL: generation}
    assert (tmp_path / FILE_NAME).stat().st_ino == before, "written in place"


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", lack_room)
        floors = FlushFloors(tmp_path)
        assert not floors.note_flush([ONE], 7)
        assert not floors.write()
    assert floors.write()
    assert read_floors(tmp_path) == {ONE: 7}


def test_floors_are_ahead_of_a_catalogue_without_the_last_flush(tmp_path: Path) -> None:
    floors = FlushFloors(tmp_path)
    assert (floors.sequence, floors.is_ahead) == (0, False)
    floors.note_flush([ONE], 7)
    again = FlushFloors(tmp_path, 0)
    assert (again.sequence, again.is_ahead) == (1, True)
    again = FlushFloors(tmp_path, 1)
    assert (again.sequence, again.is_ahead) == (1, False)
    (tmp_path / FILE_NAME).unlink()
    again = FlushFloors(tmp_path, 1)
    again.note_flush([ONE], 9)
    assert FlushFloors(tmp_path, 1).is_ahead, "no number is given twice"
