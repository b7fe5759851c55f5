"""Chunk contents that derive from the chunk's key: with the key, wrong bytes can be recognized, and which they are.

Word i of layer l of a chunk is `table[i] ^ seed(key, l)`: one table of random words for all, and a seed of 64 bits mixed
from the key and the layer. So a word shows its position by the table and its chunk and layer by the seed: bytes of another
chunk, another layer, another offset, of an older save or of no chunk all differ. It is not a checksum and needs none: two
streams of words are compared at memory speed.

Copies of payload: none; `fill` and `check` pass over the caller's array once. One thread for each Payload.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_client as kv

TABLE_SEED = 20_240_521
WORD_BYTES = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class WrongChunk:
    """A chunk that came back with other bytes than were saved. `wrong_bytes` counts the bytes that differ."""

    key: bytes
    layer: int
    wrong_bytes: int


class Payload:
    """Contents of chunks of one layout. Invariant: `_table` depends on the layer's size alone."""

    def __init__(self, layout: kv.Layout) -> None:
        assert layout.layer_bytes % WORD_BYTES == 0
        self._layers = layout.layers
        words = layout.layer_bytes // WORD_BYTES
        self._table: Words = np.random.default_rng(TABLE_SEED).integers(0, 1 << 64, words, dtype=np.uint64)
        self._expected: Words = np.empty((layout.layers, words), np.uint64)

    def fill(self, rows: Bytes, keys: kv.KeyChain, first_chunk: int) -> None:
        """Write the contents of chunks `first_chunk` on into the rows of `rows` [chunks, chunk_bytes]."""
        words = rows.view(np.uint64).reshape(len(rows), self._layers, -1)
        for row, seeds in zip(words, self._seeds(keys, first_chunk, len(rows)), strict=True):
            np.bitwise_xor(self._table, seeds[:, None], out=row)

    def check(self, rows: Bytes, keys: kv.KeyChain, first_chunk: int) -> list[WrongChunk]:
        """Compare every byte of `rows` with the contents of chunks `first_chunk` on; the layers that differ."""
        words = rows.view(np.uint64).reshape(len(rows), self._layers, -1)
        wrong: list[WrongChunk] = []
        for number, (row, seeds) in enumerate(zip(words, self._seeds(keys, first_chunk, len(rows)), strict=True)):
            np.bitwise_xor(self._table, seeds[:, None], out=self._expected)
            if not np.array_equal(row, self._expected):
                differing = (row.view(np.uint8) != self._expected.view(np.uint8)).sum(axis=1)
                key = keys[first_chunk + number]
                wrong += [WrongChunk(key, layer, int(count)) for layer, count in enumerate(differing) if count]
        return wrong

    def _seeds(self, keys: kv.KeyChain, first_chunk: int, chunks: int) -> Words:
        """One seed for each chunk and layer, [chunks, layers]."""
        column = np.frombuffer(keys.columns()[0], dtype="<u8").reshape(len(keys), -1)
        parts = column[first_chunk : first_chunk + chunks]
        layers = np.arange(1, self._layers + 1, dtype=np.uint64) * _MIX
        mixed = (np.bitwise_xor.reduce(parts, axis=1)[:, None] + layers) * _SPREAD
        seeds: Words = (mixed ^ (mixed >> _SHIFT)) * _MIX
        return seeds
