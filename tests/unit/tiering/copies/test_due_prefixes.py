"""Due prefixes: each once, in their order, as many as there may be."""

from types import SimpleNamespace
from typing import cast

import pytest

from kvpool.index.namespaces import Namespace
from kvpool.key_column import KEY_BYTES, KeyColumn
from kvpool.tiering.copies import due_prefixes
from kvpool.tiering.copies.due_prefixes import DuePrefixes
from kvpool.tiering.copies.placement import LeasedPrefix


def prefix(leaf: int, chunks: int = 1, namespace: int = 0) -> LeasedPrefix:
    """A prefix that ends in this leaf."""
    keys = b"".join(number.to_bytes(KEY_BYTES, "little") for number in (*range(1, chunks), leaf))
    return LeasedPrefix(cast(Namespace, SimpleNamespace(id=namespace)), KeyColumn(keys), 0)


def test_a_prefix_that_is_leased_again_is_due_once() -> None:
    due = DuePrefixes()
    first, other = prefix(100), prefix(100, namespace=1)
    for _ in range(1000):
        due.add_prefix(first)
        due.add_prefix(prefix(100))
        due.add_prefix(other)
    assert len(due) == 2
    assert due.take_prefix() is first
    assert due.take_prefix() is other
    assert not due


def test_one_that_could_not_start_goes_first() -> None:
    due = DuePrefixes()
    one, two = prefix(100), prefix(200)
    due.add_prefix(one)
    due.add_prefix(two)
    due.add_prefix(due.take_prefix(), is_next=True)
    assert [due.take_prefix(), due.take_prefix()] == [one, two]


@pytest.mark.parametrize("bound", ["DUE_MAX", "DUE_CHUNKS_MAX"])
def test_the_oldest_is_left_out_beyond_the_bound(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_prefixes, bound, 4)
    due = DuePrefixes()
    prefixes = [prefix(1000 + number) for number in range(10)]
    for one in prefixes:
        due.add_prefix(one)
    assert due.left_out == 6
    assert [due.take_prefix() for _ in range(len(due))] == prefixes[6:]


def test_one_prefix_may_be_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_prefixes, "DUE_CHUNKS_MAX", 4)
    due = DuePrefixes()
    due.add_prefix(prefix(1, chunks=9))
    due.add_prefix(long := prefix(2, chunks=9))
    assert (len(due), due.left_out) == (1, 1)
    assert due.take_prefix() is long
