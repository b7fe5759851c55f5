"""Interface of a tier: what the rest of kvpool asks of bytes at rest, and the records that cross.

    ArenaTier     memory whose slots clients map and copy from: DRAM
    BackingTier   chunks that must be brought into an arena before they can be read: a disk

`kvpool.tiering` is written against this page alone; docs/tiers.md says step by step how a tier is added. A tier moves bytes and
decides nothing: which chunk goes down, comes up or is compared is decided above it, who may evict what in its directory
(`slots.py`).

A job moves some chunks of one namespace between the arena and the tier:

    read | write | check ──a number──► under way ──each chunk once──► DONE | BAD_SOURCE | FAILED | CANCELLED
                         └─0: nothing was started

Control thread only, but for what says otherwise. No call waits for a device; what takes long runs on threads of the tier's own
and is reported by `completed`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NewType, Protocol

import kvpool_native
from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.packed_rows import MOVE_ROW, struct_of
from kvpool.tiers.slots import Slots
from kvpool.types import Level

_MOVE, _ = struct_of(MOVE_ROW, "key", "generation")

JobId = NewType("JobId", int)
# The answer of a tier that has started nothing: it is full, resting or not open.
NOT_STARTED = JobId(0)
Info = dict[str, int | float | str]
Counters = dict[str, int | float | str]


class TierState(IntEnum):
    """A backing tier's state. OK: it is read and written. READONLY: it is read. STARTING, OFFLINE: neither."""

    STARTING = 0
    OK = 1
    READONLY = 2
    OFFLINE = 3


class Outcome(IntEnum):
    """The end of one chunk of a job.

    BAD_SOURCE: the bytes moved from are not the chunk's; they are dropped there: in the tier after a read or a check, in the
    arena after a write. FAILED: the way or the target was bad; the source stays. CANCELLED: the tier has ended before it.
    """

    DONE = 0
    BAD_SOURCE = 1
    FAILED = 2
    CANCELLED = 3


class Finished(NamedTuple):
    """The end of chunk number `chunk` of a job. `fault`: a word for what went wrong; `tokens`: see `Moves`, after a read."""

    job: JobId
    chunk: int
    outcome: Outcome
    fault: str = ""
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class Moves:
    """The chunks of a job, in columns of one length: a chain in its order, or chunks of one namespace one by one.

    `parents`: empty for a chunk at the root, and where nobody needs them. `offsets`, `generations`: where and in which
    generation a chunk lies in the tier, as its directory says. `arena_offsets`: where its bytes are in the arena, or go to.
    `tokens`: for a write the token ids (i32) of each chunk, empty where they are not known; no column for other jobs.
    """

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    offsets: Sequence[int]
    generations: Sequence[int]
    arena_offsets: Sequence[int]
    tokens: Sequence[bytes] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self) -> bytes:
        """The same packed for native code: key, parent (zeros: none), offset, arena offset, generation."""
        rows = zip(self.keys, self.parents, self.offsets, self.arena_offsets, self.generations, strict=True)
        return b"".join(_MOVE.pack(*row) for row in rows)


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """Policy of writes to a tier: its options, in the same words for every tier.

    `admission`: a policy of `kvpool.tiering.admission`; `budget_bytes`: of a day, 0 for no bound; `watermark`: the share of the
    arena that may be without a copy below before chunks are written; `is_write_through`: each chunk as soon as it is stored.
    """

    admission: str = "all"
    budget_bytes: int = 0
    watermark: float = 0.75
    is_write_through: bool = False


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """The shared memory that a backing tier reads from and writes into.

    The layers of a chunk lie one behind the other at its place in `arena`. `index` has their checksums and says how far a chunk
    that is read has landed: a `LandingBoard` of it publishes layers in their order, each once its bytes and checksum agree.
    """

    arena: kvpool_native.Mapping
    index: kvpool_native.Mapping


class ArenaTier(Protocol):
    """A tier whose slots clients map."""

    @property
    def level(self) -> Level:
        """Its number in events and answers: the lower, the faster."""
        ...

    @property
    def directory(self) -> kvpool_native.Directory:
        """The chunks it holds, and where. The lower tiers' directories are attached to it."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes it has room for."""
        ...

    @property
    def max_chunks(self) -> int:
        """Chunks it has room for."""
        ...


class TierOwner(Protocol):
    """The owner of a backing tier, which is notified when there is work. Called on the control thread."""

    def on_completed(self) -> None:
        """Jobs have completed, or the tier can do more than before: `completed` is to be asked."""
        ...

    def on_doubt(self) -> None:
        """A failure leaves open whether the tier has what was written and not published since: it counts as not written."""
        ...


class Headers(Protocol):
    """Reader of what is stored beside chunks: token ids and scope, for whoever streams a snapshot."""

    def ask(self, places: Sequence[tuple[bytes, bytes, int, int]], *, is_urgent: bool) -> "Future[list[bytes]]":
        """Have headers read, by key, fingerprint of the namespace, offset and generation: token ids and scope of each."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        ...


class _Unowned:
    """The owner of a tier that nobody has started."""

    def on_completed(self) -> None:
        """Nobody asks."""

    def on_doubt(self) -> None:
        """Nothing was published."""


UNOWNED: TierOwner = _Unowned()


class BackingTier(Protocol):
    """A tier whose chunks are brought into an arena before they are read.

    It may fail, rest and come back at any time; the arena depends on none of that. Chunks it has lost it drops from its
    directory by itself.
    """

    @property
    def name(self) -> str:
        """The word for it in statistics, options and orders, such as `dram` or a device's."""
        ...

    @property
    def level(self) -> Level:
        """Its number in events and answers: the lower, the faster."""
        ...

    @property
    def slots(self) -> Slots:
        """Its directory and size classes."""
        ...

    @property
    def headers(self) -> "Headers | None":
        """The reader of token ids that are stored beside its chunks; None where there are none to be read."""
        ...

    @property
    def state(self) -> TierState:
        """Its state now."""
        ...

    @property
    def can_read(self) -> bool:
        """Whether `read` and `check` would start something."""
        ...

    @property
    def can_write(self) -> bool:
        """Whether `write` would start something."""
        ...

    @property
    def is_authoritative(self) -> bool:
        """Whether this daemon alone writes there, so that the directory says for certain what is there."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether somebody who needs room should wait for a write to end."""
        ...

    @property
    def write_policy(self) -> WritePolicy:
        """Its options as they are now; `reconfigure` may change them."""
        ...

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:
        """Open in the background, restore what an earlier life left into the directory, then serve until `close`.

        Never raises: what goes wrong is a state, and is tried again. The event loop runs.
        """
        ...

    async def close(self) -> bool:
        """End everything: jobs under way complete as CANCELLED or better. False where a thread waits for a device for good."""
        ...

    def reconfigure(self, config: Config) -> None:
        """Go on with another configuration, as far as it can change meanwhile."""
        ...

    def read(self, namespace: Namespace, moves: Moves, *, is_urgent: bool) -> JobId:
        """Start to bring chunks into the arena, their layers in order. What is not urgent goes behind all that is."""
        ...

    def write(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start to write chunks that lie in the arena. Their slots, on both sides, stay until the job has ended."""
        ...

    def check(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start to compare chunks with their checksums where they lie, behind all else. Arena offsets mean nothing."""
        ...

    def completed(self) -> list[Finished]:
        """The chunks that have ended since the last call, a turn's worth; `on_completed` comes again for the others.

        Each chunk of each job once, in any order.
        """
        ...

    def remember(self, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        """Have these chunks of a write, which are published now, found after a restart, with what they are retained."""
        ...

    def touch(self, key: bytes) -> None:
        """Have it outlive the daemon that a chunk was used now, or is retained otherwise."""
        ...

    def keep_up(self) -> None:
        """Have it outlive the daemon that chunks have left the directory, and that priorities have fallen back."""
        ...

    def checkpoint(self, timeout_s: float) -> bool:
        """Make certain what was written and remembered: whether a power cut now would take none of it. Blocks; any thread."""
        ...

    def forget_namespace(self, namespace: Namespace) -> None:
        """A namespace without chunks: its number is another's from now on."""
        ...

    async def note_flushed(self, namespaces: Sequence[Namespace] | None, generation: int) -> None:
        """Chunks of these namespaces (None: of all) up to a generation were dropped on order: no restart may find them."""
        ...

    def stats(self) -> Counters:
        """Counters by their public names."""
        ...

    def info(self) -> Info:
        """The resources in use, for operators."""
        ...

    def verify(self) -> list[str]:
        """Broken invariants of its own books, one line each; those of its slots are recounted by whoever holds them."""
        ...

    def problems(self) -> list[str]:
        """Problems that a restart of the daemon may solve, one line each. Any thread."""
        ...

    def shortcomings(self) -> list[str]:
        """Configured parts that are missing and that a restart would not bring back, one line each. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A backing tier that is configured and not made yet, with the sizes that others need before.

    `max_chunks`: at most, which the arena's index has room for; `descriptors`: file descriptors that it keeps open, fewer by
    another value of `descriptors_option`; `make`: the tier, not started.
    """

    name: str
    capacity_bytes: int
    max_chunks: int
    descriptors: int
    descriptors_option: str
    make: Callable[[ArenaMemory, Config, Clock], BackingTier]
