"""Load of an engine whose KV is on a device, layer by layer; with head groups each group of a layer counts as one.

The native threads first check each layer in the arena (generation and checksum, nothing written). The load then queues the
copies to the device's blocks, a few layers ahead, and reads the generations again when the device has the bytes: only then is
the layer in place. The check and the device read the arena one after the other: a client that overwrites another's slot
between the two is not detected, unless the daemon's write mode is `copy`. Chunks that have a copy in the device tier are
copied from there and not checked; where a copy has gone meanwhile, the chunk's layers so far are checked and copied from the
arena before the layer counts. Copies per byte: one, across the bus or on the device. An error of the driver ends the load with
reason `io`. A chunk that fails takes those behind it along; of a set each is alone.

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
_COMPLETE, _CANCELLED = int(LoadReason.COMPLETE), int(LoadReason.CANCELLED)


@dataclass(frozen=True, slots=True)
class ArenaCheck:
    """A native load that writes nothing, of those chunks that are taken from the arena from the start."""

    job: kvpool_native.LoadJob
    chunks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A layer on its way to the blocks of these `chunks`, of some of them from copies."""

    layer: int
    chunks: npt.NDArray[np.int64]
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
        is_set: bool = False,
    ) -> None:
        """`check`: None where no chunk is taken from the arena. `is_set`: each chunk is alone, also in the check. Begins at
        once."""
        self._blocks = blocks
        self._sources = sources
        self._check = check
        self._extents = extents
        self._is_set = is_set
        self._block_ids = block_ids.reshape(len(sources), -1)
        self._replaced = np.zeros(len(sources), np.int64)  # layers that were copied again; the run's thread alone
        self._changed = threading.Condition()
        self._layers_done = 0  # guarded by _changed
        self._reasons = np.zeros(
            len(sources), np.uint8
        )  # guarded by _changed; a LoadReason of each, COMPLETE: not failed
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
                return 1 if self._is_set or not self._reasons[0] else 0
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
            are_good = self._reasons == _COMPLETE
            leading = len(are_good) if are_good.all() else int(are_good.argmin())
            return leading if not self._has_ended or self._layers_done == len(self._extents) else 0

    def reason(self) -> int:
        """A `LoadReason` code."""
        with self._changed:
            failed = self._reasons[self._reasons != _COMPLETE]
            was_cut_short = self._has_ended and self._is_cancelled and self._layers_done < len(self._extents)
            if was_cut_short and LoadReason.IO not in failed:
                return _CANCELLED
            return int(failed[0]) if len(failed) else _COMPLETE

    def reasons(self) -> bytes:
        """A `LoadReason` code of each chunk, as of a native load of a set: CANCELLED for one without a verdict."""
        with self._changed:
            has_verdicts = self._has_ended and self._layers_done == len(self._extents)
            found = self._reasons if has_verdicts else np.where(self._reasons == _COMPLETE, _CANCELLED, self._reasons)
            return found.astype(np.uint8).tobytes()

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
            with self._changed:
                self._reasons[self._reasons == _COMPLETE] = LoadReason.IO
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
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
            chunks = self._checked(layer, queued)
            if not len(chunks):
                break
            queued.append(self._queue(layer, chunks))
            if len(queued) > LAYERS_AHEAD:
                self._settle(queued.popleft())
        while queued:
            self._settle(queued.popleft())

    def _checked(self, layer: int, queued: "deque[_Queued]") -> npt.NDArray[np.int64]:
        """The chunks that have a good layer; settles what is queued while it is waited for. None of them ends the load."""
        if self._check is not None:
            job = self._check.job
            code = job.wait_extent(layer, 0.0)
            while code == -1:
                if queued:
                    self._settle(queued.popleft())
                code = job.wait_extent(layer, 0.0 if queued else CHECK_SLICE_S)
            self._note_check(self._check, has_ended=code == 0)
        self._verify_lost(layer)
        return self._good_chunks() if not self._has_cancelled() else np.empty(0, np.int64)

    def _note_check(self, check: ArenaCheck, *, has_ended: bool) -> None:
        """Take what the check has found so far. `has_ended`: it comes to no layer more."""
        if self._is_set:
            undecided = (_COMPLETE,) if has_ended else (_COMPLETE, _CANCELLED)
            for chunk, code in zip(check.chunks.tolist(), check.job.reasons(), strict=True):
                if code not in undecided:
                    self._fail(chunk, LoadReason(code))
        elif (good := 0 if has_ended else check.job.chunks()) < len(check.chunks):
            self._fail(int(check.chunks[good]), LoadReason(check.job.reason()))

    def _verify_lost(self, layer: int) -> None:
        for chunk, reason in self._sources.verify_lost(layer, self._good_chunks(), is_set=self._is_set):
            self._fail(chunk, reason)

    def _queue(self, layer: int, chunks: npt.NDArray[np.int64]) -> _Queued:
        spread = Spread.of(self._sources.addresses(chunks), self._block_ids[chunks])
        from_copies = self._sources.from_copies(chunks)
        return _Queued(layer, chunks, from_copies, self._spread(layer, spread))

    def _spread(self, layer: int, spread: Spread) -> Event:
        extents = self._extents
        return self._blocks.queue_spread(layer, spread, extents.payload_bytes, start=extents.start(layer))

    def _settle(self, queued: _Queued) -> None:
        """Wait until the device has the layer's bytes: those of slots that still stand are in place, if all layers before it
        are. In a cancelled load one of them may not be: chunks of later layers came from the arena already."""
        self._blocks.wait(queued.event)
        if not self._is_replaced(queued):
            return
        self._fail_gone(self._still_good(queued.chunks))
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
        self._verify_lost(queued.layer)
        lost, event = self._still_good(lost), None
        for layer in range(queued.layer + 1):
            chosen = lost[self._replaced[lost] <= layer]
            if len(chosen):
                spread = Spread.of(self._sources.arena_addresses(chosen), self._block_ids[chosen])
                event = self._spread(layer, spread)
        self._replaced[lost] = queued.layer + 1
        if event is not None:
            self._blocks.wait(event)
        return True

    def _fail_gone(self, chunks: npt.NDArray[np.int64]) -> None:
        """Those whose slots were given away while the device read them are not good."""
        for chunk in chunks.tolist():
            if not self._sources.stands(chunk):
                self._fail(chunk, LoadReason.GONE)
                if not self._is_set:
                    break

    def _fail(self, chunk: int, reason: LoadReason) -> None:
        """A chunk has failed, and with it those behind it, where it is not alone."""
        with self._changed:
            failed = self._reasons[chunk : chunk + 1] if self._is_set else self._reasons[chunk:]
            failed[failed == _COMPLETE] = reason

    def _good_chunks(self) -> npt.NDArray[np.int64]:
        """The chunks that have not failed."""
        with self._changed:
            return np.flatnonzero(self._reasons == _COMPLETE)

    def _still_good(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        with self._changed:
            found: npt.NDArray[np.int64] = chunks[self._reasons[chunks] == _COMPLETE]
        return found

    def _has_cancelled(self) -> bool:
        with self._changed:
            return self._is_cancelled
