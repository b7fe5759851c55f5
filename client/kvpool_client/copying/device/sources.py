"""Sources of a load onto a device: where each chunk's bytes come from, and by which words they are still the chunk's.

Every leased chunk is in the arena. Some have a copy in the device tier's memory, which nobody holds: it counts only while the
generation of its slot stands, and the chunk is taken from the arena afterwards. Columns have a row for each chunk. One thread,
the load's.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.states import LoadReason
from kvpool_client.copying.device.extents import OwnExtents

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ArenaChunks:
    """Leased chunks in the arena, and the index that has their generations and checksums."""

    arena: kvpool_native.Mapping
    index: kvpool_native.IndexView
    offsets: Words
    slots: Words
    generations: Words

    def __len__(self) -> int:
        return len(self.offsets)

    def of(self, chosen: npt.NDArray[np.int64]) -> "ArenaChunks":
        """Some of them."""
        return ArenaChunks(self.arena, self.index, self.offsets[chosen], self.slots[chosen], self.generations[chosen])


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """Copies of the same chunks in memory of the device, at addresses; generation 0 where a chunk has none. `memory` keeps it
    mapped."""

    memory: object
    addresses: Words
    slots: Words
    generations: Words


class Sources:
    """See the module. Invariant: a chunk that is taken from the arena once is never taken from its copy again."""

    def __init__(
        self, chunks: ArenaChunks, arena_addresses: Words, copies: DeviceCopies | None, extents: OwnExtents
    ) -> None:
        """`arena_addresses`: where the arena has the chunks in this process."""
        self._chunks = chunks
        self._arena_addresses = arena_addresses
        self._copies = copies
        self._extents = extents
        self._from_copy = np.zeros(len(chunks), np.bool_) if copies is None else copies.generations != 0
        self._verified = np.zeros(len(chunks), np.int64)  # leading layers of a lost copy's chunk that the arena gave

    def __len__(self) -> int:
        return len(self._chunks)

    def addresses(self, chosen: npt.NDArray[np.int64]) -> Words:
        """Where these chunks are taken from now."""
        if self._copies is None:
            return self._arena_addresses[chosen]
        return np.where(self._from_copy, self._copies.addresses, self._arena_addresses)[chosen]

    def from_arena(self) -> npt.NDArray[np.int64]:
        """The chunks that are taken from the arena now."""
        return np.flatnonzero(~self._from_copy)

    def arena_addresses(self, chosen: npt.NDArray[np.int64]) -> Words:
        """Where the arena has these chunks."""
        return self._arena_addresses[chosen]

    def from_copies(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of these chunks, those that are taken from copies now."""
        found: npt.NDArray[np.int64] = chosen[self._from_copy[chosen]]
        return found

    def lost_of(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of chunks that were taken from copies, those whose copy has gone; they are taken from the arena from now on."""
        if self._copies is None or not len(chosen):
            return chosen
        slots, generations = self._copies.slots, self._copies.generations
        stands = [self._chunks.index.generation_at(int(slots[i])) == int(generations[i]) for i in chosen.tolist()]
        lost = chosen[~(np.array(stands, np.bool_) & self._from_copy[chosen])]
        self._from_copy[lost] = False
        return lost

    def verify_lost(self, layer: int, chosen: npt.NDArray[np.int64], *, is_set: bool) -> list[tuple[int, LoadReason]]:
        """Compare `layer`, and those before it, of every one of these chunks whose copy has gone with its checksums. Those that
        are not good, and why; the first one alone where they are no set."""
        failed: list[tuple[int, LoadReason]] = []
        if self._copies is None:
            return failed
        has_lost = (self._copies.generations != 0) & ~self._from_copy
        for number in chosen[has_lost[chosen]].tolist():
            if not self._is_good(number, layer):
                failed.append((number, LoadReason.CHECKSUM if self.stands(number) else LoadReason.GONE))
                if not is_set:
                    break
        return failed

    def stands(self, number: int) -> bool:
        """Whether the arena's slot was not given away."""
        chunks = self._chunks
        return chunks.index.generation_at(int(chunks.slots[number])) == int(chunks.generations[number])

    def _is_good(self, number: int, layer: int) -> bool:
        chunks, extents = self._chunks, self._extents
        start, slot = int(chunks.offsets[number]), int(chunks.slots[number])
        for own in range(int(self._verified[number]), layer + 1):
            found = int.from_bytes(extents.checksums(chunks.arena, start + extents.start(own)), "little")
            if found != chunks.index.checksum_at(slot, extents.numbers[own]):
                return False
            self._verified[number] = own + 1
        return True
