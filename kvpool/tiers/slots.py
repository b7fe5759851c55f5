"""Slots of a tier beside the arena: which slot has which chunk, and the size class of each geometry of chunks.

A native directory without memory of its own: its offsets count the bytes of all segments of a tier. A slot has room for a
chunk's payload and its header; chunks that do not fit a segment are not stored in the tier. Control thread only.

Invariants: a namespace has the same number here as in the arena's directory; every geometry here is one of the arena's, so
there are no more size classes than there.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import kvpool_native
from kvpool.ids import HoldId, NamespaceId, SizeClassId
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.states import Level

log = logging.getLogger(__name__)


def _no_header(extents: int) -> int:  # noqa: ARG001 - one answer for all
    return 0


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Sizes of a tier: `segments` of `segment_bytes`. `header_bytes`: of a slot for a chunk of so many extents. `extents_max`:
    extents of a chunk at most, 0 for no bound."""

    segment_bytes: int
    segments: int
    max_chunks: int
    header_bytes: Callable[[int], int] = _no_header
    extents_max: int = 0


class Run(NamedTuple):
    """Number of leading chunks of a chain that a tier has, and a hold on them (0: none), which the caller releases."""

    chunks: int
    hold: HoldId


NO_RUN = Run(0, HoldId(0))


class Slots:
    """See the module. `name`, `level`: the tier's."""

    def __init__(
        self,
        name: str,
        level: Level,
        sizes: SlotSizes,
        directory: kvpool_native.Directory | None = None,
        *,
        name_of_segment: Callable[[int], str] = "segment {}".format,
    ) -> None:
        """`directory`: a new one of these sizes; None: one of files is made. `name_of_segment`: by its number, for people."""
        self.name = name
        self.level = level
        self.sizes = sizes
        self._name_of_segment = name_of_segment
        if directory is None:
            geometry = kvpool_native.DirectoryGeometry.plan_files(sizes.segment_bytes, sizes.segments, sizes.max_chunks)
            directory = kvpool_native.Directory.of_files(geometry, level=level)
        self.directory = directory
        for segment in range(sizes.segments):
            self.directory.mark_segment_ready(segment)
        self._by_geometry: dict[tuple[int, int], SizeClassId | None] = {}
        self._given_back: list[SizeClassId] = []

    def __repr__(self) -> str:
        return f"<Slots of {self.name}, {len(self._by_geometry)} geometries>"

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all segments."""
        return self.sizes.segments * self.sizes.segment_bytes

    def find(self, namespace: NamespaceId, keys: KeyColumn, *, parent: bytes) -> Run:
        """The longest run of `keys` behind `parent` (empty: the root) that the tier has, with a hold on it."""
        held = self.directory.acquire(namespace, keys.packed, 0, parent)
        return Run(held.chunks, HoldId(held.id))

    def place_of(self, offset: int) -> str:
        """Where an offset of the directory lies, for people."""
        segment, offset_in_segment = divmod(offset, self.sizes.segment_bytes)
        return f"offset {offset_in_segment} of {self._name_of_segment(segment)}"

    def slot_bytes(self, layout: Layout) -> int:
        """Bytes of a slot for a chunk of a layout."""
        return layout.stored_bytes + self.sizes.header_bytes(layout.extents)

    def fits(self, layout: Layout) -> bool:
        """Whether a chunk of this layout fits a slot. Makes no size class."""
        fits_header = not self.sizes.extents_max or layout.extents <= self.sizes.extents_max
        return fits_header and self.slot_bytes(layout) <= self.sizes.segment_bytes

    def size_class_of(self, layout: Layout) -> SizeClassId | None:
        """The size class of a layout's chunks, made if it is new; None where they do not fit."""
        geometry = (layout.stored_bytes, layout.extents)
        if geometry not in self._by_geometry:
            self._by_geometry[geometry] = self._add(layout)
        return self._by_geometry[geometry]

    def give_back(self, geometry: tuple[int, int]) -> None:
        """Give back the class of a geometry (bytes, extents) without chunks, for the next new geometry."""
        size_class = self._by_geometry.pop(geometry, None)
        if size_class is not None:
            self._given_back.append(size_class)

    def add_namespace(self, number: NamespaceId) -> None:
        """Add a new namespace."""
        added = self.directory.add_namespace()
        assert added == number

    def is_empty_namespace(self, number: NamespaceId) -> bool:
        """Whether a namespace has no chunks here."""
        return self.directory.is_empty_namespace(number)

    def stats(self) -> dict[str, int]:
        """Counters that every tier has, by their public names."""
        counted, name = self.directory.stats(), self.name
        return {
            f"{name}.chunks": counted["chunks"],
            f"{name}.used_bytes": counted["used_bytes"],
            f"{name}.capacity_bytes": self.capacity_bytes,
            f"{name}.evicted_chunks": counted["evicted_chunks"] + counted["shed_chunks"],
            f"{name}.evicted_from_pool_chunks": counted["evicted_chunks"],
            f"{name}.retained_chunks": counted["retained_chunks"],
            f"{name}.retained_bytes": counted["retained_bytes"],
            f"{name}.retention_expired_chunks": counted["retention_expired_chunks"],
        }

    def classes(self) -> list[dict[str, int]]:
        """Slots by size class; `chunk_bytes` is the payload, without the header."""
        rows = self.directory.stats()["classes"]
        return [{**row, "chunk_bytes": row["chunk_bytes"] - self.sizes.header_bytes(row["extents"])} for row in rows]

    def verify(self, *, with_shared: bool, holds: int, pins: int) -> list[str]:
        """Broken invariants of the directory, one line each. It should have exactly `holds` holds and `pins` pins."""
        problems = [f"{self.name}: {problem}" for problem in self.directory.verify(with_shared)]
        counted = self.directory.stats()
        if (counted["holds"], counted["pins"]) != (holds, pins):
            found = f"{counted['holds']} holds and {counted['pins']} pins"
            problems.append(f"{self.name}: {found}, {holds} and {pins} are in promotions and checks")
        return problems

    def _add(self, layout: Layout) -> SizeClassId | None:
        if self.fits(layout):
            instead = self._given_back.pop() if self._given_back else None
            return SizeClassId(self.directory.add_class(self.slot_bytes(layout), layout.extents, True, instead))
        log.warning(
            "chunks of %d bytes in %d extents are not kept in the %s tier: they fit no segment or no header",
            layout.stored_bytes,
            layout.extents,
            self.name,
        )
        return None
