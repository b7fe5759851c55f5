"""Copies of loads and saves between engine memory and the pool, by native threads, or by torch on a device.

Checks what the caller passed, raises InvalidArgument, and starts runs. Any thread. Lock: `_lock` guards the arenas.
"""

import logging
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_client.connection.session import Session
from kvpool_client.copying.cache import SKIP_BLOCK, Cache, contiguous_view
from kvpool_client.copying.device_arena import PinnedBytes
from kvpool_client.copying.device_blocks import DeviceBlocks
from kvpool_client.copying.device_ring import StagingRing
from kvpool_client.copying.device_runs import DeviceLoad, DeviceSave
from kvpool_client.copying.device_side import DeviceSide
from kvpool_client.copying.gather import DeviceGatherer, Gatherer, HostGatherer
from kvpool_client.copying.staged_save import StagedSave
from kvpool_client.copying.staging_memory import StagingArea
from kvpool_client.lease import Lease
from kvpool_client.load import LoadRun
from kvpool_client.save import SaveRun

log = logging.getLogger(__name__)

COPY_BYTES_PER_S_GUESS = 4e9
CPU_SECONDS_TO_TRUST = 0.01


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """Checked engine memory: `block_ids` has the same number of ids for each chunk. `cache` None: one array."""

    view: kvpool_native.CacheView
    block_ids: npt.NDArray[np.int64]
    cache: Cache | None

    @property
    def is_on_device(self) -> bool:
        """Whether the CPU cannot read and write it."""
        return self.cache is not None and self.cache.device != "cpu"

    def of_chunks(self, chosen: list[int], chunks: int) -> npt.NDArray[np.int64]:
        """The ids of some of the chunks."""
        return np.ascontiguousarray(self.block_ids.reshape(chunks, -1)[chosen].reshape(-1))


@dataclass(frozen=True, slots=True)
class ReservedSlots:
    """Slots that a save may write: of which reservation, their offsets in the arena, and the engine's blocks for them."""

    reservation: int
    offsets: npt.NDArray[np.uint64]
    block_ids: npt.NDArray[np.int64]


class Copies:
    """The copying side of one Pool."""

    def __init__(self, layout: Layout, threads: int) -> None:
        self._layout = layout
        self._threads = kvpool_native.CopyPool(threads)
        self._lock = threading.Lock()
        self._arenas: weakref.WeakKeyDictionary[Session, PinnedBytes] = weakref.WeakKeyDictionary()  # guarded by _lock
        self._sides: weakref.WeakKeyDictionary[Cache, DeviceSide] = weakref.WeakKeyDictionary()  # guarded by _lock
        self._rings: dict[str, StagingRing] = {}  # guarded by _lock
        self._areas: weakref.WeakKeyDictionary[Session, StagingArea] = weakref.WeakKeyDictionary()  # guarded by _lock
        self._pinned: weakref.WeakKeyDictionary[StagingArea, PinnedBytes] = (
            weakref.WeakKeyDictionary()
        )  # guarded by _lock

    def blocks(
        self, cache: Cache | None, block_ids: object, *, array: object, chunks: int, is_load: bool
    ) -> EngineBlocks:
        """The engine memory of `chunks` chunks. Raises InvalidArgument."""
        if self._layout.rank is None:
            raise InvalidArgument("a Pool with rank=None looks up and acquires, it does not load or save")
        if (cache is None) == (array is None):
            raise InvalidArgument("expected either cache and block_ids, or one contiguous array")
        if cache is not None:
            if not isinstance(cache, Cache) or cache.layout != self._layout:
                raise InvalidArgument(f"cache is {cache!r}, expected one registered with this Pool's layout")
            ids = cache.checked_block_ids(() if block_ids is None else block_ids, chunks, may_skip=is_load)
            return EngineBlocks(cache.view, ids, cache)
        if block_ids is not None:
            raise InvalidArgument("block_ids are given with a contiguous array, expected none")
        view, rows = contiguous_view(array, self._layout, is_target=is_load)
        if rows != chunks:
            raise InvalidArgument(f"the array has {rows} rows, expected {chunks}, one for each chunk")
        return EngineBlocks(view, np.arange(chunks, dtype=np.int64), None)

    def load(self, session: Session, lease: Lease, first_chunk: int, blocks: EngineBlocks) -> LoadRun | None:
        """Start a load of the lease's chunks from `first_chunk` on. None where the lease names memory that is not there."""
        ids = np.full_like(blocks.block_ids, SKIP_BLOCK) if blocks.is_on_device else blocks.block_ids
        try:
            offsets, slots, generations = (
                column[first_chunk:] for column in (lease.offsets, lease.slots, lease.generations)
            )
            job = self._threads.load(
                blocks.view,
                session.arena,
                session.index,
                offsets.tobytes(),
                slots.tobytes(),
                generations.tobytes(),
                ids.tobytes(),
                self._layout.layers,
                self._layout.layer_bytes,
                session.welcome.verify != "cold",
            )
        except ValueError as error:  # the blocks are right: `blocks` has checked them
            log.warning("a lease names what the daemon's memory has not: %s", error)
            return None
        if not blocks.is_on_device or blocks.cache is None:
            return job
        return DeviceLoad(
            DeviceBlocks(self.side_of(blocks.cache), self._arena_of(session, blocks.cache)),
            job,
            session.index,
            self._layout,
            offsets=offsets.tolist(),
            slots=slots.tolist(),
            generations=generations.tolist(),
            block_ids=blocks.block_ids,
        )

    def save(self, session: Session, blocks: EngineBlocks, reserved: ReservedSlots) -> SaveRun:
        """Prepare a save into reserved slots. Raises DaemonUnreachable or Refused."""
        offsets, block_ids = reserved.offsets, reserved.block_ids
        if session.welcome.staging_bytes:
            area = self._area_of(session)
            gatherer = self._gatherer(area, block_ids.reshape(len(offsets), -1), blocks)
            return StagedSave(
                session,
                area,
                gatherer,
                layout=self._layout,
                reservation=reserved.reservation,
                chunks=len(offsets),
            )
        if blocks.is_on_device and blocks.cache is not None:
            device_blocks = DeviceBlocks(self.side_of(blocks.cache), self._arena_of(session, blocks.cache))
            return DeviceSave(device_blocks, session.arena, self._layout, offsets=offsets.tolist(), block_ids=block_ids)
        return self._threads.save(
            blocks.view,
            session.arena,
            offsets.tobytes(),
            block_ids.tobytes(),
            self._layout.layers,
            self._layout.layer_bytes,
        )

    def _gatherer(self, area: StagingArea, block_ids: npt.NDArray[np.int64], blocks: EngineBlocks) -> Gatherer:
        """`block_ids`: [chunk][block]."""
        staging = area.mapping
        if not blocks.is_on_device or blocks.cache is None:
            return HostGatherer(self._threads, blocks.view, staging, layout=self._layout, block_ids=block_ids)
        with self._lock:
            pinned = self._pinned.get(area)
            if pinned is None:
                pinned = self._pinned[area] = PinnedBytes(staging.view(), blocks.cache.device)
        return DeviceGatherer(
            DeviceBlocks(self.side_of(blocks.cache), pinned), staging, layout=self._layout, block_ids=block_ids
        )

    def side_of(self, cache: Cache) -> DeviceSide:
        """A cache's streams, and the staging ring that all caches of its device share; made at its first copy."""
        with self._lock:
            side = self._sides.get(cache)
            if side is None:
                side = self._sides[cache] = DeviceSide(cache, self._ring_of(cache.device))
            return side

    def _ring_of(self, device: str) -> StagingRing:
        import torch  # optional heavy dependency: an engine with tensors on a device has it loaded

        if device not in self._rings:
            self._rings[device] = StagingRing(torch, device, self._layout.layer_bytes)
        return self._rings[device]

    def _area_of(self, session: Session) -> StagingArea:
        """The session's staging memory, opened at its first save."""
        with self._lock:
            area = self._areas.get(session)
        if area is None:
            opened = StagingArea(session.open_staging(), self._layout.layer_bytes)
            with self._lock:
                area = self._areas.setdefault(session, opened)
        return area

    def _arena_of(self, session: Session, cache: Cache) -> PinnedBytes:
        """The session's arena, registered with the cache's device from the first copy on."""
        with self._lock:
            arena = self._arenas.get(session)
            if arena is None:
                arena = self._arenas[session] = PinnedBytes(
                    session.arena.view(), cache.device, is_writable=session.arena.writable
                )
            return arena

    def estimate_s(self, chunks: int) -> float:
        """Seconds to copy chunks, from what this Pool's threads have copied so far; a guess before that."""
        seconds = self._threads.cpu_seconds()
        is_known = seconds > CPU_SECONDS_TO_TRUST and self._threads.bytes_copied() > 0
        rate = self._threads.bytes_copied() / seconds if is_known else COPY_BYTES_PER_S_GUESS
        return chunks * self._layout.chunk_bytes / rate

    def stats(self) -> dict[str, int | float | str]:
        """Bytes copied by the native threads, the CPU time it took, and the variants that this process has chosen."""
        copied = {"copied_bytes": self._threads.bytes_copied(), "copy_cpu_seconds": self._threads.cpu_seconds()}
        return {**copied, **kvpool_native.copy_choices()}

    def stop(self) -> None:
        """End the threads; running copies are cancelled."""
        self._threads.stop()
