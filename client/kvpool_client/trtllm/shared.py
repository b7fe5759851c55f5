"""Shared memory that the scheduler half makes and the ranks of one node map: the board and the staged chunks.

The connector interface carries plans from the scheduler to its workers and nothing back; the board is the way back. Each rank
has a page of it that it alone writes: what KV it has, whether it has mapped the staged chunks, and the last load order that it
has carried out. A rank that cannot open the memory (another node, another user) never posts, and nothing is claimed.

    page of a rank:  u64 bytes of the geometry, written last │ u64 has mapped │ u64 last sequence done │ … geometry at 64

Threads: each number has one writer; readers see it late, never torn (aligned words).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool_client.engines.shared_bytes import SharedBytes
from kvpool_client.trtllm.geometry import Geometry

BOARD_PAGE_BYTES = 16384
_GEOMETRY_AT = 64
_LENGTH, _HAS_MAPPED, _DONE = range(3)


class Board:
    """The pages of all ranks."""

    def __init__(self, memory: SharedBytes) -> None:
        self._memory = memory

    @classmethod
    def create(cls, ranks: int) -> "Board":
        """The scheduler's board."""
        return cls(SharedBytes.create("kvpool-board", ranks * BOARD_PAGE_BYTES))

    @classmethod
    def attach(cls, path: str, ranks: int) -> "Board":
        """A rank's mapping of the board. Raises OSError."""
        return cls(SharedBytes.attach(path, ranks * BOARD_PAGE_BYTES))

    @property
    def path(self) -> str:
        """The path by which another process opens it."""
        return self._memory.path

    def post(self, rank: int, geometry: Geometry) -> None:
        """Post the geometry of this rank's KV."""
        page, data = self._page(rank), geometry.to_bytes()
        assert len(data) <= BOARD_PAGE_BYTES - _GEOMETRY_AT
        page[_GEOMETRY_AT : _GEOMETRY_AT + len(data)] = np.frombuffer(data, np.uint8)
        self._words(rank)[_LENGTH] = len(data)

    def geometry(self, ranks: Sequence[int]) -> Geometry | None:
        """The geometry that all ranks have posted; None while one is missing or differs."""
        pages = []
        for rank in ranks:
            length = int(self._words(rank)[_LENGTH])
            pages.append(self._page(rank)[_GEOMETRY_AT : _GEOMETRY_AT + length].tobytes())
        return Geometry.from_bytes(pages[0]) if pages[0] and len(set(pages)) == 1 else None

    def set_mapped(self, rank: int) -> None:
        """Post that this rank has mapped the staged chunks."""
        self._words(rank)[_HAS_MAPPED] = 1

    def has_mapped(self, ranks: Sequence[int]) -> bool:
        """Whether all of the ranks have."""
        return all(self._words(rank)[_HAS_MAPPED] for rank in ranks)

    def set_done(self, rank: int, sequence: int) -> None:
        """Post that this rank has carried out every load order up to `sequence`."""
        self._words(rank)[_DONE] = sequence

    def done(self, ranks: Sequence[int]) -> int:
        """The last load order that all of the ranks have carried out."""
        return min(int(self._words(rank)[_DONE]) for rank in ranks)

    def close(self) -> None:
        """Close the descriptor."""
        self._memory.close()

    def _page(self, rank: int) -> npt.NDArray[np.uint8]:
        return self._memory.view[rank * BOARD_PAGE_BYTES : (rank + 1) * BOARD_PAGE_BYTES]

    def _words(self, rank: int) -> npt.NDArray[np.uint64]:
        return self._page(rank)[:_GEOMETRY_AT].view(np.uint64)
