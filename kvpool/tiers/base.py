"""Interface of a tier: what it can do, and the records that cross.

    ArenaTier   memory whose slots clients map and copy from: DRAM
    Tier        every tier beside the arena, and what it can do besides:
        Stocked      it has a directory here, and its chunks can be checked
        Readable    its chunks are brought into an arena before they are read: a disk
        Writable    it keeps chunks that the arena needs the slots of
        Exported    its memory has copies of the arena's chunks, which clients read there: a device
        Remote      it may have chunks, which are known by hints: other nodes (`remote.py`)

`kvpool.tiering` knows tiers by these interfaces alone; docs/tiers.md explains step by step how to add one. A tier moves bytes
and decides nothing: `kvpool.tiering` and `kvpool.checks` decide which chunk is demoted, promoted or checked, and the tier's
directory (`slots.py`) decides which one it evicts.

A job moves some chunks of one namespace between the arena and the tier:

    read | write | copy | check ──a number──► under way ──each chunk once──► DONE | BAD_SOURCE | FAILED | CANCELLED
                                └─0: nothing was started

Control thread only, except where a method says otherwise. No call waits for a device: slow work runs on the tier's own threads,
and `completed` reports it.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NewType, Protocol

import kvpool_native
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.row_structs import struct_of
from kvpool.states import Level
from kvpool.tiers.slots import Slots

_MOVE, _ = struct_of(kvpool_native.MOVE_ROW, "key", "generation")

JobId = NewType("JobId", int)
# The answer of a tier that has started nothing: it is full, suspended or not open.
NOT_STARTED = JobId(0)
Info = dict[str, int | float | str]
Counters = dict[str, int | float | str]


class TierState(IntEnum):
    """A tier's state. OK: it is read and written. READONLY: it is read. STARTING, OFFLINE: neither."""

    STARTING = 0
    OK = 1
    READONLY = 2
    OFFLINE = 3


class Outcome(IntEnum):
    """The end of one chunk of a job.

    BAD_SOURCE: the source had other bytes than the chunk's, and is dropped: in the tier after a read or a check, in the arena
    after a write. FAILED: the device or the target failed; the source stays. CANCELLED: the tier was closed before.
    """

    DONE = 0
    BAD_SOURCE = 1
    FAILED = 2
    CANCELLED = 3


class Finished(NamedTuple):
    """The end of chunk number `chunk` of a job. `fault`: a word for the error; `tokens`: as in `Moves`, after a read."""

    job: JobId
    chunk: int
    outcome: Outcome
    fault: str = ""
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class Moves:
    """The chunks of a job, in columns of one length: a chain in its order, or chunks of one namespace one by one.

    `parents`: empty bytes for a chunk at the root, and in jobs that do not need them. `offsets`, `generations`: of the chunk's
    slot in the tier, from its directory. `arena_offsets`: where the arena has its bytes, or gets them. `arena_slots`: the
    number of that slot in the index. `tokens`: for a write, the token ids (i32) of each chunk, empty where they are not known.
    Other jobs have no such column.

    A copy has no parents, and the generations of its sources: the slots in the arena. A check has no arena: `arena_slots` are
    the tier's own, where they are in the index.
    """

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    offsets: Sequence[int]
    generations: Sequence[int]
    arena_offsets: Sequence[int]
    arena_slots: Sequence[int]
    tokens: Sequence[bytes] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self) -> bytes:
        """Rows for native code: key, parent (zeros: none), offset, arena offset, arena slot, generation."""
        places = zip(self.offsets, self.arena_offsets, self.arena_slots, self.generations, strict=True)
        rows = ((key, parent, *place) for key, parent, place in zip(self.keys, self.parents, places, strict=True))
        return b"".join(_MOVE.pack(*row) for row in rows)


class WritePolicy(Protocol):
    """The options of a tier's section that say which chunks are written to it."""

    @property
    def admission(self) -> str:
        """The name of a policy in `kvpool.tiering.admission`."""

    @property
    def write_budget_bytes(self) -> int:
        """Bytes that may be written in a day; 0: no bound."""

    @property
    def watermark(self) -> float:
        """The share of the arena that may hold chunks which the tier lacks; beyond it the coldest are written."""

    @property
    def write_through(self) -> bool:
        """Whether each chunk is written as soon as it is stored."""


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """The shared memory that a tier reads from and writes into, and the directory of its chunks.

    `arena` has the extents of a chunk one after another. `index` has their checksums, and the number of those that have landed
    of a chunk which is being read: its `LandingBoard` publishes the extents in order, each after its checksum was compared.
    """

    arena: kvpool_native.Mapping
    index: kvpool_native.Mapping
    directory: kvpool_native.Directory


class MemoryExport(NamedTuple):
    """A tier's memory for clients: the UUID of its device, the bytes to map, and a descriptor, which the tier closes."""

    uuid: bytes
    size: int
    fd: int


class ArenaTier(Protocol):
    """A tier whose slots clients map."""

    @property
    def directory(self) -> kvpool_native.Directory:
        """The chunks it holds, and where. The lower tiers' directories are attached to it."""

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes it has room for."""

    @property
    def max_chunks(self) -> int:
        """Chunks it has room for."""


class TierOwner(Protocol):
    """The owner of a tier, which the tier notifies. Called on the control thread."""

    def on_completed(self) -> None:
        """Jobs have completed, or the tier can do more than before: call `completed`."""

    def on_lost(self) -> None:
        """A failure: the tier may have lost chunks that were written and are not published, and has lost all copies."""


class _Unowned:
    """The owner of a tier that nobody has started."""

    def on_completed(self) -> None:
        """Ignored: nobody called `start`."""

    def on_lost(self) -> None:
        """Ignored: nothing was written."""


UNOWNED: TierOwner = _Unowned()


class Tier(Protocol):
    """A tier beside the arena. It may fail, be suspended and recover at any time; the arena works without it."""

    @property
    def name(self) -> str:
        """Its name in statistics, options and orders of operators."""

    @property
    def level(self) -> Level:
        """Its number in events and answers: the lower, the faster."""

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:
        """Open in the background, restore the chunks of earlier processes into the directory, then serve until `close`.

        Never raises: a failure changes the state, and opening is tried again. REQUIRES: a running event loop.
        """

    async def close(self) -> bool:
        """End everything; remaining jobs complete as CANCELLED. False where a thread is left waiting for its device."""

    def completed(self) -> list[Finished]:
        """The chunks that have ended since the last call, at most one turn's work; `on_completed` is called again for more.

        Reports each chunk of each job exactly once, in any order. After `close` all that are left.
        """

    def stats(self) -> Counters:
        """Counters by their public names."""

    def info(self) -> Info:
        """The resources in use, for operators."""

    def verify(self) -> list[str]:
        """Broken invariants, one line each; the link verifies its slots.

        A forked child calls this while the threads of the daemon do not exist: it takes no lock.
        """

    def problems(self) -> list[str]:
        """Problems that a restart of the daemon may solve, one line each. Any thread."""

    def shortcomings(self) -> list[str]:
        """Configured parts that are missing and that a restart would not bring back, one line each. Any thread."""


class Stocked(Tier, Protocol):
    """A tier with a directory here. It drops lost chunks from there by itself."""

    @property
    def state(self) -> TierState:
        """Its state now."""

    @property
    def slots(self) -> Slots:
        """Its directory and size classes."""

    def check(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start to compare chunks in the tier with their checksums, after all other jobs."""


class Readable(Stocked, Protocol):
    """A tier whose chunks are brought into an arena before they are read."""

    @property
    def can_read(self) -> bool:
        """Whether `read` and `check` would start something."""

    def read(self, namespace: Namespace, moves: Moves, *, is_urgent: bool) -> JobId:
        """Start to read chunks into the arena, extent by extent. Urgent jobs go first."""

    def touch(self, key: bytes) -> None:
        """Record for a restart that a chunk was used now, or that its retention has changed."""


class Headers(Protocol):
    """Reader of the token ids and scopes that a tier stores beside chunks; snapshots of events need them."""

    def request_headers(
        self, places: Sequence[tuple[bytes, bytes, int, int]], *, is_urgent: bool
    ) -> "Future[list[bytes]]":
        """Read headers, each by key, fingerprint of the namespace, offset, generation: token ids and scope of each."""

    def stats(self) -> dict[str, int]:
        """Counters, by name."""


class Writable(Stocked, Protocol):
    """A tier that keeps chunks which the arena needs the slots of, perhaps beyond the process."""

    @property
    def can_write(self) -> bool:
        """Whether `write` would start something."""

    @property
    def is_answering(self) -> bool:
        """Whether its device responds, so that a request which needs room may wait for a write to end."""

    @property
    def write_policy(self) -> WritePolicy:
        """The options in force; `reconfigure` may change them."""

    @property
    def headers(self) -> Headers | None:
        """The reader of the token ids that it stores beside chunks; None where it stores none."""

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on, as far as it can change at run time."""

    def write(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start to write chunks of the arena. The slots on both sides are protected until the job has ended."""

    def remember(self, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        """Record these published chunks of a write, with their retention, so that a restart finds them."""

    def keep_up(self) -> None:
        """Record for a restart which chunks have left the directory, and which priorities have expired."""

    def checkpoint(self, timeout_s: float) -> bool:
        """Make everything written and remembered durable. Whether it is, so that a power cut loses none. Blocks; any thread."""

    def forget_namespace(self, namespace: Namespace) -> None:
        """Forget a namespace without chunks; another one gets its number."""

    async def note_flushed(self, namespaces: Sequence[Namespace] | None, generation: int | None) -> bool:
        """An operator has dropped the chunks of these namespaces (None: all) up to a generation (None: some of them).

        Whether no restart finds them.
        """


class Backing(Readable, Writable, Protocol):
    """A lower tier, as a disk is. Its `stats` have `NAME.read_bytes` and `NAME.written_bytes`."""


class Exported(Stocked, Protocol):
    """A tier above an arena, with copies of chunks that the arena has.

    The arena has every chunk of it, so a copy that leaves moves no bytes, and one whose chunk leaves the arena goes with it.
    The daemon alone writes the memory. Clients map it and read it without a hold: a copy counts only if its slot still has the
    same generation in the index after it was read. So the directory clears the generation before the slot can be given to
    another chunk, and publishes it after all bytes of the copy are in place.
    """

    @property
    def can_copy(self) -> bool:
        """Whether `copy` and `check` would start something."""

    def export(self) -> MemoryExport | None:
        """The memory that clients map; None while the tier is not OK."""

    def copy(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start to copy chunks of the arena. The slots on both sides are protected until the job has ended."""
