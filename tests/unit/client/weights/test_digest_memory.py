"""The memory of digests: what is believed, what is not, and that processes read a file one after another."""

import hashlib
import io
import json
import logging
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool_client.engines import digest_memory, file_stamps, weights_reading
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.file_stamps import FileStamp
from kvpool_client.engines.weights_reading import WeightsReader, WeightsReading
from tests.rigs.daemon import wait_until

STAMP = FileStamp("/models/one.safetensors", 1, 2, 3, 4, 5)
DIGEST = "ab" * 32


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    return DigestMemory(tmp_path / "digests")


@pytest.fixture
def entry(memory: DigestMemory, tmp_path: Path) -> Path:
    """The one entry of the memory."""
    memory.note_digest(STAMP, DIGEST)
    (found,) = (tmp_path / "digests").iterdir()
    return found


def test_a_noted_digest_is_found_by_every_part_of_its_stamp(memory: DigestMemory, entry: Path) -> None:
    assert memory.find(STAMP) == memory.find(replace(STAMP, path="/a/link/to/it")) == DIGEST
    for field in ("device", "inode", "size", "mtime_ns", "ctime_ns", "filesystem"):
        changed: dict[str, Any] = {field: 77}
        assert memory.find(replace(STAMP, **changed)) == ""


def test_the_memory_is_its_users_alone(entry: Path) -> None:
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_may_write_is_not_believed(memory: DigestMemory, entry: Path, mode: int) -> None:
    entry.parent.chmod(mode)
    assert memory.find(STAMP) == ""


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_entry_that_others_may_write_is_not_believed(memory: DigestMemory, entry: Path, mode: int) -> None:
    entry.chmod(mode)
    assert memory.find(STAMP) == ""


def test_what_belongs_to_another_user_is_not_believed(
    memory: DigestMemory, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert memory.find(STAMP) == ""


@pytest.mark.parametrize("what", ["entry", "directory"])
def test_links_are_not_followed(memory: DigestMemory, entry: Path, tmp_path: Path, what: str) -> None:
    path = entry if what == "entry" else entry.parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert memory.find(STAMP) == ""


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 4000, b'{"digest": 7, "checksum": "x"}'])
def test_a_broken_entry_is_none_and_is_replaced(memory: DigestMemory, entry: Path, broken: bytes) -> None:
    entry.write_bytes(broken)
    assert memory.find(STAMP) == ""
    memory.note_digest(STAMP, DIGEST)
    assert memory.find(STAMP) == DIGEST


def test_a_directory_in_an_entrys_place_is_none_and_leaves_no_descriptor(memory: DigestMemory, entry: Path) -> None:
    entry.unlink()
    entry.mkdir()
    before = os.listdir("/proc/self/fd")
    assert memory.find(STAMP) == ""
    assert os.listdir("/proc/self/fd") == before


def test_a_flipped_digit_is_seen(memory: DigestMemory, entry: Path) -> None:
    values: dict[str, Any] = json.loads(entry.read_bytes())
    entry.write_text(json.dumps({**values, "digest": "b" + values["digest"][1:]}))
    assert memory.find(STAMP) == ""


def test_an_entry_of_another_file_is_none(memory: DigestMemory, entry: Path) -> None:
    memory.note_digest(replace(STAMP, inode=9), "cd" * 32)
    (other,) = {*entry.parent.iterdir()} - {entry}
    other.rename(entry)
    assert memory.find(STAMP) == ""


def test_a_memory_without_a_directory_remembers_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for memory in (DigestMemory(None), DigestMemory(tmp_path / "file" / "digests"), DigestMemory(tmp_path / "file")):
        memory.note_digest(STAMP, DIGEST)
        assert memory.find(STAMP) == ""
        with memory.turn(STAMP, threading.Event()):
            pass


def test_the_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DigestMemory.of_user({"XDG_CACHE_HOME": str(tmp_path / "x")}).note_digest(STAMP, DIGEST)
    assert len(list((tmp_path / "x/kvpool/digests").iterdir())) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    DigestMemory.of_user({}).note_digest(STAMP, DIGEST)
    assert len(list((tmp_path / ".cache/kvpool/digests").iterdir())) == 1
    assert "None" in repr(DigestMemory.of_user({"XDG_CACHE_HOME": "relative"}))


def test_the_oldest_entries_go_a_quarter_at_once(
    memory: DigestMemory, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_memory, "ENTRIES_MAX", 8)
    (entry.parent / "directory").mkdir()
    os.utime(entry.parent / "directory", (1, 1))
    os.utime(entry, (2, 2))
    for inode in range(10, 16):
        memory.note_digest(replace(STAMP, inode=inode), DIGEST)
        os.utime(next(path for path in entry.parent.iterdir() if path.stat().st_mtime > 100), (inode, inode))
    assert memory.find(STAMP) == DIGEST
    memory.note_digest(replace(STAMP, inode=16), DIGEST)
    assert [bool(memory.find(replace(STAMP, inode=inode))) for inode in (STAMP.inode, *range(10, 17))] == [
        False,
        False,
        *[True] * 6,
    ], "of nine names the directory, which stays, and the two oldest entries were to go"


def test_a_file_with_a_long_path_is_remembered(memory: DigestMemory) -> None:
    stamp = replace(STAMP, path="/\N{CJK UNIFIED IDEOGRAPH-6A21}" * 2000)
    memory.note_digest(stamp, DIGEST)
    assert memory.find(stamp) == DIGEST


def test_more_files_are_remembered_than_a_checkpoint_has() -> None:
    assert digest_memory.ENTRIES_MAX == 32768


def weights_at(place: Path, age_ns: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of weights that has last changed so long ago."""
    place.write_bytes(b"weights")
    now_s = (place.stat().st_ctime_ns + age_ns) / 1e9
    monkeypatch.setattr(weights_reading, "wall_time_s", lambda: now_s)
    monkeypatch.setattr(weights_reading, "keeps_times", lambda _: True)
    return place


def test_a_file_is_read_once(memory: DigestMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = weights_at(tmp_path / "model.bin", 10**11, monkeypatch)
    for reads in (1, 0):
        reading = WeightsReading(place)
        seen: list[int] = []
        reading.read(memory, threading.Event(), lambda seen=seen: seen.append(1))  # type: ignore[misc]  # bound now
        assert len(seen) == reads
        assert reading.done == len(b"weights")
    assert len(list((tmp_path / "digests").iterdir())) == 1, "the lock is gone"


def test_a_file_that_changes_while_it_is_read_is_not_remembered_as_it_was(
    memory: DigestMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = weights_at(tmp_path / "model.bin", 10**11, monkeypatch)
    before = FileStamp.at(str(place))

    def change() -> None:
        place.write_bytes(b"changed")

    WeightsReading(place).read(memory, threading.Event(), change)
    assert memory.find(before) == ""


def test_another_file_in_a_files_place_is_not_remembered_as_that_file(
    memory: DigestMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = weights_at(tmp_path / "model.bin", 10**11, monkeypatch)
    before, reading = FileStamp.at(str(place)), WeightsReading(place)
    (tmp_path / "other").write_bytes(b"another")
    (tmp_path / "other").rename(place)
    reading.read(memory, threading.Event())
    assert memory.find(before) == ""


def test_a_file_that_may_change_again_without_a_new_time_is_not_remembered(
    memory: DigestMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = WeightsReading(weights_at(tmp_path / "model.bin", 59 * 10**9, monkeypatch))
    reading.read(memory, threading.Event())
    assert reading.find()
    assert not list((tmp_path / "digests").iterdir())


@pytest.mark.parametrize("has_id", [True, False])
def test_a_digest_is_of_one_machine(
    memory: DigestMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_id: bool
) -> None:
    own, boot = tmp_path / "machine-id", tmp_path / "boot-id"
    monkeypatch.setattr(digest_memory, "MACHINE_IDS", (str(own), str(boot)))
    for path in (own, boot):
        path.write_text("one" if path == boot or has_id else "")
    memory.note_digest(STAMP, DIGEST)
    assert memory.find(STAMP) == DIGEST
    boot.write_text("two")
    assert memory.find(STAMP) == (DIGEST if has_id else "")
    own.write_text("two")
    assert memory.find(STAMP) == ""


def test_no_digest_is_taken_or_remembered_where_times_are_not_kept(
    memory: DigestMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = weights_at(tmp_path / "model.bin", 10**11, monkeypatch)
    memory.note_digest(FileStamp.at(str(place)), DIGEST)
    monkeypatch.setattr(weights_reading, "keeps_times", lambda _: False)
    reading = WeightsReading(place)
    reading.read(memory, threading.Event())
    assert reading.find() == weights_reading.digest_of({"model.bin": hashlib.sha256(b"weights").hexdigest()})
    (entry,) = (tmp_path / "digests").iterdir()
    entry.unlink()
    WeightsReading(place).read(memory, threading.Event())
    assert not list((tmp_path / "digests").iterdir())


@pytest.mark.parametrize(
    ("mount", "keeps"),
    [
        ("ext4 /dev/loop0 rw,relatime", True),
        ("ext4 /dev/loop0 ro,relatime", False),
        ("tmpfs tmpfs rw,size=1k", False),
        ("ramfs none rw", False),
    ],
)
def test_times_are_kept_on_a_disk_that_is_written(monkeypatch: pytest.MonkeyPatch, mount: str, keeps: bool) -> None:
    texts = {
        "/proc/self/fdinfo/5": "pos:\t0\nmnt_id:\t31\n",
        "/proc/self/mountinfo": f"3 1 8:1 / / rw - xfs /dev/sda rw\n31 3 7:0 / /m ro,x shared:1 - {mount}\n",
    }
    monkeypatch.setattr(file_stamps, "open", lambda path: io.StringIO(texts[path]), raising=False)
    assert file_stamps.keeps_times(5) is keeps
    texts["/proc/self/mountinfo"] = ""
    assert not file_stamps.keeps_times(5), "an unknown filesystem"


def test_an_unknown_descriptor_keeps_no_times() -> None:
    assert not file_stamps.keeps_times(1 << 20)


def test_a_filesystem_in_memory_keeps_no_times() -> None:
    with os.fdopen(os.memfd_create("memory"), "rb") as file:
        assert not file_stamps.keeps_times(file.fileno())


def test_processes_wait_for_whoever_reads_the_file(
    memory: DigestMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = weights_at(tmp_path / "model.bin", 10**11, monkeypatch)
    stamp = FileStamp.at(str(place))
    reading = WeightsReading(place)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: reading.read(memory, threading.Event(), lambda: seen.append(1)))
    with memory.turn(stamp, threading.Event()):
        thread.start()
        assert not reading.wait(0.3)
        memory.note_digest(stamp, DIGEST)
    thread.join(60)
    assert (reading.done, seen) == (len(b"weights"), []), "it took what the other has found"


def test_waiting_for_another_process_ends_with_the_stop(memory: DigestMemory, tmp_path: Path) -> None:
    place, stop = tmp_path / "model.bin", threading.Event()
    place.write_bytes(b"weights")
    reading = WeightsReading(place)
    thread = threading.Thread(target=lambda: reading.read(memory, stop))
    with memory.turn(FileStamp.at(str(place)), threading.Event()):
        thread.start()
        stop.set()
        wait_until(lambda: reading.wait(0), "the reading has ended")
    thread.join(60)


def test_nobody_waits_for_a_process_that_reads_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = weights_at(tmp_path / "model.bin", 10**11, monkeypatch)
    memory, reading = DigestMemory(tmp_path / "digests", stalled_s=0.2), WeightsReading(place)
    reader = WeightsReader(memory, logging.getLogger("reader"))
    with caplog.at_level(logging.INFO, "reader"), memory.turn(FileStamp.at(str(place)), threading.Event()):
        reader.begin_reading(reading)
        assert reading.wait(60)
    reader.stop()
    assert reading.find() == weights_reading.digest_of({"model.bin": hashlib.sha256(b"weights").hexdigest()})
    assert sum("waits for another process" in line for line in caplog.messages) == 1


def test_a_process_that_reads_on_is_waited_for(memory: DigestMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of a clock that stands while the other one reads on."""
    begun: list[float] = []

    class Stalled:
        def __init__(self, timeout_s: float) -> None:
            begun.append(timeout_s)

        def has_passed(self) -> bool:
            return False

    monkeypatch.setattr(digest_memory, "Deadline", Stalled)
    stop = threading.Event()
    with memory.turn(STAMP, threading.Event()) as advance:

        def wait() -> None:
            advance()
            if len(begun) > 4:
                stop.set()

        with memory.turn(STAMP, stop, wait):
            pass
    assert set(begun) == {digest_memory.STALLED_S}
    assert len(begun) > 4
