"""References: how many block tables have each block, and which blocks are free.

A block that no table has is free only once it was given back: until then the prefix tree has it. One thread.
"""


class References:
    """See the module. Invariant: a free block is in no table, and is in the list of free ones once."""

    def __init__(self, blocks: int) -> None:
        self._counts = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Free blocks."""
        return len(self._free)

    def count(self, block: int) -> int:
        """Tables that have the block."""
        return self._counts[block]

    def take_blocks(self, count: int) -> list[int]:
        """Free blocks, each in one table from now on. Requires that there are so many."""
        assert count <= len(self._free)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def add_reference(self, block: int) -> None:
        """One more table has the block."""
        self._counts[block] += 1

    def drop(self, block: int) -> int:
        """One table less; how many are left."""
        assert self._counts[block] > 0
        self._counts[block] -= 1
        return self._counts[block]

    def give_back(self, block: int) -> None:
        """The block is free. Requires that no table has it."""
        assert not self._counts[block]
        self._free.append(block)

    def free_blocks(self) -> list[int]:
        """The free blocks; for verification."""
        return list(self._free)

    def counts(self) -> list[int]:
        """The tables of each block; for verification."""
        return list(self._counts)
