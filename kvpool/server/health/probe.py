"""Self-probe: a put and a get through the path that engines use.

A thread connects to the daemon's own socket as an engine of model `kvpool-probe`, maps arena and index, and from time to
time: reserves a chunk under a fresh random key, writes bytes that derive from the key, commits them with checksums, looks
the key up in the shared index, leases it, and compares bytes, checksums, place and generation. It never reads the pool
directly: it sees what an engine sees. Every step has STEP_TIMEOUT_S.

A wrong byte, a wrong answer, no answer or a missing socket is a failure. "No room" is not: a pool whose every chunk is
held, whose memory is still being faulted in, or whose connections are all in use answers as it should. Then the chunk of
the last probe is read again instead, where it is still there.

What it costs: a connection and one 1 KiB chunk, whose lease keeps the segment of its size class from being taken back and
forth; the chunk before goes with each new one. Operators see them: one of `connections`, one of `chunks`, and
`stored_chunks` and `dram.flushed_chunks` rise by one with each probe; `leases` and `pins` leave it out. `flush` may take the
chunk once its lease has ended (where `server.lease_ttl` is shorter than the interval), which is no failure.

Threads: a Probe belongs to one thread; SelfProbe is that thread, owned by whoever made it.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvpool_native
from kvpool.clock import NS_PER_S, Clock
from kvpool.errors import KVPoolError, Refused
from kvpool.ids import KEY_BYTES, PROBE_MODEL
from kvpool.layout import Layout
from kvpool.protocol import columns
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import staging as sm
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.server.health.probe_result import STEP_TIMEOUT_S, ProbeResult
from kvpool.states import SaveState

PROBE_LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="uint8", chunk_tokens=16)
# A new chunk without a hold may be evicted, or flushed by an operator, before its lease: then the probe tries again.
ATTEMPTS = 3
# Answers of a daemon that is at its limits and not broken.
_NO_ROOM_CODES = {"busy", "full", "stopping"}
_NO_ROOM_STATES = {SaveState.FULL, SaveState.NOT_READY, SaveState.QUOTA, SaveState.STOPPING}


class ProbeFailed(KVPoolError):
    """A put and a get gave a wrong result."""


@dataclass(frozen=True, slots=True)
class _Session:
    connection: BlockingConnection
    arena: kvpool_native.Mapping
    index: kvpool_native.IndexView
    staging: kvpool_native.Mapping | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    key: bytes
    payload: bytes
    offset: int
    generation: int


class Probe:
    """Puts and gets, one after the other, on one connection; a new one after a failure.

    Invariant: `_lease` is the lease on `_kept`, the chunk of the last good probe; 0 where there is none.
    """

    def __init__(self, path: str, discard: Callable[[bytes], None]) -> None:
        """`discard` has the daemon drop the chunk of a key; it may be called from this thread and returns at once."""
        self._path = path
        self._discard = discard
        self._session: _Session | None = None
        self._kept: _Chunk | None = None
        self._lease = 0

    def __repr__(self) -> str:
        return f"<Probe {'away' if self._session is None else 'connected'}, lease {self._lease}>"

    def run(self) -> None:
        """One put and get. Raises ProbeFailed; then the next one begins with a new connection."""
        try:
            _require(Path(self._path).is_socket(), f"{self._path} is gone: no engine can connect any more")
            if self._session is None:
                self._session = self._connect()
            self._put_and_get(self._session)
        except Refused as error:
            self.close()
            if error.code not in _NO_ROOM_CODES:
                raise ProbeFailed(str(error)) from error
        except (KVPoolError, OSError, ValueError, RuntimeError) as error:
            self.close()
            raise ProbeFailed(str(error)) from error

    def close(self) -> None:
        """End the connection, and with it the lease; the chunk goes too."""
        if self._session is not None:
            self._session.connection.close()
            self._session = None
        if self._kept is not None:
            self._discard(self._kept.key)
        self._kept, self._lease = None, 0

    def _connect(self) -> _Session:
        hello = m.Hello(
            m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, PROBE_MODEL, PROBE_LAYOUT.to_wire(), name=b"self-probe"
        )
        connection = BlockingConnection(self._path, hello, STEP_TIMEOUT_S)
        welcome = connection.welcome
        try:
            came = len(connection.fds)
            _require(
                came == welcome.descriptors, f"the welcome came with {came} descriptors, not {welcome.descriptors}"
            )
            is_staged = welcome.staging_bytes > 0
            arena = kvpool_native.Mapping.attach(connection.fds[0], welcome.arena_bytes, writable=not is_staged)
            index = kvpool_native.Mapping.attach(connection.fds[1], welcome.index_bytes, writable=False)
            view = kvpool_native.IndexView(index)
            _require(view.epoch == welcome.epoch, "the index and the welcome name different epochs")
            staging = _open_staging(connection) if is_staged else None
        except BaseException:
            connection.close()
            raise
        while connection.fds:
            os.close(connection.fds.pop())
        return _Session(connection, arena, view, staging)

    def _put_and_get(self, session: _Session) -> None:
        for _ in range(ATTEMPTS):
            chunk = self._put(session)
            if chunk is None:
                if self._kept is not None:
                    self._get(session, self._kept)
                return
            if self._get(session, chunk):
                return
        raise ProbeFailed(f"{ATTEMPTS} chunks were gone right after their commit")

    def _put(self, session: _Session) -> _Chunk | None:
        """A new chunk, committed. None where there is no room."""
        key = os.urandom(KEY_BYTES)
        payload = payload_of(key)
        reserved = session.connection.call(reserve_chain(b"", key), m.Reserved)
        _require(len(reserved.states) == 1, f"reserve of one chunk answered {len(reserved.states)} states")
        state = SaveState(reserved.states[0])
        if state in _NO_ROOM_STATES:
            return None
        _require(state == SaveState.RESERVED, f"reserve of a new chunk answered {state.name}")
        chunk = _Chunk(key, payload, _first(reserved.offsets), _first(reserved.generations))
        is_inside = chunk.offset + len(payload) <= session.arena.size
        _require(is_inside, f"reserved offset {chunk.offset} is outside")
        target, offset = (session.arena, chunk.offset) if session.staging is None else (session.staging, 0)
        target.view()[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
        if session.staging is not None:
            copy = sm.CopyStaged(reserved.reservation, 0, 1, 0, PROBE_LAYOUT.extents, offset)
            session.connection.call(copy, m.Done)
        committed = session.connection.call(m.Commit(reserved.reservation, _checksums(payload), b""), m.Committed)
        _require(
            committed.states == bytes([SaveState.STORED]),
            f"commit answered {_names(committed.states)}, expected STORED",
        )
        return chunk

    def _get(self, session: _Session, chunk: _Chunk) -> bool:
        """Lease the chunk, release the one before, and compare everything. False where it was evicted."""
        is_found = len(session.index.lookup(chunk.key)) == 1
        before, lease = self._kept, self._lease
        self._kept, self._lease = chunk, 0
        if lease:
            drop = m.encode(one_way.DropLeases(columns.pack_numbers([lease])), 0)
            _require(session.connection.notify(drop), "the socket takes no request")
        leased = session.connection.call(m.Acquire(chunk.key), m.Leased)
        if before is not None and before.key != chunk.key:
            self._discard(before.key)  # its lease has ended: requests are served in order
        if not leased.lease:
            self._kept = None
            return False
        self._lease = leased.lease
        _require(is_found, "lookup missed a chunk that could be leased")
        _require(leased.chunks == 1, f"{leased.chunks} chunks were leased, expected 1")
        offset, slot, generation = _first(leased.offsets), _first(leased.slots), _first(leased.generations)
        self._compare(session, chunk, offset=offset, slot=slot, generation=generation)
        return True

    def _compare(self, session: _Session, chunk: _Chunk, *, offset: int, slot: int, generation: int) -> None:
        _require(offset == chunk.offset, f"offset {offset} was leased, {chunk.offset} was reserved")
        _require(generation == chunk.generation, f"generation {generation} was leased, {chunk.generation} was reserved")
        found = session.arena.view()[offset : offset + len(chunk.payload)].tobytes()
        _require(found == chunk.payload, f"bytes at offset {offset} are not those that were written")
        _require(session.index.covers(slot, PROBE_LAYOUT.extents), f"leased slot {slot:#x} has no words in the index")
        stored = [session.index.checksum_at(slot, extent) for extent in range(PROBE_LAYOUT.extents)]
        expected = np.frombuffer(_checksums(chunk.payload), "<u4").tolist()
        _require(stored == expected, f"checksums of slot {slot:#x} are {stored}, expected {expected}")
        present = session.index.generation_at(slot)
        _require(present == generation, f"generation of slot {slot:#x} is {present}, expected {generation}")


class SelfProbe:
    """The thread that probes every `interval_s` until it is stopped, beginning at once."""

    def __init__(
        self, probe: Probe, *, interval_s: float, clock: Clock, on_result: Callable[[ProbeResult], None]
    ) -> None:
        """`on_result` is called on the thread, once for each probe."""
        assert interval_s > 0
        self._probe = probe
        self._interval_s = interval_s
        self._clock = clock
        self._on_result = on_result
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and its connection. Blocks for a probe under way: at most its steps' time. Idempotent."""
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._probe):
            while not self._is_stopping.is_set():
                self._on_result(self._result())
                self._is_stopping.wait(self._interval_s)

    def _result(self) -> ProbeResult:
        started_ns = self._clock.now_ns()
        failure = ""
        try:
            self._probe.run()
        except ProbeFailed as error:
            failure = str(error)
        ended_ns = self._clock.now_ns()
        return ProbeResult(failure, ended_ns, (ended_ns - started_ns) / NS_PER_S)


def payload_of(key: bytes) -> bytes:
    """The bytes that a probe's chunk with this key must have: BLAKE3 of key and position."""
    size = PROBE_LAYOUT.chunk_bytes
    blocks = (kvpool_native.blake3(key + position.to_bytes(4, "little")) for position in range(-(-size // 32)))
    return b"".join(blocks)[:size]


def _open_staging(connection: BlockingConnection) -> kvpool_native.Mapping:
    answer, fd = connection.call_for_descriptor(mm.OpenMemory(b""), mm.Memory)
    try:
        return kvpool_native.Mapping.attach(fd, answer.memory_bytes, writable=True)
    finally:
        os.close(fd)


def _checksums(payload: bytes) -> bytes:
    size = PROBE_LAYOUT.extent_bytes
    extents = (payload[extent * size : (extent + 1) * size] for extent in range(PROBE_LAYOUT.extents))
    return b"".join(kvpool_native.crc32c(extent).to_bytes(4, "little") for extent in extents)


def _first(column: bytes) -> int:
    if len(column) != 8:
        raise ProbeFailed(f"a column for one chunk has {len(column)} bytes, expected 8")
    return int.from_bytes(column, "little")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProbeFailed(otherwise)


def _names(states: bytes) -> str:
    return ", ".join(SaveState(state).name for state in states)
