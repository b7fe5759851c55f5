"""Native key hashing against the reference implementation of BLAKE3, written as the formulas of `key_hash.h`."""

import random
import struct
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import pytest

import kvpool_native

CHUNK_TOKENS = 256
ROOT = bytes(range(32))


def named(name: str) -> bytes:
    return bytes(blake3.blake3(name.encode()).digest())


def keyed(name: str, data: bytes) -> bytes:
    return bytes(blake3.blake3(data, key=named(name)).digest())


def some_tokens(count: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(count).integers(-(2**31), 2**31, count, dtype=np.int64).astype(np.int32)


def reference_leaves(tokens: npt.NDArray[np.int32], chunk_tokens: int) -> bytes:
    chunks = len(tokens) // chunk_tokens
    data = tokens.astype("<i4").tobytes()
    size = 4 * chunk_tokens
    return b"".join(keyed("kvpool.leaf.1", data[i * size : (i + 1) * size]) for i in range(chunks))


@pytest.mark.parametrize("size", [0, 1, 3, 63, 64, 65, 1023, 1024, 1025, 2048, 3072, 4097, 31745, 102400])
def test_blake3_equals_the_reference(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert kvpool_native.blake3(data) == blake3.blake3(data).digest()


@pytest.mark.parametrize("chunk_tokens", [1, 15, 16, 64, 255, 256, 257, 512, 1024, 2000])
@pytest.mark.parametrize("chunks", [0, 1, 3, 15, 16, 17, 33])
def test_leaves_equal_the_reference(chunk_tokens: int, chunks: int) -> None:
    tokens = some_tokens(chunk_tokens * chunks)
    assert kvpool_native.hash_leaves(tokens, chunk_tokens) == reference_leaves(tokens, chunk_tokens)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**40])
def test_a_token_beyond_32_bits_is_refused(token: int) -> None:
    tokens = np.ones(3 * CHUNK_TOKENS, np.int64)
    tokens[-1] = token
    with pytest.raises(ValueError, match="32 bits"):
        kvpool_native.hash_leaves(tokens, CHUNK_TOKENS)


def test_other_token_arrays_are_refused() -> None:
    others: tuple[Any, ...] = (np.zeros(512, np.float32), np.zeros(512, np.uint8), np.zeros((2, 256), np.int32))
    for tokens in others:
        with pytest.raises(TypeError):
            kvpool_native.hash_leaves(tokens, CHUNK_TOKENS)
    with pytest.raises(TypeError):
        kvpool_native.hash_leaves(np.zeros(512, np.int32)[::2], CHUNK_TOKENS)
    with pytest.raises(ValueError, match="chunk_tokens"):
        kvpool_native.hash_leaves(np.zeros(512, np.int32), 0)


def test_keys_chain_over_the_leaves() -> None:
    leaves = reference_leaves(some_tokens(20 * CHUNK_TOKENS), CHUNK_TOKENS)
    expected, key = [], ROOT
    for number in range(20):
        key = keyed("kvpool.chain.1", key + leaves[32 * number : 32 * number + 32])
        expected.append(key)
    assert kvpool_native.chain_keys(ROOT, leaves) == b"".join(expected)


@pytest.mark.parametrize("chains", [0, 1, 2, 3, 5, 16, 17])
def test_chains_behind_several_parents_stand_one_behind_the_other(chains: int) -> None:
    leaves = reference_leaves(some_tokens(7 * CHUNK_TOKENS), CHUNK_TOKENS)
    parents = [keyed("parent", bytes([number])) for number in range(chains)]
    expected = b"".join(kvpool_native.chain_keys(parent, leaves) for parent in parents)
    assert kvpool_native.chain_keys(b"".join(parents), leaves) == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 255, 256, 257, 600])
@pytest.mark.parametrize("chunks", [0, 1, 15, 16, 17, 50])
def test_chunks_hashed_at_once_have_the_leaves_and_keys_of_two_calls(
    chunks: int, chunk_tokens: int, dtype: Any
) -> None:
    tokens = some_tokens(chunk_tokens * chunks + chunk_tokens - 1)
    leaves = reference_leaves(tokens, chunk_tokens)
    for parents in ((ROOT,), (ROOT, bytes(32), ROOT[::-1])):
        keys = tuple(kvpool_native.chain_keys(parent, leaves) for parent in parents)
        assert kvpool_native.hash_chunks(tokens.astype(dtype), chunk_tokens, parents) == (leaves, keys)


def test_chunks_are_hashed_at_once_of_what_leaves_are_made_of() -> None:
    tokens = np.ones(2 * CHUNK_TOKENS, np.int64)
    for parents in ((), (ROOT, ROOT[1:])):
        with pytest.raises(ValueError, match="parent"):
            kvpool_native.hash_chunks(tokens, CHUNK_TOKENS, parents)
    with pytest.raises(ValueError, match="chunk_tokens"):
        kvpool_native.hash_chunks(tokens, 0, (ROOT,))
    tokens[-1] = 2**31
    with pytest.raises(ValueError, match="32 bits"):
        kvpool_native.hash_chunks(tokens, CHUNK_TOKENS, (ROOT,))


def test_hashes_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        kvpool_native.chain_keys(ROOT[:31], b"")
    with pytest.raises(ValueError, match="32 bytes"):
        kvpool_native.chain_keys(ROOT, bytes(33))
    with pytest.raises(ValueError, match="32 bytes"):
        kvpool_native.mix_leaf(ROOT + b"x", b"image")


@pytest.mark.parametrize("size", [0, 1, 32, 992, 993, 5000])
def test_a_mixed_leaf_covers_leaf_and_payload(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    assert kvpool_native.mix_leaf(ROOT, payload) == keyed("kvpool.extra.1", ROOT + payload)


@pytest.mark.parametrize("fields", [[], [b""], [b"a", b"b"], [b"ab", b""], [bytes(40)] * 40])
def test_a_root_length_prefixes_its_fields(fields: list[bytes]) -> None:
    packed = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    assert kvpool_native.derive_root(fields) == keyed("kvpool.root.1", packed)
