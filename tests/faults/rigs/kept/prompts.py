"""Prompts of the campaign's engines: chains of several models and size classes, and a set; all of it derives from numbers.

So that anybody can ask for any of it, and check every byte. Immutable; any thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import kvpool_client as kv
from tests.rigs.daemon import SMALL
from tests.rigs.payload import chunk_bytes_of, load_all, tokens_of
from tests.rigs.sets import names_of, rows_for

ENGINES = 4
CHAIN = 6
LARGE = kv.Layout(layers=5, kv_heads=4, head_dim=16, dtype="float16", chunk_tokens=32)
# A layer of a chain takes a millisecond to copy: a process that is stopped has begun many of those, and ended few.
HUGE = kv.Layout(layers=3, kv_heads=16, head_dim=256, dtype="float16", chunk_tokens=64)
SETS = "sets"
REVISION = "1"


@dataclass(frozen=True, slots=True)
class Prompts:
    """The chains of a model, `count` of them, or the names of a set. `owner`: the engine that alone saves and flushes them."""

    model: str
    layout: kv.Layout
    count: int
    owner: int | None = None

    @property
    def chunks_max(self) -> int:
        """How many chunks one of them has."""
        return 1 if self.model == SETS else CHAIN

    @property
    def payload_bytes(self) -> int:
        """Of all of them."""
        return self.count * self.chunks_max * self.layout.chunk_bytes

    def keys(self, pool: kv.Pool, number: int, chunks: int = CHAIN) -> kv.KeyChain:
        """The first chunks of a chain."""
        first = 1000 * (sum(self.model.encode()) + number)
        return pool.keys(tokens_of(first, CHAIN * self.layout.chunk_tokens)[: chunks * self.layout.chunk_tokens])

    def find(self, pool: kv.Pool, number: int) -> int:
        """How many leading chunks are found."""
        if self.model == SETS:
            return int(pool.probe(names_of(number))[0] > 0)
        return pool.lookup(self.keys(pool, number)).chunks

    def load(self, pool: kv.Pool, number: int) -> tuple[int, int]:
        """Load what is there: how many chunks came, and how many of these have other bytes than their keys'."""
        if self.model == SETS:
            return self._load_set(pool, number)
        keys = self.keys(pool, number)
        result, into = load_all(pool, keys)
        return result.chunks, wrong_chunks(keys, into[: result.chunks])

    def _load_set(self, pool: kv.Pool, number: int) -> tuple[int, int]:
        names = names_of(number)
        expected = rows_for(pool, names)
        into = np.zeros_like(expected)
        with pool.acquire_set(names) as lease:
            result = pool.load_set(lease, into).wait()
        return result.chunks, int(result.chunks > 0 and not np.array_equal(into, expected))


def wrong_chunks(keys: kv.KeyChain, rows: "np.typing.NDArray[np.uint8]") -> int:
    """How many of these leading chunks have other bytes than their keys'."""
    return sum(not np.array_equal(row, chunk_bytes_of(keys[chunk], len(row))) for chunk, row in enumerate(rows))


def all_prompts() -> list[Prompts]:
    """Of every engine: two models and a set that all share, a model of its own, and one that it flushes often."""
    return [Prompts("shared", SMALL, 30), Prompts("huge", HUGE, 1), Prompts(SETS, SMALL, 60), *_of_engines()]


def prompts_of(engine: int) -> list[Prompts]:
    """Those that an engine saves."""
    return [prompts for prompts in all_prompts() if prompts.owner in (None, engine)]


def _of_engines() -> Iterator[Prompts]:
    for engine in range(ENGINES):
        yield Prompts(f"own-{engine}", LARGE if engine % 2 else SMALL, 16, engine)
        yield Prompts(f"scratch-{engine}", SMALL if engine % 2 else LARGE, 8, engine)
