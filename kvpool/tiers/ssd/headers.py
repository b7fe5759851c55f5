"""SSD headers: reads token ids and scopes from the headers of slots, for chunks that only the disk has.

Snapshots of events need them and can wait; no engine waits for them. Headers are read one at a time, of which few have more
than a page, so that they never take more of the disk than one read, and past the page cache if the tier's I/O is. A header
certifies itself: if the slot was used again meanwhile, the header is another chunk's, and the answer is empty.

Threads: `ask` from any thread, and it never waits. The thread `kvpool-headers` reads; it starts at the first request and has no
other work, so that a disk that hangs blocks no other thread. Bounds: QUESTIONS_MAX requests wait; a further one is answered
with empty words at once. The publisher's requests are urgent: they go first, are never refused, and there is one at a time.
"""

import contextlib
import itertools
import mmap
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import kvpool_native
from kvpool.tiers.ssd.plan import SsdPlan, segment_name

PAGE_BYTES = kvpool_native.SSD_HEADER_BYTES
HEADER_BYTES_MAX = kvpool_native.ssd_header_bytes(kvpool_native.SSD_EXTENTS_MAX)
QUESTIONS_MAX = 16
THREAD_NAME = "kvpool-headers"


class SlotAddress(NamedTuple):
    """A slot, and the expected fields of its header. `namespace`: the fingerprint that `kvpool.keys` derives."""

    key: bytes
    namespace: bytes
    offset: int
    generation: int


# The words after the checksums in each requested header; empty where the slot has another chunk now.
Answer = list[bytes]

# Urgent requests, the others, and the end of the thread; within each in the order of their numbers.
_URGENT, _PATIENT, _END = range(3)
_Question = tuple[int, int, tuple[SlotAddress, ...], "Future[Answer]"]


class SsdHeaders:
    """The headers of one tier. `epoch` empty: the tier is not open, and every answer is empty."""

    def __init__(self, plan: SsdPlan) -> None:
        self._plan = plan
        self.epoch = b""
        self.read_headers = 0
        self.refused_questions = 0
        self._questions: queue.PriorityQueue[_Question] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._is_closed = False  # guarded by _lock

    def __repr__(self) -> str:
        return f"<SsdHeaders {self.read_headers} read, {self._questions.qsize()} questions wait>"

    def request_headers(self, places: Sequence[tuple[bytes, bytes, int, int]], *, is_urgent: bool) -> "Future[Answer]":
        """Read the headers at these places (see `SlotAddress`): the words of each."""
        answer: Future[Answer] = Future()
        with self._lock:
            has_room = is_urgent or self._questions.qsize() < QUESTIONS_MAX
            if self._is_closed or not self.epoch or not has_room:
                self.refused_questions += 1
                answer.set_result([b""] * len(places))
                return answer
            asked = tuple(SlotAddress(*place) for place in places)
            self._questions.put((_URGENT if is_urgent else _PATIENT, next(self._numbers), asked, answer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
                self._thread.start()
        return answer

    @property
    def has_died(self) -> bool:
        """Whether the reading thread has died, so that no request is answered. Any thread."""
        thread = self._thread
        return thread is not None and not thread.is_alive() and not self._is_closed

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {"events.read_headers": self.read_headers, "events.refused_headers": self.refused_questions}

    def close(self) -> None:
        """Stop answering. Does not wait: a running read may never return."""
        with self._lock:
            self._is_closed = True
            self._questions.put((_END, next(self._numbers), (), Future()))

    def _run(self) -> None:
        urgency = _PATIENT
        while urgency != _END:
            urgency, _, places, answer = self._questions.get()
            if answer.set_running_or_notify_cancel():  # else the caller waits no longer
                answer.set_result([b""] * len(places) if self._is_closed else self._read(places))

    def _read(self, places: Sequence[SlotAddress]) -> Answer:
        """Read headers in the order of their offsets on disk; those of a file that cannot be read are empty."""
        found = [b""] * len(places)
        order = sorted(range(len(places)), key=lambda number: places[number].offset)
        with mmap.mmap(-1, HEADER_BYTES_MAX) as buffer, contextlib.ExitStack() as files:
            number, fd = -1, -1
            for at in order:
                segment, offset = divmod(places[at].offset, self._plan.segment_bytes)
                if segment != number:
                    files.close()
                    number, fd = segment, files.enter_context(self._opened(segment))
                found[at] = self._words_of(places[at], fd, offset, buffer)
                self.read_headers += 1
        return found

    @contextlib.contextmanager
    def _opened(self, segment: int) -> Iterator[int]:
        """The descriptor of a segment file; -1 where it cannot be opened."""
        path = self._plan.path / segment_name(segment)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = -1
        for more in (os.O_DIRECT, 0) if self._plan.config.direct else (0,):
            with contextlib.suppress(OSError):  # no direct I/O here, or the file does not exist: the answer is empty
                fd = os.open(path, flags | more)
                break
        try:
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)

    def _words_of(self, place: SlotAddress, fd: int, offset: int, buffer: mmap.mmap) -> bytes:
        page = b""
        with contextlib.suppress(OSError):  # the tier's own I/O notices a failing disk
            page = _read(fd, offset, buffer, PAGE_BYTES)
            size = kvpool_native.ssd_header_length(page) if len(page) == PAGE_BYTES else 0
            page = _read(fd, offset, buffer, size) if size > PAGE_BYTES else page
        header = kvpool_native.decode_ssd_header(page) if len(page) >= PAGE_BYTES else None
        if header is None:
            return b""
        found = (header.epoch, header.key, header.namespace, header.generation)
        is_asked = found == (self.epoch, place.key, place.namespace, place.generation)
        return header.tokens if is_asked else b""


def _read(fd: int, at: int, buffer: mmap.mmap, size: int) -> bytes:
    with memoryview(buffer)[:size] as view:
        return bytes(view[: os.preadv(fd, [view], at)])
