"""Former memory: what a keeper has of the life before this one, if it may be taken over.

    its files ──► the whole book with the highest number ──► the same terms? ──► its process has ended? ──► mapped
                       └── none, or anything else is odd: a cold start, and why

A life hands its book over last, so whoever died in between has left the book of the life before. Nothing is believed for its
name: the book says which files are its own by their numbers in the kernel. No byte of payload is read.
Control thread only; waits ENDED_S at most for a process that is ending.
"""

import errno
import fcntl
import os
from collections.abc import Mapping as Table
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvpool_native
from kvpool.config.config import Config
from kvpool.ids import PAGE_BYTES
from kvpool.index.holders import Process, has_ended
from kvpool.keys import KEY_FORMAT_VERSION
from kvpool.tiers.dram.kept.book import BadBook, BookContent, read_book
from kvpool.tiers.dram.kept.keeper import ARENA, BOOK, INDEX, LIFE_PAGE, RECORDS, name_of
from kvpool.tiers.dram.kept.life_page import LifePage

# Of book, records and index together: raised with whatever a former life may have left otherwise.
FORMAT = 1
ATTEMPTS_MAX = 3
ENDED_S = 10.0
_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x0010  # Python has no name for it
_REFUSED_SEALS = fcntl.F_SEAL_WRITE | _FUTURE_WRITE
_NO_ROOM = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
Terms = dict[str, int | str | bytes]


class ColdStart(Exception):
    """Nothing is taken over: why, as a clause."""


@dataclass(frozen=True, slots=True)
class FormerMemory:
    """Memory of the former life `number`."""

    number: int
    arena: kvpool_native.Mapping
    life_page: LifePage
    index: kvpool_native.Mapping
    records: kvpool_native.Mapping
    book: BookContent

    @property
    def resident_bytes(self) -> int:
        """Bytes of the arena that have memory already."""
        return os.fstat(self.arena.fd).st_blocks * 512


def terms_of(config: Config, geometry: kvpool_native.DirectoryGeometry, domain_tag: bytes) -> Terms:
    """What must be the same in both lives, by name, in the order of looking. Raises OSError where /proc hides it."""
    return {
        "format": FORMAT,
        "the format of keys": KEY_FORMAT_VERSION,
        "the boot": _BOOT_ID.read_text().strip(),
        "the PID namespace": os.stat(_PID_NAMESPACE).st_ino,
        "the daemon's uid": os.geteuid(),
        "server.domain_secret_file": domain_tag,
        "the page size": PAGE_BYTES,
        "dram.capacity": config.dram.capacity,
        "dram.segment": geometry.segment_bytes,
        "dram.max_chunks": geometry.max_chunks,
        "the size of the index, by the capacity of lower tiers,": geometry.index_bytes,
        "dram.huge_pages": config.dram.huge_pages,
        "dram.numa": config.dram.numa,
    }


def identity_of(descriptor: int) -> list[int]:
    """What makes a file the same one, for the kernel."""
    found = os.fstat(descriptor)
    return [found.st_dev, found.st_ino, found.st_size]


def lives_in(found: Table[str, int]) -> list[int]:
    """The numbers of lives that have a file there, the last one first."""
    numbers = {name.rpartition("-")[2] for name in found if name.startswith((f"{INDEX}-", f"{RECORDS}-", f"{BOOK}-"))}
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def find_former(found: Table[str, int], terms: Terms, geometry: kvpool_native.DirectoryGeometry) -> FormerMemory:
    """The former memory among descriptors by name, which stay the caller's. Changes nothing. Raises ColdStart, or OSError where
    this process has no room to map it."""
    if not found:
        raise ColdStart("nothing was kept")
    number, book = _last_whole(found)
    _check_terms(book.head.get("terms"), terms)
    if book.attempts >= ATTEMPTS_MAX:
        raise ColdStart(f"{book.attempts} lives have ended while they took it over")
    process = Process(*_numbers(book.head.get("process"), 2))
    if not has_ended(process, ENDED_S):
        raise ColdStart(f"the daemon that it is of, process {process.pid}, has not ended within {ENDED_S:g} s")
    return _mapped(found, number, book, geometry)


def _last_whole(found: Table[str, int]) -> tuple[int, BookContent]:
    """The last life whose book is whole and whose files are there."""
    reason = "no file of it is a book"
    for number in lives_in(found):
        name = name_of(BOOK, number)
        if name not in found:
            reason = f"life {number} ended before it handed its memory over"
            continue
        try:
            book = read_book(found[name])
        except (BadBook, OSError) as error:
            reason = str(error)
            continue
        files = book.head.get("files")
        wrong = [
            kind
            for kind, name in _files_of(number).items()
            if not isinstance(files, dict) or name not in found or identity_of(found[name]) != files.get(kind)
        ]
        if not wrong:
            return number, book
        reason = f"its {wrong[0]} is not the one that its book names"
    raise ColdStart(reason)


def _files_of(number: int) -> dict[str, str]:
    """The files of a life beside its book: their names by what they are."""
    return {
        "arena": ARENA,
        "life page": LIFE_PAGE,
        "index": name_of(INDEX, number),
        "records": name_of(RECORDS, number),
    }


def files_in_book(arena: int, life_page: int, index: int, records: int) -> dict[str, list[int]]:
    """The files of a life as its book names them, from their descriptors."""
    descriptors = (arena, life_page, index, records)
    return {kind: identity_of(descriptor) for kind, descriptor in zip(_files_of(0), descriptors, strict=True)}


def _check_terms(was: Any, now: Terms) -> None:
    if not isinstance(was, dict):
        raise ColdStart("the head of its book is damaged")
    for name, value in now.items():
        if was.get(name) != value:
            shown = "is another one now" if isinstance(value, bytes) else f"was {was.get(name)}, and is {value}"
            raise ColdStart(f"{name} {shown}")


def _mapped(
    found: Table[str, int], number: int, book: BookContent, geometry: kvpool_native.DirectoryGeometry
) -> FormerMemory:
    descriptors = {kind: found[name] for kind, name in _files_of(number).items()}
    seals = fcntl.fcntl(descriptors["arena"], fcntl.F_GET_SEALS)
    if seals & _REFUSED_SEALS or seals & _NEEDED_SEALS != _NEEDED_SEALS:
        raise ColdStart("its arena is sealed otherwise than an arena that engines write")
    try:
        arena = kvpool_native.Mapping.attach(descriptors["arena"], geometry.arena_bytes, True)
        index = kvpool_native.Mapping.attach(descriptors["index"], geometry.index_bytes, False)
        records = kvpool_native.Mapping.attach(descriptors["records"], geometry.records_bytes, False)
        life_page = LifePage.attach(descriptors["life page"])
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise ColdStart(f"its files cannot be mapped: {error}") from error
    if life_page.number > number:  # a life that died behind its hand-over has not put its own there
        raise ColdStart(f"its life page names life {life_page.number}, behind life {number}")
    if reason := kvpool_native.why_former_refused(index, records, geometry):
        raise ColdStart(reason)
    return FormerMemory(number, arena, life_page, index, records, book)


def _numbers(value: Any, count: int) -> list[int]:
    if not isinstance(value, list) or len(value) != count or not all(isinstance(one, int) for one in value):
        raise ColdStart("the head of its book is damaged")
    return value
