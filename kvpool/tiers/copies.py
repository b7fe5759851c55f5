"""Interface of a tier of copies: memory above an arena, with copies of chunks that the arena has, such as a device's.

The arena has every chunk of the tier, so a copy that leaves it moves no bytes, and one whose chunk leaves the arena goes with
it. The daemon alone writes the memory. Clients map it and read it without a hold: a copy counts only if its slot still has the
same generation in the index after it was read. So the directory clears the generation before the slot can be given to another
chunk, and publishes it after all bytes of the copy are in place.

A job copies or checks some chunks of one namespace:

    copy | check ──a number──► under way ──each chunk once──► DONE | BAD_SOURCE | FAILED | CANCELLED
                └─0: nothing was started

BAD_SOURCE: the arena's bytes are not the chunk's after a copy, the tier's are not after a check. Control thread only, except
where a method says otherwise. No call waits for a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

import kvpool_native
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.packed_rows import DEVICE_MOVE_ROW
from kvpool.tiers.base import ArenaMemory, Counters, Finished, Info, JobId, TierState
from kvpool.tiers.slots import Slots
from kvpool.types import Level


@dataclass(frozen=True, slots=True)
class CopyMoves:
    """Chunks of a job, in columns of one length. A copy goes from an arena's slot (offset, slot number in the index,
    generation) to an offset of the tier's memory. A check has the tier's own slot and generation in these columns."""

    keys: Sequence[bytes]
    arena_offsets: Sequence[int]
    slots: Sequence[int]
    generations: Sequence[int]
    offsets: Sequence[int]

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, layout: Layout) -> bytes:
        """Rows for native code."""
        rows = np.empty(len(self), DEVICE_MOVE_ROW)
        rows["arena_offset"], rows["arena_slot"] = self.arena_offsets, self.slots
        rows["generation"], rows["device_offset"] = self.generations, self.offsets
        rows["chunk_bytes"], rows["extents"] = layout.stored_bytes, layout.extents
        return rows.tobytes()


class MemoryExport(NamedTuple):
    """The tier's memory for clients: the UUID of its device, the bytes to map, and a descriptor, which the tier closes."""

    uuid: bytes
    size: int
    fd: int


class CopyOwner(Protocol):
    """The owner of a tier of copies, which the tier notifies. Called on the control thread."""

    def on_completed(self) -> None:
        """Jobs have completed, or the tier can do more than before: call `completed`."""
        ...

    def on_lost(self) -> None:
        """The memory is not used any more: drop every copy."""
        ...


class _Unowned:
    """The owner of a tier that nobody has started."""

    def on_completed(self) -> None:
        """Ignored: nobody called `start`."""

    def on_lost(self) -> None:
        """Ignored: there are no copies."""


UNOWNED: CopyOwner = _Unowned()


class CopyTier(Protocol):
    """See the module. STARTING: its device is being opened; OK: it is used; OFFLINE: it is not, and has no copies."""

    @property
    def name(self) -> str:
        """Its name in statistics, options and orders of operators."""
        ...

    @property
    def level(self) -> Level:
        """Its number in events and answers: the lower, the faster."""
        ...

    @property
    def slots(self) -> Slots:
        """Its directory and size classes."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes it has room for."""
        ...

    @property
    def state(self) -> TierState:
        """Its state now."""
        ...

    @property
    def can_copy(self) -> bool:
        """Whether `copy` and `check` would start something."""
        ...

    def start(self, namespaces: Namespaces, owner: CopyOwner) -> None:
        """Open the device in the background, then serve until `close`. Never raises: a failure changes the state. REQUIRES: a
        running event loop."""
        ...

    async def close(self) -> bool:
        """End everything; remaining jobs complete as CANCELLED. False where a thread is left waiting for its device."""
        ...

    def export(self) -> MemoryExport | None:
        """The memory that clients map; None while the tier is not OK."""
        ...

    def copy(self, namespace: Namespace, moves: CopyMoves) -> JobId:
        """Start to copy chunks of the arena. The slots on both sides are protected until the job has ended."""
        ...

    def check(self, namespace: Namespace, moves: CopyMoves) -> JobId:
        """Start to compare copies with their checksums, after all other jobs."""
        ...

    def completed(self) -> list[Finished]:
        """The chunks that have ended since the last call, at most one turn's work; `on_completed` is called again for more.

        Reports each chunk of each job exactly once, in any order. After `close` all that are left.
        """
        ...

    def stats(self) -> Counters:
        """Counters by their public names."""
        ...

    def info(self) -> Info:
        """The resources in use, for operators."""
        ...

    def problems(self) -> list[str]:
        """Problems that a restart of the daemon may solve, one line each. Any thread."""
        ...

    def shortcomings(self) -> list[str]:
        """Configured parts that are missing and that a restart would not bring back, one line each. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Plan of a configured tier of copies: what others need before it is made.

    `geometry`: of its memory, which is a region of the arena's index. `descriptors`: file descriptors that it keeps open, and
    those of its driver. `make`: makes the tier over its slots, not started.
    """

    name: str
    level: Level
    geometry: kvpool_native.DirectoryGeometry
    descriptors: int
    make: Callable[[Slots, ArenaMemory, Config], CopyTier]
