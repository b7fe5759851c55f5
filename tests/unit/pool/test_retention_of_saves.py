"""Retention of a save: one call, for every tier that has the chunks."""

from types import SimpleNamespace
from typing import Any, cast

from kvpool.clock import MonotonicClock
from kvpool.key_column import KeyColumn
from kvpool.pool.writers.retention import Retention, RetentionColumns
from kvpool.states import KEEP_PRIORITY, Level, RetainState, SaveState
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.base import Backing
from kvpool.tiers.slots import Slots
from tests.rigs.events.journal_rig import Rig, key

PRESENT, RESERVED, FULL = bytes([SaveState.PRESENT]), bytes([SaveState.RESERVED]), bytes([SaveState.FULL])
ACCEPTED, ABSENT = RetainState.ACCEPTED, RetainState.ABSENT


class Tiers:
    """Two tiers, the lower one of which has chunk 1; chunk 2 is in memory alone."""

    def __init__(self) -> None:
        self.rig = Rig()
        del self.rig.tiers  # they connect again below
        self.keys = KeyColumn.of([key([1]), key([1, 2])])
        self.touched: list[bytes] = []
        self.looks = 0
        link = LowerLink.__new__(LowerLink)
        link.tier = cast(Backing, SimpleNamespace(level=Level.SSD, touch=self.touched.append))
        link.slots = cast(Slots, SimpleNamespace(directory=self.rig.files))
        arena: Any = SimpleNamespace(directory=self.rig.memory)
        self.retention = Retention(self.rig.memory, Tiering(arena, [link], MonotonicClock()), self._look)
        self.rig.store([1])
        self.rig.demote()
        self.rig.store([1, 2])

    def _look(self) -> None:
        self.looks += 1

    def save(self, states: bytes, priorities: list[int]) -> list[int]:
        durations = bytes(4 * len(priorities))
        wanted = RetentionColumns(bytes(priorities), durations)
        return list(self.retention.of_save(self.rig.namespace, self.keys, states, wanted, now_ns=self.rig.tick()))


def test_one_save_sets_retention_in_both_tiers() -> None:
    tiers = Tiers()
    assert tiers.save(PRESENT * 2, [80, 60]) == [ACCEPTED, ACCEPTED]
    assert [tiers.rig.memory.retention(each) for each in tiers.keys] == [(80, 0), (60, 0)]
    assert tiers.rig.files.retention(tiers.keys[0]) == (80, 0)
    assert (tiers.touched, tiers.looks) == ([tiers.keys[0]], 1)


def test_a_chunk_without_a_slot_is_absent_and_takes_no_other_along() -> None:
    tiers = Tiers()
    assert tiers.save(PRESENT + FULL, [80, 60]) == [ACCEPTED, ABSENT]
    assert tiers.rig.memory.retention(tiers.keys[1]) == (35, 0)
    assert tiers.save(FULL + PRESENT, [70, 70]) == [ABSENT, ACCEPTED]
    assert [tiers.rig.memory.retention(each) for each in tiers.keys] == [(80, 0), (70, 0)]
    assert tiers.save(FULL * 2, [90, 90]) == [ABSENT, ABSENT]
    assert tiers.save(FULL + PRESENT, [90, KEEP_PRIORITY]) == [ABSENT, ACCEPTED]
    assert [tiers.rig.memory.retention(each) for each in tiers.keys] == [(80, 0), (70, 0)]


def test_a_chunk_with_unchanged_retention_keeps_it() -> None:
    tiers = Tiers()
    assert tiers.save(RESERVED + PRESENT, [KEEP_PRIORITY, 60]) == [ACCEPTED, ACCEPTED]
    assert [tiers.rig.memory.retention(each) for each in tiers.keys] == [(35, 0), (60, 0)]
