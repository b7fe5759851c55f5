"""Copies of loads and saves between engine memory and the pool, by native threads, or by a device.

Checks what the caller passed, raises InvalidArgument, and starts runs. Any thread. Lock: `_lock` guards the memory
that devices copy from and to, and the runs on devices.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool_client.arguments import check_cache
from kvpool_client.connection.session import Session
from kvpool_client.copying.cache import SKIP_BLOCK, Cache, addresses_view, contiguous_view, extents_view
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.extents import OwnExtents
from kvpool_client.copying.device.gatherer import DeviceGatherer
from kvpool_client.copying.device.load import ArenaCheck, DeviceLoad
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.copying.device.save import DeviceSave
from kvpool_client.copying.device.side import DeviceSide
from kvpool_client.copying.device.sources import ArenaChunks, DeviceCopies, Sources
from kvpool_client.copying.device.tier import TierMemory
from kvpool_client.copying.gather import Gatherer, HostGatherer
from kvpool_client.copying.staged_save import StagedSave
from kvpool_client.copying.staging_memory import StagingArea
from kvpool_client.copying.summarized_save import (
    SummarizedSave,
    SummaryBytes,
    SummaryRun,
    begin_summaries,
)
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.leased_rows import LeasedRows
from kvpool_client.verbs.load import LoadRun
from kvpool_client.verbs.save import SaveRun

log = logging.getLogger(__name__)

Run = TypeVar("Run", DeviceLoad, DeviceSave)

ADDRESSES_APART_MAX = 1 << 48  # blocks of a native view
COPY_BYTES_PER_S_GUESS = 4e9
CPU_SECONDS_TO_TRUST = 0.01


@dataclass(slots=True, eq=False)
class EngineBlocks:
    """Checked engine memory: `block_ids` has the same number of ids for each chunk. `cache` None: one array."""

    view: kvpool_native.CacheView
    block_ids: npt.NDArray[np.int64]
    cache: Cache | None

    @property
    def side(self) -> DeviceSide | None:
        """The device's; None where the CPU reads and writes it."""
        return self.cache.side if self.cache is not None else None

    def of_chunks(self, chosen: Sequence[int], chunks: int) -> npt.NDArray[np.int64]:
        """The ids of some of the chunks."""
        if len(chosen) == chunks:
            return self.block_ids
        return np.ascontiguousarray(self.block_ids.reshape(chunks, -1)[chosen].reshape(-1))


@dataclass(slots=True, eq=False)
class ReservedSlots:
    """Slots that a save may write: of which `run` of which reservation, their offsets in the arena, and the engine's blocks
    for them."""

    reservation: int
    run: int
    offsets: npt.NDArray[np.uint64]
    block_ids: npt.NDArray[np.int64]


class Copies:
    """The copying side of one Pool."""

    def __init__(self, namespace: Namespace, threads: int, shares: Sequence[Share]) -> None:
        """`shares`: the part of the chunks of each group that the engine has; of a layout without groups there is one."""
        self._namespace, self._shares = namespace, tuple(shares)
        self._layout = layout = namespace.layout
        # Of all groups: they share the session's staging memory.
        self._staged_extent_bytes = max(part.extent_bytes for part in layout.group_layouts)
        self._take_part(layout.group_layouts[0], self._shares[0])
        self._threads = kvpool_native.CopyPool(threads)
        self._lock = threading.Lock()
        self._areas: weakref.WeakKeyDictionary[Session, StagingArea] = weakref.WeakKeyDictionary()  # guarded by _lock
        # By what was mapped: a session's arena, or its staging memory.
        self._pinned: weakref.WeakKeyDictionary[object, PinnedBytes] = weakref.WeakKeyDictionary()  # guarded by _lock
        self._tiers: weakref.WeakKeyDictionary[Session, TierMemory] = weakref.WeakKeyDictionary()  # guarded by _lock
        self._runs: weakref.WeakSet[DeviceLoad | DeviceSave] = weakref.WeakSet()  # guarded by _lock

    def by_group(self) -> "list[Copies]":
        """The copying side of each group's chunks: with this one's threads and memory."""
        found = []
        for layout, share in zip(self._layout.group_layouts, self._shares, strict=True):
            found.append(copy(self))
            found[-1]._layout = layout
            found[-1]._take_part(layout, share)
        return found

    def _take_part(self, layout: Layout, share: Share) -> None:
        self._share = share
        self._own = share.of_layout(layout)
        self.is_whole = share.is_whole(layout)  # whether that is all of each chunk
        self._extents_of_part = b"" if self.is_whole else np.array(share.extents(layout), "<u4").tobytes()
        # Once: a layout works them out each time.
        self._payload_bytes, self._extent_bytes = layout.payload_bytes, layout.extent_bytes
        self._kv_extents = self._own.kv_extents

    @property
    def share(self) -> Share:
        """The part of each chunk that the engine has."""
        return self._share

    def blocks(
        self,
        cache: Cache | None,
        block_ids: object,
        array: object,
        *,
        chunks: int,
        is_load: bool,
        is_set: bool = False,
    ) -> EngineBlocks:
        """The engine memory of `chunks` chunks. `is_set`: each is alone, so that several may be saved out of one block. Raises
        InvalidArgument."""
        self._check_side(is_load=is_load)
        if (cache is None) == (array is None):
            raise InvalidArgument("expected either cache and block_ids, or one contiguous array")
        if cache is not None:
            check_cache(cache, self._namespace, self._layout, self._share)
            ids = cache.checked_block_ids(
                () if block_ids is None else block_ids, chunks, may_skip=is_load, may_repeat=is_set and not is_load
            )
            return EngineBlocks(cache.view, ids, cache)
        if block_ids is not None:
            raise InvalidArgument("block_ids are given with a contiguous array, expected none")
        name = "rows" if is_set else "into" if is_load else "from_"
        view, rows = contiguous_view(array, self._own, name, is_target=is_load)
        if rows != chunks:
            raise InvalidArgument(f"the array has {rows} rows, expected {chunks}, one for each chunk")
        return EngineBlocks(view, np.arange(chunks, dtype=np.int64), None)

    def rows_at(self, addresses: npt.NDArray[np.int64], *, is_load: bool) -> EngineBlocks:
        """Memory of the host at these addresses, all positive, as a row of an array each. Raises InvalidArgument."""
        self._check_side(is_load=is_load)
        if is_load:
            _check_apart(addresses, self._own.chunk_bytes)
        lowest = int(addresses.min()) if len(addresses) else 0
        if len(addresses) and int(addresses.max()) - lowest >= ADDRESSES_APART_MAX:
            raise InvalidArgument(
                f"rows are from {lowest:#x} up to {int(addresses.max()):#x}, expected addresses of one process's memory"
            )
        return EngineBlocks(addresses_view(addresses, self._own), addresses - lowest, None)

    def _check_side(self, *, is_load: bool) -> None:
        if self._layout.rank is None:
            raise InvalidArgument("a Pool with rank=None looks up and acquires, it does not load or save")
        if not is_load and self._layout.summaries and not self.is_whole:
            raise InvalidArgument(
                f"share is {self._share!r}, expected all of a chunk with summaries for a save: they are of all its layers"
            )

    def load(self, session: Session, rows: LeasedRows, blocks: EngineBlocks, *, is_set: bool = False) -> LoadRun | None:
        """Start a load of leased chunks. None where they are in memory that is not there. `is_set`: each is alone."""
        try:
            chunks = ArenaChunks(session.arena, session.index, rows.offsets, rows.slots, rows.generations)
            if blocks.side is None:
                return self._checked_load(session, chunks, blocks.view, blocks.block_ids, is_set=is_set)
            copies = self._tier_of(session).copies_of(session, rows, self._layout.stored_bytes, blocks.side.device)
            return self._device_load(session, chunks, blocks, side=blocks.side, copies=copies, is_set=is_set)
        except ValueError as error:  # the blocks are right: `blocks` has checked them
            log.warning("a lease names what the daemon's memory has not: %s", error)
            return None

    def check(self, session: Session, rows: LeasedRows) -> LoadRun | None:
        """Start to compare the KV of leased chunks with its checksums, where it lies. None as for `load`. REQUIRES: no
        share."""
        layout = self._layout
        chunks = ArenaChunks(session.arena, session.index, rows.offsets, rows.slots, rows.generations)
        try:
            # Of an array without rows: no block is written.
            view, _ = contiguous_view(np.empty((0, layout.chunk_bytes), np.uint8), layout, "none", is_target=True)
            ids = np.full(len(chunks), SKIP_BLOCK)
            return self._checked_load(session, chunks, view, ids)
        except ValueError as error:
            log.warning("a lease names what the daemon's memory has not: %s", error)
            return None

    def _checked_load(
        self,
        session: Session,
        chunks: ArenaChunks,
        view: kvpool_native.CacheView,
        block_ids: npt.NDArray[np.int64],
        *,
        is_set: bool = False,
    ) -> kvpool_native.LoadJob:
        """A native load, which compares every extent of the share with its checksum and writes the blocks that are not
        skipped. Raises ValueError."""
        return self._threads.load(
            view,
            chunks.arena,
            chunks.index,
            chunks.offsets.tobytes(),
            chunks.slots.tobytes(),
            chunks.generations.tobytes(),
            block_ids.tobytes(),
            self._kv_extents,
            self._payload_bytes,
            session.welcome.verify != "cold",
            numbers=self._extents_of_part,
            extent_bytes=self._extent_bytes,
            is_set=is_set,
        )

    def _device_load(
        self,
        session: Session,
        chunks: ArenaChunks,
        blocks: EngineBlocks,
        *,
        side: DeviceSide,
        copies: DeviceCopies | None,
        is_set: bool,
    ) -> DeviceLoad:
        """Raises ValueError."""
        device_blocks = DeviceBlocks(side, self._arena_of(session, side))
        extents = OwnExtents.of(self._layout, self._share)
        sources = Sources(chunks, device_blocks.addresses(chunks.offsets), copies, extents)
        checked = sources.from_arena()
        nothing = np.full((len(checked), len(blocks.block_ids) // len(chunks)), SKIP_BLOCK)
        check = None
        if len(checked):
            job = self._checked_load(session, chunks.of(checked), blocks.view, nothing, is_set=is_set)
            check = ArenaCheck(job, checked)
        return self._ran(DeviceLoad(device_blocks, sources, check, extents, block_ids=blocks.block_ids, is_set=is_set))

    def save(self, session: Session, blocks: EngineBlocks, reserved: ReservedSlots) -> SaveRun:
        """Prepare a save into reserved slots. Raises DaemonUnreachable or Refused."""
        run = self._kv_save(session, blocks, reserved)
        if not self._layout.summaries:
            return run
        return SummarizedSave(run, self._summary_runs(session, reserved), self._layout)

    def _kv_save(self, session: Session, blocks: EngineBlocks, reserved: ReservedSlots) -> SaveRun:
        offsets, block_ids = reserved.offsets, reserved.block_ids
        if session.welcome.staging_bytes:
            gatherer = self._gatherer(self._area_of(session), block_ids.reshape(len(offsets), -1), blocks)
            # Of a part the daemon counts the share's extents alone.
            return self._staged_save(session, gatherer, reserved, range(self._own.kv_extents))
        if (side := blocks.side) is not None:
            device_blocks = DeviceBlocks(side, self._arena_of(session, side))
            extents = OwnExtents.of(self._layout, self._share)
            return self._ran(DeviceSave(device_blocks, session.arena, extents, offsets=offsets, block_ids=block_ids))
        return self._threads.save(
            blocks.view,
            session.arena,
            offsets.tobytes(),
            block_ids.tobytes(),
            self._kv_extents,
            self._payload_bytes,
            numbers=self._extents_of_part,
            extent_bytes=self._extent_bytes,
        )

    def _staged_save(self, session: Session, gatherer: Gatherer, reserved: ReservedSlots, extents: range) -> StagedSave:
        return StagedSave(
            session,
            self._area_of(session),
            gatherer,
            layer_bytes=self._layout.extent_bytes,
            extents=extents,
            reserved=(reserved.reservation, reserved.run),
            chunks=len(reserved.offsets),
        )

    def _summary_runs(self, session: Session, reserved: ReservedSlots) -> list[Callable[[], SummaryRun]]:
        """What builds the summaries of reserved slots once they have the KV; where only the daemon writes the arena,
        in an array, which goes through staging."""
        layout, arena, threads = self._layout, session.arena, self._threads
        if not session.welcome.staging_bytes:
            return [partial(begin_summaries, threads, arena, layout, offsets=reserved.offsets, target=None)]
        size = layout.summary_extents * layout.layer_bytes
        built = np.empty((len(reserved.offsets), size), np.uint8)
        return [
            partial(begin_summaries, threads, arena, layout, offsets=reserved.offsets, target=built),
            partial(self._stage_summaries, session, reserved, built),
        ]

    def _stage_summaries(self, session: Session, reserved: ReservedSlots, built: SummaryBytes) -> StagedSave:
        layout, chunks = self._layout, len(built)
        view = extents_view(built, layout.layer_bytes)
        block_ids = np.arange(chunks, dtype=np.int64).reshape(chunks, 1)
        staging = self._area_of(session).mapping
        gatherer = HostGatherer(self._threads, view, staging, layout=layout, block_ids=block_ids)
        run = self._staged_save(session, gatherer, reserved, range(layout.layers, layout.extents))
        run.announce_all()
        return run

    def _gatherer(self, area: StagingArea, block_ids: npt.NDArray[np.int64], blocks: EngineBlocks) -> Gatherer:
        """`block_ids`: [chunk][block]."""
        staging, side = area.mapping, blocks.side
        if side is None:
            return HostGatherer(self._threads, blocks.view, staging, layout=self._layout, block_ids=block_ids)
        device_blocks = DeviceBlocks(side, self._pinned_bytes(area, staging, side))
        extents = OwnExtents.of(self._layout, self._share)
        return DeviceGatherer(device_blocks, staging, extents=extents, block_ids=block_ids)

    def _ran(self, run: Run) -> Run:
        """The run, which `stop` ends."""
        with self._lock:
            self._runs.add(run)
        return run

    def _area_of(self, session: Session) -> StagingArea:
        """The session's staging memory, opened at its first save."""
        with self._lock:
            area = self._areas.get(session)
        if area is None:
            opened = StagingArea(session.open_staging(), self._staged_extent_bytes)
            with self._lock:
                area = self._areas.setdefault(session, opened)
        return area

    def _tier_of(self, session: Session) -> TierMemory:
        with self._lock:
            return self._tiers.setdefault(session, TierMemory())

    def _arena_of(self, session: Session, side: DeviceSide) -> PinnedBytes:
        return self._pinned_bytes(session, session.arena, side)

    def _pinned_bytes(self, owner: object, memory: kvpool_native.Mapping, side: DeviceSide) -> PinnedBytes:
        """Shared memory, registered with the driver from the first copy on: for all devices, by the first one."""
        with self._lock:
            pinned = self._pinned.get(owner)
            if pinned is None:
                pinned = self._pinned[owner] = PinnedBytes(memory, side.device)
            return pinned

    def estimate_s(self, chunks: int) -> float:
        """Seconds to copy chunks, from what this Pool's threads have copied so far; a guess before that."""
        seconds = self._threads.cpu_seconds()
        is_known = seconds > CPU_SECONDS_TO_TRUST and self._threads.bytes_copied() > 0
        rate = self._threads.bytes_copied() / seconds if is_known else COPY_BYTES_PER_S_GUESS
        return chunks * self._own.chunk_bytes / rate

    def stats(self) -> dict[str, int | float | str]:
        """Bytes copied by the native threads, the CPU time it took, and the variants that this process has chosen."""
        copied = {"copied_bytes": self._threads.bytes_copied(), "copy_cpu_seconds": self._threads.cpu_seconds()}
        return {**copied, **kvpool_native.copy_choices()}

    def stop(self) -> None:
        """End the threads; running copies are cancelled, and no memory stays registered with a driver."""
        self._threads.stop()
        with self._lock:
            runs, pinned = list(self._runs), list(self._pinned.values())
            self._pinned.clear()
            self._tiers.clear()
        for run in runs:
            run.cancel()
        for memory in pinned:
            memory.close()


def _check_apart(addresses: npt.NDArray[np.int64], size: int) -> None:
    """Check that rows of this size at these addresses share no byte. Raises InvalidArgument for two that do."""
    order = np.argsort(addresses, kind="stable")
    shared = np.flatnonzero(np.diff(addresses[order]) < size)
    if len(shared):
        one, other = sorted(order[shared[0] : shared[0] + 2].tolist())
        raise InvalidArgument(
            f"rows[{one}] and rows[{other}] are at {int(addresses[one]):#x} and {int(addresses[other]):#x}, expected {size} "
            "bytes of its own for each"
        )
