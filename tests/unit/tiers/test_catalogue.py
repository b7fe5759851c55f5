"""The catalogue: its rows, its behaviour after failures, and its treatment of files that are not its own."""

import ast
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvpool.packed_rows import CATALOGUE_ROW
from kvpool.tiers.ssd.catalogue import check as catalogue_check
from kvpool.tiers.ssd.catalogue import opening as catalogue_open
from kvpool.tiers.ssd.catalogue import rows as catalogue_rows
from kvpool.tiers.ssd.catalogue.catalogue import Catalogue
from kvpool.tiers.ssd.catalogue.identity import Identity, NamespaceRecord, new_epoch, read_identity, write_identity
from kvpool.tiers.ssd.catalogue.rows import Row, Touch
from tests.rigs.daemon import wait_until

MAP_BYTES = 1 << 20
WAIT_S = 10.0
NAMESPACE: NamespaceRecord = ("model", [1, 2, "bfloat16"])


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(27) + b"k"


def row_of(number: int, parent: int | None = None, recency: int | None = None) -> Row:
    above = b"" if parent is None else key_of(parent)
    return Row(key_of(number), above, 8192 * number, number + 1, recency or number + 1, 4096, 1, 1)


class Disk:
    """Stands for the segment files: counts syncs, and fails them on command."""

    def __init__(self) -> None:
        self.syncs = 0
        self.error: OSError | None = None
        self.damage: lmdb.Error | None = None  # found once

    def sync(self) -> None:
        self.syncs += 1
        if self.damage is not None:
            damage, self.damage = self.damage, None
            raise damage
        if self.error is not None:
            raise self.error


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def open_catalogue(tmp_path: Path, disk: Disk) -> Callable[..., Catalogue]:
    identity = Identity(new_epoch(), {})

    def make(map_bytes: int = MAP_BYTES, checkpoint_s: float = WAIT_S) -> Catalogue:
        found = catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES).found
        known = Identity(found.epoch, found.namespaces) if found else identity
        catalogue = Catalogue(tmp_path / "catalogue", map_bytes, known, sync_data=disk.sync)
        catalogue.start(checkpoint_s=checkpoint_s)
        return catalogue

    return make


def keys_found(path: Path) -> list[bytes]:
    found = catalogue_open.examine(path / "catalogue", MAP_BYTES).found
    assert found is not None
    rows, bad = catalogue_rows.restorable(found.rows)
    assert bad == 0
    return [bytes(key) for key in rows["key"]]


def used_bytes(catalogue: Path) -> int:
    """The part of the file that has pages, as all of it had in older versions."""
    with lmdb.open(str(catalogue), readonly=True, lock=False) as environment:
        return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])


def allocated_bytes(tmp_path: Path) -> int:
    return (tmp_path / "catalogue" / "data.mdb").stat().st_blocks * 512


class FullDisk:
    """A disk without room to allocate, until it is freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allocate = os.posix_fallocate
        self.is_freed = False
        monkeypatch.setattr(os, "posix_fallocate", self._fail)

    def _fail(self, fd: int, offset: int, size: int) -> None:
        if not self.is_freed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._allocate(fd, offset, size)


def test_stored_rows_are_found_and_deleted_ones_are_not(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path
) -> None:
    catalogue = open_catalogue()
    catalogue.put_namespace(1, NAMESPACE)
    for number in range(10):
        assert catalogue.put(row_of(number, number - 1 if number else None))
    catalogue.delete(key_of(9))
    assert catalogue.close(10.0)
    assert keys_found(tmp_path) == [key_of(number) for number in range(9)]
    found = catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES).found
    assert found is not None
    assert found.namespaces == {1: NAMESPACE}
    assert read_identity(tmp_path) == Identity(found.epoch, found.namespaces)


def test_a_touch_changes_the_order_of_restoring(open_catalogue: Callable[..., Catalogue], tmp_path: Path) -> None:
    catalogue = open_catalogue()
    for number in range(4):
        catalogue.put(row_of(number))
    catalogue.touch(key_of(1), Touch(99, 80, 7))
    catalogue.touch(key_of(77), Touch(100, 35, 0))
    assert catalogue.close(10.0)
    assert keys_found(tmp_path) == [key_of(number) for number in (1, 3, 2, 0)]
    found = catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES).found
    assert found is not None
    rows = np.frombuffer(found.rows, CATALOGUE_ROW)
    kept = {bytes(row["key"]): (int(row["priority"]), int(row["duration_s"])) for row in rows}
    assert (kept[key_of(1)], kept[key_of(3)]) == ((80, 7), (35, 0))


def test_a_checkpoint_syncs_the_data_first_and_names_no_lost_chunk(
    open_catalogue: Callable[..., Catalogue], disk: Disk
) -> None:
    catalogue = open_catalogue()
    catalogue.put(row_of(1))
    before = disk.syncs
    assert catalogue.checkpoint(WAIT_S)
    assert disk.syncs > before
    disk.error = OSError(5, "Input/output error")
    assert not catalogue.checkpoint(WAIT_S)
    assert catalogue.failure is disk.error
    assert catalogue.take_lost() == []
    assert catalogue.close(10.0)


def test_a_failed_sync_loses_the_chunks_it_covered_and_is_not_retried(
    open_catalogue: Callable[..., Catalogue], disk: Disk
) -> None:
    catalogue = open_catalogue()
    catalogue.put(row_of(1))
    assert catalogue.checkpoint(WAIT_S)
    disk.error = OSError(5, "Input/output error")
    catalogue.put(row_of(2))
    assert not catalogue.checkpoint(WAIT_S)
    syncs = disk.syncs
    assert not catalogue.put(row_of(3))
    lost = [(key_of(number), row_of(number).generation) for number in (2, 3)]
    assert catalogue.take_lost() == lost, "what nobody can find after a restart is lost too"
    assert catalogue.take_lost() == []
    assert disk.syncs == syncs
    disk.error = None
    catalogue.resume(checkpoint_s=WAIT_S)
    assert catalogue.put(row_of(4))
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.failure is None
    assert catalogue.close(10.0)


def test_many_written_bytes_cause_an_early_checkpoint(
    open_catalogue: Callable[..., Catalogue], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.tiers.ssd.catalogue.catalogue.CHECKPOINT_BYTES", 8 * 4096)
    catalogue = open_catalogue(checkpoint_s=3600.0)
    assert catalogue.checkpoint(WAIT_S)
    before = catalogue.checkpoints
    for number in range(7):
        catalogue.put(row_of(number))
    wait_until(lambda: catalogue.waiting == 0, "the rows are written")
    assert catalogue.checkpoints == before
    catalogue.put(row_of(7))
    wait_until(lambda: catalogue.checkpoints == before + 1, "the checkpoint")
    assert catalogue.close(10.0)


def test_a_full_map_costs_the_chunks_left_out_and_no_more(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path
) -> None:
    catalogue = open_catalogue(map_bytes=640 << 10)
    put = 0
    while not catalogue.dropped_rows:
        for _ in range(100):
            put += 1
            catalogue.put(row_of(put))
        is_durable = catalogue.checkpoint(WAIT_S)
        assert is_durable == (catalogue.dropped_rows == 0)
        assert put < 100_000
    assert catalogue.failure is None
    for number in range(1, put // 2):
        catalogue.delete(key_of(number))
    assert not catalogue.checkpoint(WAIT_S), "chunks that a restart does not find are not durable"
    for number in range(put // 2, put + 1):
        catalogue.delete(key_of(number))
    assert catalogue.checkpoint(WAIT_S)
    dropped = catalogue.dropped_rows
    catalogue.put(row_of(put + 1))
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.dropped_rows == dropped
    assert catalogue.close(10.0)
    assert key_of(put + 1) in keys_found(tmp_path)


def test_a_bad_row_is_left_out_and_the_others_are_found(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path
) -> None:
    catalogue = open_catalogue()
    for number in range(3):
        catalogue.put(row_of(number))
    assert catalogue.close(10.0)
    with lmdb.open(str(tmp_path / "catalogue"), max_dbs=4) as environment:
        table = environment.open_db(b"chunks")
        with environment.begin(write=True) as transaction:
            value = bytearray(transaction.get(key_of(1), db=table) or b"")
            value[40] ^= 1
            transaction.put(key_of(1), bytes(value), db=table)
            transaction.put(b"short", b"row", db=table)
    found = catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES).found
    assert found is not None
    rows, bad = catalogue_rows.restorable(found.rows)
    assert (len(rows), bad) == (2, 1)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.0])
def test_a_truncated_catalogue_is_set_aside(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, share: float
) -> None:
    catalogue = open_catalogue()
    for number in range(2000):
        catalogue.put(row_of(number))
    assert catalogue.close(10.0)
    data = tmp_path / "catalogue" / "data.mdb"
    os.truncate(data, int(used_bytes(data.parent) * share))
    examined = catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES)
    assert examined.found is None
    assert examined.problem
    assert not (tmp_path / "catalogue").exists()
    assert (tmp_path / "catalogue.bad").exists()
    assert catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES) == catalogue_open.Examined()


def test_a_newer_format_is_not_changed(open_catalogue: Callable[..., Catalogue], tmp_path: Path) -> None:
    assert open_catalogue().close(10.0)
    with lmdb.open(str(tmp_path / "catalogue"), max_dbs=4) as environment:
        meta = environment.open_db(b"meta")
        newer = catalogue_open.meta_record(bytes(16), catalogue_open.FORMAT_VERSION + 1)
        with environment.begin(write=True) as transaction:
            transaction.put(catalogue_open.META_KEY, newer, db=meta)
    with pytest.raises(catalogue_open.NewerFormat, match="format 2, this version of kvpool reads up to 1"):
        catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES)
    assert (tmp_path / "catalogue").exists()


def test_the_highest_generation_is_durable_once_the_catalogue_is_open(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "catalogue"
    for end in (1 << 40, 2 << 40):
        catalogue = Catalogue(path, MAP_BYTES, Identity(bytes(16), {}), sync_data=disk.sync, generations_end=end)
        copy = shutil.copytree(path, tmp_path / str(end))
        found = catalogue_open.examine(copy, MAP_BYTES).found
        assert found is not None
        assert found.generations_end == end
        assert catalogue.close(10.0)


def test_a_catalogue_that_kills_its_reader_is_not_retried_for_ever(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path
) -> None:
    catalogue = open_catalogue()
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.close(10.0)
    path = tmp_path / "catalogue"
    for _ in range(catalogue_open.OPENINGS_MAX):
        assert catalogue_open.examine(path, MAP_BYTES).found is not None
        catalogue_open.mark_opening(path)
    examined = catalogue_open.examine(path, MAP_BYTES)
    assert examined.found is None
    assert "3 openings" in examined.problem
    assert (tmp_path / "catalogue.opening").read_text() == "0"


def test_the_first_checkpoint_sets_the_mark_back_in_place(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path
) -> None:
    catalogue_open.mark_opening(tmp_path / "catalogue")
    mark = tmp_path / "catalogue.opening"
    file = mark.stat().st_ino
    catalogue = open_catalogue()
    assert catalogue.checkpoint(WAIT_S)
    assert (mark.read_text(), mark.stat().st_ino) == ("0", file), "a full disk has no room for another one"
    assert catalogue.close(10.0)


def test_a_catalogue_is_cut_to_a_smaller_map(open_catalogue: Callable[..., Catalogue], tmp_path: Path) -> None:
    catalogue = open_catalogue(map_bytes=4 * MAP_BYTES)
    catalogue.put(row_of(1))
    assert catalogue.close(10.0)
    assert allocated_bytes(tmp_path) >= 4 * MAP_BYTES
    assert open_catalogue().close(10.0)
    assert (tmp_path / "catalogue" / "data.mdb").stat().st_size == MAP_BYTES
    assert keys_found(tmp_path) == [key_of(1)]


@pytest.mark.parametrize("name", ["catalogue.new", "identity.new"])
@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_has_the_name_of_an_unfinished_file_is_removed(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, name: str, kind: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    if kind == "file":
        (tmp_path / name).write_text("left")
    elif kind == "link":
        (tmp_path / name).symlink_to(elsewhere)
    else:
        (tmp_path / name).mkdir()
    catalogue = open_catalogue()
    catalogue.put(row_of(1))
    assert catalogue.close(10.0)
    assert keys_found(tmp_path) == [key_of(1)]
    assert not os.path.lexists(tmp_path / name)
    assert (elsewhere / "kept").read_text() == "kept"


def test_an_opening_without_room_keeps_the_rows_and_waits(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = open_catalogue()
    for number in (1, 2):
        catalogue.put(row_of(number))
    assert catalogue.close(10.0)
    os.truncate(tmp_path / "catalogue" / "data.mdb", used_bytes(tmp_path / "catalogue"))
    disk = FullDisk(monkeypatch)
    catalogue = open_catalogue()
    assert "the catalogue cannot be given its 1048576 bytes: No space left on device" in str(catalogue.failure)
    assert not catalogue.has_begun
    catalogue.delete(key_of(1))
    assert not catalogue.checkpoint(WAIT_S)
    for _ in range(catalogue_open.OPENINGS_MAX):
        catalogue.resume(checkpoint_s=WAIT_S)
        wait_until(lambda: catalogue.failure is not None, "the disk is still full")
    assert catalogue.take_lost() == []
    disk.is_freed = True
    catalogue.resume(checkpoint_s=WAIT_S)
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.has_begun
    assert catalogue.close(10.0)
    assert keys_found(tmp_path) == [key_of(2)]


def test_a_new_catalogue_without_room_leaves_nothing_half_made(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    catalogue = open_catalogue()
    assert catalogue.failure is not None
    assert list(tmp_path.glob("catalogue*")) == []
    catalogue.put(row_of(1))
    disk.is_freed = True
    catalogue.resume(checkpoint_s=WAIT_S)
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.close(10.0)
    assert keys_found(tmp_path) == [key_of(1)]


def test_rebuilt_rows_that_had_no_room_are_looked_for_again_at_the_next_opening(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullDisk(monkeypatch)
    catalogue = Catalogue(tmp_path / "catalogue", MAP_BYTES, Identity(new_epoch(), {}), sync_data=disk.sync)
    catalogue.fill(np.frombuffer(row_of(1).encode(), CATALOGUE_ROW))
    catalogue.start(checkpoint_s=WAIT_S)
    full.is_freed = True
    catalogue.resume(checkpoint_s=WAIT_S)
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.close(10.0)
    examined = catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES)
    assert (examined.found, "lacks earlier rows" in examined.problem) == (None, True)


def test_a_catalogue_that_was_set_aside_gives_its_room_to_a_new_one(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_catalogue().close(10.0)
    catalogue_open.set_aside(tmp_path / "catalogue", MAP_BYTES)
    aside = tmp_path / "catalogue.bad"
    assert aside.is_dir()
    allocate = os.posix_fallocate

    def allocate_once_free(fd: int, offset: int, size: int) -> None:
        if aside.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_once_free)
    catalogue = open_catalogue()
    assert catalogue.failure is None
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.close(10.0)


def test_a_transaction_without_room_loses_nothing(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = open_catalogue()
    catalogue.put(row_of(1))
    assert catalogue.checkpoint(WAIT_S)

    def reach(name: str) -> None:
        if name == "daemon.catalogue.before_commit":
            raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr("kvpool.tiers.ssd.catalogue.catalogue.failpoint.reach", reach)
        catalogue.put(row_of(2))
        assert not catalogue.checkpoint(WAIT_S)
        assert catalogue.put(row_of(3))
        assert (catalogue.waiting, catalogue.dropped_rows, catalogue.take_lost()) == (2, 0, [])
    catalogue.resume(checkpoint_s=WAIT_S)
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.close(10.0)
    assert sorted(keys_found(tmp_path)) == [key_of(number) for number in (1, 2, 3)]


def test_a_catalogue_damaged_before_a_failure_stays_known_as_incomplete(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = open_catalogue()
    catalogue.put(row_of(1))
    assert catalogue.checkpoint(WAIT_S)
    full = FullDisk(monkeypatch)
    disk.damage = lmdb.CorruptedError("found by a test")
    catalogue.put(row_of(2))
    assert not catalogue.checkpoint(WAIT_S)
    full.is_freed = True
    catalogue.resume(checkpoint_s=WAIT_S)
    assert catalogue.checkpoint(WAIT_S)
    assert catalogue.close(10.0)
    assert "lacks earlier rows" in catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES).problem


def test_rows_of_chunks_alone_count_as_lost(open_catalogue: Callable[..., Catalogue], disk: Disk) -> None:
    catalogue = open_catalogue()
    assert catalogue.put(row_of(1))
    assert catalogue.checkpoint(WAIT_S)
    disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
    assert not catalogue.checkpoint(WAIT_S)
    assert not catalogue.touch(key_of(1), Touch(9, 35, 0))
    assert not catalogue.delete(key_of(1))
    assert not catalogue.put(row_of(2))
    assert (catalogue.lost_rows, catalogue.dropped_rows) == (1, 0)


def test_an_identity_without_room_is_written_at_a_later_checkpoint(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(directory: Path, identity: Identity) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    catalogue = open_catalogue()
    assert catalogue.checkpoint(WAIT_S)
    with monkeypatch.context() as full:
        full.setattr("kvpool.tiers.ssd.catalogue.catalogue.write_identity", write)
        catalogue.put_namespace(1, NAMESPACE)
        catalogue.put(row_of(1))
        assert catalogue.checkpoint(WAIT_S), "the catalogue itself has all its room"
    catalogue.put(row_of(2))
    assert catalogue.checkpoint(WAIT_S)
    found = read_identity(tmp_path)
    assert found is not None
    assert found.namespaces == {1: NAMESPACE}
    assert catalogue.close(10.0)


def test_an_identity_that_is_removed_is_written_at_the_next_checkpoint(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path
) -> None:
    catalogue = open_catalogue()
    catalogue.put_namespace(1, NAMESPACE)
    assert catalogue.checkpoint(WAIT_S)
    (tmp_path / "identity").unlink()
    assert catalogue.checkpoint(WAIT_S)
    found = read_identity(tmp_path)
    assert found is not None
    assert found.namespaces == {1: NAMESPACE}


def test_the_child_imports_nothing_from_where_the_daemon_was_started(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = open_catalogue()
    catalogue.put(row_of(1))
    assert catalogue.close(10.0)
    trap, sprung = tmp_path / "trap", tmp_path / "sprung"
    trap.mkdir()
    for name in ("runpy", "lmdb", "os", "struct", "sitecustomize", "usercustomize"):
        (trap / f"{name}.py").write_text(f"open({str(sprung)!r}, 'w').write({name!r})\n")
    monkeypatch.chdir(trap)
    monkeypatch.setenv("PYTHONPATH", str(trap))
    monkeypatch.setenv("PYTHONSTARTUP", str(trap / "os.py"))
    assert keys_found(tmp_path) == [key_of(1)]
    assert not sprung.exists()


def test_the_child_has_no_directory_and_no_environment_of_the_daemons(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_catalogue().close(10.0)
    seen = tmp_path / "seen"
    spy = tmp_path / "spy.py"
    spy.write_text(f"import os\nopen({str(seen)!r}, 'w').write(repr((os.getcwd(), sorted(os.environ))))\n")
    monkeypatch.setattr(catalogue_check, "__file__", str(spy))
    monkeypatch.setenv("KVPOOL_A_SECRET", "x")
    assert catalogue_open.examine(tmp_path / "catalogue", MAP_BYTES).found is None
    directory, names = ast.literal_eval(seen.read_text())
    assert directory == "/"
    assert set(names) <= {"LC_CTYPE", "LD_LIBRARY_PATH"}  # the first one is Python's own doing


def test_a_signal_to_all_of_the_daemons_processes_is_no_fault_of_the_catalogue(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager or a terminal sends it to the reading child, too."""
    catalogue = open_catalogue()
    catalogue.put(row_of(1))
    assert catalogue.close(10.0)
    spy = tmp_path / "signalled.py"
    signals = [int(number) for number in catalogue_open.STOPPING_SIGNALS]
    spy.write_text(
        f"import os, runpy\nfor number in {signals}:\n    os.kill(os.getpid(), number)\n"
        f"runpy.run_path({catalogue_check.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(catalogue_check, "__file__", str(spy))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert keys_found(tmp_path) == [key_of(1)]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_time_to_read_a_catalogue_grows_with_its_size_and_a_stop_ends_it(
    open_catalogue: Callable[..., Catalogue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = open_catalogue()
    for number in range(2000):
        catalogue.put(row_of(number))
    assert catalogue.close(10.0)
    path = tmp_path / "catalogue"
    monkeypatch.setattr(catalogue_open, "CHECK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(catalogue_open, "CHECK_BYTES_PER_S", 1e9)
    assert catalogue_open.examine(path, MAP_BYTES).found is None  # 1 ms for its size is too little to begin with
    (tmp_path / "catalogue.bad").rename(path)
    monkeypatch.setattr(catalogue_open, "CHECK_BYTES_PER_S", 1e3)
    assert catalogue_open.examine(path, MAP_BYTES).found is not None
    spy = tmp_path / "sleeper.py"
    spy.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(catalogue_check, "__file__", str(spy))
    with pytest.raises(catalogue_open.ExaminationStopped):
        catalogue_open.examine(path, MAP_BYTES, lambda: True)
    assert path.exists()
    assert not (tmp_path / "catalogue.bad").exists()


def test_an_identity_with_any_bit_changed_is_invalid(tmp_path: Path) -> None:
    write_identity(tmp_path, Identity(new_epoch(), {1: NAMESPACE, 2: ("other", [3])}))
    file = tmp_path / "identity"
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(changed))
        assert read_identity(tmp_path) is None
    file.write_bytes(content)
    assert read_identity(tmp_path) is not None


def test_an_identity_keeps_the_newest_namespaces_when_there_are_too_many(tmp_path: Path) -> None:
    many: dict[int, NamespaceRecord] = {number: ("m" * 200, [number]) for number in range(1, 2000)}
    write_identity(tmp_path, Identity(new_epoch(), many))
    found = read_identity(tmp_path)
    assert found is not None
    assert 100 < len(found.namespaces) < len(many)
    assert min(found.namespaces) == max(many) - len(found.namespaces) + 1
