"""Contents that derive from keys: right ones pass, and any wrong byte is found and named."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import kvpool_client as kv
from kvpool.errors import InvalidArgument
from kvpool_tools.bench.payload import Payload
from kvpool_tools.bench.replay.client import replay_layout

LAYOUT = replay_layout(16 << 10, 512)
CHUNKS = 6
Rows = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def keys() -> kv.KeyChain:
    with kv.connect("/nowhere/kvpool.sock", model="m", layout=LAYOUT) as pool:
        return pool.keys(np.arange(CHUNKS * 512))


@pytest.fixture
def rows(keys: kv.KeyChain) -> Rows:
    filled = np.zeros((CHUNKS, LAYOUT.chunk_bytes), np.uint8)
    Payload(LAYOUT).fill(filled, keys, 0)
    return filled


def test_another_process_with_the_key_finds_the_bytes_right(keys: kv.KeyChain, rows: Rows) -> None:
    assert Payload(LAYOUT).check(rows, keys, 0) == []
    assert Payload(LAYOUT).check(rows[2:5], keys, 2) == []


def test_every_single_wrong_byte_is_seen_and_named(keys: kv.KeyChain, rows: Rows, seed: int) -> None:
    random = np.random.default_rng(seed)
    payload = Payload(LAYOUT)
    for _ in range(200):
        chunk, at, bits = (
            int(random.integers(CHUNKS)),
            int(random.integers(LAYOUT.chunk_bytes)),
            random.integers(1, 256),
        )
        rows[chunk, at] ^= bits
        wrong = payload.check(rows, keys, 0)
        assert [(entry.key, entry.layer, entry.wrong_bytes) for entry in wrong] == [
            (keys[chunk], at // LAYOUT.layer_bytes, 1)
        ]
        rows[chunk, at] ^= bits


def _swap(rows: Rows, one: slice, other: slice) -> None:
    rows[1, one], rows[1, other] = rows[1, other].copy(), rows[1, one].copy()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: np.copyto(rows[1], rows[2]),
        lambda rows: rows[1].fill(0),
        lambda rows: rows[1].fill(0xA5),
        lambda rows: np.copyto(rows[1], np.roll(rows[1], 8)),
        lambda rows: _swap(rows, slice(0, 8), slice(8, 16)),
        lambda rows: _swap(rows, slice(0, LAYOUT.layer_bytes), slice(LAYOUT.layer_bytes, 2 * LAYOUT.layer_bytes)),
    ],
    ids=["another chunk", "nothing", "poison", "shifted", "words swapped", "layers swapped"],
)
def test_bytes_of_another_layer_or_chunk_are_wrong(
    keys: kv.KeyChain, rows: Rows, spoil: Callable[[Rows], None]
) -> None:
    spoil(rows)
    wrong = Payload(LAYOUT).check(rows, keys, 0)
    assert {entry.key for entry in wrong} == {keys[1]}
    assert sum(entry.wrong_bytes for entry in wrong) >= 8


def test_chunks_of_another_chain_differ(keys: kv.KeyChain, rows: Rows) -> None:
    with kv.connect("/nowhere/kvpool.sock", model="m", layout=LAYOUT, salt=b"other") as pool:
        others = pool.keys(np.arange(CHUNKS * 512))
    assert len({entry.key for entry in Payload(LAYOUT).check(rows, others, 0)}) == CHUNKS
    assert len(keys) == len(others)


@pytest.mark.parametrize("size", [0, 1000, 4095, 6 << 10])
def test_a_chunk_size_that_cannot_be_cut_in_layers_is_refused(size: int) -> None:
    with pytest.raises(InvalidArgument, match="expected a multiple of 4096"):
        replay_layout(size, 512)
