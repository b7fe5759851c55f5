"""Size classes of the SSD tier: the slots in the files that chunks of a geometry have. Control thread only."""

import logging

import kvpool_native
from kvpool.layout import Layout
from kvpool.types import SizeClassId

log = logging.getLogger(__name__)


class SsdClasses:
    """By geometry. Bounded by those that DRAM has."""

    def __init__(self, directory: kvpool_native.Directory, segment_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._by_geometry: dict[tuple[int, int], SizeClassId | None] = {}
        self._given_back: list[SizeClassId] = []

    def __repr__(self) -> str:
        return f"<SsdClasses {len(self._by_geometry)} geometries>"

    def fits(self, layout: Layout) -> bool:
        """Whether a segment and a header have room for a layout's chunks."""
        size = layout.chunk_bytes + kvpool_native.SSD_HEADER_BYTES
        return layout.layers <= kvpool_native.SSD_LAYERS_MAX and size <= self._segment_bytes

    def of(self, layout: Layout) -> SizeClassId | None:
        """The class of a layout's chunks; None where they do not fit a segment or a header."""
        geometry = (layout.chunk_bytes, layout.layers)
        if geometry not in self._by_geometry:
            self._by_geometry[geometry] = self._add(layout)
        return self._by_geometry[geometry]

    def give_back(self, geometry: tuple[int, int]) -> None:
        """There are no chunks of this geometry (bytes, layers) any more: its class serves the next new one."""
        size_class = self._by_geometry.pop(geometry, None)
        if size_class is not None:
            self._given_back.append(size_class)

    def _add(self, layout: Layout) -> SizeClassId | None:
        if self.fits(layout):
            size = layout.chunk_bytes + kvpool_native.SSD_HEADER_BYTES
            instead = self._given_back.pop() if self._given_back else None
            return SizeClassId(self._directory.add_class(size, layout.layers, True, instead))
        log.warning(
            "chunks of %d bytes in %d layers are not kept on disk: they fit no segment or no header",
            layout.chunk_bytes,
            layout.layers,
        )
        return None
