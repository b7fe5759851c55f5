"""Catalogue of the SSD tier: which slot has which chunk, in LMDB, written in the background.

A restart finds chunks by it, but it is only a hint: each slot certifies itself, so a catalogue that is old, torn or lost costs
misses and nothing else. `opening.py` examines the catalogue of an earlier process.

Guarantees:
1. No change waits for the disk: changes are queued, written in order in batches, and made durable by a checkpoint.
2. A checkpoint makes the data durable first, then the catalogue. One is due after some time, or some bytes of chunks.
3. A failed sync is not repeated: chunks put since the last good checkpoint are reported by `take_lost`, and forgotten.
4. When the map or the queue is full, chunks are left out: they are found until the daemon ends, not after a restart. The
   catalogue stays usable. While chunks are left out, no checkpoint counts as complete.
5. Its file has all its room from the opening on (`room.py`). Where the disk has none for it, or for what a transaction writes,
   nothing is lost: the changes wait for `resume`.
6. A page of its file that the disk does not give is a failure as any other. LMDB reads through a map, where it would end the
   process: all pages in use are read before each transaction.

Threads: changes and `take_lost` from the control thread; one thread of its own writes; opening, `checkpoint` and `close` block
and belong in an executor. Lock order: `_lock` guards the queue and is never held during I/O.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool import failpoint
from kvpool.clock import Deadline, Stopwatch
from kvpool.ids import KEY_BYTES
from kvpool.tiers.ssd.catalogue import opening as catalogue_open
from kvpool.tiers.ssd.catalogue import rows as catalogue_rows
from kvpool.tiers.ssd.catalogue.check import TABLES_MAX
from kvpool.tiers.ssd.catalogue.identity import FILE_NAME as IDENTITY_NAME
from kvpool.tiers.ssd.catalogue.identity import Identity, NamespaceRecord, pack_namespace, write_identity
from kvpool.tiers.ssd.catalogue.room import FILE_NAME, lacks_room, load_pages, provide
from kvpool.tiers.ssd.catalogue.rows import Row, Touch
from kvpool.tiers.ssd.place import file_identity

log = logging.getLogger(__name__)

QUEUE_ROWS_MAX = 1 << 20
BATCH_WAIT_S = 0.05
CHECKPOINT_BYTES = 256 << 20
# Room that a full map keeps for removals: they need pages before they free any.
HEADROOM_BYTES = 256 << 10
_FILL_ROWS = 1 << 14
_DELETED_AT_ONCE = 8

# A key with its new value, None (remove it) or a `Touch`.
Change = tuple[bytes, bytes | Touch | None]


class Catalogue:
    """One open catalogue. Invariant: `_pending`, in the order of coming, and the batch have at most QUEUE_ROWS_MAX changes."""

    def __init__(
        self,
        path: Path,
        map_bytes: int,
        identity: Identity,
        *,
        sync_data: Callable[[], None],
        generations_end: int = 0,
    ) -> None:
        """Opens or makes the catalogue at `path` for segment files of this identity. Raises lmdb.Error or OSError.

        `generations_end` is above all generations of this process. Without room on the disk `failure` is set on return.
        """
        self._path = path
        self._epoch = identity.epoch
        self._generations_end = generations_end
        self._known = dict(identity.namespaces)  # guarded by _lock
        self._sync_data = sync_data
        self._map_bytes = map_bytes
        self._environment: lmdb.Environment | None = None
        self._lacks_rows = False  # whether rows of earlier processes are missing
        self._is_identity_due = True  # whether the file of the identity may lack namespaces
        self._identity_error = ""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: list[Change] = []  # guarded by _lock
        self._bytes_pending = 0  # guarded by _lock
        self._writing = 0  # changes of the batch under way; guarded by _lock
        self._is_stopping = False  # guarded by _lock
        self._is_running = False  # whether the thread is at work; guarded by _lock
        self._checkpoint_asked = 1  # guarded by _lock; the first one is the opening's
        self._checkpoint_done = 0  # guarded by _lock
        self._lost: list[tuple[bytes, int]] = []  # guarded by _lock
        self._left_out: set[bytes] = set()  # keys without a row until they are deleted; guarded by _lock
        self._uncertain: list[tuple[bytes, int]] = []  # put since the last checkpoint; the writer's alone
        self.failure: BaseException | None = None
        self.has_begun = False  # whether `generations_end` is durable
        self.dropped_rows = 0  # of chunks, for want of room
        self.lost_rows = 0  # of chunks, by a failure or damage
        self.checkpoints = 0
        self.busy = Stopwatch()  # while its thread waits for the disk
        self._thread: threading.Thread | None = None
        try:
            self._open()
        except (lmdb.Error, OSError) as error:
            if not lacks_room(error):
                raise
            self._wait_for_room(error, [])
        self._renew_identity()

    def __repr__(self) -> str:
        return f"<Catalogue {self._path}, {self.waiting} waiting>"

    def _open(self) -> None:
        provide(self._path, self._map_bytes)
        catalogue_open.mark_opening(self._path)
        # Each commit syncs its pages before it writes the page that makes them valid: a power cut on a disk that writes in
        # any order could otherwise take the last checkpoint too. That page itself is certain with the next sync.
        environment = self._environment = lmdb.open(
            str(self._path),
            map_size=self._map_bytes,
            max_dbs=TABLES_MAX,
            mode=0o600,
            sync=True,
            metasync=False,
            writemap=False,
            lock=False,
        )
        self._file = file_identity(self._path / FILE_NAME)
        self._pages = kvpool_native.FilePages.open(str(self._path / FILE_NAME))
        load_pages(environment, self._pages)
        self._chunks = environment.open_db(b"chunks")
        self._namespaces = environment.open_db(b"namespaces")
        self._meta = environment.open_db(b"meta")
        with self._begin() as transaction:
            transaction.put(catalogue_open.META_KEY, catalogue_open.meta_record(self._epoch), db=self._meta)
            generations = catalogue_open.number_record(self._generations_end)
            transaction.put(catalogue_open.GENERATIONS_KEY, generations, db=self._meta)
            if self._lacks_rows:
                transaction.put(catalogue_open.INCOMPLETE_KEY, b"", db=self._meta)
            for number, record in self._known.items():
                transaction.put(_number_key(number), pack_namespace(record), db=self._namespaces)
        environment.sync(True)
        environment.set_mapsize(self._map_bytes - HEADROOM_BYTES)
        self.has_begun = True
        failpoint.reach("daemon.catalogue.opened")

    @property
    def _opened(self) -> lmdb.Environment:
        assert self._environment is not None
        return self._environment

    def _begin(self) -> lmdb.Transaction:
        """Begin to write, with all pages that this may read in memory. Raises OSError and lmdb.Error."""
        load_pages(self._opened, self._pages)
        return self._opened.begin(write=True)

    @property
    def waiting(self) -> int:
        """Changes not yet written."""
        with self._lock:
            return len(self._pending) + self._writing

    def fill(self, rows: npt.NDArray[np.void]) -> None:
        """Write many rows at once. Without room the next opening looks for them again. REQUIRES: before `start`.

        Raises lmdb.Error.
        """
        assert self._thread is None
        if self.failure is not None:
            self._lacks_rows = True
            return
        for first in range(0, len(rows), _FILL_ROWS):
            with self._begin() as transaction:
                for row in rows[first : first + _FILL_ROWS]:
                    packed = row.tobytes()
                    transaction.put(packed[catalogue_rows.KEY], packed, db=self._chunks)

    def start(self, *, checkpoint_s: float) -> None:
        """Start the writing thread, if there is room. It takes a checkpoint at least this often while there are changes."""
        assert self._thread is None
        if self.failure is None:
            self._start(checkpoint_s, must_reopen=False)

    def resume(self, *, checkpoint_s: float) -> None:
        """Write again after a failure. REQUIRES: `take_lost` was called."""
        assert self.failure is not None
        if self._thread is not None:
            self._thread.join()
        self._is_running = True  # before the failure is cleared, so that `has_died` stays false
        self.failure = None
        self._start(checkpoint_s, must_reopen=True)

    def put_namespace(self, number: int, record: NamespaceRecord) -> bool:
        """Queue a namespace's record. REQUIRES: before its first row."""
        with self._lock:
            self._known[number] = record
        return self._queue(_number_key(number), pack_namespace(record))

    def delete_namespace(self, number: int) -> bool:
        """Queue the removal of a namespace's record. REQUIRES: after that of its last row."""
        with self._lock:
            self._known.pop(number, None)
        return self._queue(_number_key(number), None)

    def put_flushes(self, sequence: int) -> bool:
        """Queue the number of the last flush. REQUIRES: after the removals of all flushes up to it."""
        return self._queue(catalogue_open.FLUSHES_KEY, catalogue_open.number_record(sequence))

    def put(self, row: Row) -> bool:
        """Queue a row. False when the queue is full: the chunk will not be found after a restart."""
        return self._queue(row.key, row.encode(), row.extent_bytes * row.extents)

    def touch(self, key: bytes, touch: Touch) -> bool:
        """Queue a change of a row's last use and retention."""
        return self._queue(key, touch)

    def delete(self, key: bytes) -> bool:
        """Queue a removal."""
        return self._queue(key, None)

    @property
    def has_died(self) -> bool:
        """Whether the writing thread has ended without a stop and without a failure. Any thread."""
        return self._thread is not None and not self._is_running and self.failure is None and not self._is_stopping

    def take_lost(self) -> list[tuple[bytes, int]]:
        """Keys and generations of chunks that a failure may have lost, each returned once; the caller drops them."""
        with self._lock:
            lost, self._lost = self._lost, []
            return lost

    def checkpoint(self, timeout_s: float) -> bool:
        """Make everything put so far durable. False if it failed, took too long, or rows were left out."""
        deadline = Deadline(timeout_s)
        with self._lock:
            self._checkpoint_asked += 1
            wanted = self._checkpoint_asked
            self._changed.notify_all()
            while self._checkpoint_done < wanted and self._is_running and not deadline.has_passed():
                self._changed.wait(deadline.remaining_s())
            return self._checkpoint_done >= wanted and self.failure is None and not self._left_out

    def close(self, timeout_s: float) -> bool:
        """Write the queue, checkpoint, end the thread. False: the disk did not answer in time, and is abandoned.

        Idempotent.
        """
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.error("the catalogue is left as it is: the disk does not answer within %g s", timeout_s)
                return False
        self._close_environment()
        return True

    def _start(self, checkpoint_s: float, *, must_reopen: bool) -> None:
        arguments = (checkpoint_s, must_reopen)
        self._is_running = True
        self._thread = threading.Thread(target=self._run_to_end, args=arguments, name="kvpool-catalogue", daemon=True)
        self._thread.start()

    def _queue(self, key: bytes, value: bytes | Touch | None, chunk_bytes: int = 0) -> bool:
        with self._lock:
            if not isinstance(value, Touch):
                self._left_out.discard(key)
            waits = self.failure is None or lacks_room(self.failure)
            if not waits or len(self._pending) + self._writing >= QUEUE_ROWS_MAX:
                # After a failure no restart finds the chunk, and its data may be among the lost.
                refused = _chunks_in([(key, value)])
                self.dropped_rows += waits and len(refused)
                self.lost_rows += not waits and len(refused)
                if waits:
                    self._left_out.update(chunk for chunk, _ in refused)
                else:
                    self._lost += refused
                return False
            self._pending.append((key, value))
            self._bytes_pending += chunk_bytes
            if len(self._pending) == 1:
                self._changed.notify_all()
        return True

    def _run_to_end(self, checkpoint_s: float, must_reopen: bool) -> None:
        try:
            self._run(checkpoint_s, must_reopen)
        finally:  # a caller of `checkpoint` must not wait for a thread that has ended
            with self._lock:
                self._is_running = False
                self._changed.notify_all()

    def _run(self, checkpoint_s: float, must_reopen: bool) -> None:
        due = Deadline(checkpoint_s)
        dirty_bytes = 0
        is_dirty = False
        if must_reopen:
            with self.busy.running():
                self._reopen()
        while self.failure is None:
            batch, batch_bytes, asked, is_last = self._next_batch(due if is_dirty else None)
            due = due if is_dirty else Deadline(checkpoint_s)
            done = 0
            try:
                with self.busy.running():
                    is_dirty = self._write(batch) or is_dirty
                    dirty_bytes += batch_bytes
                    is_due = is_dirty and (is_last or due.has_passed() or dirty_bytes >= CHECKPOINT_BYTES)
                    if self.failure is None and (asked > self._checkpoint_done or is_due):
                        self._checkpoint()
                        is_dirty, dirty_bytes, done = False, 0, asked
            except catalogue_open.DAMAGE as error:
                log.error("the catalogue is damaged and begins empty: %s", error)
                self.lost_rows += len(_chunks_in(batch))
                self._lacks_rows = True
                self._reopen(is_damaged=True)
            except (lmdb.Error, OSError) as error:
                self._fail(error)
            with self._lock:
                self._writing = 0
                self._checkpoint_done = max(self._checkpoint_done, done)
                self._changed.notify_all()
            if is_last:
                return

    def _reopen(self, *, is_damaged: bool = False) -> None:
        """Open a new environment: after some failures the old one refuses every call."""
        try:
            self._close_environment()
            if is_damaged:
                catalogue_open.set_aside(self._path, self._map_bytes)
            self._open()
        except catalogue_open.DAMAGE as error:
            if is_damaged:
                self._fail(error)
                return
            log.error("the catalogue is damaged and begins empty: %s", error)
            self._lacks_rows = True
            self._reopen(is_damaged=True)
        except (lmdb.Error, OSError) as error:
            if lacks_room(error):
                self._wait_for_room(error, [])
            else:
                self._fail(error)

    def _close_environment(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _checkpoint(self) -> None:
        failpoint.reach("daemon.checkpoint.before_data")
        self._sync_data()
        load_pages(self._opened, self._pages)  # they may be all that a restart has
        if file_identity(self._path / FILE_NAME) != self._file:
            self._lacks_rows = True  # the one that is made anew
            if os.path.lexists(self._path):
                catalogue_open.set_aside(self._path, self._map_bytes)
            raise OSError(errno.ESTALE, f"{self._path} has been removed or replaced while it is in use")
        failpoint.reach("daemon.checkpoint.before_catalogue")
        self._opened.sync(True)
        failpoint.reach("daemon.checkpoint.after")
        catalogue_open.unmark_opening(self._path)
        self._uncertain = []
        self.checkpoints += 1
        self._renew_identity()

    def _renew_identity(self) -> None:
        """Write the identity's file if it is due. Without room it stays so: the catalogue has the namespaces too."""
        if not self._is_identity_due and os.path.lexists(self._path.with_name(IDENTITY_NAME)):
            return
        with self._lock:
            identity = Identity(self._epoch, dict(self._known))
        try:
            write_identity(self._path.parent, identity)
        except OSError as error:
            if not lacks_room(error):
                raise
            if str(error) != self._identity_error:
                log.error(
                    "the file of the tier's namespaces waits for room, a rebuild would lack the newest: %s", error
                )
            self._identity_error = str(error)
        else:
            self._is_identity_due, self._identity_error = False, ""

    def _wait_for_room(self, error: Exception, batch: list[Change]) -> None:
        """Keep what waits, and the batch that was not written, for `resume`."""
        log.error("the catalogue waits for room: %s", error)
        with contextlib.suppress(OSError):  # the mark counts openings that died, and this one did not
            catalogue_open.unmark_opening(self._path)
        with self._lock:
            self._pending[:0] = batch
            self._writing = 0
            self.failure = error

    def _fail(self, error: Exception) -> None:
        log.error("the catalogue cannot be written: %s", error)
        with contextlib.suppress(OSError):  # as above
            catalogue_open.unmark_opening(self._path)
        with self._lock:
            waiting = _chunks_in(self._pending)
            self.lost_rows += len(waiting)
            self._pending, self._bytes_pending = [], 0
            self._lost += self._uncertain + waiting
            self._uncertain = []
            self.failure = error

    def _next_batch(self, due: Deadline | None) -> tuple[list[Change], int, int, bool]:
        """The queued changes and the bytes of their chunks. Sleeps while there is nothing to do."""
        with self._lock:
            if not self._has_work():
                self._changed.wait(None if due is None else due.remaining_s() + 1e-3)
            if self._pending and not self._is_stopping and self._checkpoint_asked == self._checkpoint_done:
                self._changed.wait(BATCH_WAIT_S)
            batch, self._pending = self._pending, []
            self._writing = len(batch)
            batch_bytes, self._bytes_pending = self._bytes_pending, 0
            return batch, batch_bytes, self._checkpoint_asked, self._is_stopping

    def _has_work(self) -> bool:
        return bool(self._pending) or self._is_stopping or self._checkpoint_asked > self._checkpoint_done

    def _write(self, batch: list[Change]) -> bool:
        if not batch:
            return False
        # The keys are listed before the attempt: a failure makes all of them uncertain.
        listed_before = len(self._uncertain)
        self._uncertain += _chunks_in(batch)
        if any(len(key) != KEY_BYTES for key, _ in batch):
            self._is_identity_due = True
            self._renew_identity()
        try:
            with self._begin() as transaction:
                for key, value in batch:
                    self._apply(transaction, key, value)
                failpoint.reach("daemon.catalogue.before_commit")
            failpoint.reach("daemon.catalogue.after_commit")
        except lmdb.MapFullError:
            left_out = sum(isinstance(value, bytes) for _, value in batch)
            log.warning("the catalogue is full: %d chunks will not be found after a restart", left_out)
            self.dropped_rows += left_out
            with self._lock:
                self._left_out |= {key for key, value in batch if value is not None and len(key) == KEY_BYTES}
            self._delete_all([key for key, _ in batch if len(key) == KEY_BYTES])
        except lmdb.DiskError as error:
            del self._uncertain[listed_before:]
            self._wait_for_room(error, batch)
        return True

    def _delete_all(self, keys: list[bytes]) -> None:
        """Remove keys from a full map, a few at a time: a transaction cannot use the pages that it frees itself.

        A chunk that was left out must not be found later by an older row either.
        """
        self._opened.set_mapsize(self._map_bytes)
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            with self._begin() as transaction:
                for key in keys[first : first + _DELETED_AT_ONCE]:
                    transaction.delete(key, db=self._chunks)
        self._opened.set_mapsize(self._map_bytes - HEADROOM_BYTES)

    def _apply(self, transaction: lmdb.Transaction, key: bytes, value: bytes | Touch | None) -> None:
        others = self._meta if key == catalogue_open.FLUSHES_KEY else self._namespaces
        table = self._chunks if len(key) == KEY_BYTES else others
        if value is None:
            transaction.delete(key, db=table)
        elif isinstance(value, bytes):
            transaction.put(key, value, db=table)
        else:
            found = transaction.get(key, db=table)
            touched = None if found is None else catalogue_rows.with_touch(bytes(found), value)
            if touched is not None:
                transaction.put(key, touched, db=table)


def _chunks_in(changes: list[Change]) -> list[tuple[bytes, int]]:
    """Keys and generations of the chunks that are put."""
    return [
        (key, catalogue_rows.generation_of(value))
        for key, value in changes
        if isinstance(value, bytes) and len(key) == KEY_BYTES
    ]


def _number_key(number: int) -> bytes:
    return number.to_bytes(catalogue_open.NUMBER_BYTES, "big")
