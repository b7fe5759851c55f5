"""Chains of a daemon whose DRAM holds a few of them, above an SSD tier."""

import kvpool_client as kv
from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

CHUNK_TOKENS = SMALL.chunk_tokens
DRAM_CHUNKS = 24
CHAIN = 8


def chains(pool: kv.Pool, count: int) -> list[kv.KeyChain]:
    return [pool.keys(tokens_of(100 + number, CHAIN * CHUNK_TOKENS)) for number in range(count)]


def store_whole(pool: kv.Pool, keys: kv.KeyChain) -> None:
    """Stores all of a chain, though it be declined while DRAM is full of what a slow disk has not taken yet."""
    wait_until(lambda: store(pool, keys).declined == 0, "there is room")


def fill(pool: kv.Pool, count: int) -> list[kv.KeyChain]:
    """Stores several times what DRAM has room for."""
    stored = chains(pool, count)
    for keys in stored:
        store_whole(pool, keys)
    return stored


def load_right(pool: kv.Pool, keys: kv.KeyChain) -> kv.LoadResult:
    result, into = load_all(pool, keys)
    assert_right_bytes(keys, pool.layout, result, into)
    return result
