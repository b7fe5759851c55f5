"""`bench rpc`, saves: 512 chunks of 256 tokens with their token ids and with events published, of which each replaces another:
the slots (`save`, with a copy of 128 KiB), then the commit, against a raw unix socket's round trip of as many bytes.

The benchmark starts its own daemon, of which the prompts of a round fill a half. CPU times are read when the daemon has nothing
left to do: they have the events, which it publishes after its answers.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import kvpool_client as kv
from kvpool.errors import KVPoolError
from kvpool.ids import CHECKSUM_BYTES, TOKEN_BYTES
from kvpool_tools.bench.daemon import MeasuredDaemon, own_daemon
from kvpool_tools.bench.echo import RawEcho
from kvpool_tools.bench.lookup import connect
from kvpool_tools.bench.measure import Bars, Rounds, timed_s

ECHO, SAVE, COMMIT = "raw round trip, 0.5 MiB", "save, 512 chunks for as many", "commit, 512 chunks"
# The floor of each row, and its bars: 0.3 to 0.4 of what an earlier build had on two cores of a Xeon.
ROWS: dict[str, tuple[str, Bars]] = {
    ECHO: (ECHO, Bars()),
    SAVE: (ECHO, Bars(daemon_cpu_us=500)),
    COMMIT: (ECHO, Bars(us=980, daemon_cpu_us=450)),
}
LAYOUT = kv.Layout(layers=1, kv_heads=1, head_dim=1, dtype="uint8", planes=1, chunk_tokens=256)
CHUNKS, PROMPTS = 512, 8
CAPACITY_CHUNKS = 2 * PROMPTS * CHUNKS
SLOT_BYTES = 4096
ROUNDS, QUICK_ROUNDS = 21, 3
CHUNK_BYTES = CHECKSUM_BYTES * LAYOUT.extents + TOKEN_BYTES * LAYOUT.chunk_tokens
SEED = 3
# So long without any CPU time is at rest, and a daemon that is not by then has work of its own.
REST_S, REST_MAX_S = 0.002, 1.0


def bench_commit(is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """A row for each of ROWS."""
    random, rows = np.random.default_rng(SEED), np.zeros((CHUNKS, LAYOUT.chunk_bytes), np.uint8)
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
        options = (f"events.publish=ipc://{directory}/events", f"dram.max_chunks={CAPACITY_CHUNKS}")
        with (
            own_daemon(CAPACITY_CHUNKS * SLOT_BYTES, *options) as daemon,
            connect(daemon, LAYOUT) as pool,
            RawEcho(CHUNKS * CHUNK_BYTES, CHUNKS) as raw,
        ):
            begun: list[kv.Save] = []

            def begin(keys: kv.KeyChain) -> None:
                begun.append(pool.save(keys, from_=rows))

            def save() -> list[float]:
                tokens = random.integers(0, 50_000, (PROMPTS, CHUNKS * LAYOUT.chunk_tokens), dtype=np.int32)
                seconds = [timed_s(partial(begin, pool.keys(prompt))) for prompt in tokens]
                _rest(daemon)
                return seconds

            def commit() -> list[float]:
                seconds = [timed_s(partial(_commit, one)) for one in begun]
                begun.clear()
                _rest(daemon)
                return seconds

            for _ in range(CAPACITY_CHUNKS // CHUNKS // PROMPTS):
                save()
                commit()
            taken = Rounds(QUICK_ROUNDS if is_quick else ROUNDS, advance)
            taken.run(
                {
                    ECHO: (lambda: raw.round_trips_s(PROMPTS), raw.cpu_seconds),
                    SAVE: (save, daemon.cpu_seconds),
                    COMMIT: (commit, daemon.cpu_seconds),
                }
            )
            _check(daemon)
    return [taken.row(name, floor, bars) for name, (floor, bars) in ROWS.items()]


def _commit(save: kv.Save) -> None:
    result = save.commit()
    if result is None or result.stored != CHUNKS:
        raise KVPoolError(
            f"not all of {CHUNKS} small chunks were stored: the measured call proves nothing: {result and result.reasons}"
        )


def _rest(daemon: MeasuredDaemon) -> None:
    """Wait until the daemon does nothing."""
    last, begun_s = -1.0, time.perf_counter()
    while last != (last := daemon.cpu_seconds()) and time.perf_counter() < begun_s + REST_MAX_S:
        time.sleep(REST_S)


def _check(daemon: MeasuredDaemon) -> None:
    """Raises KVPoolError unless the events were published, and chunks gave their slots to others."""
    stats = daemon.stats()
    if stats["events.written"] < CAPACITY_CHUNKS // CHUNKS or stats["evicted_chunks"] < CAPACITY_CHUNKS:
        raise KVPoolError(
            f"{stats['events.written']} events were written and {stats['evicted_chunks']} chunks evicted: "
            "the measured calls prove nothing"
        )
