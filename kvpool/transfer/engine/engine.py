"""A library between nodes as the daemon uses it: a child process, and a bounded buffer that bytes bounce in.

TransferEngine of the node that pulls reads there; NIXL of the node that is pulled from writes there, so that this node's own
ranges are written by others (`expect`) or are what is written from (`write`).

Half of the buffer is for what comes from other nodes, the other half for what goes to them. All of it can be read *and written*
by anybody who reaches the ports (and by NIXL over TCP all that this process has), so that what comes out of it counts only with
the right checksum, and nothing else is ever registered. A range goes this way:

    free ──take──► taken ──read, write, expect──► moving ──answer──► taken ──give──► free
                                                     └──give: too late──► quarantined ──answer──► free

because a move that was given up may still write. Where quarantined ranges take QUARANTINE_PART of a half, those of one node
for half of that at most, the process is ended: its next life has memory of its own. Every move ends by its deadline. What is
expected and not called off is in quarantine until EXPECTED_S: by then the owner's process has written it, or was ended by its
daemon. A node whose write keeps this process for `hang_s` is blamed, and so are those whose writes are under way where it ends
by itself; where a move is late the process itself is asked whether it lives. Loop thread only.
"""

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import kvpool_native
from kvpool.ids import PAGE_BYTES
from kvpool.peers.back_off import BackOffSettings, Uniform
from kvpool.peers.control import records as r
from kvpool.transfer.child.process import ChildProcess, ChildTask, Codes, module_command
from kvpool.transfer.engine.child import CALL_OFF, CALLED_OFF, EXPECT, HUNG, MOVE, PING, UNBEGUN
from kvpool.transfer.ranges import Ranges

log = logging.getLogger(__name__)

# To import the library, and to pin the buffer: measured 0.2 s over TCP; emulated machines need a hundred times as long.
START_S = 60.0
COMMAND = module_command("kvpool.transfer.engine.child")
# Of a half: the most that one node has of it, a part at most, and what may be in quarantine.
PEER_PART = 2
PARTS = 8
QUARANTINE_PART = 2
PART_BYTES_MAX = 16 << 20
# Ports of former lives that this life avoids.
PORTS_REMEMBERED = 16
# Between two ends of the process so that it forgets others' addresses, of which it knows so many.
RENEWAL_S = 60.0
SERVERS_MAX = 4096
# A process that has not ended a move within this time is ended.
HANG_S = r.INTO_WRITE_S
# Of what another node was asked to write: beyond the longest that its process can take to begin and end it.
EXPECTED_S = r.STAGE_WAIT_MS_MAX / 1e3 + r.INTO_BEGIN_S + r.INTO_WRITE_S + 5.0
LIBRARIES = {"mooncake": "TransferEngine", "nixl": "NIXL"}
# For a node that has kept the library from all others.
BLAMED_S = 600.0
# Of `hang_s`: a process that has not answered a ping for so long hangs by itself.
PING_PART = 4
COUNTED = ("connections", "pulls", "refused", "read_bytes", "served_bytes", "failed_reads", "late_reads")
BACK_OFF = BackOffSettings(first_s=0.5, most_s=30.0)


class Half(IntEnum):
    """A half of the buffer: for reads of this node, or for what others read here."""

    READ = 0
    SERVED = 1


class MoveEnd(IntEnum):
    """The end of a move. UNBEGUN: a write of which nothing has moved, and will not."""

    DONE = 0
    FAILED = 1
    LATE = 2
    UNBEGUN = 3


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a library of LIBRARIES is used. `host`: of this node, numeric. `devices`: names with commas between, empty: all.
    `ports`: the first and last one to listen on. `buffer_bytes`: that bytes bounce in. `node`: the name of this one."""

    host: str
    protocol: str
    devices: str
    ports: tuple[int, int]
    buffer_bytes: int
    library: str = "mooncake"
    node: str = ""
    command: tuple[str, ...] = COMMAND
    hang_s: float = HANG_S
    back_off: BackOffSettings = BACK_OFF

    @property
    def title(self) -> str:
        """The library's name, for people."""
        return LIBRARIES[self.library]

    @property
    def way(self) -> str:
        """What the other node has to use, too: the protocol, and the library before it where it is not TransferEngine."""
        return self.protocol if self.library == "mooncake" else f"{self.library}-{self.protocol}"


@dataclass(slots=True, eq=False)
class BounceRange:
    """A range of the buffer, for a node. `memory`: of the life of the process that it is from."""

    offset: int
    size: int
    peer: str
    half: Half
    memory: kvpool_native.Mapping
    ranges: Ranges
    is_moving: bool = False
    is_given: bool = False


@dataclass(frozen=True, slots=True)
class PullingNode:
    """A node that asks. `peer`: by which it counts, for another may take its name. `host`: where its connection comes from."""

    name: str
    peer: str
    host: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What another node was asked to write. `mark`: which comes behind it. `ended`: when that was heard, or by its deadline."""

    mark: bytes
    ended: "asyncio.Future[MoveEnd]"


class Engine:
    """See the module. `on_change`: called when it begins to serve, and when it no longer does."""

    def __init__(self, settings: EngineSettings, random: Uniform) -> None:
        self.settings = settings
        self.on_change: list[Callable[[], None]] = []
        self._former_ports: deque[int] = deque(maxlen=PORTS_REMEMBERED)
        task = ChildTask(settings.title, settings.command, start_s=START_S, hang_s=settings.hang_s)
        asked = {
            "library": settings.library,
            "node": settings.node,
            "host": settings.host,
            "protocol": settings.protocol,
            "devices": settings.devices,
            "ports": list(settings.ports),
            "former_ports": [],
        }
        self.process = ChildProcess(
            task,
            asked,
            settings.buffer_bytes,
            random=random,
            on_change=self._note_change,
            back_off=settings.back_off,
        )
        self._half_bytes = settings.buffer_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        self._ranges = self._new_ranges()
        self._used: Counter[tuple[Half, str]] = Counter()
        self._waiting: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())
        self._lives: dict[str, bytes] = {}
        self._begun_s = 0.0
        self._pinged_s: float | None = None  # since when a ping has no answer
        self._met = 0  # agents, by this life
        self._blamed: dict[str, float] = {}  # when each node is used again
        self.life = b""  # names a life of this node's process
        self.counts: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()  # bytes by node

    def __repr__(self) -> str:
        return f"<Engine {self.settings.way} {self.process!r}, {self.quarantined_bytes} bytes in quarantine>"

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of ranges that were given back while they were moving."""
        return self._quarantined.total()

    @property
    def is_serving(self) -> bool:
        """Whether bytes can be read, and others can read here."""
        return self.process.is_serving

    @property
    def server(self) -> str:
        """The address by which others name this life of the process, `HOST:PORT`. It names no port where it writes: nobody
        connects to it."""
        server = str(self.process.facts["server"])
        return f"{server.rpartition(':')[0]}:1" if self.writes else server

    @property
    def writes(self) -> bool:
        """Whether the owner writes; else the puller reads."""
        return self.settings.library == "nixl"

    @property
    def expected_s(self) -> float:
        """For which a range that another node was asked to write may be written."""
        return EXPECTED_S

    @property
    def agent(self) -> bytes:
        """By which others write into this life's buffer."""
        return bytes(self.process.facts["agent"])

    @property
    def extent_bytes_max(self) -> int:
        """Of the largest extent that has room."""
        return self._half_bytes // PEER_PART

    def part_bytes(self, extent_bytes: int) -> int:
        """The bytes of a part of extents of this size; 0 where one does not fit."""
        most = max(extent_bytes, min(PART_BYTES_MAX, self._half_bytes // PARTS))
        return most // extent_bytes * extent_bytes if extent_bytes <= self.extent_bytes_max else 0

    def address_of(self, taken: BounceRange) -> int:
        """Where others read a range, or write to it."""
        return int(self.process.facts["base"]) + taken.offset

    @property
    def served_address(self) -> int:
        """Where the half begins that others read; where it writes, no place."""
        return 1 if self.writes else int(self.process.facts["base"]) + self._half_bytes

    def reserve_range(self, half: Half, size: int, peer: str) -> BounceRange | None:
        """A range for a node; None where there is no room for it now, or nothing is served."""
        memory = self.process.memory
        if memory is None or not self.is_serving or self._used[half, peer] + size > self._half_bytes // PEER_PART:
            return None
        offset = self._ranges[half].take_range(size)
        if offset is None:
            return None
        self._used[half, peer] += size
        return BounceRange(offset, size, peer, half, memory, self._ranges[half])

    async def room(self, half: Half, timeout_s: float) -> None:
        """Wait until a range may have become free, so long at most."""
        loop = asyncio.get_running_loop()
        freed: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout_s, _finish, freed)
        self._waiting[half].append(freed)
        try:
            await freed
        finally:
            timer.cancel()
            if freed in self._waiting[half]:
                self._waiting[half].remove(freed)

    def give(self, taken: BounceRange) -> None:
        """A range is needed no longer. Once for each; while it is moving it goes to quarantine."""
        assert not taken.is_given
        taken.is_given = True
        if taken.is_moving:
            self._quarantined[taken.peer] += taken.size
            most = self._half_bytes // QUARANTINE_PART
            if sum(min(size, most // 2) for size in self._quarantined.values()) >= most // 2 * 2:
                self.process.kill("too many moves that were given up have not ended")
        else:
            self._free(taken)

    def knows(self, server: str, life: bytes) -> bool:
        """Whether a server's address stands for this life of it. The library remembers what an address stood for, and forgets
        it with its process alone: that is ended then, once in RENEWAL_S at most."""
        if len(self._lives) < SERVERS_MAX and self._lives.setdefault(server, life) == life:
            return True
        if asyncio.get_running_loop().time() - self._begun_s >= RENEWAL_S:
            self.process.kill(f"{server} has begun a new life at a former address")
        return False

    def has_late_reads(self, peer: str) -> bool:
        """Whether moves of a node that were given up have not ended: they have room that it lacks."""
        return peer in self._quarantined

    def blames(self, peer: str) -> bool:
        """Whether a node has kept the library from all others, not long ago."""
        return self._blamed.get(peer, 0.0) > asyncio.get_running_loop().time()

    def read(
        self, into: BounceRange, server: str, address: int, *, size: int, timeout_s: float
    ) -> "asyncio.Future[MoveEnd]":
        """Begin to read a server's bytes at an address; ends within the time. REQUIRES: the range is taken, and not moving."""
        return self._begin_move(into, [MOVE, server, into.offset, address, size, b""], timeout_s)

    def write(
        self, source: BounceRange, target: r.StageInto, *, puller: PullingNode, size: int
    ) -> "asyncio.Future[MoveEnd]":
        """Begin to write to where a node wants it; ends when nothing of it can be written any more. REQUIRES: as `read`."""
        agent = [puller.peer, puller.name, puller.host, target.agent]
        request = [MOVE, agent, source.offset, target.address, size, target.mark]
        return self._begin_move(source, request, 2 * self.settings.hang_s, writes_to=puller.peer)

    def expect(self, into: BounceRange, *, timeout_s: float) -> Expected:
        """From now on another node may write to a range, and sends the mark then; ends within the time. REQUIRES: as `read`."""
        mark = os.urandom(r.MARK_BYTES)
        return Expected(mark, self._begin_move(into, [EXPECT, mark], timeout_s, mark=mark))

    def call_off(self, into: BounceRange, expected: Expected) -> None:
        """Nobody will write to a range, or has not begun to."""
        self._call_off(into.memory, expected.mark)

    def _call_off(self, memory: kvpool_native.Mapping, mark: bytes) -> None:
        if memory is self.process.memory and self.is_serving:
            self.process.send_note([CALL_OFF, mark])

    def _begin_move(
        self, taken: BounceRange, request: list[object], timeout_s: float, *, mark: bytes = b"", writes_to: str = ""
    ) -> "asyncio.Future[MoveEnd]":
        assert not taken.is_moving
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[MoveEnd] = loop.create_future()
        if taken.memory is not self.process.memory or not self.is_serving:
            ended.set_result(MoveEnd.UNBEGUN)
            return ended
        taken.is_moving = True
        timers = [loop.call_later(timeout_s, self._end_late, ended)]
        hang_s = None
        if mark:
            timers.append(loop.call_later(EXPECTED_S, self._call_off, taken.memory, mark))
            hang_s = EXPECTED_S + self.settings.hang_s
        if writes_to:
            timers.append(loop.call_later(self.settings.hang_s / 2, self._ping))

        def take_answer(codes: Codes) -> None:
            for timer in timers:
                timer.cancel()
            taken.is_moving = False
            if taken.is_given:
                self._quarantined[taken.peer] -= taken.size
                if not self._quarantined[taken.peer]:
                    del self._quarantined[taken.peer]
                self._free(taken)
            code = None if codes is None else codes[0]
            if code == HUNG or (code is None and writes_to and self.process.has_ended_by_itself):
                self._blame(writes_to or taken.peer)
            if code == HUNG:
                self.process.kill(
                    "the library has not begun a move in time"
                )  # no end of its own: no other node is blamed
            end = MoveEnd.DONE if code == 0 else MoveEnd.UNBEGUN if code == UNBEGUN else MoveEnd.FAILED
            self.counts["failed_reads"] += end is not MoveEnd.DONE and code != CALLED_OFF
            if not ended.done():
                ended.set_result(end)
            if codes is not None and writes_to and code != HUNG:
                self._met = codes[1]
            self._renew_where_worn()

        def blame() -> None:
            silent_s = 0.0 if self._pinged_s is None else loop.time() - self._pinged_s
            if writes_to and silent_s < self.settings.hang_s / PING_PART:  # else the process itself hangs
                self._blame(writes_to)

        self.process.send_request(request, take_answer, hang_s=hang_s, on_hang=blame)
        return ended

    def _ping(self) -> None:
        """Have the process ended within `hang_s` unless it answers."""
        if self._pinged_s is not None or not self.is_serving:
            return
        self._pinged_s = asyncio.get_running_loop().time()

        def take_answer(_: Codes) -> None:
            self._pinged_s = None

        self.process.send_request([PING], take_answer)

    def _renew_where_worn(self) -> None:
        """The library keeps the descriptors of agents that it has met: its process begins anew once nothing is asked for, nor
        expected, and in any case after twice as many as it should meet."""
        most = self.process.facts["met_max"] if self.writes and self.is_serving else 0
        if most and (self._met >= 2 * most or (self._met >= most and not self.process.asked)):
            self._met = 0
            self.process.kill("it has met many agents, whose descriptors NIXL keeps")

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {
            "serving": int(self.is_serving),
            "process_starts": self.process.lives,
            "quarantined_bytes": self.quarantined_bytes,
            **{name: self.counts[name] for name in COUNTED},
        }

    def info(self) -> dict[str, int | str]:
        """What is in use, for operators."""
        return {
            "library": self.settings.title,
            "protocol": self.settings.protocol,
            "devices": self.settings.devices,
            "server": self.server if self.is_serving else "",
            "buffer_bytes": self.settings.buffer_bytes,
        }

    def problem(self) -> str:
        """Why nothing is served; empty where it is, or begins. Any thread."""
        error = "" if self.is_serving else self.process.error
        return error and f"{self.settings.title} does not serve: {error}"

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        taken = sum(one.taken_bytes for one in self._ranges)
        return [f"rdma: {taken} bytes are taken, fewer are counted"] if taken < self.quarantined_bytes else []

    def _end_late(self, ended: "asyncio.Future[MoveEnd]") -> None:
        if not ended.done():
            self.counts["late_reads"] += 1
            self._ping()
            ended.set_result(MoveEnd.LATE)

    def _blame(self, peer: str) -> None:
        log.warning("peer %s has kept %s from all others: it is not used for %g s", peer, self.settings.title, BLAMED_S)
        now_s = asyncio.get_running_loop().time()
        self._blamed = {name: until_s for name, until_s in self._blamed.items() if until_s > now_s}
        if len(self._blamed) < SERVERS_MAX:
            self._blamed[peer] = now_s + BLAMED_S

    def _free(self, taken: BounceRange) -> None:
        taken.ranges.give(taken.offset, taken.size)
        if taken.ranges is self._ranges[taken.half]:
            self._used[taken.half, taken.peer] -= taken.size
            if not self._used[taken.half, taken.peer]:
                del self._used[taken.half, taken.peer]
        waiting = self._waiting[taken.half]
        while waiting:
            _finish(waiting.popleft())

    def _new_ranges(self) -> tuple[Ranges, Ranges]:
        return Ranges(0, self._half_bytes), Ranges(self._half_bytes, self._half_bytes)

    def _note_change(self) -> None:
        """A life of the process has begun or ended: each has memory of its own."""
        if self.is_serving:
            self._ranges, self._used = self._new_ranges(), Counter()
            self._lives.clear()
            self._met = 0
            self._begun_s = asyncio.get_running_loop().time()
            self.life = os.urandom(r.LIFE_BYTES)
            self._former_ports.append(self.process.facts["port"])
            self.process.settings["former_ports"] = list(self._former_ports)
        for call in self.on_change:
            call()


def _finish(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
