"""Save notes: bounded slices in order, gaps where a lost chunk was dropped, and a follower that is right in the end."""

import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvpool.key_column import KeyColumn
from kvpool.server.peers import save_notes
from kvpool.server.peers.save_notes import SaveNotes
from tests.rigs.tiers.tiered_pool import key_of

KEYS = [key_of(5, number) for number in range(40)]


def column(*numbers: int) -> KeyColumn:
    return KeyColumn.of(KEYS[number] for number in numbers)


def test_a_slice_is_bounded_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_notes, "NOTES_ONCE", 15)
    notes = SaveNotes(lambda _key: False)
    notes.begin_save(column(*range(40)))
    reported: list[bytes] = []
    last = 0
    for expected in (15, 15, 10, 0):
        found = notes.since(last)
        assert (len(found.under_way), found.lost, found.is_gap) == (expected, (), False)
        reported += found.under_way
        last = found.last
    assert reported == KEYS


def test_only_lost_chunks_that_were_dropped_are_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_notes, "NOTES_MAX", 4)
    notes = SaveNotes(lambda _key: False)
    notes.begin_save(column(0))
    last = notes.since(0).last
    notes.begin_save(column(1, 2, 3, 4, 5))
    assert notes.since(last).under_way == tuple(KEYS[2:6])
    notes.end_save(column(0), 0)
    notes.begin_save(column(6, 7, 8, 9))
    assert notes.since(last).is_gap
    assert not notes.since(0).is_gap
    assert notes.since(10_000).is_gap, "a number of another life"


def test_a_chunk_that_is_here_all_the_same_is_not_lost() -> None:
    here: set[bytes] = set()
    notes = SaveNotes(here.__contains__)
    notes.begin_save(column(0, 1))
    last = notes.since(0).last
    notes.end_save(column(0, 1), 0)
    here.add(KEYS[0])
    assert notes.since(last).lost == (KEYS[1],)


@pytest.mark.parametrize("stored", [0, 1])
def test_a_chunk_of_two_saves_is_under_way_until_both_have_ended(stored: int) -> None:
    """The first one's chunk was dropped before its save was over, stored or with the one before it, and another engine saves it
    anew."""
    notes = SaveNotes(lambda _key: False)
    notes.begin_save(column(0))
    notes.begin_save(column(0))
    last = notes.since(0).last
    notes.end_save(column(0), stored)
    assert notes.since(last).last == last
    assert notes.is_under_way(KEYS[0])
    notes.end_save(column(0), 0)
    assert notes.since(last).lost == (KEYS[0],)
    assert not notes.is_under_way(KEYS[0])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_follower_that_asks_now_and_then_knows_what_is_under_way_in_the_end(seed: int) -> None:
    """Events are reported too, at some time after they happen: here at the end, as net changes."""
    note(f"seed {seed}")
    chance = random.Random(seed)
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(save_notes, "NOTES_MAX", chance.choice((40, 12)))
        patch.setattr(save_notes, "NOTES_ONCE", chance.choice((1, 3, 100)))
        stored: set[bytes] = set()
        under_way: set[bytes] = set()
        known: set[bytes] = set()
        notes, last = SaveNotes(stored.__contains__), 0

        def ask() -> bool:
            nonlocal last
            found = notes.since(last)
            if found.is_gap:
                known.clear()
                known.update(stored)  # a snapshot
                last = 0
                return True
            known.difference_update(found.lost)
            known.update(found.under_way)
            has_more, last = found.last != last, found.last
            return has_more

        for _ in range(150):
            first = chance.randrange(len(KEYS) - 4)
            keys = [key for key in KEYS[first : first + chance.randrange(1, 5)] if key not in under_way]
            drawn = chance.random()
            if drawn < 0.35:
                stored -= set(keys)  # what is stored is not saved again
                known -= set(keys)  # events
                notes.begin_save(KeyColumn.of(keys))
                under_way |= set(keys)
            elif drawn < 0.7 and under_way:
                ended = chance.sample(sorted(under_way), chance.randrange(1, 1 + len(under_way)))
                count = chance.randrange(len(ended) + 1)
                stored |= set(ended[:count])
                notes.end_save(KeyColumn.of(ended), count)
                known |= set(ended[:count])  # events
                under_way -= set(ended)
            else:
                ask()
        while ask():
            pass
        assert known - under_way == stored
