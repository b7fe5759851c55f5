"""DRAM tier: the shared memory of arena and index, and the pages behind it.

The daemon makes both memfds, seals them against resizing, and seals the index against writing by other processes. Engines map
the index read-only, and the arena as the write mode allows. Background threads fault the pages in, segment by segment: a save
into untouched memory has a fifth of the speed, and a large arena must not delay the start. Huge pages are tried in this order:
hugetlb if configured, MADV_COLLAPSE, 4 KiB pages; `page_use` reports the kind in use.

The native directory knows which slot has which chunk; the rest of this module handles bytes only.
Threads: `prefault_next` and `collapse_next` from any thread; the rest from the control thread.
"""

import errno
import fcntl
import itertools
import logging
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import kvpool_native
from kvpool import failpoint
from kvpool.config.config import DramConfig
from kvpool.errors import LayoutMismatch
from kvpool.ids import PAGE_BYTES
from kvpool.tiers.base import ArenaMemory
from kvpool.tiers.dram import numa as numa_nodes
from kvpool.tiers.dram.memory_room import check_memory, free_huge_bytes
from kvpool.units import write_size

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
SEGMENTS_MIN = 8
NOT_COLLAPSED = (
    "dram.huge_pages is collapse, and the kernel made no huge pages of a part of the arena: 4 KiB pages serve there"
)
CHUNK_BYTES_TYPICAL_MIN = 32 << 10
CHUNKS_SMALL_ARENA = 1 << 18


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages behind the arena: `mode` is hugetlb, collapse or base; bytes in huge pages; bytes faulted in.

    `is_settling`: background threads are still at work. `shortfall`: why there are fewer huge pages than configured.
    """

    mode: str
    huge_bytes: int
    resident_bytes: int
    is_settling: bool
    shortfall: str


class DramTier:
    """The arena, its index and its directory: the `ArenaTier` of one daemon.

    Invariant: `_populated` and `_collapsed` hand each segment to exactly one thread.
    """

    def __init__(
        self,
        geometry: kvpool_native.DirectoryGeometry,
        config: DramConfig,
        epoch: bytes,
        *,
        is_kept: bool = False,
        former_arena: kvpool_native.Mapping | None = None,
    ) -> None:
        """`is_kept`: its records may outlive the process, as `records`; `former_arena`: of a former life, which goes on.

        Raises MemoryError or OSError where there is not enough memory, ConfigError for a NUMA node that does not exist.
        """
        self.geometry = geometry
        self.capacity_bytes = config.capacity
        self.max_chunks = geometry.max_chunks
        self._huge_pages = huge_pages = config.huge_pages
        self._lock = threading.Lock()
        self._populated = itertools.count()  # guarded by _lock
        self._collapsed = itertools.count()  # guarded by _lock
        self._huge_bytes = 0  # guarded by _lock
        self._resident_bytes = 0  # guarded by _lock
        if former_arena is None:
            self.arena, self._mode, self._shortfall = _create_arena(geometry.arena_bytes, huge_pages)
        else:
            self.arena, self._mode, self._shortfall = former_arena, *_pages_of(former_arena, huge_pages)
        if self._shortfall:
            log.warning("%s", self._shortfall)
        numa_nodes.place_arena(self.arena, config.numa)
        self.index = kvpool_native.Mapping.create("kvpool-index", geometry.index_bytes)
        self.records = kvpool_native.Mapping.create("kvpool-records", geometry.records_bytes) if is_kept else None
        self.directory = kvpool_native.Directory(
            self.arena, self.index, geometry, epoch, config.policy, records=self.records
        )

    def __repr__(self) -> str:
        use = self.page_use()
        return f"<DramTier {use.resident_bytes}/{self.geometry.arena_bytes} bytes resident, {use.mode}>"

    @property
    def memory(self) -> ArenaMemory:
        """The shared memory that clients map, and the directory of its chunks."""
        return ArenaMemory(self.arena, self.index, self.directory)

    def seal(self, *, is_arena_read_only: bool) -> None:
        """Let only this process write the index and, if wanted, the arena. Called once, after the index is laid out.

        Also forbids further seals of the arena: an engine could else seal it against writing, and no other engine could map it.
        """
        self.index.seal_read_only()
        if is_arena_read_only:
            self.arena.seal_read_only()
        elif not fcntl.fcntl(self.arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:  # a former life has not sealed it
            fcntl.fcntl(self.arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    def prefault_next(self) -> int | None:
        """Fault in the next segment. Returns its number, or None when all are done. Blocks."""
        segment = self._take(self._populated)
        if segment is not None:
            size = self.geometry.segment_bytes
            failpoint.reach("daemon.prefault.segment")
            self.arena.populate(segment * size, size)
            with self._lock:
                self._resident_bytes += size
                self._huge_bytes += size if self._mode == "hugetlb" else 0
        return segment

    def collapse_next(self) -> int | None:
        """Turn the next segment's pages into huge ones, if configured and possible. None when all are done.

        Its bytes may be in use meanwhile. Blocks: 1.5 s of CPU for each GiB, measured.
        """
        segment = self._take(self._collapsed) if self._mode == "collapse" else None
        if segment is None:
            return None
        size = self.geometry.segment_bytes
        is_huge = self.arena.collapse(segment * size, size)
        with self._lock:
            self._huge_bytes += size if is_huge else 0
            is_first = not is_huge and not self._shortfall and self._huge_pages != "auto"
            if is_first:
                self._shortfall = NOT_COLLAPSED
        if is_first:
            log.warning("%s", NOT_COLLAPSED)
        return segment

    def page_use(self, *, is_settling: bool = False) -> PageUse:
        """The pages behind the arena now. The mode is `collapse` as soon as one segment has huge pages."""
        with self._lock:
            mode = "base" if self._mode == "collapse" and not self._huge_bytes else self._mode
            return PageUse(mode, self._huge_bytes, self._resident_bytes, is_settling, self._shortfall)

    def _take(self, segments: "itertools.count[int]") -> int | None:
        with self._lock:
            segment = next(segments)
        return segment if segment < self.geometry.segments else None


def plan_geometry(
    config: DramConfig, further_entries: int = 0, upper: kvpool_native.DirectoryGeometry | None = None
) -> kvpool_native.DirectoryGeometry:
    """The sizes of arena and index for a configuration.

    A small arena has at least eight segments, so that several size classes fit; large segments are whole huge pages.
    `dram.max_chunks` 0 derives the index from the capacity: one entry for each 32 KiB, or for each page of a small arena.
    `further_entries`: index entries for chunks in lower tiers. `upper`: of a tier of copies, which is a region of the index.
    """
    capacity = config.capacity
    wanted = min(config.segment, -(-capacity // SEGMENTS_MIN))
    unit = HUGE_PAGE_BYTES if wanted >= 8 * HUGE_PAGE_BYTES else PAGE_BYTES
    segment_bytes = -(-wanted // unit) * unit
    derived = max(capacity // CHUNK_BYTES_TYPICAL_MIN, min(capacity // PAGE_BYTES, CHUNKS_SMALL_ARENA), 64)
    of_copies = () if upper is None else (upper,)
    wanted_chunks = config.max_chunks or derived
    return kvpool_native.DirectoryGeometry.plan(capacity, segment_bytes, wanted_chunks, further_entries, *of_copies)


def check_memory_fits(
    config: DramConfig,
    further_entries: int,
    root: Path = Path("/"),
    *,
    upper: kvpool_native.DirectoryGeometry | None = None,
    resident_bytes: int = 0,
    freed_bytes: int = 0,
) -> None:
    """Raises MemoryError where this machine lacks the memory that arena and index need.

    `further_entries`, `upper`: see `plan_geometry`. `root`: the folder that has `proc` and `sys`. `resident_bytes`: of an
    arena that is there already. `freed_bytes`: what the daemon gives back before it takes the memory, of whatever pages.
    """
    free_huge = free_huge_bytes(root) + freed_bytes if config.huge_pages == "hugetlb" else 0

    def needed_by(capacity: int) -> int:
        geometry = plan_geometry(replace(config, capacity=capacity), further_entries, upper)
        new_bytes = max(geometry.arena_bytes - resident_bytes, 0)
        return geometry.index_bytes + (0 if new_bytes <= free_huge else new_bytes)

    check_memory(
        config.capacity, needed_by, allow_overcommit=config.allow_overcommit, root=root, freed_bytes=freed_bytes
    )


def check_chunk_fits(chunk_bytes: int, *, capacity: int) -> None:
    """Raises LayoutMismatch where not even one chunk of a layout fits."""
    if chunk_bytes > capacity:
        raise LayoutMismatch(
            f"a chunk of this layout has {write_size(chunk_bytes)}, dram.capacity is {write_size(capacity)}: "
            "no chunk can be stored"
        )


def _pages_of(arena: kvpool_native.Mapping, huge_pages: str) -> tuple[str, str]:
    """The mode of the pages of a former life's arena, and why they are not those of the configuration (else empty)."""
    if os.fstat(arena.fd).st_blksize == HUGE_PAGE_BYTES:
        return "hugetlb", ""
    shortfall = (
        "dram.huge_pages is hugetlb, and the arena of the life before has none" if huge_pages == "hugetlb" else ""
    )
    return "base" if huge_pages == "off" else "collapse", shortfall


def _create_arena(size: int, huge_pages: str) -> tuple[kvpool_native.Mapping, str, str]:
    """The arena, the mode of its pages, and why they are not the reserved huge pages of the configuration (else empty)."""
    shortfall = ""
    if huge_pages == "hugetlb":
        try:
            if size % HUGE_PAGE_BYTES:
                raise OSError(errno.EINVAL, f"an arena of {size} bytes is not made of whole ones")
            return kvpool_native.Mapping.create("kvpool-arena", size, hugetlb=True), "hugetlb", ""
        except OSError as error:  # the next kind of pages is tried
            pages, free = -(-size // HUGE_PAGE_BYTES), free_huge_bytes() // HUGE_PAGE_BYTES
            shortfall = (
                f"dram.huge_pages is hugetlb and takes {pages} pages of 2 MiB, of which {free} are reserved and free "
                f"(set vm.nr_hugepages to {pages} more): huge pages are collapsed instead: {error}"
            )
    mode = "base" if huge_pages == "off" else "collapse"
    return kvpool_native.Mapping.create("kvpool-arena", size), mode, shortfall
