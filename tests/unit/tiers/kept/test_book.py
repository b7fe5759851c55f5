"""Book of a life: what was entered is read, what was cut off or damaged is not, and it never grows."""

import contextlib
import os
import random
from collections.abc import Iterator

import pytest

from kvpool.ids import PAGE_BYTES
from kvpool.index.holders import Holder, Process, joint_holder, unknown_holder
from kvpool.tiers.dram.kept import book as books
from kvpool.tiers.dram.kept.book import PLACE_BYTES, BadBook, Book, BookFull, note_attempts, read_book
from tests.rigs.daemon import SMALL

PLACES = 5
HEAD = {"epoch": b"e" * 16, "files": {"arena": [1, 2, 3]}, "process": [4, 5]}


@pytest.fixture
def book() -> Iterator[Book]:
    """A new one."""
    made = Book(HEAD, PLACES)
    yield made
    made.close()


def _holder(number: int) -> Holder:
    return Holder(number, Process(1000 + number, 7 * number), bytes([number]) * 16, 70_000)


def _fill(book: Book, numbers: Iterator[int]) -> None:
    for number in numbers:
        book.add_namespace(number, "model", SMALL)


def test_everything_entered_is_read_again(book: Book) -> None:
    for rank in range(2):
        book.add_namespace(rank, f"model@{rank}", SMALL.for_rank(0))
    for number in range(1, 4):
        book.enter_holder(_holder(number))
    book.remove_holder(2)
    book.mark_complete()
    content = read_book(book.descriptor)
    assert {name: content.head[name] for name in HEAD} == HEAD
    assert content.namespaces == {rank: (f"model@{rank}", SMALL.for_rank(0)) for rank in range(2)}
    assert content.holders == (_holder(1), _holder(3))
    assert content.attempts == 0


def test_a_number_that_is_given_again_stands_for_the_later_namespace(book: Book) -> None:
    book.add_namespace(3, "before", SMALL)
    book.add_namespace(3, "after", SMALL)
    book.mark_complete()
    assert read_book(book.descriptor).namespaces == {3: ("after", SMALL)}


def test_a_namespace_that_was_given_back_is_none(book: Book) -> None:
    for number in range(3):
        book.add_namespace(number, "model", SMALL)
    book.remove_namespace(1)
    book.mark_complete()
    assert set(read_book(book.descriptor).namespaces) == {0, 2}


def test_the_highest_number_of_a_holder_stays_when_it_has_gone(book: Book) -> None:
    for number in (3, 9, 5):
        book.enter_holder(_holder(number))
    book.remove_holder(9)
    book.mark_complete()
    content = read_book(book.descriptor)
    assert (content.last_holder, content.damaged_holders) == (9, 0)


def test_a_book_that_was_not_finished_is_not_believed(book: Book) -> None:
    book.add_namespace(0, "model", SMALL)
    with pytest.raises(BadBook, match="never finished"):
        read_book(book.descriptor)


def test_each_reader_is_counted(book: Book) -> None:
    book.mark_complete()
    for attempt in range(4):
        assert read_book(book.descriptor).attempts == attempt
        note_attempts(book.descriptor, attempt + 1)


def test_a_place_is_used_again_and_one_too_many_is_refused(book: Book) -> None:
    for number in range(1, PLACES + 1):
        book.enter_holder(_holder(number))
    with pytest.raises(BookFull):
        book.enter_holder(_holder(99))
    book.remove_holder(4)
    book.remove_holder(4)
    book.enter_holder(_holder(99))
    book.mark_complete()
    assert {holder.number for holder in read_book(book.descriptor).holders} == {1, 2, 3, 5, 99}


def test_the_log_has_an_end_and_nothing_is_half_entered(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "LOG_BYTES", 4096)
    small = Book(HEAD, PLACES)
    numbers = iter(range(10_000))
    with pytest.raises(BookFull):
        _fill(small, numbers)
    small.mark_complete()
    assert 10 < next(numbers) - 1 == len(read_book(small.descriptor).namespaces)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(small.descriptor, 1 << 30)
    small.close()


@pytest.mark.parametrize("cut", [1, 7, 8, 20, None])
def test_an_entry_without_its_beginning_is_none_yet(book: Book, cut: int | None) -> None:
    book.add_namespace(0, "kept", SMALL)
    end = book._end
    book.add_namespace(1, "cut off", SMALL)
    whole = os.pread(book.descriptor, book._end - end, end)
    os.pwrite(book.descriptor, (bytes(8) + whole[8:][:cut]).ljust(len(whole), b"\0"), end)
    book.mark_complete()
    assert read_book(book.descriptor).namespaces == {0: ("kept", SMALL)}


def test_an_entry_that_is_damaged_is_the_end_of_the_book_and_not_of_its_log(book: Book) -> None:
    book.add_namespace(0, "first", SMALL)
    at = book._end
    book.remove_namespace(0)
    book.add_namespace(0, "later", SMALL)
    book.mark_complete()
    assert read_book(book.descriptor).namespaces == {0: ("later", SMALL)}
    believed = 0
    for bit in range((book._end - at) * 8):
        byte = os.pread(book.descriptor, 1, at + bit // 8)[0]
        os.pwrite(book.descriptor, bytes([byte ^ 1 << bit % 8]), at + bit // 8)
        with contextlib.suppress(BadBook):
            assert read_book(book.descriptor).namespaces == {0: ("later", SMALL)}  # what fills an entry up says nothing
            believed += 1
        os.pwrite(book.descriptor, bytes([byte]), at + bit // 8)
    assert believed < 2 * 7 * 8


def test_a_damaged_last_number_is_a_damaged_book(book: Book) -> None:
    book.mark_complete()
    for bit in range(64):
        byte = os.pread(book.descriptor, 1, books.LAST_AT + bit // 8)[0]
        os.pwrite(book.descriptor, bytes([byte ^ 1 << bit % 8]), books.LAST_AT + bit // 8)
        with pytest.raises(BadBook, match="damaged"):
            read_book(book.descriptor)
        os.pwrite(book.descriptor, bytes([byte]), books.LAST_AT + bit // 8)


def test_flipped_bits_are_never_another_entry(book: Book) -> None:
    seed = 20261201
    print(f"seed {seed}")
    randomly = random.Random(seed)
    for number in range(8):
        book.add_namespace(number, f"model-{number}", SMALL)
    for number in range(1, PLACES + 1):
        book.enter_holder(_holder(number))
    book.mark_complete()
    expected = read_book(book.descriptor)
    size = book._end
    clean = os.pread(book.descriptor, size, 0)
    refused = 0
    for _ in range(1000):
        bit = randomly.randrange(size * 8)
        os.pwrite(book.descriptor, bytes([clean[bit // 8] ^ 1 << bit % 8]), bit // 8)
        try:
            found = read_book(book.descriptor)
        except BadBook:
            refused += 1
        else:
            assert found.head == expected.head
            assert found.namespaces == expected.namespaces
            assert found.last_holder == expected.last_holder
            assert set(found.holders) <= set(expected.holders)
            assert found.damaged_holders >= len(expected.holders) - len(found.holders)
        os.pwrite(book.descriptor, clean[bit // 8 : bit // 8 + 1], bit // 8)
    assert 0 < refused < 1000


def test_a_damaged_place_is_an_unknown_writer_of_a_number_of_its_own(book: Book) -> None:
    book.enter_holder(_holder(3))
    book.enter_holder(_holder(9))
    book.mark_complete()
    whole = read_book(book.descriptor)
    assert whole.writers == (*whole.holders, joint_holder(10, first=1))
    assert whole.first_unused == 11
    for at in (PAGE_BYTES, PAGE_BYTES + PLACE_BYTES):
        os.pwrite(book.descriptor, b"\xff", at + 8)
        content = read_book(book.descriptor)
        assert content.writers == (*content.holders, unknown_holder(10), joint_holder(11, first=1))
        assert content.first_unused == 12
    assert content.holders == ()
    another = Book(HEAD, PLACES, content.first_unused - 1)
    for holder in content.writers:
        another.enter_holder(holder)
    another.mark_complete()
    assert set(read_book(another.descriptor).writers) == {*content.writers, joint_holder(12, first=12)}
    another.close()


@pytest.mark.parametrize("content", [b"", b"\0" * PAGE_BYTES, os.urandom(3 * PAGE_BYTES), b"kvpbook1" + b"\xff" * 8192])
def test_what_is_no_book_is_refused(content: bytes) -> None:
    descriptor = os.memfd_create("none")
    os.write(descriptor, content)
    with pytest.raises(BadBook):
        read_book(descriptor)
    os.close(descriptor)


def test_it_takes_the_pages_it_has_written(book: Book) -> None:
    book.enter_holder(_holder(1))
    book.add_namespace(0, "model", SMALL)
    assert os.fstat(book.descriptor).st_size > books.LOG_BYTES
    assert os.fstat(book.descriptor).st_blocks * 512 <= 4 * PAGE_BYTES
    assert PLACE_BYTES * PLACES < PAGE_BYTES
