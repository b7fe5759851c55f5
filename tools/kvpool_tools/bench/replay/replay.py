"""`bench replay`: a trace's requests through a live daemon, with real bytes of which every one is checked.

A plan is made first: the number of requests, the hits of an infinite cache, the bytes. Then client processes share the requests
in the trace's order, at the chunk size asked, as fast as they can: the trace's arrival times are ignored. A daemon of its own
gets a capacity in bytes or as a share of the trace's unique bytes; keys are salted for each run, so that a shared daemon has
nothing of an earlier one. Where an SSD tier is asked for, its capacity is a multiple of DRAM's, and hits are counted by the
tier that had them when they were leased.

Main thread of a command only.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import kvpool_native
from kvpool.config.config import SSD_CAPACITY_MIN
from kvpool.config.path_options import check_writable
from kvpool.errors import InvalidArgument
from kvpool.ids import PAGE_BYTES
from kvpool.units import parse_size
from kvpool_tools.bench.daemon import MeasuredDaemon, found_daemon, own_daemon, wait_until_open
from kvpool_tools.bench.disk import disk_folder
from kvpool_tools.bench.replay.client import MODEL, ReplaySettings, RequestResult, replay_layout
from kvpool_tools.bench.replay.clients import Clients
from kvpool_tools.bench.replay.tally import Tally
from kvpool_tools.sim.replay_times import write_times
from kvpool_tools.sim.traces import Trace, TraceError, find_traces

TRACES_VARIABLE = "KVPOOL_TRACES"
# Bounds a run without a given number of requests to about a minute: two clients on two cores load and save 1.3 to 3.4 GB/s of
# chunks, measured with `bench all` on three traces.
DEFAULT_BYTES = 80 << 30
QUICK_REQUESTS = 400
CAPACITY_BYTES_MIN = 64 << 10
INDEXED_BYTES_MIN = 32 << 10
SALT_BYTES = 8

Row = dict[str, object]
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay. `capacity` is a size, or a share of the unique bytes such as `10%`; `salt` empty: a new one.

    `ssd_ratio`: capacity of an SSD tier for each byte of DRAM's, 0 none; `path`: the folder of its disk, None the user's own.
    `overrides`: options of the daemon, as `kvpoold --set` takes them. `is_settled`: one client, and nothing moves between
    the tiers when a request begins, or begins to save: hits are those of a simulation. `times`: a file for when each began.
    """

    clients: int
    chunk_bytes: int
    capacity: str
    requests: int | None
    salt: str
    socket: str | None
    ssd_ratio: float = 0.0
    path: str | None = None
    is_settled: bool = False
    times: str | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Plan of a replay, made before it begins. `ideal_tokens`: the hits of an infinite cache."""

    requests: int
    input_tokens: int
    ideal_tokens: int
    chunks: int
    unique_chunks: int
    chunks_max: int


def named_traces(paths: tuple[str, ...]) -> list[Trace]:
    """The traces that were named, or else those of the folder in KVPOOL_TRACES; none when neither is given."""
    if paths:
        return [Trace(Path(path)) for path in paths]
    folder = os.environ.get(TRACES_VARIABLE)
    return find_traces(Path(folder)) if folder else []


def parse_capacity(text: str, unique_bytes: int) -> int:
    """Bytes of a size such as `2GiB`, or of a share such as `10%` of `unique_bytes`. Raises InvalidArgument."""
    if not text.endswith("%"):
        return parse_size(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 10.0:
        raise InvalidArgument(f"{text!r} is no share, expected a number up to 1000 with %")
    return int(share * unique_bytes)


def plan_replay(trace: Trace, limit: int | None, chunk_bytes: int) -> ReplayPlan:
    """Count the first requests of a trace: `limit` of them, or as many as make a replay of about a minute."""
    seen: set[int] = set()
    requests = input_tokens = ideal_chunks = chunks = chunks_max = 0
    for request in islice(trace.requests(), limit):
        ids = request.hash_ids
        if limit is None and requests and (chunks + len(ids)) * chunk_bytes > DEFAULT_BYTES:
            break
        # An id stands for the whole prefix up to it, so the first new one ends what could be hit.
        ideal_chunks += next((number for number, value in enumerate(ids) if value not in seen), len(ids))
        seen.update(ids)
        requests += 1
        input_tokens += request.input_tokens
        chunks += len(ids)
        chunks_max = max(chunks_max, len(ids))
    if not chunks:
        raise TraceError(f"{trace.path}: no prompt of {requests} has a full block of {trace.block_tokens} tokens")
    return ReplayPlan(requests, input_tokens, ideal_chunks * trace.block_tokens, chunks, len(seen), chunks_max)


def bench_replay(trace: Trace, options: ReplayOptions, advance: Advance) -> Row:
    """Replay one trace; its row. Raises TraceError, InvalidArgument, or KVPoolError when a process fails."""
    replay_layout(options.chunk_bytes, trace.block_tokens)
    if options.times is not None:
        check_writable("--times", Path(options.times))
    plan = plan_replay(trace, options.requests, options.chunk_bytes)
    tally, began_s = Tally(options.chunk_bytes), list[float]()
    salt = options.salt or os.urandom(SALT_BYTES).hex()
    requests = (request.hash_ids for request in islice(trace.requests(), plan.requests))

    def count(served: RequestResult) -> None:
        tally.add_request(served)
        began_s.append(served.began_s)
        advance(plan.requests)

    with _daemon(options, plan) as daemon:
        settings = ReplaySettings(
            daemon.socket, salt, options.chunk_bytes, trace.block_tokens, plan.chunks_max, options.is_settled
        )
        with Clients(settings, options.clients) as clients:
            before, cpu_before_s, start = daemon.stats(), daemon.cpu_seconds(), time.perf_counter()
            used = clients.serve(requests, count)
            seconds, daemon_cpu_s = time.perf_counter() - start, daemon.cpu_seconds() - cpu_before_s
        after, room = daemon.stats(), _room(daemon, options.chunk_bytes)
        if not daemon.is_own and not options.salt:
            daemon.forget(MODEL)
    if options.times is not None:
        write_times(Path(options.times), began_s)
    changed = {name: after[name] - before[name] for name in ("evicted_chunks", "checksum_failures")}
    written_bytes = after.get("ssd.written_bytes", 0) - before.get("ssd.written_bytes", 0)
    tiers = tally.by_tier(
        chunk_tokens=trace.block_tokens, input_tokens=plan.input_tokens, ssd_written_bytes=written_bytes
    )
    copy_cpu_s = sum(each.copy_cpu_seconds for each in used)
    copied_bytes = (tally.loaded_chunks + tally.stored_chunks) * options.chunk_bytes
    cpu = {
        "daemon_cpu_seconds": round(daemon_cpu_s, 3),
        "client_cpu_seconds": round(sum(each.cpu_seconds for each in used), 2),
        "client_copy_cpu_seconds": round(copy_cpu_s, 2),
        "copied_gb_per_cpu_second": round(copied_bytes / copy_cpu_s / 1e9, 2) if copy_cpu_s else None,
        "cpu_seconds": round(daemon_cpu_s + sum(each.cpu_seconds for each in used), 2),
    }
    return {
        **_asked(trace, options, plan, daemon),
        "ssd_capacity_bytes": after.get("ssd.capacity_bytes", 0),
        **room,
        "seconds": round(seconds, 2),
        "requests_per_s": round(plan.requests / seconds, 1),
        "hit_rate": round(tally.loaded_chunks * trace.block_tokens / plan.input_tokens, 4),
        "ideal_hit_rate": round(plan.ideal_tokens / plan.input_tokens, 4),
        **tiers,
        **tally.counts(),
        **changed,
        **tally.speeds(),
        **cpu,
    }


def _asked(trace: Trace, options: ReplayOptions, plan: ReplayPlan, daemon: MeasuredDaemon) -> Row:
    return {
        "trace": trace.name,
        "requests": plan.requests,
        "clients": options.clients,
        "chunk_bytes": options.chunk_bytes,
        "capacity_bytes": daemon.capacity_bytes,
        "unique_bytes": plan.unique_chunks * options.chunk_bytes,
    }


def _room(daemon: MeasuredDaemon, chunk_bytes: int) -> Row:
    """Capacity of each tier in the replay's chunks: the capacities of a simulation of the same node."""
    info = daemon.info()
    slot_bytes = -(-(chunk_bytes + kvpool_native.SSD_HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES
    of_segment = info.get("ssd_segment_bytes", 0) // slot_bytes
    ssd_chunks = min(info.get("ssd_segments", 0) * of_segment, info.get("ssd_max_chunks", 0))
    return {"capacity_chunks": daemon.capacity_bytes // chunk_bytes, "ssd_capacity_chunks": ssd_chunks}


@contextmanager
def _daemon(options: ReplayOptions, plan: ReplayPlan) -> Iterator[MeasuredDaemon]:
    if options.socket is not None:
        yield found_daemon(options.socket)
        return
    wanted = parse_capacity(options.capacity, plan.unique_chunks * options.chunk_bytes)
    capacity = max(wanted, options.chunk_bytes, CAPACITY_BYTES_MIN)
    # The index is sized for chunks of 32 KiB by default; smaller ones need more entries than that.
    entries = [f"dram.max_chunks={capacity // options.chunk_bytes}"] if options.chunk_bytes < INDEXED_BYTES_MIN else []
    if not options.ssd_ratio:
        with own_daemon(capacity, *entries, *options.overrides) as daemon:
            yield daemon
        return
    ssd_capacity = max(int(options.ssd_ratio * capacity), SSD_CAPACITY_MIN)
    with disk_folder(options.path, ssd_capacity) as folder:
        # As many entries as slots: by default there is one for each 256 KiB, which is more than a chunk here.
        slots = ssd_capacity // (options.chunk_bytes + kvpool_native.SSD_HEADER_BYTES)
        tier = (
            f"ssd.path={folder / 'tier'}",
            "ssd.create=true",
            f"ssd.capacity={ssd_capacity}B",
            f"ssd.max_chunks={slots}",
        )
        with own_daemon(capacity, *entries, *tier, *options.overrides) as daemon:
            wait_until_open(daemon)
            yield daemon
