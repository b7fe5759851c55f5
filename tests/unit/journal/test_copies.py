"""Copies in the memory of a device, in events: level 0, like a lower tier's level, joined with what engines have there."""

from kvpool.events import EventKind
from kvpool.states import ReportState
from tests.rigs.events.engine_chunks import drops, has
from tests.rigs.events.journal_rig import DRAM, HBM, Rig, changes
from tests.rigs.flushing import flush_whole


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
