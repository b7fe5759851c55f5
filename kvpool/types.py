"""Types: records, ids and enums that daemon and client share.

Nothing here has behaviour beyond accessors. Values that travel are wire codes: a changed number is a change of the protocol.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple, NewType

import kvpool_native
from kvpool.key_column import KEY_BYTES as KEY_BYTES
from kvpool.key_column import KeyColumn

EPOCH_BYTES = 16
TOKEN_BYTES = 4
DURATION_BYTES = 4
PAGE_BYTES = 4096
# The socket of a node's service, and the default of engines.
SERVICE_SOCKET = "/run/kvpool/kvpool.sock"
# The model of the daemon's own probe: neither events nor the counts of leases and pins have it.
PROBE_MODEL = "kvpool-probe"

# The priority of a chunk without a retention request: the default of TensorRT-LLM's KvCacheRetentionConfig.
DEFAULT_PRIORITY: int = kvpool_native.DEFAULT_PRIORITY
PRIORITY_MAX = 100
# On the wire: leave the chunk's retention unchanged.
KEEP_PRIORITY = 255

ConnectionId = NewType("ConnectionId", int)
LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)  # a holder of slots: of the directory, or a part of a joint save
SaveId = NewType("SaveId", int)  # what a connection has reserved for one save
HoldId = NewType("HoldId", int)
NamespaceId = NewType("NamespaceId", int)
SizeClassId = NewType("SizeClassId", int)


class Level(IntEnum):
    """A tier's number: its level in events and in `Hit.tiers`."""

    HBM = 0
    DRAM = 1
    SSD = 2
    PEER = 3
    STORE = 4


LEVELS = len(Level)
# Their numbers alone: numpy takes 8 µs to compare with a member of an enumeration, and 0.3 with a number.
DRAM, PEER, STORE = int(Level.DRAM), int(Level.PEER), int(Level.STORE)
# Tiers that the node itself can give a chunk from; at level 0 it is in an engine's own memory, or a copy of one in DRAM.
NODE_TIERS = ~(1 << Level.HBM)


class WriteOrder(IntEnum):
    """Order in which chunks that only DRAM has are demoted."""

    COLDEST = 0
    NEWEST = 1
    WORTHIEST = 2  # the highest priority first, among equals the one used last


class LoadFault(IntEnum):
    """Why a promoted chunk has not come; only what the source is to blame for drops the chunk there."""

    SOURCE = 0
    PATH = 1
    MEMORY = 2


class SaveState(IntEnum):
    """State of one chunk of a save.

    RESERVED ──commit──► STORED, or PART
        └──deadline────► EXPIRED

    PENDING: another save is writing it, or it is on its way here from another tier, or after one that is: it may not come.
    PART: what this save has of it is stored; other extents, or a chunk before it that another save writes, are not yet.
    """

    PRESENT = 0
    RESERVED = 1
    PENDING = 2
    NO_PARENT = 3
    FULL = 4
    NOT_READY = 5
    FOREIGN = 6
    STORED = 7
    EXPIRED = 8
    DISCONNECTED = 9
    TIMEOUT = 10
    TOO_LONG = 11
    ABORTED = 12
    CHECKSUM = 13
    QUOTA = 14
    STOPPING = 15
    PART = 16
    OTHER = 255  # never sent: a client's value for an unknown number

    @property
    def reason(self) -> str:
        """The word that `SaveResult.reasons` counts a declined chunk under."""
        return self.name.lower().replace("_", "-")


class RetainState(IntEnum):
    """Result of a retention request for one chunk. A worse one has a higher number."""

    ACCEPTED = 0
    CLIPPED = 1
    ABSENT = 2


class ReportState(IntEnum):
    """State of one chunk that an engine reports as its own. All but the first: it is not at level 0 by this report."""

    TAKEN = 0
    FULL = 1  # beyond the bound
    NO_PARENT = 2  # the source has not reported its parent, or that was declined
    FOREIGN = 3  # another model, layout or rank has its key


class LoadReason(IntEnum):
    """Reason for the end of a load; `reason` in `LoadResult` is the name in lower case. The first four are the native module's
    codes."""

    COMPLETE = 0
    GONE = 1
    CHECKSUM = 2
    CANCELLED = 3
    TIMEOUT = 4
    IO = 5
    DISCONNECTED = 6


# Why a client declines chunks of a save by itself: the daemon gets these only in usage reports.
CLIENT_DECLINES = (SaveState.DISCONNECTED, SaveState.TIMEOUT, SaveState.TOO_LONG, SaveState.ABORTED)


@dataclass(frozen=True, slots=True)
class SparseUsage:
    """Compute by lookup: steps of sparse sequences. Blocks and KV heads count for each KV head of each layer of each recall.

    `kept_mass_millionths`: the sum, over query heads, of the estimated share of the middle blocks' mass that was recalled.
    From `staging_wanted_blocks` on: steps on devices. `repeated_blocks`: of `compared_blocks`, those that the layer's step
    before wanted as well.
    """

    recalls: int = 0
    recalled_blocks: int = 0
    middle_blocks: int = 0
    kv_heads: int = 0
    dense_kv_heads: int = 0
    query_heads: int = 0
    kept_mass_millionths: int = 0
    fetched_blocks: int = 0
    built_summaries: int = 0
    lost_sequences: int = 0
    reattached_sequences: int = 0
    staging_wanted_blocks: int = 0
    staging_hit_blocks: int = 0
    staging_prefetched_blocks: int = 0
    staging_copied_blocks: int = 0
    compared_blocks: int = 0
    repeated_blocks: int = 0


# The names of these counts, in the order of usage reports.
SPARSE_COUNTS = tuple(count.name for count in fields(SparseUsage))
MASS_UNIT = 1_000_000


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage of one client since its last report, in chunks.

    `hit_chunks` and `loaded_chunks` are by level, `failed_loads` by `LoadReason`, `declined_chunks` as CLIENT_DECLINES.
    """

    lookups: int
    lookup_chunks: int
    loads: int
    hit_chunks: tuple[int, ...]
    loaded_chunks: tuple[int, ...]
    failed_loads: tuple[int, ...]
    declined_chunks: tuple[int, ...]
    sparse: SparseUsage


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """Usage of one model since the daemon's start; tuples are by level."""

    lookups: int = 0
    lookup_tokens: int = 0
    lookup_bytes: int = 0
    hit_tokens: tuple[int, ...] = (0,) * LEVELS
    hit_bytes: tuple[int, ...] = (0,) * LEVELS
    loads: int = 0
    loaded_tokens: tuple[int, ...] = (0,) * LEVELS
    loaded_bytes: tuple[int, ...] = (0,) * LEVELS
    stored_chunks: int = 0
    stored_tokens: int = 0
    stored_bytes: int = 0
    sparse: SparseUsage = SparseUsage()

    @property
    def missed_tokens(self) -> int:
        """Tokens looked up that no tier had."""
        return self.lookup_tokens - sum(self.hit_tokens)

    @property
    def missed_bytes(self) -> int:
        """Bytes of the chunks looked up that no tier had."""
        return self.lookup_bytes - sum(self.hit_bytes)


@dataclass(frozen=True, slots=True)
class ClientFailures:
    """Failures in clients that do not belong to one model, by word, and counts of their reports."""

    failed_loads: dict[str, int]
    declined_chunks: dict[str, int]
    usage_reports: int
    clamped_values: int


@dataclass(frozen=True, slots=True)
class Measurements:
    """All counters of a pool, at one moment. `directory`: those of the native directory.

    `tiers`: the counters of each tier beside the arena, by its name; `classes`: the slots of each lower one by size class, as
    `classes` in `directory`. `chunks`: those that the arena or a lower tier has, each counted once; `evicted_chunks`: evicted
    from the last of these tiers that had them. `held_by_model`, `held_by_user`: bytes of DRAM that cannot be evicted now, by
    the model of the chunks, and by the user whose connections protect them.
    """

    server: Mapping[str, int]
    index: Mapping[str, int]
    directory: Mapping[str, Any]
    capacity_bytes: int
    resident_bytes: int
    huge_bytes: int
    is_settling: bool
    models: Mapping[str, ModelUsage]
    failures: ClientFailures
    chunks: int
    evicted_chunks: int
    held_by_model: Mapping[str, int] = field(default_factory=dict)
    held_by_user: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, Mapping[str, int | float | str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[Mapping[str, int]]] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Retention requested for tokens `start` up to `end` (None: to the end of the prompt).

    `priority` is 0 (first to go) to 100; `duration_s` counts from the last reuse, None means for ever.
    Semantics after TensorRT-LLM's KvCacheRetentionConfig.
    """

    start: int
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """A chunk's place in the arena: `extents` extents of `extent_bytes`, one after the other. `generation`: the slot's.

    `slot`: of its words in the index, the region in the upper half of a u64 and the slot's number in the lower one.
    """

    key: bytes
    generation: int
    offset: int
    slot: int
    extent_bytes: int
    extents: int


@dataclass(frozen=True, slots=True)
class CorruptChunk:
    """A chunk in the arena whose bytes do not match their checksums; `bad`: in which extents."""

    chunk: ChunkExtent
    bad: tuple[int, ...]


class EventKind(IntEnum):
    """Kind of an event."""

    CREATED = 0
    STORED = 1
    REMOVED = 2
    UPDATED = 3


class Cause(IntEnum):
    """Cause for which a chunk came to a tier or left it: the native module's codes."""

    OWN_CLASS = 0
    OTHER_CLASS = 1
    INDEX_FULL = 2
    FLUSHED = 3
    DROPPED = 4
    DISCARDED = 5
    LANDING_FAILED = 6
    STORED = 7
    PROMOTED = 8
    OTHER = 255  # never sent: a client's value for an unknown number


class Event(NamedTuple):
    """Something that happened to chunks, as `Pool.events` answers it. `id` rises by one, and a missing one is a gap; `kind` is
    an EventKind.

    CREATED: a daemon began, with room for `capacities` chunks, by level. STORED: chunks `keys`, each the parent of the next,
    came to `tiers` behind `parent` (empty: at the root). REMOVED: no tier has `keys`. UPDATED: one chunk has come to a further
    tier, left one of several, or has another priority.

    `keys` (32 bytes each) and `tokens` (int32 ids, of all keys or of none) are packed; `tiers` are bits by level (1 << Level),
    `priority` is 0 to 100; `tiers_before` and `priority_before` are those before an UPDATED, and `cause` is why it happened. An
    UPDATED that gains a tier carries what a STORED does. `namespace` is a number of this life of the daemon; -1: none.
    `adapter` and `salt_tag` are known where the token ids are, and the same for all keys.
    """

    id: int
    kind: EventKind
    namespace: int = -1
    keys: bytes = b""
    parent: bytes = b""
    tokens: bytes = b""
    tiers: int = 0
    tiers_before: int = 0
    priority: int = DEFAULT_PRIORITY
    priority_before: int = DEFAULT_PRIORITY
    cause: Cause = Cause.STORED
    capacities: tuple[int, ...] = ()
    adapter: str = ""
    salt_tag: bytes = b""

    @property
    def chunks(self) -> tuple[bytes, ...]:
        """The keys one by one."""
        return tuple(self.column)

    @property
    def column(self) -> KeyColumn:
        """The keys as a column."""
        return KeyColumn(self.keys)

    @property
    def level(self) -> Level | None:
        """The fastest tier that has the chunks now."""
        return level_of(self.tiers)

    @property
    def level_before(self) -> Level | None:
        """The fastest tier that had them before."""
        return level_of(self.tiers_before)

    @property
    def gained(self) -> tuple[Level, ...]:
        """Tiers that have the chunks since this event."""
        return levels_in(self.tiers & ~self.tiers_before)

    @property
    def lost(self) -> tuple[Level, ...]:
        """Tiers that have lost the chunks with this event."""
        return levels_in(self.tiers_before & ~self.tiers)

    @property
    def is_of_node(self) -> bool:
        """Whether it is about tiers that the node can give chunks from, and changes more than level 0."""
        changed = self.tiers ^ self.tiers_before
        return bool((self.tiers | self.tiers_before) & NODE_TIERS) and (not changed or bool(changed & NODE_TIERS))


def levels_in(tiers: int) -> tuple[Level, ...]:
    """The tiers of a set of bits, the fastest first."""
    return tuple(level for level in Level if tiers >> level & 1)


def level_of(tiers: int) -> Level | None:
    """The fastest tier of a set of bits."""
    levels = levels_in(tiers)
    return levels[0] if levels else None


class StoredChunk(NamedTuple):
    """A chunk that `Pool.snapshot` found: its 32-byte `key`, and that of its `parent` (empty: at the root). `namespace`,
    `tiers`, `priority`, `tokens`, `adapter` and `salt_tag` mean the same as in an Event."""

    key: bytes
    parent: bytes
    namespace: int
    tiers: int
    priority: int
    tokens: bytes
    adapter: str = ""
    salt_tag: bytes = b""
