"""Owners on this host: daemons whose arena and index this one has mapped, read-only.

    open ──connect, handshake, the epoch is the promised one──► MAPPED ──the connection ends, another life──► unmapped
      └──refused, late, another daemon, descriptors that are none──► NearFailed

This daemon connects as a client does, with the rights that the kernel gives it, and keeps the connection: its end is the
owner's, after which the owner's memory must not be held. A copy under way holds it until it has ended.

What answers is not trusted: only sealed memory is mapped, never writable, and its index has to be the one that the node named
over the control plane. Loop thread only; connecting has threads of its own, and a deadline.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import kvpool_native
from kvpool.errors import KVPoolError
from kvpool.peers.control import records as r
from kvpool.protocol import versions
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m

log = logging.getLogger(__name__)

OWNERS_MAX = 16
# For connecting, the handshake and mapping: an engine may be waiting meanwhile.
CONNECT_S = 1.0
# For all of it: a path may lead to a file system that hangs.
OPEN_S = 2.0
THREADS = 2
_BYTES_MAX = 1 << 62


class NearFailed(KVPoolError):
    """An owner's memory cannot be used."""


@dataclass(frozen=True, slots=True)
class NearOwner:
    """One life of an owner. `memory`: while its `connection` is open."""

    incarnation: bytes
    connection: BlockingConnection
    memory: kvpool_native.NearMemory


class NearOwners:
    """See the module. `connect`: to the socket of an owner, with its epoch, within so many seconds."""

    def __init__(
        self,
        connect: "Callable[[str, bytes, float], tuple[BlockingConnection, kvpool_native.NearMemory]] | None" = None,
    ) -> None:
        self._connect = connect or map_owner
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-near-open")
        self._owners: dict[str, NearOwner] = {}
        self._opening: dict[str, asyncio.Task[NearOwner]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<NearOwners {len(self._owners)} mapped>"

    def __len__(self) -> int:
        return len(self._owners)

    async def open(self, node: str, incarnation: bytes, near: r.Near) -> kvpool_native.NearMemory:
        """The memory of this life of a node. Raises NearFailed."""
        owner = self._owners.get(node)
        if owner is not None and owner.incarnation != incarnation:
            self._drop(node)
            owner = None
        if owner is None:
            if node not in self._opening:
                opening = asyncio.get_running_loop().create_task(self._open(node, incarnation, near))
                opening.add_done_callback(_take_failure)
                self._opening[node] = opening
            owner = await self._opened(self._opening[node])
        if owner.incarnation != incarnation:
            raise NearFailed("another life of the node is being mapped")
        if owner.memory.epoch != near.epoch:
            raise NearFailed("the node names another epoch than that of its mapped memory")
        return owner.memory

    async def close(self) -> bool:
        """End all connections. False where a thread is left that waits for a file system."""
        self._is_closed = True
        left: set[asyncio.Task[NearOwner]] = set()
        if self._opening:
            _, left = await asyncio.wait(self._opening.values(), timeout=OPEN_S)
        for node in list(self._owners):
            self._drop(node)
        self._threads.shutdown(wait=False, cancel_futures=True)
        return not left

    async def _opened(self, opening: "asyncio.Task[NearOwner]") -> NearOwner:
        try:
            return await asyncio.wait_for(asyncio.shield(opening), OPEN_S)
        except asyncio.TimeoutError as error:
            raise NearFailed(f"its memory was not mapped within {OPEN_S:g} s") from error

    async def _open(self, node: str, incarnation: bytes, near: r.Near) -> NearOwner:
        loop = asyncio.get_running_loop()
        try:
            if self._is_closed or len(self._owners) >= OWNERS_MAX:
                raise NearFailed(f"{len(self._owners)} daemons of this host are mapped, {OWNERS_MAX} at most")
            connection, memory = await loop.run_in_executor(
                self._threads, self._connect, near.socket, near.epoch, CONNECT_S
            )
        finally:
            del self._opening[node]
        if self._is_closed:
            connection.close()
            raise NearFailed("this node is about to end")
        self._owners[node] = NearOwner(incarnation, connection, memory)
        # Nothing is ever asked on it: what comes is its end.
        loop.add_reader(connection.fileno(), self._drop, node)
        log.info("the memory of peer %s at %s is mapped: %d bytes", node, near.socket, memory.size)
        return self._owners[node]

    def _drop(self, node: str) -> None:
        owner = self._owners.pop(node)
        asyncio.get_running_loop().remove_reader(owner.connection.fileno())
        owner.connection.close()


def _take_failure(opening: "asyncio.Task[NearOwner]") -> None:
    """Whoever waited for it may have given up: then nobody else takes its error."""
    if not opening.cancelled():
        opening.exception()


def map_owner(socket: str, epoch: bytes, timeout_s: float) -> "tuple[BlockingConnection, kvpool_native.NearMemory]":
    """Connect to the daemon of this epoch and map its memory. Raises NearFailed. Any thread."""
    hello = m.Hello(m.MAGIC, versions.NEWEST, m.ROLE_PEER, "", [], versions.NEWEST)
    with contextlib.ExitStack() as undone:
        try:
            connection = BlockingConnection(socket, hello, timeout_s)
            undone.callback(connection.close)
            memory = _map(connection, epoch)
        except (KVPoolError, OSError, ValueError) as error:
            raise NearFailed(f"{socket}: {error}") from error
        undone.pop_all()
        return connection, memory


def _map(connection: BlockingConnection, epoch: bytes) -> kvpool_native.NearMemory:
    fds, connection.fds = connection.fds, []
    try:
        welcome = connection.welcome
        if welcome.epoch != epoch:
            raise NearFailed("another daemon answers than the one that offered")
        if len(fds) != 2:
            raise NearFailed(f"the welcome came with {len(fds)} descriptors, expected arena and index")
        if not (0 < welcome.arena_bytes < _BYTES_MAX and 0 < welcome.index_bytes < _BYTES_MAX):
            raise NearFailed(f"arena and index have {welcome.arena_bytes} and {welcome.index_bytes} bytes")
        arena = kvpool_native.Mapping.attach(fds[0], welcome.arena_bytes, writable=False)
        index = kvpool_native.Mapping.attach(fds[1], welcome.index_bytes, writable=False)
        memory = kvpool_native.NearMemory(arena, index)
        if memory.epoch != epoch:
            raise NearFailed("the index has another epoch than its daemon")
        return memory
    finally:
        for fd in fds:
            os.close(fd)
