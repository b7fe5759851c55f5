"""Engines of several tensor-parallel sizes over chunks of one layout: paged KV of a rank, and what it must have.

The model is numpy alone: a chunk's contiguous bytes are [layer][head group][plane][token][heads of the group × dim].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from tests.rigs.payload import chunk_bytes_of

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

    def fill(self, ids: Sequence[int], items: Items) -> None:
        """Write a chunk's KV into these blocks."""
        for layer, array in enumerate(self.arrays):
            for plane in range(2):
                for number, block in enumerate(ids):
                    at = number * self.block_tokens
                    self._block(array, plane, block)[...] = items[layer, plane, at : at + self.block_tokens]

    def _block(self, array: Any, plane: int, block: int) -> Items:
        found: Items = np.asarray(array[plane, block] if self.form == "kv_first" else array[block, plane])
        return found


def expected_part(key: bytes, layout: kv.Layout, share: kv.Share) -> Items:
    """What a rank must have of the chunk with this key."""
    return part_of(kv_of(chunk_bytes_of(key, layout.chunk_bytes), layout), layout, share)
