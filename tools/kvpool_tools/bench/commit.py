"""`bench rpc`, commit: the time to publish 512 chunks of 256 tokens, from the first request to the last answer, with their
token ids and with events published, against a raw unix socket's round trip of as many bytes.

The benchmark starts its own daemon, so small that from the third save on each chunk replaces another. The slots are reserved
just before each commit, untimed, and not written: `bench copy` measures the cost of copies.
"""

import os
import tempfile
import time

from kvpool.errors import KVPoolError
from kvpool.ids import TOKEN_BYTES
from kvpool.key_column import packed_bytes
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from kvpool_tools.bench.daemon import MeasuredDaemon, own_daemon
from kvpool_tools.bench.echo import RawEcho
from kvpool_tools.bench.lookup import LAYOUT, MODEL
from kvpool_tools.bench.measure import latencies, median, timed_s

CHUNKS = 512
BAR_US = 1500
CAPACITY_CHUNKS = 3 * CHUNKS
SAMPLES, QUICK_SAMPLES = 200, 10
WARM_UP = 4
TIMEOUT_S = 10.0
CRC_BYTES = 4
CHUNK_BYTES = CRC_BYTES * LAYOUT.extents + TOKEN_BYTES * LAYOUT.chunk_tokens


def bench_commit(is_quick: bool) -> list[dict[str, object]]:
    """Rows: the raw round trip, and the commit with its ratio to it."""
    samples = QUICK_SAMPLES if is_quick else SAMPLES
    hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, MODEL, LAYOUT.to_wire())
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
        publish = f"events.publish=ipc://{directory}/events"
        with (
            own_daemon(CAPACITY_CHUNKS * LAYOUT.chunk_bytes, publish) as daemon,
            BlockingConnection(daemon.socket, hello, TIMEOUT_S) as connection,
            RawEcho(CHUNKS * CHUNK_BYTES, CHUNKS) as raw,
        ):
            for _ in range(WARM_UP):
                _commit_s(connection)
            before_s, daemon_before_s = time.process_time(), daemon.cpu_seconds()
            committed_s = [_commit_s(connection) for _ in range(samples)]
            used_s, daemon_s = time.process_time() - before_s, daemon.cpu_seconds() - daemon_before_s
            echo_s = raw.round_trips_s(samples)
            raw_s = raw.cpu_seconds()
            _check(daemon, samples)
    ratio = round(median(committed_s) / median(echo_s), 2)
    return [
        latencies(
            "raw round trip, 0.5 MiB",
            echo_s,
            bar_us=None,
            ratio=1.0,
            cpu_seconds=round(raw_s, 4),
            daemon_cpu_seconds=None,
        ),
        latencies(
            f"commit, {CHUNKS} chunks",
            committed_s,
            bar_us=BAR_US,
            ratio=ratio,
            cpu_seconds=round(used_s, 4),
            daemon_cpu_seconds=round(daemon_s, 4),
        ),
    ]


def _commit_s(connection: BlockingConnection) -> float:
    """Reserve, commit and end; the seconds of the commit alone."""
    made = connection.call(reserve_chain(b"", os.urandom(packed_bytes(CHUNKS))), m.Reserved)
    if made.states != bytes([SaveState.RESERVED]) * CHUNKS:
        raise KVPoolError(f"not all of {CHUNKS} small chunks were reserved: the measured call proves nothing")
    checksums, tokens = (
        bytes(CRC_BYTES * LAYOUT.extents * CHUNKS),
        os.urandom(TOKEN_BYTES * LAYOUT.chunk_tokens * CHUNKS),
    )
    request, answers = m.Commit(made.reservation, checksums, tokens), []
    seconds = timed_s(lambda: answers.append(connection.call(request, m.Committed)))
    if answers[0].states != bytes([SaveState.STORED]) * CHUNKS:
        raise KVPoolError(f"not all of {CHUNKS} small chunks were stored: the measured call proves nothing")
    return seconds


def _check(daemon: MeasuredDaemon, samples: int) -> None:
    """Raises KVPoolError unless the events were published."""
    if daemon.stats()["events.written"] < samples:
        raise KVPoolError("the daemon wrote fewer events than it had commits: the measured calls prove nothing")
