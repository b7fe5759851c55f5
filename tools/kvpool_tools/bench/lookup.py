"""`bench lookup`: the keys of a 128k-token prompt and the lookup of its 512 chunks, int32 array in; and the probe of 8192 keys
of a set, as an engine's own offloading names the blocks of such a prompt.

Floors: SHA-256 of the same tokens in one pass for the keys, and 512 probes of a dict in this process for the lookup. All
kinds are taken in turn, in rounds. Repeated calls find their memory in the processor's caches, which an engine between
two prompts does not: the cold row reads 64 MiB of other memory before each lookup.
"""

import hashlib
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from kvpool.errors import KVPoolError
from kvpool_tools.bench.daemon import REVISION, MeasuredDaemon
from kvpool_tools.bench.measure import Bars, Rounds, timed_s

TOKENS = 131_072
LAYOUT = kv.Layout(layers=1, kv_heads=1, head_dim=16, dtype="bfloat16", chunk_tokens=256)
MODEL = "bench-lookup"
WHOLE_BAR_US = 500
OTHER_BYTES = 64 << 20
ROUNDS = 20
QUICK_ROUNDS = 2
SAMPLES = 20
COLD_SAMPLES = 3
SET_KEYS, STORED_KEYS = 8192, 64

KEYS, MISS, HIT, COLD, WHOLE, SET = (
    "keys of 128k tokens",
    "lookup, miss",
    "lookup, 512 chunks hit",
    "lookup, 512 hit, cold caches",
    "keys and lookup, 512 hit",
    "probe, 8192 keys of a set",
)
HASH_FLOOR, PROBE_FLOOR = "SHA-256 of 128k tokens", "dict, 512 probes"
# The floor of each row, and its bars: by the floor 0.5 to 0.8 of what the fastest build had before.
ROWS: dict[str, tuple[str, Bars]] = {
    HASH_FLOOR: (HASH_FLOOR, Bars()),
    KEYS: (HASH_FLOOR, Bars(us=WHOLE_BAR_US)),
    PROBE_FLOOR: (PROBE_FLOOR, Bars()),
    MISS: (PROBE_FLOOR, Bars(times_floor=0.38)),
    HIT: (PROBE_FLOOR, Bars(times_floor=0.56)),
    COLD: (PROBE_FLOOR, Bars(us=WHOLE_BAR_US)),
    WHOLE: (HASH_FLOOR, Bars(us=WHOLE_BAR_US, times_floor=0.38)),
    SET: (HASH_FLOOR, Bars(us=20_000)),
}


def bench_lookup(daemon: MeasuredDaemon, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """Rows: the floors, keys, a miss, a hit of 512 chunks with warm and cold caches, and keys with lookup together."""
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    tokens = np.random.default_rng(2).integers(0, 50_000, TOKENS, dtype=np.int32)
    other = np.ones(OTHER_BYTES, np.uint8)
    with connect(daemon) as pool:
        missing, keys = pool.keys(tokens[::-1].copy()), pool.keys(tokens)
        store_zeros(pool, keys)
        names = np.random.default_rng(3).integers(0, 256, (SET_KEYS, 32), dtype=np.uint8)
        zeros = np.zeros((STORED_KEYS, LAYOUT.chunk_bytes), np.uint8)
        stored = pool.save_set(names[:STORED_KEYS], zeros).commit()
        table = {keys[number]: number for number in range(len(keys))}
        probes = list(table)
        calls: dict[str, Callable[[], object]] = {
            HASH_FLOOR: lambda: hashlib.sha256(tokens.data).digest(),
            KEYS: lambda: pool.keys(tokens),
            PROBE_FLOOR: lambda: [table[key] for key in probes],
            MISS: lambda: pool.lookup(missing),
            HIT: lambda: pool.lookup(keys),
            WHOLE: lambda: pool.lookup(pool.keys(tokens)),
            SET: lambda: pool.probe(names),
        }
        taken = Rounds(rounds, advance)
        taken.run(
            {name: (lambda call=call: [timed_s(call) for _ in range(SAMPLES)], None) for name, call in calls.items()}
            | {COLD: (lambda: [_cold_s(other, calls[HIT]) for _ in range(COLD_SAMPLES)], None)}
        )
        if pool.lookup(keys).chunks != len(keys) or pool.lookup(missing).chunks:
            raise KVPoolError("a lookup found other chunks than were stored: the measured calls prove nothing")
        if np.count_nonzero(pool.probe(names)) != STORED_KEYS or stored.stored != STORED_KEYS:
            raise KVPoolError("a probe found other chunks than were stored: the measured calls prove nothing")
    if not daemon.is_own:
        daemon.forget(MODEL)
    return [taken.row(name, floor, bars) for name, (floor, bars) in ROWS.items()]


def _cold_s(other: npt.NDArray[np.uint8], call: Callable[[], object]) -> float:
    other.sum()
    return timed_s(call)


def connect(
    daemon: MeasuredDaemon, layout: kv.Layout = LAYOUT, share: kv.Share | None = None, salt: bytes | None = None
) -> kv.Pool:
    """A Pool for small chunks, with a salt of its own: a shared daemon must not have the chunks of an earlier run."""
    return kv.connect(
        daemon.socket,
        model=MODEL,
        revision=REVISION,
        layout=layout,
        share=share,
        salt=os.urandom(16) if salt is None else salt,
        timeout_s=10.0,
    )


def store_zeros(pool: kv.Pool, keys: kv.KeyChain) -> None:
    """Have all chunks of `keys` stored, or this Pool's share of them. Raises KVPoolError if the daemon declines."""
    parts = [share.of_layout(part) for share, part in zip(pool.shares, pool.layout.group_layouts, strict=True)]
    rows = [
        np.zeros((len(chunks), part.chunk_bytes), np.uint8)
        for part, chunks in zip(parts, pool.chunks_to_save(keys), strict=True)
    ]
    result = pool.save(keys, from_=rows if pool.layout.groups else rows[0]).commit()
    if result is None or result.declined:
        raise KVPoolError(f"the daemon declined to store {len(keys)} small chunks: {result}")
