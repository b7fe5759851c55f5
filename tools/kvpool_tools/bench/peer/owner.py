"""Owner's side of kvpool over TransferEngine or NIXL: a node in a process of its own, with event loop and library process.

    puller → owner: [number, "begin", pull, first, count]    offer chunks; answered by the checksums of their extents
                    [number, "stage", kind, …]               of a Stage or StageInto its fields; answered by those of Staged or
                                                             Refused
                    [number, "end", pull]                    the pull is over

A socket pair stands in for the control plane between nodes. Threads: the main one reads requests, the loop's does the rest.
"""

import asyncio
import mmap
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import astuple
from threading import Thread
from typing import Any, TypeVar

from kvpool.clock import Deadline, MonotonicClock
from kvpool.peers.control import records as r
from kvpool.transfer.child.service import DaemonLink
from kvpool.transfer.engine.engine import Engine, EngineSettings, PullingNode
from kvpool.transfer.engine.served_parts import OfferedChunks, ServedParts
from kvpool_tools.bench.peer.node import EXTENTS, HOST, LONG_S, THREADS, Node

BEGIN, STAGE, END = "begin", "stage", "end"
OWNER, PULLER = "owner", "puller"
# The options' defaults: `peer.rdma_ports` and `peer.rdma_buffer`.
PORTS = (15000, 15999)
BUFFER_BYTES = 256 << 20
LOOK_S = 0.01

Value = TypeVar("Value")


def engine_settings(
    library: str, protocol: str, devices: str, command: tuple[str, ...], *, node: str
) -> EngineSettings:
    """How each side uses the library."""
    return EngineSettings(
        HOST, protocol, devices, PORTS, BUFFER_BYTES, library=library, node=node, command=command, hang_s=LONG_S
    )


async def wait_until_serving(engine: Engine) -> None:
    """Wait until the engine's process serves. Raises ConnectionError with the reason."""
    deadline = Deadline(LONG_S)
    while not engine.is_serving:
        if engine.process.error or deadline.has_passed():
            raise ConnectionError(engine.process.error or f"{engine.settings.title} has not begun within {LONG_S:g} s")
        await asyncio.sleep(LOOK_S)


class Owner:
    """See the module. `facts`: the process identifiers whose CPU time is the owner's."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._node = Node(settings["chunks"], settings["chunk_bytes"])
        self._node.fill()
        self._server = self._node.serve(is_encrypted=False)
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        self._engine = Engine(
            engine_settings(
                settings["library"], settings["protocol"], settings["devices"], tuple(settings["command"]), node=OWNER
            ),
            secrets.SystemRandom(),
        )
        self._call(self._start())
        self._parts = ServedParts(
            self._engine,
            self._node.arena,
            self._node.view,
            self._checks,
            threads=THREADS,
            bytes_per_s=0,
            stall_s=LONG_S,
            clock=MonotonicClock(),
        )
        process = self._engine.process.process
        assert process is not None
        self.facts: Mapping[str, Any] = {"pid": process.pid}

    def serve(self, link: DaemonLink) -> None:
        """Answer requests, until there are no more."""
        for request in link.requests():
            self._loop.call_soon_threadsafe(self._take, link, *request)

    def close(self) -> None:
        """End the reader's process."""
        self._call(self._engine.process.close())

    def _take(self, link: DaemonLink, number: int, kind: str, *fields: Any) -> None:
        if kind == STAGE:
            record, *values = fields
            stage = (r.StageInto if record == r.StageInto.KIND else r.Stage)(*values)
            self._parts.serve(stage.pull, stage, _answering(link, number), puller=PullingNode(PULLER, PULLER, HOST))
        elif kind == BEGIN:
            pull, first, count = fields
            chunks = OfferedChunks(self._node.columns(first, count), EXTENTS, self._node.extent_bytes)
            checks = self._checks(chunks)
            self._parts.add_offer(pull, PULLER, chunks, checks)
            link.answer(number, [checks])
        else:
            self._parts.drop(*fields)
            link.answer(number, [])

    def _checks(self, chunks: OfferedChunks) -> bytes:
        return self._server.checks(
            self._node.view, *chunks.columns, extents=chunks.extents, extent_bytes=chunks.extent_bytes
        )

    async def _start(self) -> None:
        self._engine.process.start()
        await wait_until_serving(self._engine)

    def _call(self, work: "Coroutine[Any, Any, Value]") -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * LONG_S)


def _answering(link: DaemonLink, number: int) -> Callable[[r.Staged | r.Refused], bool]:
    def answer(found: r.Staged | r.Refused) -> bool:
        link.answer(number, [found.KIND, *astuple(found)])
        return True

    return answer


def connect_owner(settings: Mapping[str, Any], _: mmap.mmap) -> Owner:
    """An owner whose library serves. Raises ConnectionError with the reason."""
    return Owner(settings)


def serve_owner(link: DaemonLink, owner: Owner) -> None:
    """See `Owner.serve`."""
    owner.serve(link)
