"""Hashes of blocks: those of several chunks at once equal those of each."""

import random

import pytest

from kvpool.key_column import KEY_BYTES, KeyColumn
from kvpool.router_events.block_hashes import block_hash, block_hashes, hashes_of


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_hashes_of_several_chunks_equal_those_of_each_in_order(blocks: int, seed: int) -> None:
    keys = KeyColumn(random.Random(seed).randbytes(KEY_BYTES * 7))
    assert hashes_of(keys, blocks) == [block for key in keys for block in block_hashes(key, blocks)]
    assert hashes_of(keys, blocks)[blocks - 1 :: blocks] == [block_hash(key) for key in keys]
    assert hashes_of(KeyColumn(b""), blocks) == []
