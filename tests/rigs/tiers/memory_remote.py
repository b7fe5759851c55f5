"""A remote tier in this process: other nodes' chunks in dicts, pulled by a thread, with failures on command.

`hints` is what this node believes of another one, `chunks` what that one has: they may differ. A withheld chunk lands no extent
until `release`; a closed tier cancels what is left.
"""

import asyncio
import queue
import threading
from dataclasses import dataclass, field

import kvpool_native
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.pool.lower_tiers import Planner, Site, TierPlan
from kvpool.states import Level
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiers.base import (
    NOT_STARTED,
    UNOWNED,
    ArenaMemory,
    Counters,
    Finished,
    Info,
    JobId,
    Moves,
    Outcome,
    TierOwner,
)
from kvpool.tiers.remote import Asker, PullOrder, RemoteRun

STOP_TIMEOUT_S = 10.0


@dataclass
class Node:
    """Another node. `hints`: the keys that it seems to have; `chunks`: the bytes of those that it has."""

    hints: set[bytes] = field(default_factory=set)
    chunks: dict[bytes, bytes] = field(default_factory=dict)

    def store(self, chunks: dict[bytes, bytes]) -> None:
        """Have these chunks, and say so."""
        self.chunks |= chunks
        self.hints |= set(chunks)


@dataclass(frozen=True)
class _Job:
    number: JobId
    layout: Layout
    moves: Moves
    node: Node


class MemoryRemote:
    """See the module, and `Remote`."""

    name = "peer"
    level = Level.PEER

    def __init__(self, nodes: list[Node], memory: ArenaMemory) -> None:
        self.nodes = nodes
        self.asked: list[list[bytes]] = []  # the keys of each pull
        self.accepts_jobs = True
        self.outcomes: dict[bytes, Outcome] = {}  # of chunks that do not come
        self._memory = memory
        self._landings = kvpool_native.LandingBoard(memory.index)
        self._owner: TierOwner = UNOWNED
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._ended: list[Finished] = []  # guarded by _lock
        self._thread = threading.Thread(target=self._run, name="memory-remote", daemon=True)
        self._loops: list[asyncio.AbstractEventLoop] = []
        self._read_bytes = 0

    def withhold(self) -> None:
        """Land nothing until `release`."""
        self._may_go_on.clear()

    def release(self) -> None:
        """Go on."""
        self._may_go_on.set()

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:
        self._owner = owner
        self._loops.append(asyncio.get_running_loop())
        self._thread.start()

    async def close(self) -> bool:
        self._is_closed = True
        self.release()
        self._queue.put(None)
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, STOP_TIMEOUT_S)
        self._owner.on_completed()
        return not self._thread.is_alive()

    def find(self, namespace: Namespace, keys: KeyColumn, first: int) -> RemoteRun:
        def end(node: Node) -> int:
            number = first
            while number < len(keys) and keys[number] in node.hints:
                number += 1
            return number

        return max(
            (RemoteRun(end(node), str(number)) for number, node in enumerate(self.nodes)), key=lambda run: run.end
        )

    def find_at(self, asker: Asker, keys: KeyColumn, first: int) -> RemoteRun:
        node = asker.owner
        is_known = node in [str(number) for number in range(len(self.nodes))]
        return RemoteRun(len(keys), node) if is_known else RemoteRun(first)

    def find_each(self, namespace: Namespace, keys: KeyColumn) -> list[tuple[str, list[int]]]:
        found: dict[str, list[int]] = {}
        for number, key in enumerate(keys):
            having = [str(at) for at, node in enumerate(self.nodes) if key in node.hints]
            if having:
                found.setdefault(having[0], []).append(number)
        return list(found.items())

    def read(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        if not self.accepts_jobs:
            return NOT_STARTED
        assert (order.before[-1] if order.before else b"") == moves.parents[0]
        self.asked.append(list(moves.keys))
        number = JobId(len(self.asked))
        self._queue.put(_Job(number, namespace.layout, moves, self.nodes[int(order.run.node)]))
        return number

    def completed(self) -> list[Finished]:
        with self._lock:
            taken, self._ended = self._ended, []
        return taken

    def stats(self) -> Counters:
        return {"peer.read_bytes": self._read_bytes}

    def info(self) -> Info:
        return {"peer_nodes": len(self.nodes)}

    def verify(self) -> list[str]:
        return []

    def problems(self) -> list[str]:
        return []

    def shortcomings(self) -> list[str]:
        return []

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            for chunk in range(len(job.moves)):
                self._may_go_on.wait()
                outcome = self._pull(job, chunk)
                with self._lock:
                    self._ended.append(Finished(job.number, chunk, outcome))
            if not self._is_closed:
                self._loops[0].call_soon_threadsafe(self._owner.on_completed)

    def _pull(self, job: _Job, chunk: int) -> Outcome:
        key, slot = job.moves.keys[chunk], job.moves.arena_slots[chunk]
        stored = job.node.chunks.get(key)  # once: a test may take it away meanwhile
        if self._is_closed or key in self.outcomes or stored is None:
            self._landings.fail(slot)
            return Outcome.CANCELLED if self._is_closed else self.outcomes.get(key, Outcome.FAILED)
        extent_bytes = job.layout.extent_bytes
        for extent in range(job.layout.extents):
            at = extent * extent_bytes
            start = job.moves.arena_offsets[chunk] + at
            view = self._memory.arena.view()[start : start + extent_bytes]
            view[:] = memoryview(stored)[at : at + extent_bytes]
            self._landings.land(slot, extent, kvpool_native.crc32c(view).to_bytes(4, "little"))
        self._read_bytes += job.layout.stored_bytes
        return Outcome.DONE


def planner(nodes: list[Node], made: list[MemoryRemote]) -> Planner:
    """A line of the pool's composition: makes the tier over these nodes and adds it to the list."""

    def link(site: Site) -> RemoteLink:
        made.append(MemoryRemote(nodes, site.memory))
        return site.remote(made[-1])

    return lambda _config: TierPlan(link)
