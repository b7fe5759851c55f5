"""Weights reading: the digest of the files of weights, over every byte, found in the background.

    reading ──every file read, or remembered──► known
        └──a file cannot be read, or is no longer what it was──► refused

A reading takes the files' stamps when it is made, and compares them when it has ended: its digest is that of the files as they
were then, or there is none. An engine has read its weights before, so nothing may have changed since its process began. A
file's digest is SHA-256 (1.4 GB/s on a thread with the processor's instructions for it, where BLAKE2b had 0.6 GB/s), and is
remembered (`digest_memory`), so that processes of one node read each file once.

Any thread; the files are read on the reader's own, without the interpreter's lock. Lock: `_changed` guards the queue.
"""

import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvpool_native
from kvpool.clock import NS_PER_S, Deadline, MonotonicClock, wall_time_s
from kvpool.errors import LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.file_stamps import FileStamp, first_difference, first_younger, keeps_times, stamps_of

# Bytes of one read: long enough that the calls around it do not count, short enough that a stop is seen soon.
READ_BYTES = 8 << 20
DIGEST_HEX = 32
# Two changes within a tick of a filesystem's clock have one time. Most have ticks of up to 10 ms, so a file that has just
# changed is read a moment later.
TICK_NS = 20_000_000
# The digest of a file that has changed since then is not remembered. Some filesystems have ticks of 2 s. And of the writes to
# a page through a shared mapping only the first changes the times, until the page is on disk: for some 35 s at most by Linux's
# defaults (vm.dirty_expire_centisecs and vm.dirty_writeback_centisecs). The rest is a guess.
REMEMBERED_AGE_NS = 60 * NS_PER_S
# How often the log shows how far a reading is.
PROGRESS_S = 10.0
STOP_TIMEOUT_S = 2.0


class WeightsReading:
    """The digest of the weights in one place, once it is known. `size`: bytes of all files; `done`: those read so far."""

    def __init__(self, place: Path, further: Sequence[str] = (), *, since_ns: int | None = None) -> None:
        """`further`: names of other files there that count. `since_ns`: nothing there may have changed since then, in
        nanoseconds since 1970. Raises LayoutMismatch where something has, or the files cannot be looked at."""
        self.place = place
        self._further = tuple(further)
        self._stamps = self._look()
        if self._stamps and since_ns is not None and (younger := self._younger_than(since_ns)):
            raise changed_since_start(younger)
        self.size = sum(stamp.size for stamp in self._stamps.values())
        self.done = 0
        self.is_begun = False  # guarded by the reader's lock
        self._ended = threading.Event()
        self._digest = self._refusal = ""

    def __repr__(self) -> str:
        state = f"refused: {self._refusal}" if self._refusal else self._digest or f"{self.done}/{self.size} bytes"
        return f"<WeightsReading {self.place} {state}>"

    @property
    def has_files(self) -> bool:
        """Whether there are weights in that place."""
        return bool(self._stamps)

    def first_changed(self) -> str:
        """The path of a file that is not what it was when this was made; empty where all are. Raises LayoutMismatch."""
        return first_difference(self._stamps, self._look())

    def find(self) -> str | None:
        """The digest; None while the files are read. Raises LayoutMismatch where there is none, with the reason."""
        if not self._ended.is_set():
            return None
        if self._refusal:
            raise LayoutMismatch(self._refusal)
        return self._digest

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, `timeout_s` at most. Whether it has come."""
        return self._ended.wait(timeout_s)

    def read(
        self,
        memory: DigestMemory,
        stop: threading.Event,
        show: Callable[[], None] = lambda: None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the files, until `stop`; `show` is called after every READ_BYTES, `wait` while another process reads a file. The
        reader's thread."""
        way = _Way(memory, stop, show, wait)
        try:
            digests = {name: self._digest_of(stamp, way) for name, stamp in self._stamps.items()}
            changed = self.first_changed()
            if changed:
                raise changed_since_start(changed)
            self._digest = digest_of(digests)
        except LayoutMismatch as error:
            self._refusal = str(error)
        except OSError as error:
            self._refusal = f"the weights in {str(self.place)!r} cannot be read: {error}"
        except Exception as error:  # the places after it are read, whatever fails here: memory, a codec, a logger
            self._refusal = f"reading the weights in {str(self.place)!r} has failed: {error!r}"
        finally:
            self._ended.set()

    def refuse(self, reason: str) -> None:
        """End it unread."""
        self._refusal = reason
        self._ended.set()

    def _look(self) -> dict[str, FileStamp]:
        try:
            return stamps_of(self.place, self._further)
        except OSError as error:
            raise LayoutMismatch(f"the weights in {str(self.place)!r} cannot be read: {error}") from error

    def _younger_than(self, since_ns: int) -> str:
        try:
            return first_younger(self.place, self._stamps, since_ns + TICK_NS)
        except OSError as error:
            raise LayoutMismatch(f"the weights in {str(self.place)!r} cannot be read: {error}") from error

    def _digest_of(self, stamp: FileStamp, way: "_Way") -> str:
        begun = self.done
        with open(stamp.path, "rb", buffering=0) as file:
            memory = way.memory if keeps_times(file.fileno()) else DigestMemory(None)
            digest = memory.find(stamp)
            if not digest:
                with memory.turn(stamp, way.stop, way.wait) as advance:
                    digest = memory.find(stamp) or self._read_whole(file.fileno(), stamp, memory, way, advance=advance)
        self.done = begun + stamp.size
        return digest

    def _read_whole(
        self, file: int, stamp: FileStamp, memory: DigestMemory, way: "_Way", *, advance: Callable[[], None]
    ) -> str:
        if _age_ns(stamp) < TICK_NS:
            way.stop.wait(TICK_NS / NS_PER_S)
        age_ns = _age_ns(stamp)
        whole, room = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
        while size := os.readv(file, [room]):
            whole.update(room[:size])
            self.done += size
            advance()
            way.show()
            if way.stop.is_set():
                raise LayoutMismatch(f"reading {stamp.path!r} was ended")
        if FileStamp.at(stamp.path, file) != stamp:
            raise changed_since_start(stamp.path)
        if age_ns >= REMEMBERED_AGE_NS:
            memory.note_digest(stamp, whole.hexdigest())
        return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class _Way:
    """How a reading goes. Its arguments are those of `WeightsReading.read`."""

    memory: DigestMemory
    stop: threading.Event
    show: Callable[[], None]
    wait: Callable[[], None]


class WeightsReader:
    """Reads one place after another on a thread of its own, which is there while something is to be read."""

    def __init__(
        self, memory: DigestMemory, logger: logging.Logger, when_read: Callable[[], None] = lambda: None
    ) -> None:
        """`when_read` is called after each reading, on the reader's thread; it does not raise."""
        self._memory = memory
        self._logger = logger
        self._when_read = when_read
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._queue: deque[WeightsReading] = deque()  # guarded by _changed
        self._thread: threading.Thread | None = None  # guarded by _changed

    def __repr__(self) -> str:
        return f"<WeightsReader {len(self._queue)} places to read>"

    def begin_reading(self, reading: WeightsReading) -> None:
        """Read this place when those before it have been read, if it was not begun before."""
        with self._changed:
            if reading.is_begun:
                return
            reading.is_begun = True
            self._queue.append(reading)
            if self._thread is None and not self._stop.is_set():
                thread = threading.Thread(target=self._run, name="kvpool-weights", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:  # no more threads for this user
                    self._queue.remove(reading)
                    reading.refuse(f"the weights in {str(reading.place)!r} cannot be read: {error!r}")
                else:
                    self._thread = thread

    def stop(self) -> None:
        """End the thread. Waits for at most STOP_TIMEOUT_S: a disk may not answer."""
        self._stop.set()
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while (reading := self._next()) is not None:
            shown = _Shown(reading, self._logger)
            reading.read(self._memory, self._stop, shown.show_progress, shown.wait)
            shown.show_end()
            self._when_read()

    def _next(self) -> WeightsReading | None:
        with self._changed:
            if self._queue:  # after a stop each ends at once
                return self._queue.popleft()
            self._thread = None
            return None


class _Shown:
    """What the log has of one reading: a line every PROGRESS_S, and one at its end if there was one before."""

    def __init__(self, reading: WeightsReading, logger: logging.Logger) -> None:
        self._reading = reading
        self._logger = logger
        self._clock = MonotonicClock()
        self._begun_ns = self._clock.now_ns()
        self._next = Deadline(PROGRESS_S, self._clock)
        self._has_shown = self._has_waited = False

    def show_progress(self) -> None:
        """Show how far it is, now and then."""
        if self._next.has_passed():
            self._has_shown, self._next = True, Deadline(PROGRESS_S, self._clock)
            self._log("until all are, nothing of them is loaded or saved")

    def wait(self) -> None:
        """Show that it waits, the first time at once."""
        if not self._has_waited:
            self._has_shown = self._has_waited = True
            self._log("waits for another process of this user that reads them")
        self.show_progress()

    def show_end(self) -> None:
        """It has ended."""
        if self._has_shown:
            self._log(f"ended after {(self._clock.now_ns() - self._begun_ns) / NS_PER_S:.1f} s")

    def _log(self, what: str) -> None:
        reading = self._reading
        self._logger.info(
            "kvpool: read %d of %d bytes of weights in %s: %s", reading.done, reading.size, reading.place, what
        )


def digest_of(facts: Mapping[str, object]) -> str:
    """A short digest of named facts, in any order."""
    return kvpool_native.blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hex()[:DIGEST_HEX]


def changed_since_start(path: str) -> LayoutMismatch:
    """The refusal of a file that may not be the one that the engine has loaded."""
    return LayoutMismatch(
        f"{path!r} has changed since the engine started, expected the files that it has loaded: start the engine again"
    )


def _age_ns(stamp: FileStamp) -> int:
    """How long ago the file has changed."""
    return int(wall_time_s() * NS_PER_S) - stamp.ctime_ns
