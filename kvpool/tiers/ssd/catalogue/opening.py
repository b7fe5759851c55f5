"""Opening of an earlier process's catalogue so that a damaged one cannot kill the daemon.

    marker ──► a child process reads every record ──readable──► its rows; damaged rows are left out
       │                     └──damaged──► moved aside (`catalogue.bad`)
       └──three openings did not live until their first checkpoint──► moved aside unread

LMDB maps its file, and a truncated one kills the process that reads it: so a child process reads it and passes the rows on. The
marker beside the catalogue keeps a daemon from dying of the same catalogue again and again. Blocks: for an executor.
"""

import contextlib
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmdb

import kvpool_native
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.ids import EPOCH_BYTES
from kvpool.tiers.ssd.catalogue import check as catalogue_check
from kvpool.tiers.ssd.catalogue.check import TABLES_MAX
from kvpool.tiers.ssd.catalogue.identity import NamespaceRecord, remove, unpack_namespace
from kvpool.tiers.ssd.catalogue.room import FILE_NAME, aside_of, load_pages
from kvpool.tiers.ssd.catalogue.rows import ROW_BYTES

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
# Seconds that reading may take beside those for its size. Measured on two busy cores: 4 million rows, 1.1 GB, in 7 s.
CHECK_TIMEOUT_S = 60.0
CHECK_BYTES_PER_S = 25e6
STOP_POLL_S = 0.2
# The variables that the child gets: they say where the interpreter's own libraries are.
CHILD_VARIABLES = ("LD_LIBRARY_PATH",)
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OPENINGS_MAX = 3
META_KEY = b"catalogue"
# Present where rows of earlier processes are missing: the next opening rebuilds them from the slots.
INCOMPLETE_KEY = b"incomplete"
# Every generation of this process is below this number, and every one of the next process above it.
GENERATIONS_KEY = b"generations"
GENERATIONS_OF_A_LIFE = 1 << 40
# The count of flushes whose removals the catalogue has (`flushed.py`).
FLUSHES_KEY = b"flushes"
NUMBER_BYTES = 4
# LMDB's errors for a file with wrong bytes: a retry would not help.
DAMAGE = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
_CHILD_BEGINNING = """\
import runpy, sys
library, script = sys.argv[1:3]
del sys.argv[1:3]
sys.path.append(library)
runpy.run_path(script, run_name="__main__")
"""
# What a catalogue that is set aside may take beside its map: what the file system adds.
BESIDE_MAP_BYTES = 16 << 10
_MARKER = "catalogue.opening"
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Found:
    """A readable catalogue: the epoch of its segment files, its packed rows unchecked, namespaces by number.

    `generations_end`: above all generations of the process that wrote it; 0: unknown. `flushes`: the last flush whose removals
    it has.
    """

    epoch: bytes
    rows: bytes
    namespaces: dict[int, NamespaceRecord]
    generations_end: int = 0
    flushes: int = 0


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of an examination. Both fields empty: there is no catalogue. `problem`: why it was moved aside."""

    found: Found | None = None
    problem: str = ""


class NewerFormat(KVPoolError):
    """A newer version of kvpool wrote the catalogue. It stays unchanged."""


class Unreadable(KVPoolError):
    """The disk does not give the catalogue. It stays unchanged."""


class ExaminationStopped(KVPoolError):
    """The daemon stops before the catalogue was read. It stays unchanged."""


def examine(path: Path, bytes_max: int, is_stopping: Callable[[], bool] = lambda: False) -> Examined:
    """Read the catalogue at `path` through a child.

    Raises NewerFormat, Unreadable, ExaminationStopped once `is_stopping` is true, and OSError where the directory cannot be
    used.
    """
    if not os.path.lexists(path):
        return Examined()
    found: Found | None = None
    openings = _openings(path)
    if problem := _foreign_in(path):
        pass
    elif openings >= OPENINGS_MAX:
        problem = f"{openings} openings ended before their first checkpoint"
    else:
        rows, problem = _read_in_child(path, is_stopping)
        if not problem:
            found, problem = _read_the_rest(path, rows)
    if problem:
        log.error("catalogue %s is discarded: %s", path, problem)
        set_aside(path, bytes_max)
    return Examined(found, problem)


def mark_opening(path: Path) -> None:
    """Mark that the catalogue is about to be opened in this process."""
    _write_openings(path, _openings(path) + 1)


def unmark_opening(path: Path) -> None:
    """Set the mark back, after the opening has succeeded and the first checkpoint is complete."""
    if _openings(path):
        _write_openings(path, 0)


def meta_record(epoch: bytes, version: int = FORMAT_VERSION) -> bytes:
    """The catalogue's format version and the epoch of its segment files."""
    checked = version.to_bytes(4, "little") + epoch
    return checked + kvpool_native.crc32c(checked).to_bytes(4, "little")


def number_record(number: int) -> bytes:
    """A number in the catalogue's meta table: the end of its process's generations, or the last flush it has."""
    checked = number.to_bytes(8, "little")
    return checked + kvpool_native.crc32c(checked).to_bytes(4, "little")


def set_aside(path: Path, bytes_max: int) -> None:
    """Move a catalogue aside for examination. The last one is kept, unless it is too large."""
    aside = aside_of(path)
    remove(aside)
    path.rename(aside)
    bound_aside(path, bytes_max)
    unmark_opening(path)


def bound_aside(path: Path, bytes_max: int) -> None:
    """Remove the catalogue that was set aside if it is too large, which it may be for a capacity that was lowered."""
    aside = aside_of(path)
    if os.path.lexists(aside) and _blocks_in(aside) * _BLOCK_BYTES > bytes_max + BESIDE_MAP_BYTES:
        remove(aside)


def _blocks_in(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_blocks
    return sum(file.lstat().st_blocks for file in path.rglob("*"))


def _foreign_in(path: Path) -> str:
    """The reason why this is no catalogue: opening it could block, or change a file elsewhere. Empty: it may be one."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        return "it is no directory"
    odd = sorted(file.name for file in path.iterdir() if not stat.S_ISREG(file.lstat().st_mode))
    if odd:
        return f"{odd[0]} is no regular file"
    return "" if (path / FILE_NAME).exists() else f"it has no {FILE_NAME}"


def _read_in_child(path: Path, is_stopping: Callable[[], bool]) -> tuple[bytes, str]:
    """All rows, or the problem. Raises ExaminationStopped and Unreadable."""
    fd = os.memfd_create("kvpool-catalogue-rows", os.MFD_CLOEXEC)
    limit_s = CHECK_TIMEOUT_S + _blocks_in(path) * _BLOCK_BYTES / CHECK_BYTES_PER_S
    try:
        with _begin_child(path, fd) as child:
            try:
                output, errors = _wait_for(child, Deadline(limit_s), is_stopping)
            except subprocess.TimeoutExpired:
                return b"", f"it could not be read within {limit_s:.0f} s"
            finally:
                child.kill()
        words = output.split()
        if words[:1] == [catalogue_check.UNREADABLE.encode()]:
            raise Unreadable(f"read of {path / FILE_NAME} failed: {os.strerror(int(words[1]))}")
        if child.returncode != 0 or len(words) != 2 or words[0] != b"ok":
            last = errors.decode(errors="replace").strip().splitlines()
            return b"", f"reading it ended with {child.returncode}: {last[-1] if last else 'no word'}"
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            return file.read(), ""
    finally:
        os.close(fd)


def _begin_child(path: Path, fd: int) -> "subprocess.Popen[bytes]":
    """The reading child. Signals that stop the daemon may reach all of its processes; a child that they ended would look like
    one that a damaged catalogue has crashed. This thread's mask is the child's from its first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING_SIGNALS)
    try:
        return subprocess.Popen(  # noqa: S603 - this interpreter, a script of ours, a path of the configuration
            _child_command(path, fd),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(fd,),
            cwd="/",
            env={name: os.environ[name] for name in CHILD_VARIABLES if name in os.environ},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child_command(path: Path, fd: int) -> list[str]:
    """The child's command. Isolated: it imports nothing from the working directory or PYTHONPATH, and the lmdb used here."""
    lmdb_at = str(Path(lmdb.__file__).parent.parent)
    arguments = [lmdb_at, catalogue_check.__file__, str(path), str(fd), str(ROW_BYTES)]
    return [sys.executable, "-I", "-c", _CHILD_BEGINNING, *arguments]


def _wait_for(
    child: "subprocess.Popen[bytes]", deadline: Deadline, is_stopping: Callable[[], bool]
) -> tuple[bytes, bytes]:
    """The child's output. Raises TimeoutExpired and ExaminationStopped."""
    while not deadline.has_passed():
        with contextlib.suppress(subprocess.TimeoutExpired):  # the child still runs: check for a stop
            return child.communicate(timeout=min(STOP_POLL_S, deadline.remaining_s()))
        if is_stopping():
            raise ExaminationStopped("the daemon is stopping, its catalogue is left as it is")
    return child.communicate(timeout=0.0)


def _read_the_rest(path: Path, rows: bytes) -> tuple[Found | None, str]:
    """Meta record and namespaces: the child has read them before, so this process can."""
    try:
        with lmdb.open(str(path), readonly=True, lock=False, max_dbs=TABLES_MAX) as environment:
            load_pages(environment, kvpool_native.FilePages.open(str(path / FILE_NAME)))
            with environment.begin() as transaction:
                meta = environment.open_db(b"meta", transaction, create=False)
                record = transaction.get(META_KEY, db=meta)
                generations = bytes(transaction.get(GENERATIONS_KEY, db=meta) or b"")
                flushes = bytes(transaction.get(FLUSHES_KEY, db=meta) or b"")
                is_incomplete = transaction.get(INCOMPLETE_KEY, db=meta) is not None
                with transaction.cursor(environment.open_db(b"namespaces", transaction, create=False)) as cursor:
                    packed = [(bytes(key), bytes(value)) for key, value in cursor]
    except lmdb.Error as error:
        return None, f"it cannot be opened: {error}"
    version, epoch = _parse_meta(bytes(record or b""))
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"its catalogue has format {version}, this version of kvpool reads up to {FORMAT_VERSION}: "
            "use the version that wrote it, or another ssd.path"
        )
    if version < FORMAT_VERSION:
        return None, f"its format is not version {FORMAT_VERSION} of kvpool's"
    if is_incomplete:
        return None, "it was begun empty after damage and lacks earlier rows"
    namespaces = {
        int.from_bytes(key, "big"): entry
        for key, value in packed
        if len(key) == NUMBER_BYTES and (entry := unpack_namespace(value)) is not None
    }
    end = _parse_number(generations)
    return Found(epoch, rows, namespaces, end if end < kvpool_native.GENERATION_END else 0, _parse_number(flushes)), ""


def _parse_meta(record: bytes) -> tuple[int, bytes]:
    """Format version and epoch; version 0 for a damaged record."""
    version, epoch = int.from_bytes(record[:4], "little"), record[4 : 4 + EPOCH_BYTES]
    return (version, epoch) if len(epoch) == EPOCH_BYTES and meta_record(epoch, version) == record else (0, b"")


def _parse_number(record: bytes) -> int:
    """The number; 0 for a damaged or missing record."""
    number = int.from_bytes(record[:8], "little")
    return number if record == number_record(number) else 0


def _openings(path: Path) -> int:
    try:
        return int(path.with_name(_MARKER).read_text())
    except (OSError, ValueError):
        return 0


def _write_openings(path: Path, openings: int) -> None:
    """Write the mark in place and never remove it: a full disk has no room for a new one."""
    fd = os.open(path.with_name(_MARKER), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, os.pwrite(fd, str(openings).encode(), 0))
    finally:
        os.close(fd)
