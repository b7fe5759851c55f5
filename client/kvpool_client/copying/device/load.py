"""Load of an engine whose KV is on a device, layer by layer; with head groups each group of a layer counts as one.

The native threads first check each layer in the arena (generation and checksum, nothing written). The load then queues the
copies to the device's blocks, a few layers ahead, and reads the generations again when the device has the bytes: only then is
the layer in place. The check and the device read the arena one after the other: a client that overwrites another's slot
between the two is not detected, unless the daemon's write mode is `copy`. Chunks that have a copy in the device tier are
copied from there and not checked; where a copy has gone meanwhile, the chunk's layers so far are checked and copied from the
arena before the layer counts. Copies per byte: one, across the bus or on the device. An error of the driver ends the load with
reason `io`.

Threads: the run's own, and any that waits. `_changed` guards all mutable state and is not held while bytes move.
"""

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.states import LoadReason
from kvpool_client.copying.device.blocks import DeviceBlocks, Event, Spread
from kvpool_client.copying.device.extents import OwnExtents
from kvpool_client.copying.device.sources import Sources

CHECK_SLICE_S = 0.05
# Layers queued on the device ahead of the one that is waited for: enough to keep its copy engine busy (a guess).
LAYERS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ArenaCheck:
    """A native load that writes nothing, of those chunks that are taken from the arena from the start."""

    job: kvpool_native.LoadJob
    chunks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A layer on its way to the first `count` chunks' blocks, of some chunks from copies."""

    layer: int
    count: int
    from_copies: npt.NDArray[np.int64]
    event: Event


class DeviceLoad:
    """See the module. Has the methods of `load.LoadRun`."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        sources: Sources,
        check: ArenaCheck | None,
        extents: OwnExtents,
        *,
        block_ids: npt.NDArray[np.int64],
    ) -> None:
        """`check`: None where no chunk is taken from the arena. Begins at once."""
        self._blocks = blocks
        self._sources = sources
        self._check = check
        self._extents = extents
        self._block_ids = block_ids.reshape(len(sources), -1)
        self._replaced = np.zeros(len(sources), np.int64)  # layers that were copied again; the run's thread alone
        self._changed = threading.Condition()
        self._layers_done = 0  # guarded by _changed
        self._good = len(sources)  # guarded by _changed
        self._reason = LoadReason.COMPLETE  # guarded by _changed
        self._is_cancelled = False  # guarded by _changed
        self._has_ended = False  # guarded by _changed
        try:
            self._mark: Event | None = blocks.after_engine()
        except RuntimeError:  # the device refuses: the run ends with that
            self._mark = None
        self._thread = threading.Thread(target=self._run, name="kvpool-device-load", daemon=True)
        self._thread.start()

    def wait_extent(self, extent: int, timeout_s: float) -> int:
        """1: in place, 0: the load ended before, -1: time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers_done > extent or self._has_ended, timeout_s)
            if self._layers_done > extent:
                return 1 if self._good else 0
            return 0 if self._has_ended else -1

    def wait(self, timeout_s: float) -> bool:
        """Whether the load has ended within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_ended, timeout_s)

    def done(self) -> bool:
        """Whether the load has ended."""
        with self._changed:
            return self._has_ended

    def cancel(self) -> None:
        """End the load; when it has returned, nothing writes to the device."""
        with self._changed:
            self._is_cancelled = True
        if self._check is not None:
            self._check.job.cancel()
        self._thread.join()

    def chunks(self) -> int:
        """Leading chunks that have not failed; of an ended load, the leading chunks whose layers are all in place."""
        with self._changed:
            return self._good if not self._has_ended or self._layers_done == len(self._extents) else 0

    def reason(self) -> int:
        """A `LoadReason` code."""
        with self._changed:
            return self._reason

    def progress(self) -> int:
        """Layers in place, and what the check has dealt with."""
        checked = self._check.job.progress() if self._check is not None else 0
        with self._changed:
            return self._layers_done + checked

    def _run(self) -> None:
        try:
            if self._mark is None:
                raise RuntimeError("the engine's work could not be marked")
            if self._is_engine_done(self._mark):
                self._copy()
        except RuntimeError:  # the driver's words: nothing was loaded
            self._blocks.end_loads()
            self._limit(0, LoadReason.IO)
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            if self._is_cancelled and self._layers_done < len(self._extents) and self._reason != LoadReason.IO:
                self._reason = LoadReason.CANCELLED
            self._has_ended = True
            self._changed.notify_all()

    def _is_engine_done(self, mark: Event) -> bool:
        """Wait until the device has done what the engine had queued before the load: it may still use the blocks. False where
        the load was cancelled."""
        while not mark.wait(CHECK_SLICE_S):
            if self._has_cancelled():
                return False
        return True

    def _copy(self) -> None:
        queued: deque[_Queued] = deque()
        for layer in range(len(self._extents)):
            count = self._checked(layer, queued)
            if not count:
                break
            queued.append(self._queue(layer, count))
            if len(queued) > LAYERS_AHEAD:
                self._settle(queued.popleft())
        while queued:
            self._settle(queued.popleft())

    def _checked(self, layer: int, queued: "deque[_Queued]") -> int:
        """How many chunks have a good layer; settles what is queued while it is waited for. 0 ends the load."""
        if self._check is not None:
            job, chunks = self._check.job, self._check.chunks
            code = job.wait_extent(layer, 0.0)
            while code == -1:
                if queued:
                    self._settle(queued.popleft())
                code = job.wait_extent(layer, 0.0 if queued else CHECK_SLICE_S)
            good = job.chunks() if code == 1 else 0
            if good < len(chunks):
                self._limit(int(chunks[good]), LoadReason(job.reason()))
        self._limit(*self._sources.verify_lost(layer, self._count()))
        return 0 if self._has_cancelled() else self._count()

    def _queue(self, layer: int, count: int) -> _Queued:
        spread = Spread.of(self._sources.addresses(count), self._block_ids[:count])
        from_copies = self._sources.from_copies(count)
        return _Queued(layer, count, from_copies, self._spread(layer, spread))

    def _spread(self, layer: int, spread: Spread) -> Event:
        extents = self._extents
        return self._blocks.queue_spread(layer, spread, extents.payload_bytes, start=extents.start(layer))

    def _settle(self, queued: _Queued) -> None:
        """Wait until the device has the layer's bytes: those of slots that still stand are in place, if all layers before it
        are. In a cancelled load one of them may not be: chunks of later layers came from the arena already."""
        self._blocks.wait(queued.event)
        if not self._is_replaced(queued):
            return
        self._limit(self._standing(min(queued.count, self._count())), LoadReason.GONE)
        with self._changed:
            if self._layers_done == queued.layer:
                self._layers_done += 1
                self._changed.notify_all()

    def _is_replaced(self, queued: _Queued) -> bool:
        """Copy the layers so far of chunks whose copies have gone, from the arena. False: the load was cancelled instead."""
        lost = self._sources.lost_of(queued.from_copies)
        if not len(lost):
            return True
        if self._has_cancelled():
            return False
        self._limit(*self._sources.verify_lost(queued.layer, self._count()))
        lost, event = lost[lost < self._count()], None
        for layer in range(queued.layer + 1):
            chosen = lost[self._replaced[lost] <= layer]
            if len(chosen):
                spread = Spread.of(self._sources.arena_addresses(chosen), self._block_ids[chosen])
                event = self._spread(layer, spread)
        self._replaced[lost] = queued.layer + 1
        if event is not None:
            self._blocks.wait(event)
        return True

    def _standing(self, count: int) -> int:
        """Leading chunks whose slots were not given away while the device read them."""
        return next((number for number in range(count) if not self._sources.stands(number)), count)

    def _limit(self, count: int, reason: LoadReason) -> None:
        with self._changed:
            if count < self._good:
                self._good, self._reason = count, reason

    def _count(self) -> int:
        with self._changed:
            return self._good

    def _has_cancelled(self) -> bool:
        with self._changed:
            return self._is_cancelled
