"""Columns of keys against a plain list of them."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.key_column import KEY_BYTES, KeyColumn, packed_bytes


def keys_of(count: int) -> list[bytes]:
    return [random.Random(number).randbytes(KEY_BYTES) for number in range(count)]


@given(st.integers(0, 9), st.integers(-12, 12), st.integers(-12, 12))
def test_a_column_is_sliced_like_a_list(count: int, first: int, end: int) -> None:
    keys = keys_of(count)
    column = KeyColumn.of(keys)
    assert (len(column), list(column), column.packed) == (count, keys, b"".join(keys))
    assert list(column[first:end]) == keys[first:end]
    assert list(column[first:]) + list(column[:end]) == keys[first:] + keys[:end]
    if -count <= first < count:
        assert column[first] == keys[first]
    else:
        with pytest.raises(IndexError):
            column[first]


def test_a_whole_column_is_not_copied() -> None:
    column = KeyColumn.of(keys_of(3))
    assert column[:].packed is column.packed
    assert column.of_rank(0, 1).packed is column.packed


@given(st.integers(0, 6))
def test_each_key_follows_the_one_before(count: int) -> None:
    keys, parent = keys_of(count), b"p" * KEY_BYTES
    column = KeyColumn.of(keys)
    assert column.parents(parent) == [parent, *keys][:count]
    assert [column.before(at, parent) for at in range(count)] == [parent, *keys][:count]
    assert column.before(0) == b""


@given(st.lists(st.booleans(), max_size=8))
def test_keys_are_chosen_by_indexes(mask: list[bool]) -> None:
    keys = keys_of(len(mask))
    column, places = KeyColumn.of(keys), [at for at, is_chosen in enumerate(mask) if is_chosen]
    wanted = [keys[at] for at in places]
    assert list(column.chosen(places)) == wanted
    assert list(column.chosen(np.flatnonzero(mask).tolist())) == wanted


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 6), st.integers(0, 6))
def test_each_rank_has_its_own_keys(ranks: int, chunks: int, first: int, end: int) -> None:
    keys = keys_of(ranks * chunks)
    by_rank = [keys[rank * chunks : (rank + 1) * chunks] for rank in range(ranks)]
    column = KeyColumn.of(keys)
    assert [list(own) for own in column.by_rank(ranks)] == by_rank
    assert list(column.part_of_ranks(ranks, first=first, end=end)) == [key for own in by_rank for key in own[first:end]]


@pytest.mark.parametrize(("count", "at_once", "sizes"), [(0, 3, []), (3, 3, [3]), (7, 3, [3, 3, 1])])
def test_a_column_is_given_in_parts(count: int, at_once: int, sizes: list[int]) -> None:
    column = KeyColumn.of(keys_of(count))
    parts = list(column.parts(at_once))
    assert [len(part) for part in parts] == sizes
    assert b"".join(part.packed for part in parts) == column.packed
    assert len(column.packed) == packed_bytes(count)


def test_columns_are_equal_by_their_keys() -> None:
    first, other = keys_of(2)
    assert KeyColumn(first + other) == KeyColumn.of([first, other])
    assert hash(KeyColumn(first + other)) == hash(KeyColumn.of([first, other]))
    assert KeyColumn(first) != KeyColumn(other)
    assert KeyColumn(first) != first
    assert repr(KeyColumn(first + other)) == "<KeyColumn 2 keys>"


@pytest.mark.parametrize("packed", [b"x", bytes(KEY_BYTES - 1), bytes(2 * KEY_BYTES + 1)])
def test_half_a_key_is_refused(packed: bytes) -> None:
    with pytest.raises(AssertionError, match="no whole keys of 32"):
        KeyColumn(packed)


def test_the_first_of_several_keys_is_found_by_all_its_bytes() -> None:
    keys = KeyColumn.of(bytes([number]) * 32 for number in range(20))
    assert keys.find_any({keys[7], keys[3], bytes(31) + b"x"}) == 3
    assert keys.find_any({keys[7][:8] + bytes(24)}) == 20, "its head alone is no key"
    assert keys.find_any([keys[19]]) == 19
    assert (keys.find_any([]), KeyColumn(b"").find_any([keys[0]])) == (20, 0)
