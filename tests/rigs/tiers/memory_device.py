"""A device in memory behind the device tier: `OpenDevice` without a driver, which fails, hangs and withholds on command.

A job's bytes move when it is given; its chunks are reported by the next turn of the event loop, or when a test releases them.
"""

import os
import struct
from collections.abc import Callable
from typing import cast

import kvpool_native
from kvpool.config.config import Config
from kvpool.pool.lower_tiers import Planner, TierPlan
from kvpool.tiers.base import ArenaMemory, Info, MemoryExport, Outcome
from kvpool.tiers.hbm.device import DeviceUnavailable, OpenDevice
from kvpool.tiers.hbm.plan import DESCRIPTORS, HbmPlan, plan_hbm
from kvpool.tiers.hbm.tier import HbmTier

UUID = bytes(range(16))
ROW = struct.Struct("<6Q")  # arena offset, slot, generation, offset, bytes of the chunk, extents
# One extent moves at a time.
JOBS_MAX = 8


class MemoryDevice:
    """See the module. `outcome_of`: the end of a chunk, by the kind of its job and its row."""

    name = "memory"

    def __init__(self, plan: HbmPlan, memory: ArenaMemory) -> None:
        self.memory = kvpool_native.Mapping.create("memory-device", plan.size)
        self.is_hung = False
        self.is_withholding = False
        self.closes = True
        self.outcome_of: Callable[[str, int], Outcome] = lambda _kind, _number: Outcome.DONE
        self._arena = memory.arena
        self._index = kvpool_native.IndexView(memory.index)
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._jobs = 0
        self._chunks = 0
        self._ended: list[tuple[int, int, int]] = []
        self._withheld: list[tuple[int, int, int]] = []

    @property
    def export(self) -> MemoryExport:
        return MemoryExport(UUID, self.memory.size, self.memory.fd)

    def fileno(self) -> int:
        return self._event

    def copy(self, rows: bytes) -> int:
        return self._start("copy", rows)

    def check(self, rows: bytes) -> int:
        return self._start("check", rows)

    def completed(self) -> list[tuple[int, int, int]]:
        if self._ended:
            os.eventfd_read(self._event)
        ended, self._ended = self._ended, []
        return ended

    def release(self) -> None:
        """Report what was withheld, the last chunk first."""
        self._report(self._withheld[::-1])
        self._withheld = []

    def hang(self) -> None:
        """Answer nothing any more: all that is under way has failed."""
        self.is_hung = True
        self._report([(job, chunk, Outcome.FAILED) for job, chunk, _ in self._withheld])
        self._withheld = []

    def spoil(self, offset: int) -> None:
        """Change a byte of a copy."""
        self.memory.view()[offset] ^= 0xFF

    def stats(self) -> dict[str, int | float]:
        return {"jobs": self._jobs}

    def info(self) -> Info:
        return {"hbm_device": self.name}

    def close(self, timeout_s: float) -> bool:
        self._report([(job, chunk, Outcome.CANCELLED) for job, chunk, _ in self._withheld])
        self._withheld = []
        return self.closes

    def _start(self, kind: str, rows: bytes) -> int:
        if len({job for job, _, _ in self._withheld}) >= JOBS_MAX:
            return 0
        self._jobs += 1
        ended = []
        for chunk, row in enumerate(ROW.iter_unpack(rows)):
            self._chunks += 1
            outcome = Outcome.FAILED if self.is_hung else self.outcome_of(kind, self._chunks)
            if outcome is Outcome.DONE:
                outcome = self._copy(row) if kind == "copy" else self._check(row)
            ended.append((self._jobs, chunk, int(outcome)))
        if self.is_withholding:
            self._withheld += ended
        else:
            self._report(ended)
        return self._jobs

    def _copy(self, row: tuple[int, ...]) -> Outcome:
        source, slot, generation, target, size, extents = row
        if self._index.generation_at(slot) != generation:
            return Outcome.FAILED
        found = kvpool_native.copy_extents(
            self.memory, target.to_bytes(8, "little"), self._arena, source, extents, size // extents
        )
        return self._compare(found, slot, extents)

    def _check(self, row: tuple[int, ...]) -> Outcome:
        _, slot, _, offset, size, extents = row
        return self._compare(
            kvpool_native.extent_checksums(self.memory, offset, size // extents, extents), slot, extents
        )

    def _compare(self, found: bytes, slot: int, extents: int) -> Outcome:
        expected = struct.pack(f"<{extents}I", *(self._index.checksum_at(slot, extent) for extent in range(extents)))
        return Outcome.DONE if found == expected else Outcome.BAD_SOURCE

    def _report(self, ended: list[tuple[int, int, int]]) -> None:
        if ended:
            if not self._ended:
                os.eventfd_write(self._event, 1)
            self._ended += ended


def copy_planner(made: list[MemoryDevice], failures: list[str] | None = None) -> Planner:
    """A line of the pool's composition: the device tier over such devices, which are added to the list. While there are
    `failures`, each opening takes one and fails for that reason."""

    def open_device(plan: HbmPlan, memory: ArenaMemory) -> OpenDevice:
        if failures:
            raise DeviceUnavailable(failures.pop(0))
        made.append(MemoryDevice(plan, memory))
        return cast(OpenDevice, made[-1])

    def plan(config: Config) -> TierPlan | None:
        planned = plan_hbm(config)
        return TierPlan(
            lambda site: site.copies(HbmTier(planned, site.memory, site.config, open_device=open_device)),
            region=planned.geometry,
            descriptors=DESCRIPTORS,
        )

    return plan
