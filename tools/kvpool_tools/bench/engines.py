"""`bench engines`: requests a second of one daemon with 64 engines, against raw round trips of as many connections.

Each engine saves new prompts of 32 chunks and leases one that it saved before, in turn: slots, commit, lease, and a release
that goes with the next request. Counted are answers: of four requests three have one. The pool is small: new chunks take the
slots of others. One thread drives all engines, as it does the floor's, so that both stand for what the daemon can serve, not
for so many interpreters. No bytes are copied.

The rounds of daemon and floor take turns. A ratio is to the floor of the same round; more is better.
"""

import os
import select
import socket as sockets
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from kvpool.errors import KVPoolError
from kvpool.ids import CHECKSUM_BYTES
from kvpool.key_column import packed_bytes
from kvpool.layout import Layout
from kvpool.protocol import columns, frames
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from kvpool_tools.bench.daemon import own_daemon
from kvpool_tools.bench.echo import RawEcho
from kvpool_tools.bench.measure import median, spread

MODEL = "bench-engines"
LAYOUT = Layout(layers=1, kv_heads=1, head_dim=16, dtype="uint8", planes=1, chunk_tokens=256)
ENGINES, CHUNKS, SEED = 64, 32, 4
# An engine may fall behind others by some prompts, and finds its own all the same.
CAPACITY_CHUNKS = 16 * ENGINES * CHUNKS
ROUNDS, QUICK_ROUNDS = 8, 3
ROUND_S, QUICK_ROUND_S = 2.0, 0.2
# About a request's and an answer's of these.
REQUEST_BYTES, ANSWER_BYTES = 600, 200
TIMEOUT_S = 10.0
# A third of what an earlier build had on two cores of a Xeon: three times as many requests.
CPU_BAR_US = 28
RECEIVE_BYTES = 64 << 10
ECHO, MIXED = f"raw round trips, {ENGINES} connections", f"{ENGINES} engines, saves and loads of {CHUNKS} chunks"

# What an engine sends; it gets the answer's frame.
Requests = Generator[bytes, bytes, None]


def bench_engines(is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """Rows: the floor, and the daemon."""
    rounds, round_s = (QUICK_ROUNDS, QUICK_ROUND_S) if is_quick else (ROUNDS, ROUND_S)
    # By last use a prompt that is leased again and again stays.
    options = (f"dram.max_chunks={CAPACITY_CHUNKS}", "dram.policy=lru")
    rates: dict[str, list[float]] = {ECHO: [], MIXED: []}
    cpu_us: dict[str, list[float]] = {ECHO: [], MIXED: []}
    with ExitStack() as stack:
        daemon = stack.enter_context(own_daemon(CAPACITY_CHUNKS * LAYOUT.chunk_bytes, *options))
        raw = stack.enter_context(RawEcho(REQUEST_BYTES, ANSWER_BYTES, ENGINES))
        hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, MODEL, LAYOUT.to_wire())
        served = [
            stack.enter_context(closing(BlockingConnection(daemon.socket, hello, TIMEOUT_S))) for _ in range(ENGINES)
        ]
        peers = [stack.enter_context(sockets.socket(fileno=os.dup(one.fileno()))) for one in served]
        random, counts = np.random.default_rng(SEED), Counter[str]()
        engines = {
            ECHO: (Drive([(peer, _echo()) for peer in raw.sockets]), raw.cpu_seconds),
            MIXED: (Drive([(peer, _engine(random, counts)) for peer in peers]), daemon.cpu_seconds),
        }
        for number in range(rounds):
            for name, (drive, clock) in engines.items():
                before_s, begun_s = clock(), time.perf_counter()
                answers = drive.run(round_s)
                taken_s = time.perf_counter() - begun_s
                if number:
                    rates[name].append(answers / taken_s)
                    cpu_us[name].append((clock() - before_s) / answers * 1e6)
            advance(rounds)
    rows = [_row(name, rates[name], rates[ECHO], cpu_us[name]) for name in rates]
    return [row | {"leases_short": counts["short"] if row["name"] == MIXED else None} for row in rows]


class Drive:
    """Engines of one kind, each with one request under way, until the time is up."""

    def __init__(self, engines: Sequence[tuple[sockets.socket, Requests]]) -> None:
        self._engines = {peer.fileno(): (peer, requests) for peer, requests in engines}
        self._received = dict.fromkeys(self._engines, b"")
        self._poll = select.epoll()
        for fd, (peer, requests) in self._engines.items():
            peer.sendall(next(requests))
            self._poll.register(fd, select.EPOLLIN)

    def run(self, seconds: float) -> int:
        """Answers in so many seconds. Raises KVPoolError where a connection ends, or nothing is answered."""
        answers, end_s = 0, time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            ready = self._poll.poll(TIMEOUT_S)
            if not ready:
                raise KVPoolError(f"none of {len(self._engines)} requests was answered within {TIMEOUT_S:g} s")
            answers += sum(self._take(fd) for fd, _ in ready)
        return answers

    def _take(self, fd: int) -> bool:
        """Read what has come, and go on where that is an answer."""
        peer, requests = self._engines[fd]
        data = peer.recv(RECEIVE_BYTES)
        if not data:
            raise KVPoolError("a connection has ended: the measured requests prove nothing")
        received = self._received[fd] + data
        is_whole: bool = len(received) == frames.LENGTH.size + frames.LENGTH.unpack_from(received)[0]
        self._received[fd] = b"" if is_whole else received
        if is_whole:
            peer.sendall(requests.send(received))
        return is_whole


def _echo() -> Requests:
    while True:
        yield bytes(REQUEST_BYTES)


def _engine(random: np.random.Generator, counts: Counter[str]) -> Requests:
    """Saves new prompts and leases the first one, for ever. Where that is short, another connection was served too often
    meanwhile: it is counted, and the prompt saved last takes its place."""
    leased_keys, release, checksums = b"", b"", bytes(CHECKSUM_BYTES * LAYOUT.extents * CHUNKS)
    while True:
        keys = random.bytes(packed_bytes(CHUNKS))
        reservation, states, *_ = _fields((yield release + m.encode(reserve_chain(b"", keys), 1)))
        if states != bytes([SaveState.RESERVED]) * CHUNKS:
            raise KVPoolError(f"not all of {CHUNKS} chunks were reserved: the measured requests prove nothing")
        yield m.encode(m.Commit(reservation, checksums, b""), 2)
        leased_keys = leased_keys or keys
        lease, leased, *_ = _fields((yield m.encode(m.Acquire(leased_keys[-packed_bytes(1) :], CHUNKS), 3)))
        if leased != CHUNKS:
            counts["short"] += 1
            leased_keys = keys
        release = m.encode(one_way.DropLeases(columns.pack_numbers([lease])), 0) if lease else b""


def _fields(frame: bytes) -> list[Any]:
    return frames.decode(frame[frames.LENGTH.size :])[2]


def _row(name: str, rates: list[float], floors: list[float], cpu_us: list[float]) -> dict[str, object]:
    ratios = [rate / floor for rate, floor in zip(rates, floors, strict=True)]
    return {
        "name": name,
        "rounds": len(rates),
        "requests_per_s": round(median(rates)),
        "requests_spread_per_s": spread(rates, 0),
        "ratio": round(median(ratios), 2),
        "ratio_spread": spread(ratios),
        "daemon_cpu_us": round(median(cpu_us), 1),
        "daemon_cpu_spread_us": spread(cpu_us, 1),
        "daemon_cpu_bar_us": CPU_BAR_US if name == MIXED else None,
    }
