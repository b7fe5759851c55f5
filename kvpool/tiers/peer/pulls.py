"""Pulls under way: the jobs of the peer tier, each from its first request to its last chunk's end.

    ASKED ──Offer──► RECEIVING ──each chunk──► ended
      ▲                 │
      ├── a part has come, and there was more to ask for ──┤
      └── refused, late, nothing there: the next node ◄────┘
    ASKED ──nobody to ask any more──► all chunks that are left have ended

Loop thread only. Invariants: `left` of a pull counts the chunks that were not reported; a pull without any is forgotten.
`_bytes_of` has the bytes of those chunks by the node that is asked for them.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import kvpool_native
from kvpool.clock import Deadline
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.packed_numbers import pack_u64
from kvpool.tiers.base import Finished, JobId, Moves, Outcome
from kvpool.tiers.remote import NOBODY, Asker, PullOrder

NO_KEYS = KeyColumn(b"")


@dataclass(slots=True)
class Part:
    """Chunks of a pull that a node offers at once, by their numbers; `left` of them have not ended. `received`: the transport
    and its job, once it has begun at `begun_ns`; `address`: of the stream that the node offers. `is_coming`: chunks are on
    their way to the node itself. `is_broken`: its path failed. `fault`: why the first chunk that failed did. `over`: all of it
    has ended."""

    chunks: Sequence[int]
    begun_ns: int
    is_coming: bool
    over: "asyncio.Future[None]"
    left: int = field(init=False)
    received: tuple[str, int] = ("", 0)
    address: str = ""
    received_bytes: int = 0
    is_broken: bool = False
    has_failed: bool = False  # a chunk has, or came with wrong bytes
    fault: str = ""

    def __post_init__(self) -> None:
        self.left = len(self.chunks)

    @property
    def is_not_there_yet(self) -> bool:
        """Whether it failed through no fault of the node: what that waits for takes longer."""
        return self.is_coming and self.fault == "late"


@dataclass(slots=True)
class Pull:
    """One pull of a namespace's chunks. `node`: the name of the node that is asked, for `asker`, who may have named it;
    `tried`: those that were asked before. `before`: the keys before its own. `first`: of the chunks that are asked for or
    received now, the `part`; `clocked`: how many were left, and how many absent, when the deadline was set. `is_cut`: a chunk
    of a chain has failed. `is_reported`: of each chunk. Where the chunks `are_alone`, `absent` are those that did not come from
    the node, and that another one may have."""

    job: JobId
    node: str
    namespace: Namespace
    moves: Moves
    deadline: Deadline
    before: KeyColumn = NO_KEYS
    asker: Asker = NOBODY
    is_named: bool = False
    are_alone: bool = False
    absent: set[int] = field(default_factory=set)
    first: int = 0
    part: Part | None = None
    clocked: tuple[int, int] = (-1, 0)
    busy: Deadline | None = None  # for which it waits for room at its node
    is_cut: bool = False
    has_failed: bool = False  # at its node, which counts once
    tried: set[str] = field(default_factory=set)
    is_reported: bytearray = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.is_reported = bytearray(len(self.moves))
        self.left = len(self.moves)

    @property
    def layout(self) -> Layout:
        """The layout of its chunks."""
        return self.namespace.layout

    @property
    def rest(self) -> list[int]:
        """The chunks that have not ended."""
        return [chunk for chunk in range(self.first, len(self.moves)) if not self.is_reported[chunk]]

    @property
    def wanted(self) -> Sequence[int]:
        """The chunks to be asked for next: from `first` on, up to one that has come by another connection; or each that is not
        known to be absent."""
        if self.are_alone:
            return [chunk for chunk in self.rest if chunk not in self.absent]
        end = self.is_reported.find(1, self.first)
        return range(self.first, len(self.moves) if end < 0 else end)

    def columns(self, chunks: Sequence[int]) -> tuple[bytes, bytes]:
        """Where these chunks go: arena offsets and slots, u64."""
        offsets, slots = self.moves.arena_offsets, self.moves.arena_slots
        return pack_u64([offsets[chunk] for chunk in chunks]), pack_u64([slots[chunk] for chunk in chunks])


class Pulls:
    """See the module. `landings`: the board on which chunks that do not come are marked."""

    def __init__(self, landings: kvpool_native.LandingBoard) -> None:
        self._landings = landings
        self._by_job: dict[JobId, Pull] = {}
        self._by_received: dict[tuple[str, int], Pull] = {}
        self._ended: list[Finished] = []
        self._bytes_of: Counter[str] = Counter()
        self._jobs = 0

    def __repr__(self) -> str:
        return f"<Pulls {len(self._by_job)} under way>"

    def __len__(self) -> int:
        return len(self._by_job)

    def bytes_of(self, node: str) -> int:
        """What was asked of a node, or will be, and has not come."""
        return self._bytes_of[node]

    def begin_pull(self, order: PullOrder, namespace: Namespace, moves: Moves, deadline: Deadline) -> Pull:
        """A new pull, of which nothing was asked yet. Behind the deadline no further part is asked for."""
        self._jobs += 1
        run = order.run
        pull = Pull(
            JobId(self._jobs),
            run.node,
            namespace,
            moves,
            deadline,
            order.before,
            order.asker,
            run.is_named,
            order.are_alone,
        )
        self._by_job[pull.job] = pull
        self._count(pull, pull.left)
        return pull

    def turn_to(self, pull: Pull, node: str, *, may_come_back: bool) -> None:
        """Ask another node for what is left of a pull. REQUIRES: nothing is received of it now."""
        self._count(pull, -pull.left)
        if not may_come_back:
            pull.tried.add(pull.node)
            pull.clocked = pull.clocked[0], 0
        pull.node, pull.is_named, pull.has_failed = node, False, False
        pull.absent.clear()
        self._count(pull, pull.left)

    def receive(self, pull: Pull, part: Part, received: tuple[str, int]) -> None:
        """A transport's job receives a part's chunks from now on."""
        pull.part, part.received = part, received
        self._by_received[received] = pull

    def of_received(self, received: tuple[str, int]) -> Pull | None:
        """The pull of a transport's job."""
        return self._by_received.get(received)

    def all(self) -> list[Pull]:
        """Every pull under way."""
        return list(self._by_job.values())

    def fail(self, pull: Pull, outcome: Outcome, fault: str) -> None:
        """Report all chunks that were not. REQUIRES: nothing is received into their slots."""
        for chunk in range(pull.first, len(pull.moves)):
            if not pull.is_reported[chunk]:
                self._landings.fail(pull.moves.arena_slots[chunk])
                self.report(pull, Finished(pull.job, chunk, outcome, fault))

    def give_back(self, pull: Pull) -> None:
        """A chunk of the part has not come, and may be asked for again."""
        self._end_one(pull)

    def end_part(self, pull: Pull, part: Part) -> None:
        """All chunks of a part have ended: go on with the first that has not. Those that may be asked for again are, where
        nothing of the part has failed; else they have failed. Of chunks alone these are asked of another node."""
        left = [chunk for chunk in part.chunks if not pull.is_reported[chunk]]
        if pull.are_alone:
            pull.absent.update(left)
        for chunk in left if part.has_failed and not pull.are_alone else ():
            self._landings.fail(pull.moves.arena_slots[chunk])
            self.report(pull, Finished(pull.job, chunk, Outcome.FAILED, part.fault))
        pull.is_cut = pull.layout.is_chained and part.has_failed and not pull.are_alone
        pull.first = pull.is_reported.index(0, pull.first) if pull.left else len(pull.moves)

    def report(self, pull: Pull, finished: Finished) -> None:
        """A chunk has ended; with the last one of its part the next one may be asked for."""
        assert not pull.is_reported[finished.chunk]
        pull.is_reported[finished.chunk] = 1
        pull.left -= 1
        self._count(pull, -1)
        self._ended.append(finished)
        self._end_one(pull)
        if not pull.left:
            del self._by_job[pull.job]

    def take_ended(self) -> list[Finished]:
        """The chunks that have ended since the last call."""
        taken, self._ended = self._ended, []
        return taken

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        over = [pull for pull in self._by_job.values() if all(pull.is_reported)]
        strangers = [pull for pull in self._by_received.values() if pull.job not in self._by_job]
        found = [f"peer: {len(over)} pulls have ended, {len(strangers)} are unknown"] if over or strangers else []
        counted: Counter[str] = Counter()
        for pull in self._by_job.values():
            counted[pull.node] += pull.is_reported.count(0) * pull.layout.stored_bytes
        if counted != self._bytes_of:
            found.append(f"peer: {dict(self._bytes_of)} bytes are counted by node, {dict(counted)} are under way")
        return found

    def _end_one(self, pull: Pull) -> None:
        part = pull.part
        if part is None:
            return
        part.left -= 1
        if not part.left:
            del self._by_received[part.received]
            pull.part = None
            if not part.over.done():
                part.over.set_result(None)

    def _count(self, pull: Pull, chunks: int) -> None:
        self._bytes_of[pull.node] += chunks * pull.layout.stored_bytes
        if not self._bytes_of[pull.node]:
            del self._bytes_of[pull.node]
