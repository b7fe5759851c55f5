"""Copies in the memory of a device, in events: level 0, like a lower tier's level, joined with what engines have there."""

from kvpool.events import Event, EventKind
from kvpool.states import ReportState
from tests.rigs.events.engine_chunks import drops, has
from tests.rigs.events.journal_rig import DRAM, HBM, Rig
from tests.rigs.flushing import flush_whole


def changes(rig: Rig) -> list[tuple[EventKind, int, int, int]]:
    """Kind, chunks, tiers before and after of each event but the first."""
    found: list[Event] = []
    while (news := rig.journal.since(b"", found[-1].id if found else 0)).events:
        found += news.events
    return [(event.kind, len(event.chunks), event.tiers_before, event.tiers) for event in found]


def test_level_0_ends_when_neither_an_engine_nor_a_device_has_the_chunk() -> None:
    rig = Rig(has_device=True)
    rig.store([1])
    assert rig.copy([1]) == 1
    assert has(rig, [1]) == [ReportState.TAKEN]
    drops(rig, [[1]])
    assert changes(rig) == [(EventKind.STORED, 1, 0, DRAM), (EventKind.UPDATED, 1, DRAM, DRAM | HBM)]
    assert has(rig, [1]) == [ReportState.TAKEN]
    assert rig.device is not None
    flush_whole(rig.device, rig.tick())
    assert len(changes(rig)) == 2
    drops(rig, [[1]])
    assert changes(rig)[2:] == [(EventKind.UPDATED, 1, DRAM | HBM, DRAM)]
