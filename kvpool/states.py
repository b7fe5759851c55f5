"""States of chunks, as words and wire codes that daemon and client share: tiers, priorities, and how saves and loads end.

A changed number is a change of the protocol.
"""

from dataclasses import dataclass
from enum import IntEnum

import kvpool_native

# The priority of a chunk without a retention request: the default of TensorRT-LLM's KvCacheRetentionConfig.
DEFAULT_PRIORITY: int = kvpool_native.DEFAULT_PRIORITY
PRIORITY_MAX = 100
# On the wire: leave the chunk's retention unchanged.
KEEP_PRIORITY = 255


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
class TokenRange:
    """Retention requested for tokens `start` up to `end` (None: to the end of the prompt).

    `priority` is 0 (first to go) to 100; `duration_s` counts from the last reuse, None means for ever.
    Semantics after TensorRT-LLM's KvCacheRetentionConfig.
    """

    start: int
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None


_LEVELS_IN = [tuple(level for level in Level if tiers >> level & 1) for tiers in range(1 << LEVELS)]


def levels_in(tiers: int) -> tuple[Level, ...]:
    """The tiers of a set of bits, the fastest first."""
    return _LEVELS_IN[tiers & (len(_LEVELS_IN) - 1)]


def level_of(tiers: int) -> Level | None:
    """The fastest tier of a set of bits."""
    levels = levels_in(tiers)
    return levels[0] if levels else None
