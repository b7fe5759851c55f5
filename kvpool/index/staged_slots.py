"""Staged slots of one reservation, which the daemon fills itself: which extents are copied, with the checksums of the copies.

Where clients may not write the arena they write staging memory of their own, and the daemon copies from there. Only bytes that
it has stored and checksummed in the same pass count: a chunk can be published when every extent of it has been copied, and with
these checksums alone. Holds no payload. Control thread only.
"""

from typing import NamedTuple

from kvpool.packed_numbers import U32_BYTES, u32_of, u64_of
from kvpool.states import SaveState

# In the arena, of the slots of some chunks.
Offsets = list[int]


class Extents(NamedTuple):
    """Extents of a reservation's slots: of these chunks, counted from its first, the extents of these numbers."""

    chunks: range
    numbers: range


class StagedSlots:
    """The reserved slots of one reservation, in order.

    Invariant: where `_has_copy` is 1 for an extent, `_checksums` has that of a finished copy: a byte and a u32 for each
    [chunk][extent].
    """

    def __init__(self, *, states: bytes, offsets: bytes, extents: int) -> None:
        """Of an answer to `reserve`: a state and a u64 offset for each chunk asked."""
        pairs = zip(states, u64_of(offsets), strict=True)
        self._offsets = [offset for state, offset in pairs if state == SaveState.RESERVED]
        self._extents = extents
        self._has_copy = bytearray(len(self._offsets) * extents)
        self._checksums = bytearray(len(self._has_copy) * U32_BYTES)

    def __repr__(self) -> str:
        return f"<StagedSlots {self._has_copy.count(1)}/{len(self._has_copy)} extents copied>"

    def offsets(self, chunks: range) -> Offsets:
        """Arena offsets of these chunks."""
        return self._offsets[chunks.start : chunks.stop]

    def clear(self, extents: Extents) -> None:
        """Clear these extents, which are about to be written: until `note` they have no copy."""
        self._mark(extents, b"\0")

    def note_copy(self, extents: Extents, checksums: bytes) -> None:
        """Note that these extents have been copied; `checksums` is u32 [chunk][extent], or empty where they have not."""
        if not checksums:
            return
        self._mark(extents, b"\1")
        own, given = u32_of(self._checksums), u32_of(checksums)
        for at, place in enumerate(self._places(extents)):
            own[place] = given[at :: len(extents.numbers)]

    def are_whole(self, first: int, checksums: bytes) -> list[bool]:
        """Whether each chunk from the `first` on was copied completely and has the checksums of its writer."""
        count, size = self._extents, self._extents * U32_BYTES
        every = b"\1" * count
        end = first + len(checksums) // size
        return [
            self._has_copy[at * count : (at + 1) * count] == every
            and self._checksums[at * size : (at + 1) * size] == checksums[(at - first) * size : (at - first + 1) * size]
            for at in range(first, end)
        ]

    def _mark(self, extents: Extents, has_copy: bytes) -> None:
        for place in self._places(extents):
            self._has_copy[place] = has_copy * len(extents.chunks)

    def _places(self, extents: Extents) -> list[slice]:
        """Where each of the extents is in the chunks' rows."""
        begin, end = extents.chunks.start * self._extents, extents.chunks.stop * self._extents
        return [slice(begin + number, end, self._extents) for number in extents.numbers]
