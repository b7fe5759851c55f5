"""Device tier: the memory of a GPU with copies of chunks that DRAM has, and what becomes of it when the device fails.

    STARTING ──opened──► OK ──hangs, or fails ERRORS_UNTIL_OFFLINE times in a row──► OFFLINE, until the daemon restarts
        └──cannot be opened──► OFFLINE ──a pause, longer each time──► opened again

A device that failed after clients could map its memory is not tried again: a copy that it has left unanswered may still be
written at any time, and clients keep what they have mapped. Nothing depends on this tier: DRAM has every chunk. The daemon
starts and serves without waiting for the device.

Control thread only, except where `Tier` says otherwise. Invariant: the mover has exactly the jobs in `_jobs`.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

import kvpool_native
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.packed_rows import DEVICE_MOVE_ROW
from kvpool.states import Level
from kvpool.tiers.base import (
    NOT_STARTED,
    UNOWNED,
    ArenaMemory,
    Counters,
    Finished,
    Info,
    JobId,
    MemoryExport,
    Moves,
    Outcome,
    TierOwner,
    TierState,
)
from kvpool.tiers.hbm.device import DeviceUnavailable, OpenDevice
from kvpool.tiers.hbm.plan import NAME, HbmPlan
from kvpool.tiers.slots import Slots, SlotSizes
from kvpool.transfer.workers import call_later

log = logging.getLogger(__name__)

# Jobs of which a chunk has failed. A guess: most errors of a driver stay until its process ends.
ERRORS_UNTIL_OFFLINE = 3
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 300.0
# Chunks that are settled in one turn of the control thread, at some 10 µs each.
SETTLED_AT_ONCE = 64
# How long an opening takes until operators read that it does.
OPENING_S = 30.0
# How long a stop waits for the device: for what is under way, and for an opening.
STOP_TIMEOUT_S = 5.0


class HbmTier:
    """See the module, and `Exported`."""

    name = NAME
    level = Level.HBM

    def __init__(
        self,
        plan: HbmPlan,
        memory: ArenaMemory,
        config: Config,
        *,
        open_device: Callable[[HbmPlan, ArenaMemory], OpenDevice] = OpenDevice,
    ) -> None:
        """`open_device` blocks, and raises DeviceUnavailable."""
        self.plan = plan
        self._open_device = open_device
        geometry = plan.geometry
        self.slots = Slots(
            NAME,
            self.level,
            SlotSizes(geometry.segment_bytes, geometry.segments, geometry.max_chunks),
            kvpool_native.Directory.of_copies(memory.directory, geometry, config.dram.policy),
        )
        self.slots.directory.cap_retained(config.dram.retained_quota)
        self.slots.directory.bound_chains(config.server.max_chain_chunks)
        self._memory = memory
        self._owner: TierOwner = UNOWNED
        self._device: OpenDevice | None = None
        self._opening: asyncio.Future[OpenDevice] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._pause_s = FIRST_PAUSE_S
        self._state = TierState.STARTING
        self._reason = ""
        self._is_closing = False
        self._jobs: dict[JobId, int] = {}  # chunks of each that have not ended
        self._ended: deque[tuple[int, int, int]] = deque()  # not reported yet
        self._errors = 0  # jobs in a row
        self._failed_job = NOT_STARTED
        self._failed_chunks = 0

    def __repr__(self) -> str:
        return f"<HbmTier {self.plan.config.device} {self.state.name.lower()}>"

    @property
    def state(self) -> TierState:
        """See the module."""
        return self._state

    @property
    def can_copy(self) -> bool:
        """Whether chunks can be copied and checked."""
        return self._state is TierState.OK

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:  # noqa: ARG002 - nothing is restored
        """Open the device in the background."""
        self._owner = owner
        self._open()

    async def close(self) -> bool:
        """End what is under way. False: the device does not answer, and is abandoned."""
        self._is_closing = True
        if self._retry is not None:
            self._retry.cancel()
        has_opened = await self._wait_for_opening()
        self._become(TierState.OFFLINE, "because the daemon stops")
        if self._device is None:
            return has_opened
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._device.fileno())
        return await loop.run_in_executor(None, self._device.close, STOP_TIMEOUT_S)

    def export(self) -> MemoryExport | None:
        """The memory that clients map."""
        return self._device.export if self._device is not None and self.can_copy else None

    def copy(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start to copy chunks of the arena."""
        if self._device is None or not self.can_copy:
            return NOT_STARTED
        return self._begun(self._device.copy(_rows(moves, namespace.layout)), len(moves))

    def check(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start to compare copies with their checksums."""
        if self._device is None or not self.can_copy:
            return NOT_STARTED
        return self._begun(self._device.check(_rows(moves, namespace.layout)), len(moves))

    def completed(self) -> list[Finished]:
        """Finished chunks, at most one turn's work."""
        if self._device is None:
            return []
        self._ended.extend(self._device.completed())
        finished = []
        for _ in range(len(self._ended) if self._is_closing else min(SETTLED_AT_ONCE, len(self._ended))):
            number, chunk, code = self._ended.popleft()
            job, outcome = JobId(number), Outcome(code)
            self._jobs[job] -= 1
            if not self._jobs[job]:
                del self._jobs[job]
            self._note(job, outcome)
            finished.append(Finished(job, chunk, outcome))
        if self.can_copy and (self._device.is_hung or self._errors >= ERRORS_UNTIL_OFFLINE):
            self._give_up()
        if self._ended:
            asyncio.get_running_loop().call_soon(self._owner.on_completed)
        return finished

    def stats(self) -> Counters:
        """Counters, by name."""
        counted = self._device.stats() if self._device is not None else {}
        return {
            "hbm.state": self._state.name.lower(),
            "hbm.reason": self._reason,
            "hbm.failed_copies": self._failed_chunks,
            **{f"hbm.mover_{name}": count for name, count in counted.items()},
        }

    def info(self) -> Info:
        """The resources in use, for operators."""
        opened = self._device.info() if self._device is not None else {"hbm_device": self.plan.config.device}
        return {
            **opened,
            "hbm_state": self._state.name.lower(),
            "hbm_reason": self._reason,
            "hbm_capacity_bytes": self.plan.size,
            "hbm_segment_bytes": self.plan.geometry.segment_bytes,
            "hbm_max_chunks": self.plan.geometry.max_chunks,
        }

    def verify(self) -> list[str]:
        """Broken invariants, one line each: none, because the link verifies the slots."""
        return []

    def problems(self) -> list[str]:
        """None: a restart opens a device again that was given up, but costs the chunks of DRAM. Any thread."""
        return []

    def shortcomings(self) -> list[str]:
        """A device that is not in use. Any thread."""
        if self._state is TierState.STARTING and self._reason:
            return [f"hbm: {self.plan.config.device} is not open yet: {self._reason}"]
        if self._state is not TierState.OFFLINE or self._is_closing:
            return []
        if self._device is None:
            return [f"hbm: {self.plan.config.device} could not be opened: {self._reason}"]
        return [f"hbm: the device is not used until the daemon restarts: {self._reason}"]

    def _become(self, state: TierState, reason: str) -> None:
        if state is not self._state:
            is_fault = state is TierState.OFFLINE and not self._is_closing
            log.log(logging.WARNING if is_fault else logging.INFO, "hbm tier %s %s", state.name, reason)
        self._state, self._reason = state, reason

    def _open(self) -> None:
        """Open the device on a thread of its own: it may never end."""
        self._retry = None
        loop = asyncio.get_running_loop()
        opening: asyncio.Future[OpenDevice] = loop.create_future()
        opening.add_done_callback(self._note_opening)
        self._opening = opening
        self._late = loop.call_later(OPENING_S, self._note_late_opening)

        def run() -> None:
            try:
                device = self._open_device(self.plan, self._memory)
            except DeviceUnavailable as error:
                # Without its traceback, which has what was taken of the device.
                call_later(loop, _settle, opening, DeviceUnavailable(str(error)))
            else:
                call_later(loop, _settle, opening, device)

        threading.Thread(target=run, name="kvpool-device-open", daemon=True).start()

    def _note_late_opening(self) -> None:
        if self._state is TierState.STARTING:
            self._reason = f"the driver has not answered for {OPENING_S:g} s (is the device healthy? nvidia-smi)"
            log.warning("hbm tier: %s", self._reason)

    def _note_opening(self, opening: "asyncio.Future[OpenDevice]") -> None:
        """The device is open, or is tried again later."""
        if self._late is not None:
            self._late.cancel()
        if opening.cancelled():
            return
        self._opening = None
        error = opening.exception()
        if error is not None:
            self._become(TierState.OFFLINE, str(error))
            if not self._is_closing:
                self._retry = asyncio.get_running_loop().call_later(self._pause_s, self._open)
                self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            return
        self._device = opening.result()
        asyncio.get_running_loop().add_reader(self._device.fileno(), self._owner.on_completed)
        self._become(TierState.OK, f"on {self._device.name}: {self.plan.size} bytes")
        self._owner.on_completed()

    async def _wait_for_opening(self) -> bool:
        """Wait until no opening is under way. False: it does not end, and is abandoned."""
        if self._opening is None:
            return True
        await asyncio.wait([self._opening], timeout=STOP_TIMEOUT_S)
        is_done = self._opening is None or self._opening.done()
        if not is_done:
            self._opening.cancel()
        return is_done

    def _give_up(self) -> None:
        """Use the device no more."""
        assert self._device is not None
        reason = "it does not answer" if self._device.is_hung else f"{self._errors} jobs failed in a row"
        self._become(TierState.OFFLINE, f"because {reason}")
        self._owner.on_lost()

    def _note(self, job: JobId, outcome: Outcome) -> None:
        if outcome is Outcome.FAILED:
            self._errors += job != self._failed_job
            self._failed_job = job
            self._failed_chunks += 1
        elif outcome is not Outcome.CANCELLED:
            self._errors = 0

    def _begun(self, number: int, chunks: int) -> JobId:
        if not number:
            return NOT_STARTED
        self._jobs[JobId(number)] = chunks
        return JobId(number)


def _rows(moves: Moves, layout: Layout) -> bytes:
    """Rows for native code."""
    rows = np.empty(len(moves), DEVICE_MOVE_ROW)
    rows["arena_offset"], rows["arena_slot"] = moves.arena_offsets, moves.arena_slots
    rows["generation"], rows["device_offset"] = moves.generations, moves.offsets
    rows["chunk_bytes"], rows["extents"] = layout.stored_bytes, layout.extents
    return rows.tobytes()


def _settle(opening: "asyncio.Future[OpenDevice]", result: OpenDevice | DeviceUnavailable) -> None:
    """End an opening, unless nobody waits for it any more."""
    if opening.done():
        return
    if isinstance(result, DeviceUnavailable):
        opening.set_exception(result)
    else:
        opening.set_result(result)
