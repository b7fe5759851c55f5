"""A prompt's key chain against the reference BLAKE3 package, however the tokens arrive."""

import random
from collections.abc import Sequence

import blake3
import numpy as np
import pytest

from kvpool.errors import InvalidArgument
from kvpool_client.key_chain import Extra, KeyChain, as_tokens

CHUNK_TOKENS = 16
ROOT, OTHER = bytes(range(32)), bytes(range(32, 64))


def _keyed(name: str, data: bytes) -> bytes:
    return blake3.blake3(data, key=blake3.blake3(name.encode()).digest()).digest()


def _reference(tokens: Sequence[int], root: bytes, extra: Sequence[Extra] = ()) -> bytes:
    keys, parent = b"", root
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        end = start + CHUNK_TOKENS
        packed = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens[start:end])
        leaf = _keyed("kvpool.leaf.1", packed)
        touching = [entry for entry in extra if entry[0] < end and entry[1] > start]
        if touching:
            leaf = _keyed("kvpool.extra.1", leaf + _payload(touching, start, end))
        parent = _keyed("kvpool.chain.1", parent + leaf)
        keys += parent
    return keys


def _payload(touching: Sequence[Extra], start: int, end: int) -> bytes:
    payload = len(touching).to_bytes(4, "little")
    for first, last, content in touching:
        for number in (max(first, start) - start, min(last, end) - start, first - start):
            payload += number.to_bytes(8, "little", signed=True)
        payload += len(content).to_bytes(4, "little") + content
    return payload


def _chain(extra: Sequence[Extra] = ()) -> KeyChain:
    return KeyChain(CHUNK_TOKENS, lambda: (ROOT,), extra)


def test_an_empty_chain_has_no_keys() -> None:
    chain = _chain()
    chain.extend([])
    assert (len(chain), chain.tokens, chain.columns()) == (0, 0, (b"",))
    with pytest.raises(IndexError):
        chain[0]


def test_the_keys_equal_the_reference(seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(-(1 << 31), 1 << 31) for _ in range(20 * CHUNK_TOKENS + 5)]
    chain = _chain()
    chain.extend(tokens)
    assert chain.columns() == (_reference(tokens, ROOT),)
    assert (len(chain), chain.tokens) == (20, 320)


def test_keys_do_not_depend_on_the_pieces_in_which_tokens_arrive(seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(1 << 17) for _ in range(50 * CHUNK_TOKENS + 3)]
    chain, position = _chain(), 0
    while position < len(tokens):
        size = chance.choice((1, 3, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 100))
        chain.extend(tokens[position : position + size])
        position += size
        assert chain.columns() == (_reference(tokens[:position], ROOT),)


def test_one_token_changes_every_later_key_and_no_earlier_one() -> None:
    tokens = list(range(6 * CHUNK_TOKENS))
    one, two = _chain(), _chain()
    one.extend(tokens)
    tokens[2 * CHUNK_TOKENS] += 1
    two.extend(tokens)
    assert [one[i] == two[i] for i in range(6)] == [True, True, False, False, False, False]


def test_keys_are_counted_from_both_ends() -> None:
    chain = _chain()
    chain.extend(range(3 * CHUNK_TOKENS))
    (column,) = chain.columns()
    assert [chain[i] for i in range(3)] == [column[0:32], column[32:64], column[64:96]]
    assert chain[-1] == chain[2]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            chain[outside]


def test_a_new_domain_roots_the_chain_again() -> None:
    tokens, roots = list(range(4 * CHUNK_TOKENS)), [(ROOT,)]
    chain = KeyChain(CHUNK_TOKENS, lambda: roots[0])
    chain.extend(tokens[:40])
    roots[0] = (OTHER,)
    assert chain.columns() == (_reference(tokens[:40], OTHER),)
    chain.extend(tokens[40:])
    assert chain.columns() == (_reference(tokens, OTHER),)


def test_tokens_that_arrive_after_a_new_domain_belong_to_it() -> None:
    tokens, roots = list(range(4 * CHUNK_TOKENS)), [(ROOT,)]
    chain = KeyChain(CHUNK_TOKENS, lambda: roots[0])
    chain.extend(tokens[:40])
    roots[0] = (OTHER,)
    chain.extend(tokens[40:])
    assert chain.columns() == (_reference(tokens, OTHER),)


def test_a_scheduler_has_a_column_for_each_rank() -> None:
    tokens = list(range(2 * CHUNK_TOKENS))
    chain = KeyChain(CHUNK_TOKENS, lambda: (ROOT, OTHER))
    chain.extend(tokens)
    assert chain.columns() == (_reference(tokens, ROOT), _reference(tokens, OTHER))


@pytest.mark.parametrize(
    "extra",
    [
        [(0, 1, b"image")],
        [(10, 40, b"image")],
        [(15, 16, b""), (16, 17, b"")],
        [(20, 1000, b"x" * 5000), (3, 21, b"audio")],
        [(64, 65, b"beyond")],
    ],
)
def test_extras_equal_the_reference(extra: list[Extra]) -> None:
    tokens = list(range(4 * CHUNK_TOKENS))
    chain = _chain(extra)
    chain.extend(tokens[:30])
    chain.extend(tokens[30:])
    assert chain.columns() == (_reference(tokens, ROOT, extra),)


def test_an_image_with_another_start_gives_another_key() -> None:
    keys = []
    for first in (3, 4):
        chain = _chain([(first, 40, b"image")])
        chain.extend(range(2 * CHUNK_TOKENS))
        keys.append(chain[1])
    assert keys[0] != keys[1]


def test_an_extras_tokens_may_be_numpys() -> None:
    given, plain = _chain([(np.int64(10), np.int32(40), b"image")]), _chain([(10, 40, b"image")])  # type: ignore[list-item]
    for chain in (given, plain):
        chain.extend(range(4 * CHUNK_TOKENS))
    assert given.columns() == plain.columns()


@pytest.mark.parametrize(
    "extra",
    [(0, 1), (1, 1, b""), (2, 1, b""), (-1, 1, b""), (0, 1, "text"), (0.0, 1, b""), "abc", None],
    ids=str,
)
def test_a_meaningless_extra_is_refused(extra: object) -> None:
    with pytest.raises(InvalidArgument):
        _chain([extra])  # type: ignore[list-item]  # what callers get wrong


def test_an_engines_own_hashes_are_leaves() -> None:
    hashes = [b"block-0", b"block-1" * 9]
    chain, parent = _chain(), ROOT
    chain.append_hashes(hashes[:1])
    chain.append_hashes(hashes[1:])
    for position, value in enumerate(hashes):
        parent = _keyed("kvpool.chain.1", parent + blake3.blake3(value).digest())
        assert chain[position] == parent


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "<i4", ">i4", "u4", "i8", ">i8", "u8"])
def test_every_integer_width_gives_the_same_keys(dtype: str) -> None:
    tokens = np.arange(100, dtype=dtype)
    for form in (tokens, tokens.repeat(2)[::2]):
        chain = _chain()
        chain.extend(form)
        assert chain.columns() == (_reference(range(100), ROOT),)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        ["a"],
        [None],
        [True],
        [[1, 2]],
        [[1], [2, 3]],
        7,
        "tokens",
        [1 << 31],
        [-(1 << 31) - 1],
        [1 << 64],
        np.array([1 << 40], dtype=np.uint64),
        np.array([1 << 31], dtype=np.uint32),
    ],
    ids=str,
)
def test_an_invalid_token_is_refused_and_changes_nothing(tokens: object) -> None:
    chain = _chain()
    chain.extend(range(20))
    with pytest.raises(InvalidArgument):
        chain.extend(tokens)
    chain.extend(range(20, 32))
    assert chain.columns() == (_reference(range(32), ROOT),)


def test_the_callers_array_may_change_afterwards() -> None:
    tokens = np.arange(CHUNK_TOKENS + 8, dtype=np.int32)
    chain = _chain()
    chain.extend(tokens)
    tokens[:] = 0
    chain.extend(range(24, 32))
    assert chain.columns() == (_reference(range(32), ROOT),)


def test_tokens_are_not_copied_when_they_have_the_right_width() -> None:
    tokens = np.arange(8, dtype=np.int32)
    assert np.shares_memory(as_tokens(tokens), tokens)


def test_token_ids_are_unchanged_however_they_arrive() -> None:
    chance = random.Random(7)
    tokens = [chance.randrange(1 << 31) for _ in range(CHUNK_TOKENS * 9 + 3)]
    chain = KeyChain(CHUNK_TOKENS, lambda: (ROOT,))
    at = 0
    while at < len(tokens):
        step = chance.randrange(1, 40)
        chain.extend(tokens[at : at + step])
        at += step
        for chunk in (0, len(chain) - 1):
            expected = tokens[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS] if len(chain) else []
            if len(chain):
                assert chain.token_ids([chunk]) == np.array(expected, "<i4").tobytes()
    assert chain.token_ids(range(9)) == np.array(tokens[: 9 * CHUNK_TOKENS], "<i4").tobytes()
    chain.append_hashes([b"h"])
    assert chain.token_ids([0]) == b""
    chain.append_hashes([b"i"], tokens[:CHUNK_TOKENS])
    assert chain.token_ids([10]) == np.array(tokens[:CHUNK_TOKENS], "<i4").tobytes()
    assert chain.token_ids([9, 10]) == b""
