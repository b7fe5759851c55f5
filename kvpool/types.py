"""Shared records, ids and enums: the words that daemon and client have in common.

Nothing here has behaviour beyond reading itself. Values that travel are wire codes:
a changed number is a change of the protocol.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

KEY_BYTES = 32
EPOCH_BYTES = 16

ConnectionId = NewType("ConnectionId", int)
LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)
HoldId = NewType("HoldId", int)
NamespaceId = NewType("NamespaceId", int)
SizeClassId = NewType("SizeClassId", int)


class Level(IntEnum):
    """A tier's number: its level in events and in `Hit.tiers`."""

    HBM = 0
    DRAM = 1
    SSD = 2
    PEER = 3


class SaveState(IntEnum):
    """What became of one chunk of a save.

    RESERVED ──commit──► STORED
        └──deadline────► EXPIRED
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

    @property
    def reason(self) -> str:
        """The word that `SaveResult.reasons` counts a declined chunk under."""
        return self.name.lower().replace("_", "-")


class LoadReason(IntEnum):
    """Why a load ended; `reason` in `LoadResult` is the name in lower case. The first four are the native module's codes."""

    COMPLETE = 0
    GONE = 1
    CHECKSUM = 2
    CANCELLED = 3
    TIMEOUT = 4
    IO = 5
    DISCONNECTED = 6


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Retention asked for tokens `start` up to `end` (None: to the end of the prompt).

    `priority` is 0 (first to go) to 100; `duration_s` counts from the last reuse, None means for ever.
    Semantics after TensorRT-LLM's KvCacheRetentionConfig.
    """

    start: int
    end: int | None = None
    priority: int = 35
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """Where a chunk lies in the arena: `layers` extents of `layer_bytes` one behind the other."""

    key: bytes
    offset: int
    layer_bytes: int
    layers: int
