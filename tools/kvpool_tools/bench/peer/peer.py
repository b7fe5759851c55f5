"""`bench peer`: chunks from one node to another by each transport, against plain sockets.

    socket             the same bytes from the same memory into the same memory, without marks or checksums
    stream, encrypted  kvpool's own, of which both nodes are in this process, with threads of the native core
    shared memory      kvpool's own between daemons of one host: copies out of the owner's arena, mapped once more
    TransferEngine     calls of the library alone, and kvpool over it, in processes of their own (`engine_ways`)
    NIXL               kvpool over it, in processes of its own

All go over loopback, with as many connections, threads or pulls at once as the row says; CPU time is of both sides. A round
takes memcpy, the socket, and every other way in turn, so that disturbances of the machine affect all equally; a ratio is to the
socket of the same round. The first round warms page tables and connections and is not counted. The target is overwritten before
each pull and compared with the source after it, outside the measured time.

The time to the first extent counts from the call to the first extent of the first chunk, landed and verified.

TransferEngine and NIXL are optional packages: where one is missing, or fails, its rows are absent and a note has the reason.
"""

import os
import select
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import kvpool_native
from kvpool.errors import KVPoolError
from kvpool_tools.bench.measure import median, spread, timed_s, timed_with_cpu_s
from kvpool_tools.bench.peer.engine_ways import KVPOOL, EngineAbsent, EngineChoice, EngineWays
from kvpool_tools.bench.peer.node import EXTENTS, HOST, JOBS_MAX, LONG_S, STALL_S, THREADS, Node
from kvpool_tools.bench.peer.plain_socket import send_plain

SIZES = {"64 KiB": 64 << 10, "0.5 MiB": 512 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20, "32 MiB": 32 << 20}
QUICK_SIZES = ("64 KiB", "2 MiB")
STREAMS = (1, 2)
TOTAL_BYTES = 256 << 20
QUICK_BYTES = 4 << 20
ROUNDS = 7
QUICK_ROUNDS = 2
RATIO_BAR = 0.9
CPU_BAR = 0.6
SOCKET, STREAM, ENCRYPTED, SHARED = "socket", "stream", "encrypted stream", "shared memory"

# Sends all chunks once: seconds, CPU seconds of both sides, and microseconds to the first extent.
Way = Callable[[str], tuple[float, float, float]]


@dataclass(slots=True)
class _Rounds:
    """Results of one way over the counted rounds. Invariant: every list has one entry for each of them."""

    rate: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    first_extent_us: list[float] = field(default_factory=list)

    def add_round(self, gigabytes: float, *, seconds: float, plain_s: float, cpu_s: float, first_us: float) -> None:
        """Of one round. `plain_s`: of the socket."""
        self.rate.append(gigabytes / seconds)
        self.ratio.append(plain_s / seconds)
        self.cpu.append(cpu_s / gigabytes)
        self.first_extent_us.append(first_us)


@dataclass(frozen=True, slots=True)
class _Run:
    """Rounds to measure. `advance`: called after each. `notes`: takes why there are no rows of a way."""

    rounds: int
    notes: list[str]
    advance: Callable[[], None]


class _Setting:
    """Two nodes with chunks of one size, the servers of one and the queue of the other."""

    def __init__(self, chunk_bytes: int, streams: int, total: int) -> None:
        self.chunk_bytes, self.streams = chunk_bytes, streams
        self.chunks = max(streams, total // chunk_bytes)
        self.owner, self.puller = Node(self.chunks, chunk_bytes), Node(self.chunks, chunk_bytes)
        self.owner.fill()
        ways = [STREAM, ENCRYPTED] if kvpool_native.tls_library() else [STREAM]
        self.servers = {way: self.owner.serve(is_encrypted=way == ENCRYPTED) for way in ways}
        self.queue = kvpool_native.PullQueue(self.puller.arena, self.puller.index, THREADS, JOBS_MAX)
        self.near = kvpool_native.NearQueue(self.puller.arena, self.puller.index, THREADS, JOBS_MAX)
        self.memory = self.owner.mapped_again()

    def ways(self) -> dict[str, Way]:
        """How the bytes can go; the floor is the first."""
        return {SOCKET: lambda _: (*self.send_plain(), 0.0), **dict.fromkeys((*self.servers, SHARED), self.pull)}

    @property
    def gigabytes(self) -> float:
        """Of one round."""
        return self.chunks * self.chunk_bytes / 1e9

    def close(self) -> None:
        """End all threads."""
        for server in self.servers.values():
            server.stop(LONG_S)
        self.queue.stop(LONG_S)
        self.near.stop(LONG_S)

    def pull(self, way: str) -> tuple[float, float, float]:
        """Seconds, CPU seconds, and microseconds to the first extent of one pull of all chunks."""
        self.puller.renew()
        ends: list[kvpool_native.PullOutcome] = []
        seconds, cpu_s = timed_with_cpu_s(lambda: self._copy(ends) if way == SHARED else self._pull(way, ends))
        failed = {end.fault for end in ends if end.fault}
        if failed:
            raise KVPoolError(f"a pull over the {way} failed: {', '.join(sorted(failed))}")
        pairs = zip(self.owner.chunks(), self.puller.chunks(), strict=True)
        if not all(np.array_equal(sent, received) for sent, received in pairs):
            raise KVPoolError(
                f"wrong bytes: chunks of {self.chunk_bytes} bytes came over the {way} other than they were sent"
            )
        first = next(end for end in ends if end.chunk == 0)
        return seconds, cpu_s, first.waited_us + first.first_extent_us

    def _pull(self, way: str, ends: list[kvpool_native.PullOutcome]) -> None:
        server, ticket, slots = self.servers[way], os.urandom(32), self.owner.slots
        columns, extent_bytes = (slots.offsets, slots.slots, slots.generations), self.chunk_bytes // EXTENTS
        checks = server.checks(self.owner.view, *columns, extents=EXTENTS, extent_bytes=extent_bytes)
        offer, _ = server.offer(
            ticket,
            self.owner.view,
            *columns,
            extents=EXTENTS,
            extent_bytes=extent_bytes,
            connections=self.streams,
            peer=1,
            timeout_s=LONG_S,
        )
        job = self.queue.pull(
            HOST,
            server.port,
            ticket,
            self.puller.view,
            self.puller.slots.offsets,
            self.puller.slots.slots,
            extents=EXTENTS,
            extent_bytes=extent_bytes,
            connections=self.streams,
            stall_s=STALL_S,
            timeout_s=LONG_S,
            checks=checks,
            encrypted=way == ENCRYPTED,
        )
        if not offer or not job:
            raise KVPoolError(f"a pull over the {way} was refused")
        while len(ends) < self.chunks:
            select.select([self.queue], [], [], LONG_S)
            ends += self.queue.take_outcomes()
        while not server.take_outcomes():
            select.select([server], [], [], LONG_S)

    def _copy(self, ends: list[kvpool_native.PullOutcome]) -> None:
        there, here, extent_bytes = self.owner.slots, self.puller.slots, self.chunk_bytes // EXTENTS
        columns = (there.offsets, there.slots, there.generations)
        checks = self.servers[STREAM].checks(self.owner.view, *columns, extents=EXTENTS, extent_bytes=extent_bytes)
        job = self.near.pull(
            self.memory,
            *columns,
            self.puller.view,
            here.offsets,
            here.slots,
            extents=EXTENTS,
            extent_bytes=extent_bytes,
            checks=checks,
            parts=self.streams,
            timeout_s=LONG_S,
        )
        if not job:
            raise KVPoolError(f"a pull over the {SHARED} was refused")
        while len(ends) < self.chunks:
            select.select([self.near], [], [], LONG_S)
            ends += self.near.take_outcomes()

    def send_plain(self) -> tuple[float, float]:
        """Seconds and CPU seconds of as many bytes over plain sockets, made within the time."""
        source, target, size = (
            self.owner.arena.view().data,
            self.puller.arena.view().data,
            self.chunks * self.chunk_bytes,
        )
        return timed_with_cpu_s(lambda: send_plain(source, target, size=size, streams=self.streams))


def bench_peer(
    is_quick: bool, advance: Callable[[int], None], choice: EngineChoice, notes: list[str]
) -> list[dict[str, Any]]:
    """A row for each size of chunks, number of streams, and way. `notes` gets why there are none of a way."""
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    sizes = QUICK_SIZES if is_quick else tuple(SIZES)
    steps = len(sizes) * len(STREAMS) * rounds
    rows = []
    choices = [choice, replace(choice, library="nixl", has_library=False)]
    for streams in STREAMS:
        for name in sizes:
            with ExitStack() as stack:
                setting = _Setting(SIZES[name], streams, QUICK_BYTES if is_quick else TOTAL_BYTES)
                stack.callback(setting.close)
                ways = setting.ways()
                for one in list(choices):
                    found = _engine_ways(one, setting, stack, notes)
                    if not found:
                        choices.remove(one)
                    ways |= found
                rows += _measure(setting, name, ways, _Run(rounds, notes, lambda: advance(steps)))
    return rows


def _engine_ways(choice: EngineChoice, setting: _Setting, stack: ExitStack, notes: list[str]) -> dict[str, Way]:
    """The ways of a library; none where it cannot be used, which is noted."""
    try:
        engine = EngineWays(choice, setting.owner, setting.puller, streams=setting.streams)
    except EngineAbsent as absent:
        notes.append(f"rows of {choice.title} are absent: {absent}")
        return {}
    stack.callback(engine.close)
    return dict.fromkeys(engine.ways, engine.pull)


def _measure(setting: _Setting, name: str, ways: dict[str, Way], run: _Run) -> list[dict[str, Any]]:
    results = {way: _Rounds() for way in ways}
    flat = np.ones(setting.chunks * setting.chunk_bytes, np.uint8)
    copy = np.zeros_like(flat)
    memcpy = []
    for number in range(run.rounds):
        floor_s = timed_s(lambda: kvpool_native.copy_plain(copy, flat))
        plain_s = 0.0
        for way in list(results):
            try:
                seconds, cpu_s, first_us = ways[way](way)
            except EngineAbsent as absent:
                run.notes.append(f"rows of {way}, {name}, {setting.streams} at once are absent: {absent}")
                del results[way]
                continue
            plain_s = plain_s or seconds
            if number:
                results[way].add_round(
                    setting.gigabytes, seconds=seconds, plain_s=plain_s, cpu_s=cpu_s, first_us=first_us
                )
        if number:
            memcpy.append(setting.gigabytes / floor_s)
        run.advance()
    return [_row(setting, name, way, found, memcpy=memcpy) for way, found in results.items()]


def _row(setting: _Setting, name: str, way: str, results: _Rounds, *, memcpy: list[float]) -> dict[str, Any]:
    is_stream, has_extents = way == STREAM, way in (STREAM, ENCRYPTED, SHARED, *KVPOOL.values())
    return {
        "chunk": name,
        "chunks": setting.chunks,
        "streams": setting.streams,
        "way": way,
        "rounds": len(results.rate),
        "memcpy_gb_per_s": round(median(memcpy), 2),
        "gb_per_s": round(median(results.rate), 2),
        "spread_gb_per_s": spread(results.rate),
        "ratio": round(median(results.ratio), 2),
        "ratio_spread": spread(results.ratio),
        "ratio_bar": RATIO_BAR if is_stream else None,
        "cpu_seconds_per_gb": round(median(results.cpu), 3),
        "cpu_spread_seconds_per_gb": spread(results.cpu),
        "cpu_bar": CPU_BAR if is_stream else None,
        "first_extent_us": round(median(results.first_extent_us)) if has_extents else None,
        "first_extent_spread_us": spread(results.first_extent_us, 0) if has_extents else [0, 0],
    }
