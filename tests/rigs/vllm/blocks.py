"""The blocks of the scripted engine (see `engine.py`), as vLLM's block pool: free, in the prefix cache, or held by others.

A block that the connector holds is not reused before it is released, and is overwritten then: a later reader
reads bytes that belong to no token.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class ScriptedBlocks:
    """`overwrite` fills blocks with bytes that belong to no token; `in_use`: the blocks of all requests."""

    def __init__(self, count: int, overwrite: Callable[[list[int]], None], in_use: Callable[[], set[int]]) -> None:
        self.blocks: Sequence[int] = range(count)
        self.held: Counter[int] = Counter()
        self.held_most = 0
        self._overwrite = overwrite
        self._in_use = in_use
        self._left: set[int] = set()
        self.on_reset: Callable[[], None] = lambda: None
        self.reset()

    def reset(self) -> None:
        """All blocks are free, and hold nothing."""
        assert not self.held, f"vLLM forgets no prefix while blocks are held: {self.held}"
        self.free = list(self.blocks[1:])
        self.local: dict[bytes, int] = {}
        self._overwrite(self.free)

    @property
    def num_gpu_blocks(self) -> int:
        """All blocks, the null block included."""
        return len(self.blocks)

    def get_num_free_blocks(self) -> int:
        """Blocks without a reference."""
        return len(self.blocks) - 1 - len(self._in_use() | set(self.held))

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes, as vLLM does while no block has a reference; whether that was so."""
        if self.get_num_free_blocks() != len(self.blocks) - 1:
            return False
        self._left.clear()
        self.reset()
        self.on_reset()
        return True

    def touch(self, blocks: Sequence[int]) -> None:
        """Hold blocks of requests."""
        assert set(blocks) <= self._in_use() | set(self.local.values())
        self.held.update(blocks)
        self.held_most = max(self.held_most, len(self.held))

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        """Let blocks go."""
        for block in ordered_blocks:
            assert self.held[block] > 0
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if block in self._left:
                    self._left.discard(block)
                    self._overwrite([block])
                    self.free.append(block)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Take blocks out of the engine's own prefix cache."""
        in_use = self._in_use()
        for value, block in list(self.local.items()):
            if block in block_ids:
                del self.local[value]
                if block not in in_use:
                    self.give_back([block])

    def give_back(self, blocks: Iterable[int], *, overwrite: bool = False) -> None:
        """The engine needs these blocks no more."""
        for block in blocks:
            if block in self.held:
                self._left.add(block)
                continue
            if overwrite:
                self._overwrite([block])
            self.free.append(block)
