"""Tallies of sparse sequences and their reports: every change is added once, and no value is one that cannot be."""

import math

import numpy as np
import pytest

from kvpool.protocol import usage
from kvpool.usage import MASS_UNIT, SparseUsage
from kvpool_client.connection.counters import Counters
from kvpool_sparse.results import Recall
from kvpool_sparse.tally import Tally, TallyReports


def _recall(*kept_mass: float) -> Recall:
    """Three of some blocks for each of two KV heads, one of them dense."""
    blocks = np.zeros((2, 3), np.int32)
    return Recall(blocks, None, np.array(kept_mass, np.float32), np.array([True, False]), np.array([False, False]))


def _taken(counters: Counters) -> SparseUsage:
    """Compute by lookup in the report that is taken now."""
    counts = counters.take_unsent()
    return usage.unpack(usage.pack(counts)).sparse if counts else SparseUsage()


def test_a_recall_is_counted_by_kv_head_and_query_head() -> None:
    tally = Tally(fetched_blocks=7, summaries_built=5, lost=1, reattached=2)
    tally.note_recall(_recall(0.5, 0.75, 1.0, math.nan), blocks=10)
    assert tally.since(Tally()) == SparseUsage(
        recalls=1,
        recalled_blocks=6,
        middle_blocks=20,
        kv_heads=2,
        dense_kv_heads=1,
        query_heads=3,
        kept_mass_millionths=2_250_000,
        fetched_blocks=7,
        built_summaries=5,
        lost_sequences=1,
        reattached_sequences=2,
    )
    assert tally.as_dict()["kept_mass"] == 0.75


@pytest.mark.parametrize("mass", [1.0000001, math.inf, -1.0, -math.inf, 1e300])
def test_a_mass_that_cannot_be_is_cut(mass: float) -> None:
    tally = Tally(kept_mass_sum=mass, kept_mass_count=1)
    assert tally.since(Tally()).kept_mass_millionths == (MASS_UNIT if mass > 0 else 0)


@pytest.mark.parametrize("mass", [math.inf, -math.inf, math.nan])
def test_a_mass_that_is_no_number_counts_nothing_from_then_on(mass: float) -> None:
    before, after = Tally(kept_mass_sum=mass, kept_mass_count=1), Tally(kept_mass_sum=mass, kept_mass_count=2)
    assert after.since(before).kept_mass_millionths == 0


def test_sequences_of_a_pool_share_its_report() -> None:
    counters = Counters()
    tallies = Tally(), Tally()
    for tally in tallies:
        tally.note_recall(_recall(0.5, 0.5), blocks=4)
        TallyReports(counters, tally).send()
    assert _taken(counters).recalls == 2


def test_changes_are_added_once_and_only_when_a_report_was_taken() -> None:
    counters, tally = Counters(), Tally()
    reports = TallyReports(counters, tally)
    assert not reports.are_due
    assert _taken(counters) == SparseUsage()
    assert reports.are_due
    tally.note_recall(_recall(0.5, 1.0), blocks=4)
    reports.send()
    reports.send()
    assert not reports.are_due
    tally.note_recall(_recall(1.0, 1.0), blocks=5)
    assert _taken(counters) == SparseUsage(1, 6, 8, 2, 1, 2, 1_500_000)
    assert reports.are_due
    reports.send()
    assert _taken(counters) == SparseUsage(1, 6, 10, 2, 1, 2, 2_000_000)


def test_a_sequence_at_rest_causes_no_report() -> None:
    counters = Counters()
    TallyReports(counters, Tally()).send()
    assert counters.take_unsent() == []


def test_what_could_not_be_sent_goes_with_the_next_report() -> None:
    counters, tally = Counters(), Tally(lost=1)
    TallyReports(counters, tally).send()
    counters.put_back(counters.take_unsent())
    TallyReports(counters, Tally(lost=2)).send()
    assert _taken(counters).lost_sequences == 3
