"""Three directories joined as tiers: what the bindings take and refuse, and that a chunk may come from any lower tier."""

from typing import Any

import pytest

import kvpool_native
from kvpool.types import KEY_BYTES, Level, LoadFault, SaveState

CHUNK_BYTES = 2 * 4096
KEY = bytes(range(KEY_BYTES))
PEER = 3


class ThreeTiers:
    """DRAM over files over a store, each with room for four chunks of one layer."""

    def __init__(self) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan(4 * CHUNK_BYTES, CHUNK_BYTES, 4, 8)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.memory = kvpool_native.Directory(None, index, geometry, bytes(16))
        below = kvpool_native.DirectoryGeometry.plan_files(CHUNK_BYTES, 4, 4)
        self.files = kvpool_native.Directory.of_files(below)
        self.store = kvpool_native.Directory.of_files(below, level=PEER)
        self.all = (self.memory, self.files, self.store)
        for directory, segments in zip(self.all, (geometry.segments, 4, 4), strict=True):
            assert (directory.add_namespace(), directory.add_class(CHUNK_BYTES, 1)) == (0, 0)
            for segment in range(segments):
                directory.mark_segment_ready(segment)
        self.tiers = kvpool_native.TierSet(self.all)

    def put(self, directory: kvpool_native.Directory) -> None:
        """The chunk is stored in this tier."""
        made = directory.reserve(0, 0, b"", KEY, 1)
        assert made.states == bytes([SaveState.RESERVED])
        assert directory.commit(made.id, 0, bytes(4)) == bytes([SaveState.STORED])
        directory.end_reservation(made.id, 1)


def test_a_chunk_comes_from_the_tier_that_is_named_and_a_bad_one_is_dropped_there_alone() -> None:
    rig = ThreeTiers()
    rig.put(rig.files)
    rig.put(rig.store)
    assert rig.tiers.tiers_of(KEY) == 1 << Level.SSD | 1 << PEER
    made = rig.memory.promote(0, 0, b"", KEY, 2, bytes([rig.store.level]))
    assert (made.states, rig.memory.columns([made.id]).levels) == (bytes([SaveState.RESERVED]), bytes([PEER]))
    failed = rig.memory.fail_landing(KEY, int.from_bytes(made.generations, "little"), LoadFault.SOURCE)
    assert (failed.removed, failed.dropped_in_source, failed.next_level) == (0, 1, Level.SSD)
    rig.memory.release(made.id, 3)
    assert rig.tiers.tiers_of(KEY) == 1 << Level.SSD
    assert rig.memory.stats()["landings_failed_source"] == 1
    assert [directory.verify() for directory in rig.all] == [[], [], []]


SOURCE_COLUMNS = ("source_levels", "source_generations", "checksums")


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((b"\x02\x02",), "source_levels must be one for each chunk"),
        ((b"\x09",), "level must be 0 to 7"),
        ((b"", bytes(8)), "source_levels must be one for each chunk"),
        ((b"\x02", bytes(7)), "source_generations must be none"),
        ((b"\x02", b"", bytes(8)), "checksums must be none"),
    ],
)
def test_sources_that_do_not_fit_the_chunks_are_refused(sources: tuple[bytes, ...], expected: str) -> None:
    rig = ThreeTiers()
    columns: dict[str, Any] = dict(zip(SOURCE_COLUMNS, sources, strict=False))
    with pytest.raises(ValueError, match=expected):
        rig.memory.promote(0, 0, b"", KEY, 2, **columns)


def test_an_invalid_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="fault must be 0"):
        ThreeTiers().memory.fail_landing(KEY, 1, 3)


def test_tiers_that_do_not_fit_together_are_refused() -> None:
    rig = ThreeTiers()
    with pytest.raises(ValueError, match="another set"):
        kvpool_native.TierSet((rig.memory,))
    with pytest.raises(ValueError, match="one tier at least"):
        kvpool_native.TierSet(())
    del rig.tiers
    with pytest.raises(ValueError, match="levels do not rise"):
        kvpool_native.TierSet((rig.files, rig.memory))
    rig.put(rig.files)
    with pytest.raises(ValueError, match="has chunks already"):
        kvpool_native.TierSet(rig.all)
