"""Book: what the next life must know of this one, in a memory file of its own that only the daemon has.

    page 0      magic:8 head entry …            marks at MARKS_AT: complete:u64 attempts:u64 last:u32 crc:u32
    page 1 on   holders, PLACE_BYTES each       whoever may be writing the arena, as connections come and go
    behind      namespaces, appended            their model and layout, by the number that records have

    entry := length:u32 crc:u32 body             at multiples of 8; body: msgpack; the CRC-32C is of the body; zeros: the end
    last                                         the highest number of a holder that was entered

A life writes the head, enters what is known from the former life, and marks the book complete: only then may a following
life believe it. A kill may cut a write between two pages, so an entry's first eight bytes are written last: until then it is
none. A namespace that cannot be read is damage, and with it the book, since what follows says whose a number is. A holder's
place that cannot be read is one holder that is not known.
`attempts` counts the lives that have begun to read this one: who dies of it is not followed for ever.

Control thread only. Invariant: whatever has been entered is in the file when the call returns.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

import kvpool_native
from kvpool.ids import PAGE_BYTES, PROOF_BYTES
from kvpool.index.holders import Holder, Process, joint_holder, unknown_holder
from kvpool.layout import Layout

MAGIC = b"kvpbook1"
MARKS_AT = PAGE_BYTES - 24
LAST_AT = MARKS_AT + 16
# The file is sparse: it takes the pages that were written.
LOG_BYTES = 64 << 20
HEAD_BYTES_MAX = MARKS_AT - len(MAGIC)
PLACES_MAX = 1 << 18  # of holders: beyond twice the connections that may be configured
_MARKS = struct.Struct("<QQ")
_LAST = struct.Struct("<I")
_PREFIX = struct.Struct("<II")
_PLACE = struct.Struct(f"<IIQ{PROOF_BYTES}sII20x")
_CRC = struct.Struct("<I")
PLACE_BYTES = _PLACE.size + _CRC.size
_LIMITS = {"max_str_len": LOG_BYTES, "max_bin_len": LOG_BYTES, "max_array_len": 1 << 16, "max_map_len": 1 << 10}
assert PLACE_BYTES == 64

Fields = dict[str, Any]  # of a head: what identifies a life and its memory, by name


class BookFull(Exception):
    """There is no room for an entry, or no memory for its page."""


class BadBook(Exception):
    """A file is no book that can be believed: why, as a clause."""


@dataclass(frozen=True, slots=True)
class BookContent:
    """A book as another life reads it. `namespaces`: model and layout by number; `damaged_holders`: places that have none and
    are not free; `last_holder`: the highest number that was entered; `attempts`: lives that read it before."""

    head: Fields
    namespaces: dict[int, tuple[str, Layout]]
    holders: tuple[Holder, ...]
    damaged_holders: int
    last_holder: int
    attempts: int

    @property
    def writers(self) -> tuple[Holder, ...]:
        """Whoever may be writing: `holders`, an unknown one where places are damaged, and what that life's connections were
        together, last."""
        unknown = (unknown_holder(self.last_holder + 1),) if self.damaged_holders else ()
        return (*self.holders, *unknown, joint_holder(self.first_unused - 1, first=self.head["first_holder"]))

    @property
    def first_unused(self) -> int:
        """The lowest number that was nobody's, `writers` included."""
        return self.last_holder + 2 + (self.damaged_holders > 0)


class Book:
    """The book of this life. `descriptor`: its file."""

    def __init__(self, head: Fields, places: int, last_holder: int = 0) -> None:
        """`places`: for holders; `last_holder`: the highest number that a former life has given. Raises OSError or BookFull."""
        assert 0 < places <= PLACES_MAX
        self._log_at = _log_at(places)
        self._size = self._log_at + LOG_BYTES
        self.descriptor = os.memfd_create("kvpool-book", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.descriptor, 0o600)
        os.ftruncate(self.descriptor, self._size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._end = self._log_at
        self._free = list(range(places - 1, -1, -1))
        self._place_of: dict[int, int] = {}
        self._last_holder = last_holder
        entry = _entry({**head, "places": places, "first_holder": last_holder + 1})
        if len(entry) > HEAD_BYTES_MAX:
            raise BookFull
        self._write(MAGIC + entry, 0)
        self._write_last()

    def __repr__(self) -> str:
        return f"<Book {self._end - self._log_at} bytes of namespaces, {len(self._place_of)} holders>"

    def add_namespace(self, number: int, model: str, layout: Layout) -> None:
        """Enter a namespace, before it has chunks. One that had the number before has none any more. Raises BookFull."""
        self._append([number, model, layout.to_wire()])

    def remove_namespace(self, number: int) -> None:
        """Enter that a number stands for no namespace any more. Raises BookFull."""
        self._append([number])

    def enter_holder(self, holder: Holder) -> None:
        """Enter a connection, before it may write. REQUIRES: it is not there. Raises BookFull."""
        assert holder.number not in self._place_of
        if not self._free:
            raise BookFull
        place = self._free.pop()
        process = holder.process
        packed = _PLACE.pack(holder.number, process.pid, process.start, holder.proof, holder.user, holder.first)
        self._write(_sealed(packed), PAGE_BYTES + place * PLACE_BYTES)
        if holder.number > self._last_holder:
            self._last_holder = holder.number
            self._write_last()
        self._place_of[holder.number] = place

    def remove_holder(self, number: int) -> None:
        """A connection can write no more; nothing where it is not there."""
        place = self._place_of.pop(number, None)
        if place is not None:
            self._write(bytes(PLACE_BYTES), PAGE_BYTES + place * PLACE_BYTES)
            self._free.append(place)

    def mark_complete(self) -> None:
        """From now on another life may believe it."""
        self._write(_MARKS.pack(1, 0), MARKS_AT)

    def close(self) -> None:
        """Close the file; whoever else has it keeps it."""
        os.close(self.descriptor)

    def _write_last(self) -> None:
        self._write(_sealed(_LAST.pack(self._last_holder)), LAST_AT)

    def _append(self, body: object) -> None:
        entry = _entry(body)
        if self._end + len(entry) > self._size:
            raise BookFull
        self._write(entry[_PREFIX.size :], self._end + _PREFIX.size)
        self._write(entry[: _PREFIX.size], self._end)
        self._end += len(entry)

    def _write(self, data: bytes, offset: int) -> None:
        try:
            written = os.pwrite(self.descriptor, data, offset)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise BookFull from error
            raise
        assert written == len(data)


def read_book(descriptor: int) -> BookContent:
    """Read the book of another life. Raises BadBook."""
    page = os.pread(descriptor, PAGE_BYTES, 0)
    if not page.startswith(MAGIC) or len(page) < PAGE_BYTES:
        raise BadBook("its book is of another format")
    is_complete, attempts = _MARKS.unpack_from(page, MARKS_AT)
    if is_complete != 1:
        raise BadBook("its book was never finished")
    head = next(_bodies(page[len(MAGIC) : MARKS_AT]), None)
    places, first = (head.get("places"), head.get("first_holder")) if isinstance(head, dict) else (None, None)
    last = page[LAST_AT : LAST_AT + _LAST.size]
    if (
        not isinstance(places, int)
        or not 0 < places <= PLACES_MAX
        or not isinstance(first, int)
        or page[LAST_AT:] != _sealed(last)
    ):
        raise BadBook("the head of its book is damaged")
    assert isinstance(head, dict)
    table = os.pread(descriptor, places * PLACE_BYTES, PAGE_BYTES)
    log_at = _log_at(places)
    log = os.pread(descriptor, os.lseek(descriptor, log_at, os.SEEK_HOLE) - log_at, log_at)
    namespaces: dict[int, tuple[str, Layout]] = {}
    try:
        for number, *identity in _bodies(log):
            namespaces.pop(number, None)
            if identity:
                model, wire = identity
                namespaces[int(number)] = str(model), Layout.from_wire(wire)
    except (TypeError, ValueError) as error:
        raise BadBook(f"a namespace in its book is none: {error}") from error
    places_read = list(_holders(table))
    holders = tuple(one for one in places_read if one is not None)
    last_holder = max([*_LAST.unpack(last), *(one.number for one in holders)])
    return BookContent(head, namespaces, holders, len(places_read) - len(holders), last_holder, attempts)


def revoke_book(descriptor: int) -> None:
    """No life may believe this book any more, whoever still has it."""
    os.pwrite(descriptor, _MARKS.pack(0, 0), MARKS_AT)


def note_attempts(descriptor: int, attempts: int) -> None:
    """So many lives have begun to take over what this book is of, for those after them."""
    os.pwrite(descriptor, _MARKS.pack(1, attempts), MARKS_AT)


def _log_at(places: int) -> int:
    return PAGE_BYTES + -(-places * PLACE_BYTES // PAGE_BYTES) * PAGE_BYTES


def _entry(body: object) -> bytes:
    packed: bytes = msgpack.packb(body)
    return _PREFIX.pack(len(packed), kvpool_native.crc32c(packed)) + packed + bytes(-len(packed) % _PREFIX.size)


def _sealed(packed: bytes) -> bytes:
    return packed + _CRC.pack(kvpool_native.crc32c(packed))


def _bodies(log: bytes) -> Iterator[Any]:
    """What was appended. Raises BadBook where that cannot be read."""
    at = 0
    while any(log[at : at + _PREFIX.size]):
        length, crc = _PREFIX.unpack_from(log, at)
        body = log[at + _PREFIX.size : at + _PREFIX.size + length]
        if len(body) < length or kvpool_native.crc32c(body) != crc:
            raise BadBook("an entry of its book is damaged")
        try:
            yield msgpack.unpackb(body, strict_map_key=False, **_LIMITS)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise BadBook(f"an entry of its book is damaged: {error}") from error
        at += _PREFIX.size + -(-length // _PREFIX.size) * _PREFIX.size


def _holders(table: bytes) -> Iterator[Holder | None]:
    """What the places have that are not free; None: a damaged one."""
    for at in range(0, len(table) - PLACE_BYTES + 1, PLACE_BYTES):
        packed = table[at : at + _PLACE.size]
        number, pid, start, proof, user, first = _PLACE.unpack(packed)
        if table[at : at + PLACE_BYTES].count(0) != PLACE_BYTES:
            is_whole = _CRC.unpack_from(table, at + _PLACE.size)[0] == kvpool_native.crc32c(packed)
            yield Holder(number, Process(pid, start), proof, user, first) if is_whole else None
