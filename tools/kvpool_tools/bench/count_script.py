"""The fixed script of `bench turns --count`, which valgrind runs: each request of an engine in turn, between two marks.

    python -m kvpool_tools.bench.count_script MARKS SOCKET

MARKS is the library of `counted.MARKS_SOURCE`: between its calls callgrind counts, and each end writes what was counted to a
file of its own. First the daemon's side: frames into a connection of this process, with a whole pool behind it, until the
answer is written. Then the client's, on the daemon at SOCKET, whose work is not counted. Prints the name of each counted
request, a line each. Garbage collection is off, as in the benchmark of times.
"""

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvloop

import kvpool_client as kv
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.errors import KVPoolError
from kvpool.ids import ConnectionId
from kvpool.key_column import packed_bytes
from kvpool.layout import Layout
from kvpool.layouts.groups import Group
from kvpool.pool.pool import Pool
from kvpool.protocol import columns, frames
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.reserve_runs import ReserveRun, RunForm, pack_runs
from kvpool.server.connections.connection import Connection
from kvpool.server.connections.lease_frames import LeaseFrames
from kvpool.server.connections.turns import Turns
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.service import VERBS, engine_handlers

CHUNK = Layout(layers=1, kv_heads=1, head_dim=16, dtype="uint8", chunk_tokens=256)
SHORT, LONG = 4, 512
SHORT_ROUNDS, LONG_ROUNDS, WARM_ROUNDS = 15, 9, 3
# Of a hybrid model. A hit of GROUPED chunks needs all of the first group, and the last ones of each other.
GROUPS = Layout(
    chunk_tokens=CHUNK.chunk_tokens,
    groups=(
        Group(layers=1, kv_heads=1, head_dim=16, dtype="uint8"),
        *(
            Group(kind="window", window=window, layers=1, kv_heads=1, head_dim=16, dtype="uint8")
            for window in (512, 1024, 4096)
        ),
    ),
)
GROUPED = 32
# Layout, chunks of a prompt, how often it is counted, and how its rows name it.
PROMPTS = (
    (CHUNK, SHORT, SHORT_ROUNDS, f"{SHORT} chunks"),
    (CHUNK, LONG, LONG_ROUNDS, f"{LONG} chunks"),
    (CHUNK, GROUPED, LONG_ROUNDS, f"{GROUPED} chunks"),
    (GROUPS, GROUPED, LONG_ROUNDS, f"{GROUPED} chunks of {len(GROUPS.groups)} groups"),
)
# Of an engine that offloads by itself, such as vLLM with kvpool's tier: keys of its own, each alone.
SET, SET_NAME = 32, "a set of 32"
SEED = 3
SETTLE_S = 0.05
MODEL = "counted"


class Counter:
    """Marks the beginning and the end of what is counted."""

    def __init__(self, library: str) -> None:
        self._marks = ctypes.CDLL(library)

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """What is done within is counted under this name, or not at all where it is empty."""
        if name:
            self._marks.begin_count()
        yield
        if name:
            self._marks.end_count()
            print(name, flush=True)


class Answers:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        """An answer."""
        self.written.append(data)

    def is_closing(self) -> bool:
        """It never does."""
        return False

    def set_write_buffer_limits(self, high: int) -> None:
        """There is no buffer."""

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


class DaemonSide:
    """A connection to a pool of this process."""

    def __init__(self, counter: Counter) -> None:
        self._counted = counter.counted
        self._random = np.random.default_rng(SEED)
        clock, chunks = MonotonicClock(), 4 * LONG
        options = (
            f"dram.capacity={chunks * CHUNK.chunk_bytes}B",
            f"dram.max_chunks={chunks}",
            "dram.prefault=false",
            "dram.connection_quota=1.0",
            f"events.publish=ipc://{os.getcwd()}/events",
        )
        self._pool = Pool(load_config(None, list(options)), clock)
        self._answers, self._sequence, times = Answers(), 0, RequestTimes(VERBS)
        turns, at_once = Turns(clock), LeaseFrames(self._pool.chains, times, clock)
        self._connections = {}
        for number, layout in enumerate((CHUNK, GROUPS), 1):
            session = self._pool.open_session(ConnectionId(number), MODEL, layout)
            self._connections[layout] = connection = Connection(
                session.connection,
                engine_handlers(self._pool, session, user=None, clock=clock),
                clock=clock,
                turns=turns,
                times=times,
                on_closed=lambda *_: None,
                on_protocol_error=lambda: None,
                on_failed=lambda _: None,
                serve_at_once=at_once.of_session(session),
            )
            connection.connection_made(self._answers)  # type: ignore[arg-type]  # as much of a transport as is used

    async def run(self) -> None:
        """Every request of an engine for a prompt, of few chunks and of many, and over groups."""
        await self._pool.start()
        for layout, chunks, rounds, name in PROMPTS:
            for number in range(WARM_ROUNDS + rounds):
                await self._serve_prompt(layout, chunks, name if number >= WARM_ROUNDS else "")
        for number in range(WARM_ROUNDS + LONG_ROUNDS):
            await self._serve_set(SET_NAME if number >= WARM_ROUNDS else "")
        problems = self._pool.verify()["problems"]
        await self._pool.stop()
        if problems:
            raise KVPoolError(f"the pool is broken: {problems[0]}")

    async def _serve_prompt(self, layout: Layout, chunks: int, name: str) -> None:
        """Save a new prompt, from the third one on in the place of others, and lease it."""
        parts = layout.group_layouts
        keys = [self._random.bytes(packed_bytes(part.chunks_of(chunks))) for part in parts]
        tokens = self._random.integers(0, 50_000, CHUNK.chunk_tokens * chunks, dtype=np.int32).tobytes()
        runs = [
            ReserveRun(group, RunForm.ROOT if part.is_chained else RunForm.ALONE, part.chunks_of(chunks))
            for group, part in enumerate(parts)
        ]

        async def ask(verb: str, record: object) -> list[Any]:
            return await self._ask(layout, f"daemon: {verb}, {name}" if name else "", record)

        made = await ask("reserve", m.Reserve(pack_runs(runs), b"".join(keys)))
        await ask("commit", m.Commit(made[0], bytes(CHUNK.extents * 4 * layout.rows_of(chunks)), tokens))
        leaves = [of[-packed_bytes(1) :] if part.is_chained else of for part, of in zip(parts, keys, strict=True)]
        leased = await ask("acquire", m.Acquire(b"".join(leaves), chunks))
        if leased[1] != chunks:
            raise KVPoolError(f"{leased[1]} of {chunks} chunks were leased: the counted requests prove nothing")
        await ask("release", one_way.DropLeases(columns.pack_numbers(leased[:1])))

    async def _serve_set(self, name: str) -> None:
        """Save chunks that are each alone, and lease them."""
        keys = self._random.bytes(packed_bytes(SET))
        record_of: dict[str, Callable[[list[Any]], object]] = {
            "reserve": lambda _: m.Reserve(pack_runs([ReserveRun(0, RunForm.ALONE, SET)]), keys),
            "commit": lambda made: m.Commit(made[0], bytes(CHUNK.extents * 4 * SET), b""),
            "acquire": lambda _: m.Acquire(keys, set_of=1),
            "release": lambda leased: one_way.DropLeases(columns.pack_numbers(leased[:1])),
        }
        answer: list[Any] = []
        for verb, make in record_of.items():
            answer = await self._ask(CHUNK, f"daemon: {verb}, {name}" if name else "", make(answer))
            if verb == "acquire" and answer[1] != SET:
                raise KVPoolError(f"{answer[1]} of {SET} chunks were leased: the counted requests prove nothing")

    async def _ask(self, layout: Layout, name: str, record: object) -> list[Any]:
        """The fields of the answer, after which the daemon has time for what follows from the request."""
        connection = self._connections[layout]
        self._sequence += 1
        self._answers.written.clear()
        sent = m.encode(record, self._sequence)
        is_answered = record.KIND not in one_way.UNANSWERED  # type: ignore[attr-defined]
        with self._counted(name):
            connection.data_received(sent)
            while connection.is_waiting or (is_answered and not self._answers.written):
                await asyncio.sleep(0)
        await asyncio.sleep(SETTLE_S)
        answers = b"".join(self._answers.written)
        return frames.decode(answers[frames.LENGTH.size :])[2] if answers else []


class ClientSide:
    """A client of the daemon at a socket."""

    def __init__(self, counter: Counter, socket: str) -> None:
        self._counted = counter.counted
        self._socket = socket
        self._random = np.random.default_rng(SEED)

    def run(self) -> None:
        """Every call of an engine for a prompt, of few chunks and of many, and over groups."""
        for layout, chunks, rounds, name in PROMPTS:
            with kv.connect(self._socket, model=MODEL, revision="1", layout=layout, timeout_s=60.0) as pool:
                for number in range(WARM_ROUNDS + rounds):
                    self._serve_prompt(pool, chunks, name if number >= WARM_ROUNDS else "")
        with kv.connect(self._socket, model=MODEL, revision="1", layout=CHUNK, timeout_s=60.0) as pool:
            for number in range(WARM_ROUNDS + LONG_ROUNDS):
                self._serve_set(pool, SET_NAME if number >= WARM_ROUNDS else "")

    def _call(self, verb: str, name: str, work: Callable[[], Any]) -> Any:
        with self._counted(f"client: {verb}, {name}" if name else ""):
            return work()

    def _serve_set(self, pool: kv.Pool, name: str) -> None:
        """Save chunks that are each alone, as vLLM's tier does, and lease them."""
        names = self._random.integers(0, 256, (SET, 32), dtype=np.uint8)
        rows = np.zeros((SET, CHUNK.chunk_bytes), np.uint8)
        addresses = rows.ctypes.data + CHUNK.chunk_bytes * np.arange(SET, dtype=np.int64)
        save = self._call("save", name, lambda: pool.save_set(names, addresses))
        stored = self._call("commit", name, save.commit)
        levels = self._call("probe", name, lambda: pool.probe(names))
        lease = self._call("acquire", name, lambda: pool.acquire_set(names))
        if stored.stored != SET or lease.chunks != SET or not levels.all():
            raise KVPoolError(f"not all of {SET} chunks were stored and leased: the counted calls prove nothing")
        self._call("release", name, lease.release)
        pool.claim(bytes(32))  # answered when the release has been served

    def _serve_prompt(self, pool: kv.Pool, chunks: int, name: str) -> None:
        """Save a new prompt, and lease it."""
        tokens = self._random.integers(0, 50_000, CHUNK.chunk_tokens * chunks, dtype=np.int32)

        def call(verb: str, work: Callable[[], Any]) -> Any:
            return self._call(verb, name, work)

        keys = call("keys", lambda: pool.keys(tokens))
        rows = [
            np.zeros((len(of_group), part.chunk_bytes), np.uint8)
            for of_group, part in zip(pool.chunks_to_save(keys), pool.layout.group_layouts, strict=True)
        ]
        save = call("save", lambda: pool.save(keys, from_=rows if pool.layout.groups else rows[0]))
        stored = call("commit", save.commit)
        hit = call("lookup", lambda: pool.lookup(keys))
        lease = call("acquire", lambda: pool.acquire(hit))
        if stored.stored != sum(map(len, rows)) or lease.chunks != chunks:
            raise KVPoolError(f"not all of {chunks} chunks were stored and leased: the counted calls prove nothing")
        call("release", lease.release)
        pool.claim(bytes(32))  # answered when the release has been served


def main(arguments: Sequence[str]) -> None:
    """Run both sides."""
    marks, socket = arguments
    counter = Counter(marks)
    gc.collect()
    gc.disable()
    uvloop.run(DaemonSide(counter).run())
    ClientSide(counter, socket).run()


if __name__ == "__main__":
    main(sys.argv[1:])
