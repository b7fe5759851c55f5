"""`bench peer`: chunks from one node to another, over the stream, plain and encrypted, and out of its shared memory, against
plain sockets.

Both nodes are in this process, with threads of the native core, and reach one another over loopback: its CPU time is of both
sides. The plain socket sends the same bytes from the same memory into the same memory, over as many connections and without
marks or checksums. A round takes memcpy, the socket, the streams and shared memory in turn, so that disturbances of the
machine affect all equally; a ratio is to the socket of the same round. The first round warms page tables and is not counted.
The target is overwritten before each pull and compared with the source after it, outside the measured time.

The time to the first layer counts from the call to the first layer of the first chunk, landed and verified.
"""

import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import numpy as np

import kvpool_native
from kvpool.bench.measure import median, spread, timed_s, timed_with_cpu_s
from kvpool.errors import KVPoolError

LAYERS = 32
SIZES = {"64 KiB": 64 << 10, "0.5 MiB": 512 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20, "32 MiB": 32 << 20}
QUICK_SIZES = ("64 KiB", "2 MiB")
STREAMS = (1, 2)
TOTAL_BYTES = 256 << 20
QUICK_BYTES = 4 << 20
ROUNDS = 7
QUICK_ROUNDS = 2
RATIO_BAR = 0.9
CPU_BAR = 0.6
HOST = "127.0.0.1"
THREADS = 4
SEGMENT_BYTES = 64 << 20
# The one before may not have ended yet when all of its chunks have.
JOBS_MAX = 4
# Of one system call of the plain socket.
PIECE_BYTES = 1 << 20
LONG_S = 60.0
SOCKET, STREAM, ENCRYPTED, SHARED = "socket", "stream", "encrypted stream", "shared memory"


class _Node:
    """A node's memory with slots for so many chunks, and what refers to them. Of an owner: with bytes."""

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        capacity = chunks * chunk_bytes
        geometry = kvpool_native.DirectoryGeometry.plan(capacity, min(SEGMENT_BYTES, capacity), chunks)
        self.arena = kvpool_native.Mapping.create("bench-arena", geometry.arena_bytes)
        self.index = kvpool_native.Mapping.create("bench-index", geometry.index_bytes)
        self._directory = kvpool_native.Directory(self.arena, self.index, geometry, os.urandom(16))
        self.view = kvpool_native.IndexView(self.index)
        self._namespace = self._directory.add_namespace()
        self._class = self._directory.add_class(chunk_bytes, LAYERS)
        for segment in range(geometry.segments):
            self._directory.mark_segment_ready(segment)
        self._keys = b"".join(number.to_bytes(32, "little") for number in range(1, chunks + 1))
        self._chunk_bytes = chunk_bytes
        self.slots = self._reserve()

    def _reserve(self) -> kvpool_native.Reserved:
        slots = self._directory.reserve(self._namespace, self._class, b"", self._keys, 1)
        if len(slots.slots) * 4 != len(self._keys):
            raise KVPoolError(f"an arena of {self.arena.size} bytes has no room for {len(self._keys) // 32} chunks")
        return slots

    def renew(self) -> None:
        """Slots in which nothing has landed."""
        self._directory.end_reservation(self.slots.id, 1)
        self.slots = self._reserve()
        for chunk in self.chunks():
            chunk[:] = 0

    def chunks(self) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The bytes of each chunk."""
        arena = np.frombuffer(self.arena.view(), np.uint8)
        offsets = np.frombuffer(self.slots.offsets, "<u8").tolist()
        return [arena[offset : offset + self._chunk_bytes] for offset in offsets]

    def fill(self) -> None:
        """Random bytes, committed as a save does it."""
        random = np.random.default_rng(1)
        for chunk in self.chunks():
            chunk[:] = random.integers(0, 256, len(chunk), np.uint8)
        offsets = np.frombuffer(self.slots.offsets, "<u8").tolist()
        layer_bytes = self._chunk_bytes // LAYERS
        checksums = [kvpool_native.extent_checksums(self.arena, at, layer_bytes, LAYERS) for at in offsets]
        self._directory.commit(self.slots.id, 0, b"".join(checksums))


@dataclass(slots=True)
class _Rounds:
    """Results of one way over the counted rounds. Invariant: every list has one entry for each of them."""

    rate: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    first_layer_us: list[float] = field(default_factory=list)


class _Setting:
    """Two nodes with chunks of one size, the servers of one and the queue of the other."""

    def __init__(self, chunk_bytes: int, streams: int, total: int) -> None:
        self.chunk_bytes, self.streams = chunk_bytes, streams
        self.chunks = max(streams, total // chunk_bytes)
        self.owner, self.puller = _Node(self.chunks, chunk_bytes), _Node(self.chunks, chunk_bytes)
        self.owner.fill()
        ways = [STREAM, ENCRYPTED] if kvpool_native.HAS_TLS else [STREAM]
        self.servers = {way: self._serve(encrypted=way == ENCRYPTED) for way in ways}
        self.queue = kvpool_native.PullQueue(self.puller.arena, self.puller.index, THREADS, JOBS_MAX)
        self.near = kvpool_native.NearQueue(self.puller.arena, self.puller.index, THREADS, JOBS_MAX)
        # As another process maps it: with page tables of its own.
        mapped = [
            kvpool_native.Mapping.attach(one.fd, one.size, writable=False)
            for one in (self.owner.arena, self.owner.index)
        ]
        self.memory = kvpool_native.NearMemory(*mapped)
        self.ways = (*ways, SHARED)

    def _serve(self, *, encrypted: bool) -> kvpool_native.ExtentServer:
        return kvpool_native.ExtentServer(
            self.owner.arena,
            self.owner.index,
            HOST,
            0,
            threads=THREADS,
            offers_max=JOBS_MAX,
            strangers_max=16,
            connections_max=16,
            hello_timeout_s=LONG_S,
            stall_s=LONG_S,
            encrypted=encrypted,
        )

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
        """Seconds, CPU seconds, and microseconds to the first layer of one pull of all chunks."""
        self.puller.renew()
        ends: list[kvpool_native.PullOutcome] = []
        pull = self._copy if way == SHARED else lambda into: self._pull(way, into)
        seconds, cpu_s = timed_with_cpu_s(lambda: pull(ends))
        failed = {end.fault for end in ends if end.fault}
        if failed:
            raise KVPoolError(f"a pull over the {way} failed: {', '.join(sorted(failed))}")
        pairs = zip(self.owner.chunks(), self.puller.chunks(), strict=True)
        if not all(np.array_equal(sent, received) for sent, received in pairs):
            raise KVPoolError(
                f"wrong bytes: chunks of {self.chunk_bytes} bytes came over the {way} other than they were sent"
            )
        first = next(end for end in ends if end.chunk == 0)
        return seconds, cpu_s, first.waited_us + first.first_layer_us

    def _pull(self, way: str, ends: list[kvpool_native.PullOutcome]) -> None:
        server, ticket, slots = self.servers[way], os.urandom(32), self.owner.slots
        columns, layer_bytes = (slots.offsets, slots.slots, slots.generations), self.chunk_bytes // LAYERS
        checks = server.checks(self.owner.view, *columns, layers=LAYERS, layer_bytes=layer_bytes)
        offer, _ = server.offer(
            ticket,
            self.owner.view,
            *columns,
            layers=LAYERS,
            layer_bytes=layer_bytes,
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
            layers=LAYERS,
            layer_bytes=layer_bytes,
            connections=self.streams,
            stall_s=LONG_S,
            timeout_s=LONG_S,
            checks=checks,
            encrypted=way == ENCRYPTED,
        )
        if not offer or not job:
            raise KVPoolError(f"a pull over the {way} was refused")
        while len(ends) < self.chunks:
            select.select([self.queue], [], [], LONG_S)
            ends += self.queue.take_outcomes()
        while not server.completed():
            select.select([server], [], [], LONG_S)

    def _copy(self, ends: list[kvpool_native.PullOutcome]) -> None:
        there, here, layer_bytes = self.owner.slots, self.puller.slots, self.chunk_bytes // LAYERS
        columns = (there.offsets, there.slots, there.generations)
        checks = self.servers[STREAM].checks(self.owner.view, *columns, layers=LAYERS, layer_bytes=layer_bytes)
        job = self.near.pull(
            self.memory,
            *columns,
            self.puller.view,
            here.offsets,
            here.slots,
            layers=LAYERS,
            layer_bytes=layer_bytes,
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
        return timed_with_cpu_s(self._send_plain)

    def _send_plain(self) -> None:
        share = self.chunks * self.chunk_bytes // self.streams
        source, target = self.owner.arena.view(), self.puller.arena.view()
        threads = []
        with socket.create_server((HOST, 0)) as listener:
            for number in range(self.streams):
                receiver = socket.create_connection(listener.getsockname())
                sender, _ = listener.accept()
                part = slice(number * share, (number + 1) * share)
                threads.append(Thread(target=_send, args=(sender, source[part])))
                threads.append(Thread(target=_receive, args=(receiver, target[part])))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _send(connection: socket.socket, source: memoryview) -> None:
    with connection:
        for at in range(0, len(source), PIECE_BYTES):
            connection.sendall(source[at : at + PIECE_BYTES])


def _receive(connection: socket.socket, target: memoryview) -> None:
    with connection:
        at = 0
        while at < len(target):
            count = connection.recv_into(target[at : at + PIECE_BYTES], 0, socket.MSG_WAITALL)
            if not count:
                return
            at += count


def bench_peer(is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """A row for each size of chunks, number of streams, and way."""
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    sizes = QUICK_SIZES if is_quick else tuple(SIZES)
    steps = len(sizes) * len(STREAMS) * rounds
    rows = []
    for streams in STREAMS:
        for name in sizes:
            setting = _Setting(SIZES[name], streams, QUICK_BYTES if is_quick else TOTAL_BYTES)
            try:
                rows += _measure(setting, name, rounds, lambda: advance(steps))
            finally:
                setting.close()
    return rows


def _measure(setting: _Setting, name: str, rounds: int, advance: Callable[[], None]) -> list[dict[str, Any]]:
    ways = {way: _Rounds() for way in (SOCKET, *setting.ways)}
    flat = np.ones(setting.chunks * setting.chunk_bytes, np.uint8)
    copy = np.zeros_like(flat)
    memcpy = []
    for number in range(rounds):
        floor_s = timed_s(lambda: kvpool_native.copy_plain(copy, flat))
        plain_s, plain_cpu_s = setting.send_plain()
        measured = {SOCKET: (plain_s, plain_cpu_s, 0.0)} | {way: setting.pull(way) for way in setting.ways}
        if number:
            memcpy.append(setting.gigabytes / floor_s)
            for way, (seconds, cpu_s, first_us) in measured.items():
                ways[way].rate.append(setting.gigabytes / seconds)
                ways[way].ratio.append(plain_s / seconds)
                ways[way].cpu.append(cpu_s / setting.gigabytes)
                ways[way].first_layer_us.append(first_us)
        advance()
    return [_row(setting, name, way, results, memcpy=memcpy) for way, results in ways.items()]


def _row(setting: _Setting, name: str, way: str, results: _Rounds, *, memcpy: list[float]) -> dict[str, Any]:
    is_stream = way == STREAM
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
        "cpu_spread": spread(results.cpu),
        "cpu_bar": CPU_BAR if is_stream else None,
        "first_layer_us": round(median(results.first_layer_us)) if way != SOCKET else None,
        "first_layer_spread_us": spread(results.first_layer_us, 0) if way != SOCKET else [0, 0],
    }
