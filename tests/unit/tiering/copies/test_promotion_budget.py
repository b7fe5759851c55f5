"""Promotion budget: never more than its room, never more than it has earned, and nothing is lost in between."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.tiering.copies.promotion_budget import EARNED, PromotionBudget


def test_the_room_may_be_filled_once() -> None:
    budget = PromotionBudget(1000)
    assert (budget.affordable(300), budget.affordable(1001)) == (3, 0)
    budget.spend(900)
    assert budget.affordable(300) == 0
    budget.earn(200)
    assert budget.affordable(300) == 1


def test_what_was_served_long_ago_does_not_pay_for_a_flood() -> None:
    budget = PromotionBudget(1000)
    budget.earn(10**12)
    assert budget.affordable(1) == 1000


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=60), st.integers(1, 2000))
def test_all_that_is_moved_is_earned_but_for_the_room(steps: list[tuple[int, int]], capacity: int) -> None:
    budget, served, moved = PromotionBudget(capacity), 0, 0
    for earned, wanted in steps:
        budget.earn(earned)
        served += earned
        taken = min(wanted, budget.affordable(1))
        budget.spend(taken)
        moved += taken
        assert 0 <= budget.affordable(1) <= capacity
        assert moved <= capacity + EARNED * served
