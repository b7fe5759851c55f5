"""`bench copy`: paged KV into the pool and back, per copying thread, against memcpy of the same bytes.

Save counts from the reservation to the answered commit, load from the acquire to the last verified layer. A round takes
memcpy, gather, save, memcpy, scatter, load and memcpy in turn, so that disturbances of the machine affect all equally. A save's
or load's ratio is to the mean of the two memcpys around it, its other ratio to the gather or scatter before it: memcpy of each
piece in the save's order, without a checksum and without a daemon. The first round warms page tables and is not counted. The
load's target is overwritten before each round and every load is compared with the source, outside the measured time.

Saves by copy have rows of their own (`write_mode`), from a second daemon where the first is this benchmark's: the daemon's CPU
time is then a part of their price.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
import kvpool_native
from kvpool.errors import KVPoolError
from kvpool_tools.bench.daemon import REVISION, MeasuredDaemon, own_daemon
from kvpool_tools.bench.measure import median, rates, spread, timed_s, timed_with_cpu_s

BLOCK_TOKENS = 16
TOTAL_BYTES = 512 << 20
QUICK_BYTES = 64 << 20
ROUNDS = 11
QUICK_ROUNDS = 3
SAVE_BAR = 0.7
LOAD_BAR = 0.85
# Against the checksum-free gather and scatter.
PIECES_BAR = 1.0
# Saves of small chunks pay for a request and a commit beside the same bytes.
SMALL_SAVE_BAR = 0.95
MODEL = "bench-copy"
SMALL = "0.5 MiB"
SIZES = {
    "32 MiB": kv.Layout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", chunk_tokens=256),
    "2 MiB": kv.Layout(layers=8, kv_heads=2, head_dim=128, dtype="bfloat16", chunk_tokens=256),
    SMALL: kv.Layout(layers=4, kv_heads=1, head_dim=128, dtype="bfloat16", chunk_tokens=256),
}

Layers = list[npt.NDArray[np.uint16]]
# Seconds, CPU seconds of this process, CPU seconds of the daemon.
_Measured = tuple[float, float, float]


@dataclass(slots=True)
class _Rounds:
    """Results of the counted rounds. Invariant: every list but `memcpy` has one entry for each of them."""

    total: int
    write_mode: str
    memcpy: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    save_ratio: list[float] = field(default_factory=list)
    load_ratio: list[float] = field(default_factory=list)
    gather: list[float] = field(default_factory=list)
    scatter: list[float] = field(default_factory=list)
    save_gather_ratio: list[float] = field(default_factory=list)
    load_scatter_ratio: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    daemon_cpu_s: float = 0.0
    save_cpu_s: float = 0.0
    save_daemon_cpu_s: float = 0.0

    def add_round(self, floors_s: list[float], pieces_s: list[float], save_s: "_Measured", load_s: "_Measured") -> None:
        """Count one round: three memcpys, the gather and the scatter, and what the save and the load between them took."""
        self.memcpy += [self.total / seconds / 1e9 for seconds in floors_s]
        self.save.append(self.total / save_s[0] / 1e9)
        self.load.append(self.total / load_s[0] / 1e9)
        self.save_ratio.append((floors_s[0] + floors_s[1]) / 2 / save_s[0])
        self.load_ratio.append((floors_s[1] + floors_s[2]) / 2 / load_s[0])
        self.gather.append(self.total / pieces_s[0] / 1e9)
        self.scatter.append(self.total / pieces_s[1] / 1e9)
        self.save_gather_ratio.append(pieces_s[0] / save_s[0])
        self.load_scatter_ratio.append(pieces_s[1] / load_s[0])
        self.cpu_s += save_s[1] + load_s[1]
        self.daemon_cpu_s += save_s[2] + load_s[2]
        self.save_cpu_s += save_s[1]
        self.save_daemon_cpu_s += save_s[2]


def bench_copy(daemon: MeasuredDaemon, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """One row for each chunk size and write mode."""
    modes = 2 if daemon.is_own else 1
    steps = len(SIZES) * (QUICK_ROUNDS if is_quick else ROUNDS) * modes
    rows = []
    for measured in _modes(daemon, is_quick):
        rows += [
            _measure_size(measured, name, layout, lambda: advance(steps), is_quick=is_quick)
            for name, layout in SIZES.items()
        ]
    if not daemon.is_own:
        daemon.forget(MODEL)
    return rows


def _modes(daemon: MeasuredDaemon, is_quick: bool) -> Iterator[MeasuredDaemon]:
    """The daemon, and one of the other write mode if this one is the benchmark's own."""
    yield daemon
    if daemon.is_own:
        capacity = daemon.capacity_bytes // (8 if is_quick else 1)  # a quick run fills an eighth of it
        with own_daemon(capacity, "server.write_mode=copy") as by_copy:
            yield by_copy


def _measure_size(
    daemon: MeasuredDaemon, name: str, layout: kv.Layout, advance: Callable[[], None], *, is_quick: bool
) -> dict[str, Any]:
    total = QUICK_BYTES if is_quick else TOTAL_BYTES
    chunks = total // layout.chunk_bytes
    source, target = _engine(layout, chunks, fill=True), _engine(layout, chunks, fill=False)
    flat, copy = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    rounds = _Rounds(total, daemon.info()["write_mode"])
    # A salt of this run: a shared daemon must not have the chunks of an earlier one.
    with kv.connect(
        daemon.socket, model=MODEL, revision=REVISION, layout=layout, salt=os.urandom(16), timeout_s=10.0
    ) as pool:
        saving, loading = (pool.register(layers, BLOCK_TOKENS, "kv_first") for layers in (source, target))
        for number in range(QUICK_ROUNDS if is_quick else ROUNDS):
            random = np.random.default_rng(number)
            block_ids = random.permutation(saving.blocks)
            keys = pool.keys(random.integers(0, 50_000, chunks * layout.chunk_tokens, dtype=np.int32))
            for layer in target:
                layer.fill(0)
            ids, per_chunk = block_ids.tobytes(), saving.blocks_per_chunk
            floors_s = [timed_s(lambda: kvpool_native.copy_plain(copy, flat))]
            pieces_s = [timed_s(lambda: kvpool_native.gather_plain(saving.view, ids, per_chunk, copy))]  # noqa: B023 - called at once
            save_s = _measured(daemon, lambda: _save(pool, keys, saving, block_ids))  # noqa: B023 - called at once
            floors_s.append(timed_s(lambda: kvpool_native.copy_plain(copy, flat)))
            pieces_s.append(timed_s(lambda: kvpool_native.scatter_plain(loading.view, ids, per_chunk, flat)))  # noqa: B023 - called at once
            load_s = _measured(daemon, lambda: _load(pool, keys, loading, block_ids))  # noqa: B023 - called at once
            floors_s.append(timed_s(lambda: kvpool_native.copy_plain(copy, flat)))
            _compare(source, target, name)
            if number:
                rounds.add_round(floors_s, pieces_s, save_s, load_s)
            advance()
    return _row(name, chunks, rounds)


def _measured(daemon: MeasuredDaemon, call: Callable[[], None]) -> _Measured:
    before_s = daemon.cpu_seconds()
    seconds, cpu_s = timed_with_cpu_s(call)
    return seconds, cpu_s, daemon.cpu_seconds() - before_s


def _engine(layout: kv.Layout, chunks: int, *, fill: bool) -> Layers:
    blocks = chunks * layout.chunk_tokens // BLOCK_TOKENS
    shape = (2, blocks, BLOCK_TOKENS, layout.kv_heads, layout.head_dim)
    random = np.random.default_rng(1)
    if fill:
        return [random.integers(1, 65535, shape, dtype=np.uint16) for _ in range(layout.layers)]
    return [np.zeros(shape, np.uint16) for _ in range(layout.layers)]


def _save(pool: kv.Pool, keys: kv.KeyChain, cache: kv.Cache, block_ids: npt.NDArray[np.int64]) -> None:
    result = pool.save(keys, cache, block_ids).commit()
    if result is None or result.stored != len(keys):
        raise KVPoolError(f"the daemon declined a save of {len(keys)} chunks: {result}; it needs 1 GiB of its own")


def _load(pool: kv.Pool, keys: kv.KeyChain, cache: kv.Cache, block_ids: npt.NDArray[np.int64]) -> None:
    with pool.acquire(pool.lookup(keys)) as lease:
        if lease.chunks != len(keys):
            raise KVPoolError(
                f"{lease.chunks} of {len(keys)} chunks are left to load; the daemon needs 1 GiB of its own"
            )
        result = pool.load(lease, cache, block_ids).wait()
    if result.chunks != len(keys):
        raise KVPoolError(f"a load of {len(keys)} chunks ended early: {result}")


def _compare(source: Layers, target: Layers, name: str) -> None:
    if not all(np.array_equal(saved, loaded) for saved, loaded in zip(source, target, strict=True)):
        raise KVPoolError(f"wrong bytes: {name} chunks came back other than they were saved")


def _row(name: str, chunks: int, rounds: _Rounds) -> dict[str, Any]:
    save_ratio, load_ratio = median(rounds.save_ratio), median(rounds.load_ratio)
    saved_gb = rounds.total * len(rounds.save) / 1e9
    gather_bar = SMALL_SAVE_BAR if name == SMALL else PIECES_BAR
    return {
        "write_mode": rounds.write_mode,
        "chunk": name,
        "chunks": chunks,
        "rounds": len(rounds.save),
        **rates("memcpy", rounds.memcpy),
        **rates("save", rounds.save),
        "save_ratio": round(save_ratio, 2),
        "save_ratio_spread": spread(rounds.save_ratio),
        "save_bar": SAVE_BAR if rounds.write_mode == "in-place" else None,
        **rates("gather", rounds.gather),
        "save_gather_ratio": round(median(rounds.save_gather_ratio), 2),
        "save_gather_ratio_spread": spread(rounds.save_gather_ratio),
        "save_gather_bar": gather_bar if rounds.write_mode == "in-place" else None,
        **rates("load", rounds.load),
        "load_ratio": round(load_ratio, 2),
        "load_ratio_spread": spread(rounds.load_ratio),
        "load_bar": LOAD_BAR,
        **rates("scatter", rounds.scatter),
        "load_scatter_ratio": round(median(rounds.load_scatter_ratio), 2),
        "load_scatter_ratio_spread": spread(rounds.load_scatter_ratio),
        "load_scatter_bar": PIECES_BAR,
        "ratio": round(min(save_ratio, load_ratio), 2),
        "cpu_seconds": round(rounds.cpu_s, 2),
        "daemon_cpu_seconds": round(rounds.daemon_cpu_s, 3),
        "cpu_seconds_per_gb": round(rounds.cpu_s / (2 * saved_gb), 3),
        "save_cpu_seconds_per_gb": round(rounds.save_cpu_s / saved_gb, 3),
        "save_daemon_cpu_seconds_per_gb": round(rounds.save_daemon_cpu_s / saved_gb, 3),
    }
