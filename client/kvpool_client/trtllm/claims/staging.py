"""Staging: the host memory in which claimed chunks wait for the ranks, and how layer groups divide it.

    shard 0: slots of group 0 │ slots of group 1 │ …   shard 1: …          a slot: a chunk, layer by layer

A group with a window needs few chunks of every claim, one of full attention all of them: each has slots for as many claims of a
length that is a guess. Without windows all is of full groups. Pure; any thread.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgument
from kvpool_client.trtllm.geometry import Geometry

# A claim of so many tokens, or of so many windows where that is more, has its chunks of all groups staged.
CLAIM_TOKENS = 8192
CLAIM_WINDOWS = 4
# The part of the staging that windows have at least: many short prompts need a whole window each.
WINDOW_SHARE_MIN = 0.25


def staging_slots(geometry: Geometry, shard_bytes: int) -> tuple[int, ...]:
    """Slots of each group in one shard's part of the staging. Raises InvalidArgument where a block of each full group and a
    window of each other do not fit."""
    groups = geometry.groups
    chunks = max(CLAIM_WINDOWS * max(group.run for group in groups), -(-CLAIM_TOKENS // geometry.tokens_per_block))
    window_bytes = sum(group.run * group.chunk_bytes for group in groups)
    full_bytes = sum(group.chunk_bytes for group in groups if group.is_full)
    share = max(WINDOW_SHARE_MIN, window_bytes / (window_bytes + chunks * full_bytes))
    windows = max(1.0, share * shard_bytes / window_bytes) if window_bytes else 0.0
    counts = [int(group.run * windows) for group in groups]
    left = shard_bytes - shard_bytes_of(geometry, counts)
    slots = tuple(left // full_bytes if group.is_full else count for group, count in zip(groups, counts, strict=True))
    if left < full_bytes:
        raise InvalidArgument(
            f"the staging has {shard_bytes} bytes for each shard, expected at least {window_bytes + full_bytes}, a block of "
            "each layer group, or of its window: set TLLM_KVPOOL_STAGING_MIB to a larger number"
        )
    return slots


def shard_bytes_of(geometry: Geometry, slots: Sequence[int]) -> int:
    """Bytes of one shard's slots."""
    return sum(count * group.chunk_bytes for count, group in zip(slots, geometry.groups, strict=True))


def group_offsets(geometry: Geometry, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Where each group's slots begin in a shard."""
    sizes = [count * group.chunk_bytes for count, group in zip(slots, geometry.groups, strict=True)]
    return (0, *accumulate(sizes[:-1]))


def staged_layers(
    memory: npt.NDArray[np.uint8], geometry: Geometry, shard: int, slots: tuple[int, ...]
) -> list[list[npt.NDArray[np.uint8]]]:
    """One shard's slots by group, layer by layer: uint8 [slots, layer_bytes] each."""
    size = shard_bytes_of(geometry, slots)
    own = memory[shard * size : (shard + 1) * size]
    found = []
    for group, count, offset in zip(geometry.groups, slots, group_offsets(geometry, slots), strict=True):
        rows = own[offset : offset + count * group.chunk_bytes].reshape(count, group.layers, group.layer_bytes)
        found.append([rows[:, layer] for layer in range(group.layers)])
    return found
