"""Staging records, for saves by copy: copies out of a connection's staging memory into reserved slots.

For daemons that map the arena read-only to clients (`staging_bytes` of the Welcome is not 0). A save reserves and commits as
any other; between the two the client writes extents to its staging memory and has the daemon copy them. Fields as in
`messages`. Any thread.
"""

from dataclasses import dataclass
from typing import ClassVar

# Extents of all chunks of one CopyStaged: of a part each has a place of its own in the arena.
COPIED_EXTENTS_MAX = 1 << 17


@dataclass(slots=True, unsafe_hash=True)
class CopyStaged:
    """Have the daemon copy extents of reserved chunks out of staging: of each chunk `extents` one after the other, chunk by
    chunk from `offset` on. Chunks are counted among the reserved ones of a save's `run`. Answered by Done when staging may be
    written again; also where the reservation has ended, which the answer to Commit shows. At most COPIED_EXTENTS_MAX extents
    in all.
    """

    KIND: ClassVar[int] = 29
    reservation: int
    first_chunk: int
    chunks: int
    first_extent: int
    extents: int
    offset: int
    run: int = 0
