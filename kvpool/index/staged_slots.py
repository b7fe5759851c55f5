"""Staged slots of one reservation, which the daemon fills itself: which extents are copied, with the checksums of the copies.

Where clients may not write the arena they write staging memory of their own, and the daemon copies from there. Only bytes that
it has stored and checksummed in the same pass count: a chunk can be published when every extent of it has been copied, and with
these checksums alone. Holds no payload. Control thread only.
"""

from typing import NamedTuple

from kvpool.ids import CHECKSUM_BYTES
from kvpool.states import SaveState

OFFSET_BYTES = 8


class Extents(NamedTuple):
    """Extents of a reservation's slots: of these chunks, counted from its first, the extents of these numbers."""

    chunks: range
    numbers: range


class StagedSlots:
    """The reserved slots of one reservation, in order.

    Invariant: `_has_copy` has a byte for each extent of each chunk, 1 exactly where `_checksums` has that of a finished copy.
    """

    def __init__(self, *, states: bytes, offsets: bytes, extents: int) -> None:
        """Of an answer to `reserve`: a state and a u64 offset for each chunk asked."""
        self._extents = extents
        self._offsets = b"".join(
            offsets[number * OFFSET_BYTES : (number + 1) * OFFSET_BYTES]
            for number, state in enumerate(states)
            if state == SaveState.RESERVED
        )
        self._has_copy = bytearray(len(self._offsets) // OFFSET_BYTES * extents)
        self._checksums = bytearray(len(self._has_copy) * CHECKSUM_BYTES)

    def __repr__(self) -> str:
        return f"<StagedSlots {sum(self._has_copy)}/{len(self._has_copy)} extents copied>"

    def offsets(self, chunks: range) -> tuple[int, ...]:
        """Arena offsets of these chunks."""
        column = memoryview(self._offsets)[chunks.start * OFFSET_BYTES : chunks.stop * OFFSET_BYTES]
        return tuple(
            int.from_bytes(column[at : at + OFFSET_BYTES], "little") for at in range(0, len(column), OFFSET_BYTES)
        )

    def clear(self, extents: Extents) -> None:
        """Clear these extents, which are about to be written: until `note` they have no copy."""
        count = len(extents.numbers)
        for chunk in extents.chunks:
            at = chunk * self._extents + extents.numbers.start
            self._has_copy[at : at + count] = bytes(count)

    def note_copy(self, extents: Extents, checksums: bytes) -> None:
        """Note that these extents have been copied; `checksums` is u32 [chunk][extent], or empty where they have not."""
        count = len(extents.numbers)
        row = count * CHECKSUM_BYTES
        for number in range(len(checksums) // row):
            at = (extents.chunks.start + number) * self._extents + extents.numbers.start
            self._has_copy[at : at + count] = b"\x01" * count
            self._checksums[at * CHECKSUM_BYTES : at * CHECKSUM_BYTES + row] = checksums[
                number * row : (number + 1) * row
            ]

    def are_whole(self, first: int, checksums: bytes) -> list[bool]:
        """Whether each chunk from the `first` on was copied completely and has the checksums of its writer."""
        row = self._extents * CHECKSUM_BYTES
        found: list[bool] = []
        for number in range(len(checksums) // row):
            at = (first + number) * self._extents
            stored = self._checksums[at * CHECKSUM_BYTES : at * CHECKSUM_BYTES + row]
            is_copied = 0 not in self._has_copy[at : at + self._extents]
            found.append(is_copied and stored == checksums[number * row : (number + 1) * row])
        return found
