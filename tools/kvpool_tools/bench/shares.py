"""`bench shares`: a rank of two loads its heads out of chunks that engines of another and of its own size have stored, against
shards of its own size.

A round is a load of shards, one of what one rank stored whole and one of what two ranks stored in parts, each first in turn and
with a memcpy behind it, so that disturbances of the machine affect all equally; the first round is not counted. A ratio is to
the load of shards in the same round. Blocks have each head's bytes in a row, as vLLM's layout LBHNC. Every load is compared
with what was stored, outside the measured time.

    full      all layers attend to all tokens
    hybrid    one layer in four does, the others to a window of four chunks, which is all that is stored and loaded of them
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
import kvpool_native
from kvpool.errors import KVPoolError
from kvpool_tools.bench.daemon import REVISION, MeasuredDaemon
from kvpool_tools.bench.measure import median, rates, spread, timed_s, timed_with_cpu_s

MODEL = "bench-shares"
SIZE = 2
HEADS, HEAD_BYTES, BLOCK_TOKENS, CHUNK_TOKENS = 8, 512, 16, 64
LAYERS, WINDOW_CHUNKS = 16, 4
CHUNKS, QUICK_CHUNKS = 48, 12
ROUNDS, QUICK_ROUNDS = 31, 3
HEAD_GROUPS = (2, 8)
LOAD_BAR = 0.8
WAYS = ("shards", "by_one", "by_two")

Items = npt.NDArray[np.uint8]


def bench_shares(daemon: MeasuredDaemon, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """One row for each kind of model and number of head groups."""
    rounds, chunks = (QUICK_ROUNDS, QUICK_CHUNKS) if is_quick else (ROUNDS, CHUNKS)
    steps = 2 * len(HEAD_GROUPS) * rounds
    rows = [
        _measure(daemon, kind, head_groups, chunks=chunks, rounds=rounds, advance=lambda: advance(steps))
        for kind in ("full", "hybrid")
        for head_groups in HEAD_GROUPS
    ]
    if not daemon.is_own:
        daemon.forget(MODEL)
    return rows


@dataclass(slots=True)
class _Rounds:
    """Results of the counted rounds, by way."""

    memcpy: list[float] = field(default_factory=list)
    rate: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    ratio: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAYS, 0.0))

    def add_round(self, size: int, floors_s: Sequence[float], taken: dict[str, tuple[float, float]]) -> None:
        """Count one round of loads of so many bytes."""
        self.memcpy += [size / seconds / 1e9 for seconds in floors_s]
        for way, (seconds, cpu_s) in taken.items():
            self.rate[way].append(size / seconds / 1e9)
            self.ratio[way].append(taken["shards"][0] / seconds)
            self.cpu_s[way] += cpu_s


class _Rank:
    """One rank's connection and memory: of each group of the layout an array a layer, [blocks, heads, bytes of a head]."""

    def __init__(
        self, socket: str, layout: kv.Layout, shares: Sequence[kv.Share] | None, *, salt: bytes, chunks: int
    ) -> None:
        share = None if shares is None else list(shares) if layout.groups else shares[0]
        self.pool = kv.connect(
            socket, model=MODEL, revision=REVISION, layout=layout, share=share, salt=salt, timeout_s=10.0
        )
        self.keys = self.pool.keys(np.arange(chunks * CHUNK_TOKENS + 1, dtype=np.int32))
        blocks = chunks * CHUNK_TOKENS // BLOCK_TOKENS
        self._ids = np.random.default_rng(2).permutation(blocks).reshape(chunks, -1)
        self.arrays: list[list[Items]] = []
        for number, part in enumerate(layout.group_layouts):
            heads = part.kv_heads if shares is None else part.kv_heads // part.head_groups * shares[number].groups
            shape = (blocks, heads, BLOCK_TOKENS * HEAD_BYTES)
            self.arrays.append([np.zeros(shape, np.uint8) for _ in range(part.layers)])
        self._caches = [
            self.pool.register(arrays, block_tokens=BLOCK_TOKENS, form="packed", group=number)
            for number, arrays in enumerate(self.arrays)
        ]

    def fill(self, first_head: int) -> None:
        """The model's KV of this rank's heads, from `first_head` on."""
        for number, arrays in enumerate(self.arrays):
            for layer, array in enumerate(arrays):
                array[...] = _kv_of(number, layer, array.shape, first_head)

    def save(self) -> None:
        """Store all that a later prompt can load."""
        if self.pool.layout.groups:
            named = self.pool.chunks_to_save(self.keys)
            ids = [self._ids[list(chunks)].reshape(-1) for chunks in named]
            result: Any = self.pool.save(self.keys, self._caches, ids).commit()
        else:
            result = self.pool.save(self.keys, self._caches[0], self._ids.reshape(-1)).commit()
        if result is None or result.declined:
            raise KVPoolError(f"the daemon declined a save: {result}; it needs 1 GiB of its own")

    def load(self) -> None:
        """Load the longest hit, from the lookup to the last verified layer."""
        with self.pool.acquire(self.pool.lookup(self.keys)) as lease:
            if self.pool.layout.groups:
                ids = [self._ids[list(chunks)].reshape(-1) for chunks in lease.ranges]
                result = self.pool.load(lease, self._caches, ids).wait()
            else:
                result = self.pool.load(lease, self._caches[0], self._ids[: lease.chunks].reshape(-1)).wait()
        if result.chunks != len(self.keys):
            raise KVPoolError(f"a load of {len(self.keys)} chunks ended early: {result}")

    def check(self, first_head: int) -> None:
        """Compare what was loaded with the model's KV, and overwrite it."""
        for number, arrays in enumerate(self.arrays):
            loaded = self._loaded_blocks(number)
            for layer, array in enumerate(arrays):
                if not np.array_equal(array[loaded], _kv_of(number, layer, array.shape, first_head)[loaded]):
                    raise KVPoolError(f"wrong bytes: layer {layer} of group {number} came back other than it was saved")
                array.fill(0)

    @property
    def bytes_loaded(self) -> int:
        """Bytes that a load of all chunks brings."""
        return sum(
            array[0].nbytes * len(self._loaded_blocks(number))
            for number, arrays in enumerate(self.arrays)
            for array in arrays
        )

    def _loaded_blocks(self, group: int) -> npt.NDArray[np.int64]:
        role = self.pool.layout.of_group(group).group
        chunks = len(self.keys) if role is None else role.chunks_of(len(self.keys), CHUNK_TOKENS)
        return self._ids[len(self.keys) - chunks :].reshape(-1)


def _kv_of(group: int, layer: int, shape: Sequence[int], first_head: int) -> Items:
    """Bytes that differ from block to block, head to head and layer to layer."""
    blocks, heads, size = shape
    begins = np.random.default_rng((group, layer)).integers(0, 256, (blocks, HEADS, 1), dtype=np.uint8)
    return begins[:, first_head : first_head + heads] + np.arange(size).astype(np.uint8)


def _layout(kind: str, heads: int, head_groups: int) -> kv.Layout:
    shape: dict[str, Any] = {
        "kv_heads": heads,
        "head_dim": HEAD_BYTES,
        "dtype": "uint8",
        "planes": 1,
        "format": "bench",
        "block_tokens": BLOCK_TOKENS,
        "head_groups": head_groups,
    }
    if kind == "full":
        return kv.Layout(layers=LAYERS, chunk_tokens=CHUNK_TOKENS, **shape)
    full = kv.Group(layers=LAYERS // 4, **shape)
    window = kv.Group(kind="window", window=WINDOW_CHUNKS * CHUNK_TOKENS, layers=LAYERS - LAYERS // 4, **shape)
    return kv.Layout(chunk_tokens=CHUNK_TOKENS, groups=(full, window))


def _measure(
    daemon: MeasuredDaemon, kind: str, head_groups: int, *, chunks: int, rounds: int, advance: Callable[[], None]
) -> dict[str, Any]:
    run = os.urandom(8)  # a shared daemon must not have the chunks of an earlier run
    apart, joint = _layout(kind, HEADS // SIZE, 1), _layout(kind, HEADS, head_groups)
    shares = [[kv.Share.of_rank(part, rank, SIZE) for part in joint.group_layouts] for rank in range(SIZE)]
    ranks: dict[str, _Rank] = {}
    for way, layout, written in (
        ("shards", replace(apart, world=SIZE, rank=0), (None,)),
        ("by_one", joint, (None,)),
        ("by_two", joint, shares),
    ):
        salt = run + way.encode()
        for rank, share in enumerate(written):
            writer = _Rank(daemon.socket, layout, share, salt=salt, chunks=chunks)
            writer.fill(rank * HEADS // SIZE)
            writer.save()
            writer.pool.close()
        ranks[way] = _Rank(daemon.socket, layout, None if way == "shards" else shares[0], salt=salt, chunks=chunks)
    counted, flat = _Rounds(), np.ones((2, ranks["shards"].bytes_loaded), np.uint8)
    for number in range(rounds):
        floors_s, taken = [], {}
        for place in range(len(WAYS)):
            way = WAYS[(number + place) % len(WAYS)]
            taken[way] = timed_with_cpu_s(ranks[way].load)
            ranks[way].check(0)
            floors_s.append(timed_s(lambda: kvpool_native.copy_plain(flat[0], flat[1])))
        if number:
            counted.add_round(flat.shape[1], floors_s, taken)
        advance()
    for rank_of in ranks.values():
        rank_of.pool.close()
    return _row(kind, head_groups, flat.shape[1], counted)


def _row(kind: str, head_groups: int, size: int, counted: _Rounds) -> dict[str, Any]:
    row: dict[str, Any] = {
        "layers": kind,
        "head_groups": head_groups,
        "mib": round(size / (1 << 20), 1),
        "rounds": len(counted.rate["shards"]),
        **rates("memcpy", counted.memcpy),
    }
    gb = size * len(counted.rate["shards"]) / 1e9
    for way in WAYS:
        row |= rates(way, counted.rate[way])
        if way != "shards":
            row |= {
                f"{way}_ratio": round(median(counted.ratio[way]), 2),
                f"{way}_ratio_spread": spread(counted.ratio[way]),
                f"{way}_bar": LOAD_BAR,
            }
        row[f"{way}_cpu_seconds_per_gb"] = round(counted.cpu_s[way] / gb, 3)
    return row
