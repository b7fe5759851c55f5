"""Staged slots of one reservation, which the daemon fills itself: which extents are copied, with the checksums of the copies.

Where clients may not write the arena they write staging memory of their own, and the daemon copies from there. Only bytes that
it has stored and checksummed in the same pass count: a chunk can be published when every extent of it has been copied, and with
these checksums alone. Holds no payload. Control thread only.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.states import SaveState

# In the arena, of the slots of some chunks.
Offsets = npt.NDArray[np.uint64]


class Extents(NamedTuple):
    """Extents of a reservation's slots: of these chunks, counted from its first, the extents of these numbers."""

    chunks: range
    numbers: range

    @property
    def place(self) -> tuple[slice, slice]:
        """Where they are in an array [chunk][extent]."""
        return slice(self.chunks.start, self.chunks.stop), slice(self.numbers.start, self.numbers.stop)


class StagedSlots:
    """The reserved slots of one reservation, in order.

    Invariant: where an extent `_has_copy`, `_checksums` has that of a finished copy. Arrays [chunk][extent].
    """

    def __init__(self, *, states: bytes, offsets: bytes, extents: int) -> None:
        """Of an answer to `reserve`: a state and a u64 offset for each chunk asked."""
        are_reserved = np.frombuffer(states, np.uint8) == SaveState.RESERVED
        self._offsets: Offsets = np.frombuffer(offsets, "<u8")[are_reserved]
        shape = len(self._offsets), extents
        self._has_copy = np.zeros(shape, np.bool_)
        self._checksums = np.zeros(shape, "<u4")

    def __repr__(self) -> str:
        return f"<StagedSlots {np.count_nonzero(self._has_copy)}/{self._has_copy.size} extents copied>"

    def offsets(self, chunks: range) -> Offsets:
        """Arena offsets of these chunks."""
        return self._offsets[chunks.start : chunks.stop]

    def clear(self, extents: Extents) -> None:
        """Clear these extents, which are about to be written: until `note` they have no copy."""
        self._has_copy[extents.place] = False

    def note_copy(self, extents: Extents, checksums: bytes) -> None:
        """Note that these extents have been copied; `checksums` is u32 [chunk][extent], or empty where they have not."""
        if checksums:
            self._has_copy[extents.place] = True
            self._checksums[extents.place] = np.frombuffer(checksums, "<u4").reshape(len(extents.chunks), -1)

    def are_whole(self, first: int, checksums: bytes) -> list[bool]:
        """Whether each chunk from the `first` on was copied completely and has the checksums of its writer."""
        given = np.frombuffer(checksums, "<u4").reshape(-1, self._has_copy.shape[1])
        part = slice(first, first + len(given))
        are_whole: list[bool] = (self._has_copy[part] & (self._checksums[part] == given)).all(axis=1).tolist()
        return are_whole
