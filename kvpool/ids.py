"""Ids and sizes that daemon and client share, and where a chunk is in the arena.

Nothing here has behaviour. Values that travel are wire codes: a changed number is a change of the protocol.
"""

from dataclasses import dataclass
from typing import NewType

from kvpool.key_column import KEY_BYTES as KEY_BYTES

EPOCH_BYTES = 16
# Of what a welcome has for its client alone: who has it was that client.
PROOF_BYTES = 16
TOKEN_BYTES = 4
DURATION_BYTES = 4
CHECKSUM_BYTES = 4
TICKET_BYTES = 32
PAGE_BYTES = 4096
# The largest number that the daemon gives: numbers that come back may be any.
NUMBER_MAX = (1 << 64) - 1
# Of a model's name with its revision, in UTF-8: any text, which logs and commands show with escapes.
MODEL_BYTES_MAX = 512
# The socket of a node's service, and the default of engines.
SERVICE_SOCKET = "/run/kvpool/kvpool.sock"
# The model of the daemon's own probe: neither events nor the counts of leases and pins have it.
PROBE_MODEL = "kvpool-probe"

ConnectionId = NewType("ConnectionId", int)
ReservationId = NewType("ReservationId", int)  # a holder of slots: of the directory, or a part of a joint save
SaveId = NewType("SaveId", int)  # what a connection has reserved for one save
HoldId = NewType("HoldId", int)
NamespaceId = NewType("NamespaceId", int)
SizeClassId = NewType("SizeClassId", int)


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


# Python packages of NIXL, by what they are built for: either moves memory of the host alike.
NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
