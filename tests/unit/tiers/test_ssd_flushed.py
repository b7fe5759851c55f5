"""Floors of flushed generations by namespace, over damage and many orders."""

import os
from pathlib import Path

import pytest

from kvpool.tiers.ssd import flushed as ssd_flushed
from kvpool.tiers.ssd.catalogue.identity import FILE_NAME as IDENTITY_NAME
from kvpool.tiers.ssd.catalogue.identity import read_identity
from kvpool.tiers.ssd.flushed import ALL, FILE_NAME, floor_of, note_flushed, read_floors

ONE, OTHER = b"1" * 32, b"2" * 32


def test_floors_rise_and_a_floor_of_all_namespaces_replaces_the_others(tmp_path: Path) -> None:
    assert read_floors(tmp_path) == {}
    note_flushed(tmp_path, [ONE], 7)
    note_flushed(tmp_path, [ONE, OTHER], 5)
    floors = read_floors(tmp_path)
    assert [floor_of(floors, name) for name in (ONE, OTHER, b"3" * 32)] == [7, 5, 0]
    note_flushed(tmp_path, None, 9)
    assert read_floors(tmp_path) == {ALL: 9}
    note_flushed(tmp_path, [OTHER], 11)
    floors = read_floors(tmp_path)
    assert [floor_of(floors, name) for name in (ONE, OTHER)] == [9, 11]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_directory_in_a_files_place_leaves_no_descriptor(tmp_path: Path) -> None:
    for name in (FILE_NAME, IDENTITY_NAME):
        (tmp_path / name).mkdir()
    before = os.listdir("/proc/self/fd")
    assert read_floors(tmp_path) == {}
    assert read_identity(tmp_path) is None
    assert os.listdir("/proc/self/fd") == before


def test_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    note_flushed(tmp_path, [ONE], 7)
    whole = (tmp_path / FILE_NAME).read_bytes()
    for at in range(len(whole)):
        (tmp_path / FILE_NAME).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_floors(tmp_path) == {}
        (tmp_path / FILE_NAME).write_bytes(whole[:at])
        assert read_floors(tmp_path) == {}


def test_more_floors_than_the_file_holds_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_flushed, "FILE_BYTES_MAX", 400)
    note_flushed(tmp_path, [bytes([number]) * 32 for number in range(40)], 3)
    assert read_floors(tmp_path) == {ALL: 3}
