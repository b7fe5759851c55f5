"""Leased rows: where leased chunks lie, a row for each. A lease has them for its chunks of one group after the other; of a set
some of them, in any order.

Pure; any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.states import DRAM

Words = npt.NDArray[np.uint64]
Levels = npt.NDArray[np.uint8]
_WORD = np.dtype("<u8")


@dataclass(slots=True, eq=False)
class LeasedRows:
    """Rows of leased chunks. `offsets`: in the arena; `slots`: by what the index has the words of each slot; `generations`:
    what the generation word must still have after the copy; `tiers`: the level when it was leased. `lease`: the daemon's number
    of it, `numbers`: those of the rows there. A scheduler's have no offsets and no slots."""

    offsets: Words
    slots: Words
    generations: Words
    tiers: Levels
    lease: int
    numbers: Sequence[int]

    @classmethod
    def of(cls, leased: m.Leased, rows: range) -> "LeasedRows":
        """Some rows of a lease."""
        part = slice(rows.start, rows.stop)
        return cls(
            words_of(leased.offsets)[part],
            words_of(leased.slots)[part],
            words_of(leased.generations)[part],
            np.frombuffer(leased.tiers, np.uint8)[part],
            leased.lease,
            rows,
        )

    @classmethod
    def chosen(cls, leased: m.Leased, places: npt.NDArray[np.intp], numbers: Sequence[int]) -> "LeasedRows":
        """Rows of a set's lease, by the keys that have them. `numbers`: see the class."""
        return cls(
            words_of(leased.offsets)[places],
            words_of(leased.slots)[places],
            words_of(leased.generations)[places],
            np.frombuffer(leased.tiers, np.uint8)[places],
            leased.lease,
            numbers,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def place_of(self, row: int) -> tuple[int, int]:
        """By which number the daemon has leased a row's chunk, and its row among all that it has leased by that."""
        return self.lease, self.numbers[row]


def words_of(column: bytes) -> Words:
    """A column's whole words: one with fewer than there are rows is refused where the rows are used."""
    return np.frombuffer(column[: len(column) // _WORD.itemsize * _WORD.itemsize], _WORD)


def chunk_ranges(layout: Layout, chunks: int) -> tuple[range, ...]:
    """The chunks of each group that a hit of so many needs."""
    return tuple(range(chunks - part.chunks_of(chunks), chunks) for part in layout.group_layouts)


def levels_by_chunk(layout: Layout, chunks: int, levels: bytes) -> Levels:
    """The level of each of so many leased chunks, by that of each row: the slowest of its groups', DRAM where none needs it."""
    rows = np.frombuffer(levels, np.uint8)
    if not layout.groups:
        return rows
    found, is_needed = np.zeros(chunks, np.uint8), np.zeros(chunks, np.bool_)
    for of_group in chunk_ranges(layout, chunks):
        part = slice(of_group.start, of_group.stop)
        found[part] = np.maximum(found[part], rows[: len(of_group)])
        is_needed[part] = True
        rows = rows[len(of_group) :]
    found[~is_needed] = DRAM
    return found
