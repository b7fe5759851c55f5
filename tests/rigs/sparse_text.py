"""A text whose KV is known, and sequences over it: what the tests of compute by lookup share."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from kvpool_sparse import SparseConfig, SparseSequence
from kvpool_sparse.results import Floats
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import tokens_of

if TYPE_CHECKING:
    from kvpool_sparse.device import DeviceSequence  # imports torch

LAYOUT = kv.Layout(layers=2, kv_heads=2, head_dim=32, dtype="bfloat16", chunk_tokens=64, summaries="clusters7")
CONFIG = SparseConfig(
    init_tokens=64, local_tokens=96, topk_share=0.25, block_tokens=64, dense_boundary=256, offload_boundary=512
)
EVERYTHING = SparseConfig(
    init_tokens=64, local_tokens=96, topk_share=1.0, block_tokens=64, dense_boundary=0, offload_boundary=512
)
NOTHING = SparseConfig(
    init_tokens=64, local_tokens=96, topk_share=0.0, block_tokens=64, dense_boundary=0, offload_boundary=512
)
DENSE = SparseConfig(init_tokens=64, local_tokens=96, block_tokens=64, dense_boundary=1 << 20, offload_boundary=1 << 20)
HEADS = 6
Bits = npt.NDArray[np.uint16]


def bits_of(numbers: Floats) -> Bits:
    """The bfloat16 of floats, rounded towards zero."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def floats_of(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Text:
    """KV and queries of a sequence that derive from its seed and the position alone."""

    def __init__(self, seed: int, tokens: int) -> None:
        random = np.random.default_rng(seed)
        shape = (LAYOUT.layers, tokens, LAYOUT.kv_heads, LAYOUT.head_dim)
        self.ids = tokens_of(seed, tokens)
        self.keys = bits_of(random.standard_normal(shape, np.float32))
        self.values = bits_of(random.standard_normal(shape, np.float32))
        self.query = random.standard_normal((HEADS, LAYOUT.head_dim), np.float32) * np.float32(2)

    def append_to(self, sequence: "SparseSequence | DeviceSequence", end: int, step: int = 100) -> None:
        """Append everything from what the sequence has up to `end`, in pieces, layer by layer."""
        for first in range(sequence.tokens, end, step):
            rows = slice(first, min(end, first + step))
            for layer in range(LAYOUT.layers):
                sequence.append(layer, self.keys[layer, rows], self.values[layer, rows])

    def exact(self, layer: int, tokens: int, query: Floats | None = None) -> Floats:
        """Full attention, in double precision."""
        chosen = self.query if query is None else query
        grouped = chosen.reshape(LAYOUT.kv_heads, -1, LAYOUT.head_dim).astype(np.float64)
        keys = floats_of(self.keys[layer, :tokens]).astype(np.float64)
        values = floats_of(self.values[layer, :tokens]).astype(np.float64)
        logits = np.einsum("grd,tgd->grt", grouped, keys) / np.sqrt(LAYOUT.head_dim)
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        found: Floats = np.einsum("grt,tgd->grd", weights, values).reshape(HEADS, LAYOUT.head_dim).astype(np.float32)
        return found


def bits_equal(one: Floats, other: Floats) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@contextlib.contextmanager
def sequence_of(
    pool: kv.Pool, text: Text, config: SparseConfig, end: int, *, is_shared: bool = False
) -> Iterator[SparseSequence]:
    with SparseSequence(pool, config, tokens=text.ids[:end] if is_shared else None, threads=2) as sequence:
        text.append_to(sequence, end)
        yield sequence


def due_chunks(tokens: int) -> int:
    """The chunks of a sequence that have left the window."""
    return (CONFIG.init_tokens + 64 * CONFIG.middle_blocks(tokens)) // LAYOUT.chunk_tokens


def lose_lease(daemon: Daemon, pool: kv.Pool) -> None:
    """End the pool's connection, and the lease of a sequence with it."""
    end_connection_of(pool)
    wait_until(lambda: pool.connected and daemon.stats()["leases"] == 0, "its lease has ended with the connection")


def end_connection_of(pool: kv.Pool) -> None:
    """End the pool's connection from within, as a lost answer does."""
    session = pool._link.session
    assert session is not None
    session.end_session("ended by the test")
    pool._link.lost()
