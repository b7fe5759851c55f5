"""TransferEngine and NIXL in `bench peer`: calls of the library alone, and kvpool over it.

    library    of TransferEngine: a process reads whole chunks out of another one's memory, without checksums: what kvpool over
               it can reach
    kvpool     the owner's process copies extents into its buffer, this one has them read, or written by NIXL, and copies them
               into slots, both with checksums (docs/cluster.md); a socket pair stands in for the control plane

Processes live as long as the setting, end with this process at the latest, and are ended where they do not answer in time.
Their output goes nowhere. Where the library cannot be used, or fails, `EngineAbsent` has the reason. Main thread only: the
event loop runs while something is measured.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import astuple, dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from kvpool.clock import MonotonicClock
from kvpool.errors import KVPoolError, PeerUnreachable, Refused
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.transfer.child.process import ChildProcess, ChildTask
from kvpool.transfer.engine.engine import LIBRARIES, Engine
from kvpool.transfer.engine.engine_transport import EngineTransport
from kvpool.transfer.stream_address import StreamAddress
from kvpool.transfer.transport import ChunkEnd, Ending, Order, Region
from kvpool_tools.bench.measure import cpu_seconds
from kvpool_tools.bench.peer.engine_child import BATCHES, LIBRARY, OWNER, READER, READS, command_of
from kvpool_tools.bench.peer.node import EXTENTS, HOST, JOBS_MAX, LONG_S, THREADS, WORD, Node
from kvpool_tools.bench.peer.owner import BEGIN, END, PORTS, PULLER, STAGE, engine_settings, wait_until_serving

LIBRARY_WAYS = {"TransferEngine, batches": BATCHES, "TransferEngine, single reads": READS}
KVPOOL = {library: f"kvpool over {title}" for library, title in LIBRARIES.items()}
ENGINE_WAYS = (*LIBRARY_WAYS, KVPOOL["mooncake"])
# To make and fill an owner's memory, and to start the library twice.
START_S = 120.0
LOOK_S = 0.01
FIRST_EXTENT_LOOK_S = 1e-3
# Of a process that only answers.
NO_MEMORY = 4096
_SILENT = logging.NullHandler()

Value = TypeVar("Value")


class EngineAbsent(KVPoolError):
    """The library cannot be used here, or has failed."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """How a library is used: as the options `peer.rdma_protocol` and `peer.rdma_devices` say it. `reader`: the command of its
    processes in kvpool. `has_library`: calls of TransferEngine alone are measured too."""

    protocol: str
    devices: str = ""
    library: str = "mooncake"
    reader: tuple[str, ...] = field(default_factory=lambda: command_of(READER))
    has_library: bool = True

    @property
    def title(self) -> str:
        """The library's name."""
        return LIBRARIES[self.library]


class _OwnerLink:
    """The owner's process in the place of a link to a peer."""

    # No port of its own: a server of TransferEngine has to be on this host.
    member = SimpleNamespace(endpoint=f"tcp://{HOST}:0")
    life = None

    def __init__(self, process: ChildProcess) -> None:
        self._process = process

    def request(self, stage: r.AnyStage, timeout_s: float) -> "asyncio.Future[r.Staged]":
        """See `PeerLink`."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[r.Staged] = loop.create_future()

        def fail(error: KVPoolError) -> None:
            if not answered.done():
                answered.set_exception(error)

        def answer(found: list[Any] | None) -> None:
            late.cancel()
            if found is None:
                fail(PeerUnreachable("the owner's process has ended"))
            elif found[0] == r.Refused.KIND:
                fail(Refused(*found[1:]))
            elif not answered.done():
                answered.set_result(r.Staged(*found[1:]))

        late = loop.call_later(timeout_s, fail, PeerUnreachable("the owner's process does not answer"))
        self._process.send_request([STAGE, stage.KIND, *astuple(stage)], answer)
        return answered


class EngineWays:
    """Processes for chunks of one size. Raises EngineAbsent where they cannot begin."""

    def __init__(self, choice: EngineChoice, source: Node, target: Node, *, streams: int) -> None:
        logging.getLogger("kvpool").addHandler(_SILENT)  # reasons are in what is raised
        self._source, self._target, self._streams = source, target, streams
        self._chunks = len(source.chunks())
        self._pulls = 0
        self._ended: asyncio.Event = asyncio.Event()
        self._way = KVPOOL[choice.library]
        settings = {
            "library": choice.library,
            "node": "",
            "host": HOST,
            "protocol": choice.protocol,
            "devices": choice.devices,
            "ports": PORTS,
        }
        size = self._chunks * source.chunk_bytes
        self._library = [
            _process(choice, LIBRARY, {**settings, "former_ports": []}, size) for _ in range(2 * choice.has_library)
        ]
        shape = {"chunks": self._chunks, "chunk_bytes": source.chunk_bytes, "command": choice.reader}
        self._owner = _process(choice, OWNER, {**settings, **shape}, NO_MEMORY)
        self._engine = Engine(
            engine_settings(choice.library, choice.protocol, choice.devices, choice.reader, node=PULLER),
            secrets.SystemRandom(),
        )
        self._transport = EngineTransport(
            self._engine, target.arena, target.index, threads=THREADS, jobs_max=JOBS_MAX, clock=MonotonicClock()
        )
        self.ways = (*(LIBRARY_WAYS if choice.has_library else ()), self._way)
        self._loop = asyncio.new_event_loop()
        try:
            self._run(self._start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    def pull(self, way: str) -> tuple[float, float, float]:
        """Seconds, CPU seconds of both sides, and microseconds to the first extent, 0 where there are none, of one pull of all
        chunks, compared afterwards. Raises EngineAbsent where it fails."""
        return self._pull_chunks() if way == self._way else self._read_chunks(way)

    def _read_chunks(self, way: str) -> tuple[float, float, float]:
        source, target = self._library
        assert target.memory is not None
        into = np.frombuffer(target.memory.view(), np.uint8)
        into[:] = 0
        sizes = (self._source.chunk_bytes, self._chunks, self._streams)
        request = (LIBRARY_WAYS[way], source.facts["server"], source.facts["base"], *sizes)
        (code,), seconds, cpu_s = self._timed(lambda: _ask(target, *request), self._library)
        if code:
            raise EngineAbsent(f"{way} of {self._source.chunk_bytes} bytes failed: code {code}")
        self._compare(way, list(into.reshape(self._chunks, -1)))
        return seconds, cpu_s, 0.0

    def _pull_chunks(self) -> tuple[float, float, float]:
        self._target.renew()
        processes = [self._owner, self._engine.process]
        (ends, first_s), seconds, cpu_s = self._timed(self._pull_all, processes, self._owner.facts["pid"])
        failed = {end.fault or end.ending.name for end in ends if end.ending is not Ending.DONE}
        if failed:
            raise EngineAbsent(f"{self._way} failed: {', '.join(sorted(failed))}")
        self._compare(self._way, self._target.chunks())
        return seconds, cpu_s, first_s * 1e6

    async def _pull_all(self) -> tuple[list[ChunkEnd], float]:
        begun_s, share = time.perf_counter(), self._chunks // self._streams
        pulls = dict([await self._begin(stream * share, share) for stream in range(self._streams)])
        first = asyncio.create_task(self._first_extent(begun_s))
        try:
            ends = await self._ends(pulls)
            return ends, await first if all(end.ending is Ending.DONE for end in ends) else 0.0
        finally:
            first.cancel()

    async def _ends(self, pulls: dict[int, int]) -> list[ChunkEnd]:
        """The ends of all chunks, by the orders' deadlines. `pulls`: the pull of each job, which is released then."""
        ends: list[ChunkEnd] = []
        left = dict.fromkeys(pulls, self._chunks // self._streams)
        while len(ends) < self._chunks:
            self._ended.clear()
            found = self._transport.completed()
            if not found:
                await asyncio.wait_for(self._ended.wait(), 2 * LONG_S)
            for end in found:
                ends.append(end)
                left[end.job] -= 1
                if not left[end.job]:
                    await _ask(self._owner, END, pulls[end.job])
        return ends

    async def _begin(self, first: int, count: int) -> tuple[int, int]:
        """Ask for chunks, and have them fetched: job and pull."""
        self._pulls += 1
        (checks,) = await _ask(self._owner, BEGIN, self._pulls, first, count)
        offsets, slots, _ = self._target.columns(first, count)
        order = Order(
            node="owner",
            link=cast(PeerLink, _OwnerLink(self._owner)),
            offer=r.Offer(self._pulls, count, b"", 1, "", cast(bytes, checks), b""),
            address=StreamAddress(HOST, 0),
            into=Region(offsets, slots),
            extents=EXTENTS,
            extent_bytes=self._target.extent_bytes,
            stall_s=LONG_S,
            timeout_s=LONG_S,
        )
        job = self._transport.submit(order)
        if not job:
            raise EngineAbsent(f"{self._way}: a pull was refused")
        return job, self._pulls

    async def _first_extent(self, begun_s: float) -> float:
        """Seconds until the first extent of the first chunk is in its slot, to a look."""
        last = slice(self._source.extent_bytes - WORD, self._source.extent_bytes)
        sent, received = self._source.chunks()[0][last], self._target.chunks()[0][last]
        while not np.array_equal(sent, received):
            await asyncio.sleep(FIRST_EXTENT_LOOK_S)
        return time.perf_counter() - begun_s

    def _compare(self, way: str, chunks: Sequence["np.ndarray[Any, np.dtype[np.uint8]]"]) -> None:
        pairs = zip(self._source.chunks(), chunks, strict=True)
        if not all(np.array_equal(sent, received) for sent, received in pairs):
            size = self._source.chunk_bytes
            raise KVPoolError(f"wrong bytes: chunks of {size} bytes came by {way} other than they were sent")

    def _timed(
        self, work: "Callable[[], Coroutine[Any, Any, Value]]", processes: Sequence[ChildProcess], *pids: int
    ) -> tuple[Value, float, float]:
        """What it returns, seconds, and CPU seconds of this process and of these."""
        everyone = [*(one.process.pid for one in processes if one.process is not None), *pids]
        before_s, cpu_s = time.perf_counter(), _cpu_s(everyone)
        found = self._run(work())
        return found, time.perf_counter() - before_s, _cpu_s(everyone) - cpu_s

    def _run(self, work: "Coroutine[Any, Any, Value]") -> Value:
        task = self._loop.create_task(asyncio.wait_for(work, START_S))
        try:
            return self._loop.run_until_complete(task)
        except (asyncio.TimeoutError, ConnectionError) as error:
            raise EngineAbsent(str(error) or f"{self._way} did not end within {START_S:g} s") from error
        finally:
            task.cancel()  # after Ctrl-C it has not ended

    async def _start(self) -> None:
        self._transport.start(self._ended.set)
        await wait_until_serving(self._engine)  # alone: where it cannot be, nothing else is tried
        others = [*self._library, self._owner]
        for process in others:
            process.start()
        while not all(process.is_serving for process in others):
            for process in others:
                if process.error:
                    raise ConnectionError(process.error)
            await asyncio.sleep(LOOK_S)
        for process in self._library[:1]:
            assert process.memory is not None
            memory = np.frombuffer(process.memory.view(), np.uint8).reshape(self._chunks, -1)
            for sent, row in zip(self._source.chunks(), memory, strict=True):
                row[:] = sent

    async def _close(self) -> None:
        for process in (*self._library, self._owner):
            await process.close()
        await self._transport.close()
        await asyncio.get_running_loop().shutdown_default_executor()


def _process(choice: EngineChoice, role: str, settings: dict[str, Any], memory_bytes: int) -> ChildProcess:
    # An owner answers after a library that hangs was given up here.
    task = ChildTask(f"{choice.title}'s {role}", command_of(role), start_s=START_S, hang_s=2 * LONG_S)
    return ChildProcess(task, settings, memory_bytes, random=secrets.SystemRandom(), on_change=lambda: None)


async def _ask(process: ChildProcess, *request: object) -> list[Any]:
    """The answer of a process. Raises EngineAbsent where it ends, which it does when it takes too long."""
    if not process.is_serving:
        raise EngineAbsent(process.error)
    answered: asyncio.Future[list[Any] | None] = asyncio.get_running_loop().create_future()

    def answer(found: list[Any] | None) -> None:
        if not answered.done():
            answered.set_result(found)

    process.send_request(request, answer)
    found = await answered
    if found is None:
        raise EngineAbsent(f"a process of the library has ended: {process.error}")
    return found


def _cpu_s(pids: Sequence[int]) -> float:
    try:
        return time.process_time() + sum(cpu_seconds(pid) for pid in pids)
    except ProcessLookupError as error:
        raise EngineAbsent(f"a process of the library has ended: {error}") from error
