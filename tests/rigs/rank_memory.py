"""Engines of several tensor-parallel sizes over chunks of one layout: paged KV of a rank, and what it must have.

The model is numpy alone: a chunk's contiguous bytes are [layer][head group][plane][token][heads of the group × dim].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from tests.rigs.payload import chunk_bytes_of
from tests.rigs.prompts import as_given, key_of, whole_result

Items = npt.NDArray[np.uint16]
FORMS = ("kv_first", "block_first", "head_major", "joint_planes")


def kv_of(row: npt.NDArray[np.uint8], layout: kv.Layout) -> Items:
    """A chunk's KV [layer, plane, token, head, dim], out of its contiguous bytes."""
    groups = layout.head_groups
    shape = (layout.layers, groups, layout.planes, layout.chunk_tokens, layout.kv_heads // groups, layout.head_dim)
    by_token = row.view(np.uint16).reshape(shape).transpose(0, 2, 3, 1, 4, 5)
    return by_token.reshape(layout.layers, layout.planes, layout.chunk_tokens, layout.kv_heads, layout.head_dim)


def part_of(items: Items, layout: kv.Layout, share: kv.Share) -> Items:
    """What a rank with this share has of a chunk's KV."""
    heads = layout.kv_heads // layout.head_groups
    layers = slice(share.first_layer, share.first_layer + share.layers)
    return items[layers, :, :, share.first_group * heads : (share.first_group + share.groups) * heads]


class RankMemory:
    """Paged KV of one rank, of two planes, in one of FORMS: `arrays` to be registered, seen as `form` with blocks, tokens and
    heads in that order, wherever the bytes are."""

    def __init__(self, layout: kv.Layout, share: kv.Share, *, blocks: int, block_tokens: int, memory: str) -> None:
        self.layout, self.share, self.block_tokens = layout, share, block_tokens
        heads = layout.kv_heads // layout.head_groups * share.groups
        token, dim = block_tokens, layout.head_dim
        self.form = "kv_first" if memory in ("kv_first", "head_major") else "block_first"
        if memory == "kv_first":
            made = [np.zeros((2, blocks, token, heads, dim), np.uint16) for _ in range(share.layers)]
        elif memory == "block_first":
            made = [np.zeros((blocks, 2, token, heads, dim), np.uint16) for _ in range(share.layers)]
        elif memory == "head_major":
            owned = [np.zeros((2, blocks, heads, token, dim), np.uint16) for _ in range(share.layers)]
            made = [array.transpose(0, 1, 3, 2, 4) for array in owned]
        else:
            owned = [np.zeros((blocks, heads, token, 2, dim), np.uint16) for _ in range(share.layers)]
            made = [array.transpose(0, 3, 2, 1, 4) for array in owned]
        self.arrays: list[Any] = made

    def chunk(self, ids: Sequence[int]) -> Items:
        """The KV in these blocks, [layer, plane, token, head, dim]."""
        planes = [
            [np.concatenate([self._block(array, plane, block) for block in ids]) for plane in range(2)]
            for array in self.arrays
        ]
        return np.array(planes)

    def fill(self, ids: Sequence[int], items: npt.NDArray[Any]) -> None:
        """Write a chunk's KV into these blocks."""
        for layer, array in enumerate(self.arrays):
            for plane in range(2):
                for number, block in enumerate(ids):
                    at = number * self.block_tokens
                    self._block(array, plane, block)[...] = items[layer, plane, at : at + self.block_tokens]

    def expected(self, key: bytes) -> Items:
        """What the rank must have of the chunk with this key."""
        return expected_part(key, self.layout, self.share)

    def _block(self, array: Any, plane: int, block: int) -> Items:
        found: Items = np.asarray(array[plane, block] if self.form == "kv_first" else array[block, plane])
        return found


def expected_part(key: bytes, layout: kv.Layout, share: kv.Share) -> Items:
    """What a rank must have of the chunk with this key."""
    return part_of(kv_of(chunk_bytes_of(key, layout.chunk_bytes), layout), layout, share)


class StateMemory:
    """A rank's states, of a block a chunk: they begin at an odd byte of a padded block, whose other bytes nobody writes."""

    form, block_tokens = "auto", None
    BEFORE, BEHIND, FILL = 3, 5, 7

    def __init__(self, layout: kv.Layout, share: kv.Share, blocks: int) -> None:
        self.layout, self.share = layout, share
        size = share.groups * layout.payload_bytes
        self._blocks = [
            np.full((blocks, self.BEFORE + size + self.BEHIND), self.FILL, np.uint8) for _ in range(share.layers)
        ]
        self.arrays = [
            whole[:, self.BEFORE : self.BEFORE + size].reshape(blocks, share.groups, -1) for whole in self._blocks
        ]
        assert all(np.shares_memory(*pair) for pair in zip(self.arrays, self._blocks, strict=True))

    def chunk(self, ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The state in a block, [layer, head group, bytes]."""
        for whole in self._blocks:
            assert (whole[:, : self.BEFORE] == self.FILL).all()
            assert (whole[:, -self.BEHIND :] == self.FILL).all()
        return np.stack([array[ids[0]] for array in self.arrays])

    def fill(self, ids: Sequence[int], items: npt.NDArray[Any]) -> None:
        """Write a state into a block."""
        for array, right in zip(self.arrays, items, strict=True):
            array[ids[0]] = right

    def expected(self, key: bytes) -> npt.NDArray[np.uint8]:
        """What the rank must have of the state with this key."""
        whole = chunk_bytes_of(key, self.layout.chunk_bytes).reshape(self.layout.layers, self.layout.head_groups, -1)
        share = self.share
        layers = slice(share.first_layer, share.first_layer + share.layers)
        return whole[layers, share.first_group : share.first_group + share.groups]


class RankEngine:
    """A rank's memory of each group of its Pool's layout, in which every chunk has blocks of its own, in any order."""

    BLOCK_TOKENS = 16
    CHUNKS = 12

    def __init__(self, pool: kv.Pool, memory: str = "kv_first") -> None:
        self.pool = pool
        self.memories: list[RankMemory | StateMemory] = []
        self._ids = np.random.default_rng(5).permutation(2 * self.CHUNKS).reshape(self.CHUNKS, 2)
        for part, share in zip(pool.layout.group_layouts, pool.shares, strict=True):
            if part.group is not None and part.group.kind == "state":
                self.memories.append(StateMemory(part, share, 2 * self.CHUNKS))
            else:
                of_blocks = {"blocks": 2 * self.CHUNKS, "block_tokens": self.BLOCK_TOKENS}
                self.memories.append(RankMemory(part, share, **of_blocks, memory=memory))
        self.register([self._shown(each) for each in self.memories])

    def register(self, arrays: Sequence[Any]) -> None:
        """Have these arrays of each group loaded and saved."""
        self._caches = [
            self.pool.register(of_group, block_tokens=self._tokens_of(memory), form=memory.form, group=group)
            for group, (of_group, memory) in enumerate(zip(arrays, self.memories, strict=True))
        ]

    def save(self, keys: kv.KeyChain, boundaries: Sequence[int] | None = None) -> kv.SaveResult:
        """Save a prompt's chunks layer by layer, the last one first."""
        named = self.pool.chunks_to_save(keys, boundaries=boundaries)
        for group, (memory, chunks) in enumerate(zip(self.memories, named, strict=True)):
            for place, chunk in enumerate(chunks):
                memory.fill(self._of_chunk(memory, place), memory.expected(key_of(keys, group, chunk)))
        self._write()
        save = self.pool.save(keys, self._given(self._caches), self._given(self._blocks(named)), boundaries=boundaries)
        for group, share in enumerate(self.pool.shares):
            for layer in reversed(range(share.layers)):
                save.layer(layer, group)
        return save.commit()

    def load(self, lease: kv.Lease) -> kv.LoadResult:
        """Load all that a lease has, layer by layer."""
        begun = self.pool.load(lease, self._given(self._caches), self._given(self._blocks(lease.ranges)))
        layers = [(group, layer) for group, share in enumerate(self.pool.shares) for layer in range(share.layers)]
        are_there = [begun.wait_layer(layer, group=group) for group, layer in layers]
        result = begun.wait()
        assert all(are_there) or result.reason != "complete"
        return result

    def assert_loads(self, keys: kv.KeyChain) -> None:
        """All that is found of a prompt is loaded, and has the right bytes."""
        with self.pool.acquire(self.pool.lookup(keys)) as lease:
            assert lease.chunks == len(keys)
            assert self.load(lease) == whole_result(self.pool.layout, lease.chunks)
            self.assert_has(keys, lease.ranges)

    def assert_has(self, keys: kv.KeyChain, ranges: Sequence[Sequence[int]]) -> None:
        """The memory has these chunks of each group."""
        self._read()
        for group, (memory, chunks) in enumerate(zip(self.memories, ranges, strict=True)):
            for place, chunk in enumerate(chunks):
                found = memory.chunk(self._of_chunk(memory, place))
                assert np.array_equal(found, memory.expected(key_of(keys, group, chunk))), (group, chunk)

    def clear(self) -> None:
        """Forget what was loaded."""
        for memory in self.memories:
            for array in memory.arrays:
                array[...] = 0
        self._write()

    def _shown(self, memory: "RankMemory | StateMemory") -> Sequence[Any]:
        """The arrays that are registered for a group's memory."""
        return memory.arrays

    def _write(self) -> None:
        """Have what was filled in the registered arrays."""

    def _read(self) -> None:
        """Have what is in the registered arrays."""

    def _given(self, by_group: Sequence[Any]) -> Any:
        return as_given(self.pool, by_group)

    def _tokens_of(self, memory: "RankMemory | StateMemory") -> int:
        return memory.block_tokens or self.pool.layout.chunk_tokens

    def _of_chunk(self, memory: "RankMemory | StateMemory", place: int) -> list[int]:
        """The blocks of the chunk at a place of a save or a load."""
        found: list[int] = self._ids[place].tolist()
        return found[: self.pool.layout.chunk_tokens // self._tokens_of(memory)]

    def _blocks(self, named: Sequence[Sequence[int]]) -> list[list[int]]:
        """The blocks of all chunks of each group."""
        return [
            [block for place in range(len(chunks)) for block in self._of_chunk(memory, place)]
            for memory, chunks in zip(self.memories, named, strict=True)
        ]
