"""Copies in the memory of a device, in events: level 0, like a lower tier's level, joined with what engines have there."""

from kvpool.types import Event, EventKind, Level, ReportState
from tests.rigs.events.engine_chunks import chunks_of, drops, has
from tests.rigs.events.journal_rig import DRAM, HBM, SSD, Rig, key, take_snapshot
from tests.rigs.events.readers import Replica
from tests.rigs.flushing import flush_whole


def changes(rig: Rig) -> list[tuple[EventKind, int, int, int]]:
    """Kind, chunks, tiers before and after of each event but the first."""
    found: list[Event] = []
    while (news := rig.journal.since(b"", found[-1].id if found else 0)).events:
        found += news.events
    return [(event.kind, len(event.chunks), event.tiers_before, event.tiers) for event in found]


def test_a_copy_in_a_device_gains_and_loses_level_0_like_a_lower_tier() -> None:
    rig = Rig(has_device=True)
    rig.store([1, 2])
    assert rig.copy([1, 2]) == 2
    rig.demote_all()
    rig.journal.take_changes()
    flush_whole(rig.memory, rig.tick())
    updated = EventKind.UPDATED
    assert changes(rig) == [
        (EventKind.STORED, 2, 0, DRAM),
        (updated, 1, DRAM, DRAM | HBM),
        (updated, 1, DRAM, DRAM | HBM),
        (updated, 1, DRAM | HBM, DRAM | HBM | SSD),
        (updated, 1, DRAM | HBM, DRAM | HBM | SSD),
        (updated, 1, DRAM | HBM | SSD, DRAM | SSD),
        (updated, 1, DRAM | SSD, SSD),
        (updated, 1, DRAM | HBM | SSD, DRAM | SSD),
        (updated, 1, DRAM | SSD, SSD),
    ]
    gained = rig.journal.since(b"", 1).events[0]
    assert (gained.tokens, gained.gained) == (chunks_of([1])[0].tokens, (Level.HBM,))
    assert rig.verify() == []


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


def test_a_snapshot_lists_a_copied_chunk_once_with_level_0() -> None:
    rig, replica = Rig(has_device=True), Replica()
    rig.store([1, 2])
    assert rig.copy([1]) == 1
    page = rig.journal.snapshot(0)
    assert [(chunk.key, chunk.tiers) for chunk in page.chunks] == [(key([1]), DRAM | HBM), (key([1, 2]), DRAM)]
    assert take_snapshot(rig, replica)
    assert replica.tiers() == rig.truth()
    assert rig.journal.explain(key([1]))["tiers"] == ["hbm", "dram"]
    assert rig.journal.since(b"", -1).events[0].capacities[:2] == (7, 400)


def test_other_nodes_get_no_event_of_level_0_alone() -> None:
    rig = Rig(has_device=True)
    rig.store([1])
    rig.copy([1])
    rig.demote_all()
    flush_whole(rig.memory, rig.tick())
    found = rig.journal.since(b"", 0).events
    assert [(event.tiers_before, event.tiers) for event in found if event.is_of_node] == [
        (0, DRAM),
        (DRAM | HBM, DRAM | HBM | SSD),
        (DRAM | SSD, SSD),
    ]
