"""Clients that speak the protocol without the client library: sockets, frames, and a writer that can lie.

What the library would never send is sent from here. Every wait has a deadline.
"""

import contextlib
import mmap
import os
import socket
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import kvpool_client as kv
import kvpool_native
from kvpool.protocol import frames
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import staging as sm
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.dropping import drop_leases

TIMEOUT_S = 60.0
MODEL = "test-model"


def hello_of(layout: kv.Layout = SMALL, model: str = MODEL, role: str = m.ROLE_ENGINE) -> m.Hello:
    """The hello of an engine, or with role admin of an operator."""
    return m.Hello(m.MAGIC, m.PROTOCOL_VERSION, role, model, layout.to_wire() if role == m.ROLE_ENGINE else [])


HELLO = m.encode(hello_of(), 0)


def engine(daemon: Daemon, layout: kv.Layout = SMALL, model: str = MODEL) -> BlockingConnection:
    """A handshaken engine's connection."""
    return BlockingConnection(daemon.socket, hello_of(layout, model), TIMEOUT_S)


def raw_socket(daemon: Daemon) -> socket.socket:
    """A connected socket on which nothing has been sent."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(TIMEOUT_S)
    raw.connect(daemon.socket)
    return raw


def raw_engine(daemon: Daemon, hello: m.Hello | None = None) -> socket.socket:
    """A socket whose handshake is over; the descriptors that came with the welcome are closed."""
    raw = raw_socket(daemon)
    raw.sendall(m.encode(hello or hello_of(), 0))
    _, fds, _, _ = socket.recv_fds(raw, 65536, 2)
    for fd in fds:
        socket.close(fd)
    return raw


def answers_until_eof(raw: socket.socket) -> list[tuple[int, int, list[object]]]:
    """Every frame that the daemon sends before it ends the connection. Fails with a timeout where it does not."""
    reader, answers = frames.FrameReader(), []
    with contextlib.suppress(ConnectionResetError):  # what it refuses it need not have read
        while data := raw.recv(1 << 20):
            answers += list(reader.feed(data))
    return answers


def next_answer(raw: socket.socket) -> tuple[int, int, list[Any]]:
    """The next frame, read to the length in its header."""
    (length,) = frames.LENGTH.unpack(_exactly(raw, frames.LENGTH.size))
    return frames.decode(_exactly(raw, length))


def _exactly(raw: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = raw.recv(size - len(data))
        assert piece, "the daemon ended the connection"
        data += piece
    return data


@contextlib.contextmanager
def mapped_arena(connection: BlockingConnection) -> Iterator[mmap.mmap]:
    """The arena as any engine may map it: writable, unless saves are by copy."""
    rights = mmap.PROT_READ | (0 if connection.welcome.staging_bytes else mmap.PROT_WRITE)
    with mmap.mmap(connection.fds[0], connection.welcome.arena_bytes, mmap.MAP_SHARED, rights) as arena:
        yield arena


@contextlib.contextmanager
def staging_fd(connection: BlockingConnection) -> Iterator[int]:
    """The connection's staging memory, by its descriptor."""
    _, fd = connection.call_for_descriptor(mm.OpenMemory(b""), mm.Memory)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def mapped_staging(connection: BlockingConnection) -> Iterator[mmap.mmap]:
    """The connection's staging memory."""
    with staging_fd(connection) as fd, mmap.mmap(fd, connection.welcome.staging_bytes) as staging:
        yield staging


def key_of(number: int, seed: int = 0) -> bytes:
    """A chunk key made of a number."""
    return kvpool_native.blake3(struct.pack("<qq", seed, number))


def keys_of(first: int, count: int, seed: int = 0) -> bytes:
    """A column of keys."""
    return b"".join(key_of(number, seed) for number in range(first, first + count))


def payload_of(key: bytes, size: int = SMALL.chunk_bytes) -> bytes:
    """The bytes that a chunk with this key must have."""
    return np.random.Generator(np.random.PCG64(zlib.crc32(key))).bytes(size)


def checksums_of(payload: bytes, layout: kv.Layout = SMALL) -> bytes:
    """The column of checksums of one chunk."""
    extents = np.frombuffer(payload, np.uint8).reshape(layout.extents, layout.extent_bytes)
    return struct.pack(f"<{layout.extents}I", *(kvpool_native.crc32c(extent) for extent in extents))


def reserve(connection: BlockingConnection, keys: bytes, parent: bytes = b"") -> m.Reserved:
    """Reserve; the answer as it is."""
    return connection.call(reserve_chain(parent, keys), m.Reserved)


def write_and_commit(connection: BlockingConnection, keys: bytes, made: m.Reserved) -> bytes:
    """Write what was reserved as it should be, and commit it; the states."""
    if connection.welcome.staging_bytes:
        return stage_and_commit(connection, keys, made)
    sums = b""
    with mapped_arena(connection) as arena:
        for number, offset in enumerate(np.frombuffer(made.offsets, "<u8").tolist()):
            payload = payload_of(keys[32 * number : 32 * number + 32])
            arena[offset : offset + len(payload)] = payload
            sums += checksums_of(payload)
    return connection.call(m.Commit(made.reservation, sums, b""), m.Committed).states


def stage_and_commit(connection: BlockingConnection, keys: bytes, made: m.Reserved) -> bytes:
    """The same by copy, a chunk at a time through the beginning of staging."""
    sums = b""
    with mapped_staging(connection) as staging:
        for number in range(len(made.states)):
            payload = payload_of(keys[32 * number : 32 * number + 32])
            staging[: len(payload)] = payload
            connection.call(sm.CopyStaged(made.reservation, number, 1, 0, SMALL.extents, 0), m.Done)
            sums += checksums_of(payload)
    return connection.call(m.Commit(made.reservation, sums, b""), m.Committed).states


def store(connection: BlockingConnection, keys: bytes) -> None:
    """Store chunks as a good engine does; nothing where all of them are there."""
    made = reserve(connection, keys)
    if set(made.states) != {SaveState.PRESENT}:
        assert set(write_and_commit(connection, keys, made)) == {SaveState.STORED}


def read_back(connection: BlockingConnection, keys: bytes) -> list[bool]:
    """Lease `keys`; for each leased chunk whether its bytes are right."""
    leased = connection.call(m.Acquire(keys), m.Leased)
    right = []
    with mapped_arena(connection) as arena:
        for number, offset in enumerate(np.frombuffer(leased.offsets, "<u8").tolist()):
            payload = payload_of(keys[32 * number : 32 * number + 32])
            right.append(arena[offset : offset + len(payload)] == payload)
    drop_leases(connection, leased.lease)
    return right
