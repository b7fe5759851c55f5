"""Promotion budget: never more than its room, never more than it has earned, and nothing is lost in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.tiering.copies.promotion_budget import EARNED, TRIED, PromotionBudget


@pytest.mark.parametrize(("below", "tried"), [(1000, 100), (10_000, 10), (500, 100)])
def test_a_tier_that_serves_nothing_tries_by_its_share_of_the_arena(below: int, tried: int) -> None:
    budget = PromotionBudget(1000, below)
    budget.spend(1000)
    budget.earn(served_bytes=0, missed_bytes=1001)
    assert budget.affordable(1) == tried


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000)), max_size=60),
    st.integers(1, 2000),
    st.integers(1, 4000),
)
def test_all_that_is_moved_is_earned_or_tried_but_for_the_room(
    steps: list[tuple[int, int, int]], capacity: int, below: int
) -> None:
    budget, served, missed, moved = PromotionBudget(capacity, below), 0, 0, 0
    for earned, lacking, wanted in steps:
        budget.earn(served_bytes=earned, missed_bytes=lacking)
        served, missed = served + earned, missed + lacking
        taken = min(wanted, budget.affordable(1))
        budget.spend(taken)
        moved += taken
        assert 0 <= budget.affordable(1) <= capacity
        assert moved <= capacity + EARNED * served + TRIED * min(1.0, capacity / below) * missed + 1e-6
