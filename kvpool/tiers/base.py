"""Interface of a lower tier: its directory, and that chunks can be read from it and written to it.

An interface, so that `index` decides about two tiers without knowing how bytes lie on a disk. Control thread only.
"""

from typing import Protocol

import kvpool_native
from kvpool.index.namespaces import Namespace
from kvpool.packed_rows import MOVE_ROW, struct_of
from kvpool.types import SizeClassId

_MOVE, _ = struct_of(MOVE_ROW, "key", "generation")


class SlowerTier(Protocol):
    """A tier below DRAM. Jobs are numbered; what became of their chunks comes back through the pool."""

    @property
    def directory(self) -> kvpool_native.Directory:
        """Which chunks it holds, and where."""
        ...

    @property
    def can_read(self) -> bool:
        """Whether chunks can be promoted."""
        ...

    @property
    def can_write(self) -> bool:
        """Whether chunks can be demoted."""
        ...

    def size_class_of(self, namespace: Namespace) -> SizeClassId | None:
        """The size class of a namespace's chunks down there; None where they do not fit."""
        ...

    def read(self, namespace: Namespace, rows: bytes, *, is_urgent: bool) -> int:
        """Start reading; a job's number or 0. Rows: see `pack_moves`."""
        ...

    def write(self, namespace: Namespace, rows: bytes, tokens: list[bytes]) -> int:
        """Start writing; a job's number or 0. `tokens`: the token ids of each row, i32, where they are known."""
        ...

    def compare(self, namespace: Namespace, rows: bytes) -> int:
        """Start comparing chunks with their checksums where they lie, behind all else; a job's number or 0.

        The place in the arena does not matter.
        """
        ...

    def remember(self, namespace: Namespace, key: bytes, parent: bytes, offset: int, generation: int) -> None:
        """A chunk is stored there: have it found after a restart, and kept as it is."""
        ...

    def touch(self, key: bytes) -> None:
        """A chunk stored there was used, or is kept otherwise from now on: have that outlive the daemon."""
        ...


def pack_moves(
    keys: list[bytes], parents: list[bytes], offsets: list[int], arena_offsets: list[int], generations: list[int]
) -> bytes:
    """The rows of a job: key, parent (zeros: none), place in the files, place in the arena, generation in the files."""
    rows = zip(keys, parents, offsets, arena_offsets, generations, strict=True)
    return b"".join(_MOVE.pack(*row) for row in rows)
