"""The catalogue of the SSD tier: which chunk lies where, in LMDB, written behind.

What it is: enough to find the chunks again after a restart. What it is not: the truth about them; each slot certifies
itself, so a catalogue that is old, torn or lost costs misses and nothing else. No write waits for a disk: rows are
queued, written in batches, and kept for certain by a checkpoint (data first, then the catalogue).

Opening a damaged LMDB file can kill the process, so a child process looks at it first; what it does not pass is moved
aside. Threads: `put`, `delete` and `is_behind` from the control thread; one thread of its own writes; `open`, `load` and
`close` block and belong in an executor.

Lock order: `_lock` guards the queue and is never held during I/O.
"""

import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgpack
import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool import failpoint
from kvpool.clock import Deadline
from kvpool.tiers import catalogue_rows
from kvpool.tiers.catalogue_check import TABLES_MAX
from kvpool.tiers.catalogue_rows import Row
from kvpool.types import KEY_BYTES

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
QUEUE_ROWS_MAX = 1 << 20
BATCH_WAIT_S = 0.05
CHECK_TIMEOUT_S = 60.0
ASIDE_MAX = 2
_META = b"catalogue"
_NUMBER_BYTES = 4
# What LMDB says of a file whose bytes are not what it wrote.
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

# A namespace as the catalogue keeps it: model and layout in wire form.
NamespaceRecord = tuple[str, list[int | str]]


class Catalogue:
    """One open catalogue. Invariant: `_pending` holds at most QUEUE_ROWS_MAX changes, in the order they came."""

    def __init__(self, path: Path, map_bytes: int, epoch: bytes, *, sync_data: Callable[[], None]) -> None:
        """Opens, or makes, the catalogue at `path` for segment files of this `epoch`. Raises lmdb.Error or OSError."""
        self._path = path
        self._sync_data = sync_data
        self._map_bytes = map_bytes
        self._epoch = epoch
        self._known_namespaces: dict[bytes, bytes] = {}  # written again wherever they may have been lost
        self._open()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: list[tuple[bytes, bytes | None]] = []  # guarded by _lock
        self._is_stopping = False  # guarded by _lock
        self._checkpoint_asked = 0  # guarded by _lock
        self._checkpoint_done = 0  # guarded by _lock
        self.failure: BaseException | None = None
        self.dropped_rows = 0
        self._thread: threading.Thread | None = None

    def _open(self) -> None:
        self._path.mkdir(mode=0o700, exist_ok=True)
        # Each commit syncs its pages before it writes the page that makes them valid: a power cut on a disk that writes in any
        # order could otherwise take the last checkpoint too. That page itself is certain with the next commit or checkpoint.
        self._environment = lmdb.open(
            str(self._path),
            map_size=self._map_bytes,
            max_dbs=TABLES_MAX,
            mode=0o600,
            sync=True,
            metasync=False,
            writemap=False,
        )
        self._chunks = self._environment.open_db(b"chunks")
        self._namespaces = self._environment.open_db(b"namespaces")
        self._meta = self._environment.open_db(b"meta")
        with self._environment.begin(write=True) as transaction:
            if transaction.get(_META, db=self._meta) is None:
                transaction.put(_META, _meta_record(self._epoch), db=self._meta)
            for key, value in self._known_namespaces.items():
                transaction.put(key, value, db=self._namespaces)

    @property
    def waiting(self) -> int:
        """Changes not yet written."""
        with self._lock:
            return len(self._pending)

    def load(self) -> tuple["npt.NDArray[np.void]", dict[int, NamespaceRecord], int]:
        """Every good row in the order of restoring, the namespaces by number, and how many records were bad."""
        with self._environment.begin(buffers=False) as transaction:
            with transaction.cursor(self._chunks) as cursor:
                keys = b"".join(cursor.iternext(keys=True, values=False))
                values = b"".join(cursor.iternext(keys=False, values=True))
            namespaces = dict(self._read_namespaces(transaction))
        rows, bad = catalogue_rows.parse(keys, values)
        return catalogue_rows.in_restoring_order(rows), namespaces, bad

    def start(self, *, checkpoint_s: float) -> None:
        """Begin to write behind, with a checkpoint at least this often while there are changes."""
        assert self._thread is None
        self._start(checkpoint_s, must_reopen=False)

    def resume(self, *, checkpoint_s: float) -> None:
        """Write again after a failure. What was queued or written since the last checkpoint may be lost."""
        assert self.failure is not None
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self.dropped_rows += len(self._pending)
            self._pending = []
            self.failure = None
        self._start(checkpoint_s, must_reopen=True)

    def put_namespace(self, number: int, record: NamespaceRecord) -> bool:
        """Queue a namespace, before its first row."""
        packed = msgpack.packb(record)
        key, value = number.to_bytes(_NUMBER_BYTES, "big"), kvpool_native.crc32c(packed).to_bytes(4, "little") + packed
        self._known_namespaces = {**self._known_namespaces, key: value}
        return self._queue(key, value)

    def put(self, row: Row) -> bool:
        """Queue a row. False when the queue is full: the chunk will not be found after a restart."""
        key, value = row.encode()
        return self._queue(key, value)

    def delete(self, key: bytes) -> bool:
        """Queue a removal."""
        return self._queue(key, None)

    def checkpoint(self, timeout_s: float) -> bool:
        """Have everything queued so far kept for certain. False when that did not come to be in time."""
        deadline = Deadline(timeout_s)
        with self._lock:
            self._checkpoint_asked += 1
            wanted = self._checkpoint_asked
            self._changed.notify_all()
            while self._checkpoint_done < wanted and self.failure is None and not deadline.has_passed():
                self._changed.wait(deadline.remaining_s())
            return self._checkpoint_done >= wanted

    def close(self) -> None:
        """Write what is queued, checkpoint, end the thread. Idempotent."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._environment.close()

    def _start(self, checkpoint_s: float, *, must_reopen: bool) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(checkpoint_s, must_reopen), name="kvpool-catalogue", daemon=True
        )
        self._thread.start()

    def _queue(self, key: bytes, value: bytes | None) -> bool:
        with self._lock:
            if len(self._pending) >= QUEUE_ROWS_MAX or self.failure is not None:
                self.dropped_rows += 1
                return False
            self._pending.append((key, value))
            if len(self._pending) == 1:
                self._changed.notify_all()
        return True

    def _run(self, checkpoint_s: float, must_reopen: bool) -> None:
        due = Deadline(checkpoint_s)
        is_dirty = False
        if must_reopen:
            self._reopen(is_damaged=False)
        while self.failure is None:
            batch, asked, is_last = self._next_batch(due if is_dirty else None)
            due = due if is_dirty else Deadline(checkpoint_s)
            try:
                is_dirty = self._write(batch) or is_dirty
                if asked > self._checkpoint_done or (is_dirty and (is_last or due.has_passed())):
                    failpoint.reach("daemon.checkpoint.before_data")
                    self._sync_data()
                    failpoint.reach("daemon.checkpoint.before_catalogue")
                    self._environment.sync(True)
                    failpoint.reach("daemon.checkpoint.after")
                    is_dirty = False
            except DAMAGE as error:
                log.error("the catalogue is damaged and begins anew: %s", error)
                self.dropped_rows += len(batch)
                self._reopen(is_damaged=True)
            except (lmdb.Error, OSError) as error:
                log.error("the catalogue cannot be written: %s", error)
                self.failure = error
            with self._lock:
                self._checkpoint_done = asked if self.failure is None else self._checkpoint_done
                self._changed.notify_all()
            if is_last:
                return

    def _reopen(self, *, is_damaged: bool) -> None:
        """A new environment, because one that has failed in certain ways refuses all that follows."""
        try:
            self._environment.close()
            if is_damaged:
                _move_aside(self._path)
            self._open()
        except (lmdb.Error, OSError) as error:
            log.error("the catalogue cannot be opened again: %s", error)
            self.failure = error

    def _next_batch(self, due: Deadline | None) -> tuple[list[tuple[bytes, bytes | None]], int, bool]:
        """What has been queued, once there is something to do; with nothing to do it sleeps until there is."""
        with self._lock:
            if not self._has_work():
                self._changed.wait(None if due is None else due.remaining_s() + 1e-3)
            if self._pending and not self._is_stopping and self._checkpoint_asked == self._checkpoint_done:
                self._changed.wait(BATCH_WAIT_S)
            batch, self._pending = self._pending, []
            return batch, self._checkpoint_asked, self._is_stopping

    def _has_work(self) -> bool:
        return bool(self._pending) or self._is_stopping or self._checkpoint_asked > self._checkpoint_done

    def _write(self, batch: list[tuple[bytes, bytes | None]]) -> bool:
        if not batch:
            return False
        try:
            with self._environment.begin(write=True) as transaction:
                for key, value in batch:
                    table = self._chunks if len(key) == KEY_BYTES else self._namespaces
                    if value is None:
                        transaction.delete(key, db=table)
                    else:
                        transaction.put(key, value, db=table)
                failpoint.reach("daemon.catalogue.before_commit")
            failpoint.reach("daemon.catalogue.after_commit")
        except lmdb.MapFullError:
            # Removals alone may still fit; the chunks left out are found until the daemon's end, not after it.
            self.dropped_rows += sum(value is not None for _, value in batch)
            with self._environment.begin(write=True) as transaction:
                for key, _ in batch:
                    transaction.delete(key, db=self._chunks)
        return True

    def _read_namespaces(self, transaction: lmdb.Transaction) -> list[tuple[int, NamespaceRecord]]:
        found = []
        with transaction.cursor(self._namespaces) as cursor:
            for key, value in cursor:
                packed = bytes(value[4:])
                if len(key) == _NUMBER_BYTES and kvpool_native.crc32c(packed).to_bytes(4, "little") == value[:4]:
                    model, layout = msgpack.unpackb(packed)
                    self._known_namespaces[bytes(key)] = bytes(value)
                    found.append((int.from_bytes(key, "big"), (model, layout)))
        return found


def read_epoch(path: Path) -> bytes | None:
    """The epoch of the segment files that a catalogue is about; None where there is none that may be opened.

    Blocks for as long as it takes to read every record in a child process. What cannot be read is moved aside.
    """
    if not os.path.lexists(path):
        return None
    problem = _foreign_in(path) or _problem_of(path)
    if problem:
        log.error("catalogue %s is discarded: %s", path, problem)
        _move_aside(path)
        return None
    with (
        lmdb.open(str(path), readonly=True, lock=False, max_dbs=TABLES_MAX) as environment,
        environment.begin() as transaction,
    ):
        record = transaction.get(_META, db=environment.open_db(b"meta", transaction, create=False))
    if record is None or len(record) != 24 or _meta_record(record[4:20]) != record:
        log.error("catalogue %s is discarded: its format is not version %d of kvpool's", path, FORMAT_VERSION)
        _move_aside(path)
        return None
    return bytes(record[4:20])


def _foreign_in(path: Path) -> str:
    """What of the catalogue is no file of ours: opening it could block, or change what is somewhere else."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        return "it is no directory"
    odd = sorted(file.name for file in path.iterdir() if not stat.S_ISREG(file.lstat().st_mode))
    return f"{odd[0]} is no regular file" if odd else ""


def _problem_of(path: Path) -> str:
    command = [sys.executable, "-m", "kvpool.tiers.catalogue_check", str(path)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, a module of ours, a path of the configuration
            command, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it could not be read within {CHECK_TIMEOUT_S:g} s"
    words = done.stdout.split()
    if done.returncode != 0 or len(words) != 3 or words[0] != b"ok":
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return f"reading it ended with {done.returncode}: {last[-1] if last else 'no word'}"
    return ""


def _move_aside(path: Path) -> None:
    for number in range(ASIDE_MAX, 0, -1):
        newer = path if number == 1 else path.with_name(f"{path.name}.bad-{number - 1}")
        target = path.with_name(f"{path.name}.bad-{number}")
        if os.path.lexists(newer):
            _remove(target)
            newer.rename(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _meta_record(epoch: bytes) -> bytes:
    checked = FORMAT_VERSION.to_bytes(4, "little") + epoch
    return checked + kvpool_native.crc32c(checked).to_bytes(4, "little")


def new_epoch() -> bytes:
    """The name of a new set of segment files."""
    return os.urandom(16)
