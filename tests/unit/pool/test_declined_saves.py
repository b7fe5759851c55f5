"""Users none of whose saves are taken any more."""

import pytest

from kvpool.pool.declined_saves import FORGOTTEN_AFTER_S, SHOWN_AFTER_S, USERS_MAX, DeclinedSaves
from kvpool.states import SaveState
from tests.rigs.clock import HandClock

SHARE, FULL, TAKEN = bytes([SaveState.QUOTA] * 5), bytes([SaveState.FULL]), bytes([SaveState.RESERVED, SaveState.FULL])


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_a_user_all_of_whose_saves_are_declined_is_shown_until_one_is_taken(clock: HandClock) -> None:
    saves = DeclinedSaves(clock)
    for _ in range(20):
        saves.note_answer(1000, SHARE)
        saves.note_answer(1001, TAKEN)
        assert saves.problems() == []
        clock.advance(SHOWN_AFTER_S / 19)
    saves.note_answer(1000, SHARE)
    (problem,) = saves.problems()
    assert problem.startswith("saves: all of user 1000 are declined for 3")
    assert "105 chunks (quota: dram.connection_quota and server.user_quota bound it)" in problem
    saves.note_answer(1000, TAKEN)
    assert saves.problems() == []
    saves.note_answer(1000, FULL)
    assert saves.problems() == [], "it begins again"


def test_who_saves_nothing_any_more_is_not_shown(clock: HandClock) -> None:
    saves = DeclinedSaves(clock)
    saves.note_answer(1000, FULL)
    clock.advance(SHOWN_AFTER_S)
    saves.note_answer(1000, FULL)
    assert "dram.capacity is held whole" in saves.problems()[0]
    clock.advance(FORGOTTEN_AFTER_S + 1)
    assert saves.problems() == []


def test_what_no_operator_bounds_and_what_counts_for_nobody_is_not_shown(clock: HandClock) -> None:
    saves = DeclinedSaves(clock)
    for states in (bytes([SaveState.PENDING]), bytes([SaveState.NO_PARENT]), b""):
        for _ in range(2):
            saves.note_answer(1000, states)
            clock.advance(SHOWN_AFTER_S)
    for _ in range(2):
        saves.note_answer(None, SHARE)
        clock.advance(SHOWN_AFTER_S)
    assert saves.problems() == []


def test_as_many_users_as_there_may_be_are_known(clock: HandClock) -> None:
    saves = DeclinedSaves(clock)
    for _ in range(2):
        for user in range(2 * USERS_MAX):
            saves.note_answer(user, SHARE)
        clock.advance(SHOWN_AFTER_S)
    assert len(saves._users) == USERS_MAX
