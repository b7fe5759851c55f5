"""Hashes of blocks: those of several chunks at once equal those of each."""

import random

import pytest

from kvpool.router_events.block_hashes import block_hash, block_hashes, hashes_of
from kvpool.types import KEY_BYTES


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_hashes_of_several_chunks_equal_those_of_each_in_order(blocks: int, seed: int) -> None:
    keys = random.Random(seed).randbytes(KEY_BYTES * 7)
    each = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    assert hashes_of(keys, blocks) == [block for key in each for block in block_hashes(key, blocks)]
    assert hashes_of(keys, blocks)[blocks - 1 :: blocks] == [block_hash(key) for key in each]
    assert hashes_of(b"", blocks) == []
