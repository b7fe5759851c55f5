"""Message records: one dataclass for each kind of frame.

A record's fields are its wire fields in order, and each has one fixed type; `codec` reads and writes them. Nobody changes a
record once it is made. Python does not freeze it: that costs 0.2 µs for each field of each request and answer (measured).
Columns are packed little endian: keys 32 bytes each, offsets and generations u64, states, tiers and priorities u8, checksums
and durations (in milliseconds, 0: no end) u32.
Requests carry a sequence number that the answer repeats; those of `one_way`, and `Usage`, are never answered. Any thread.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvpool.protocol.records.codec import decode_as as decode_as
from kvpool.protocol.records.codec import encode as encode

MAGIC = b"KVPL"
PROTOCOL_VERSION = 1  # the newest version; see `versions`
KEYS_MAX = 28_000  # with the retention of each they still fit a frame
LEAF_CHUNKS_MAX = 4096  # chunks, of all groups and ranks, that are leased at once by their leaves
RETAIN_KEYS_MAX = 4096  # chunks in one Retain, RetainKeys or Demote: each takes time on the control thread
RENEWALS_MAX = 4096
CLAIMS_MAX = 1024
HOLDS_MAX = 4096  # of one lease: beyond, granting it would take longer than a turn
SHARE_KEYS_MAX = 4096  # chunks in one Reserve of parts
SET_KEYS_MAX = HOLDS_MAX  # chunks of a set, of all ranks, in one Acquire
NO_LEVEL = 0xFF
COMMIT_BYTES_MAX = 900_000
RECORDS_MAX = 512
CONNECTION_NAME_BYTES_MAX = 128
ENDED_MAX = 256  # connections of a process that a Hello names

ROLE_ENGINE = "engine"
ROLE_ADMIN = "admin"
ROLE_PEER = "peer"  # another daemon of this host, which maps the memory and asks nothing


@dataclass(slots=True, unsafe_hash=True)
class Hello:
    """The first frame of a connection: it speaks the versions `oldest` to `version`. An admin sends an empty layout. `name`:
    UTF-8, CONNECTION_NAME_BYTES_MAX bytes at most, for people alone. `ended`: connections of this process that have ended, and
    to slots of which it writes nothing any more: for each `connection:u32` and `proof` of its welcome, ENDED_MAX at most."""

    KIND: ClassVar[int] = 1
    magic: bytes
    version: int
    role: str
    model: str
    layout: list[Any]
    oldest: int = 1
    name: bytes = b""
    ended: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class Welcome:
    """The daemon's answer to Hello; an engine gets arena and index by descriptors. `staging_bytes` 0: it writes in place.
    `protocol`: the version that both speak from now on. `remote_bytes`: of the table of other nodes' chunks, whose descriptor
    is the third one; 0: there is none. `has_store`: chunks may be sought in a store that nodes share. `connection`: the number
    of this one, which none has before or after it while the memory is kept. `life`: of the daemons that have the arena one
    after the other, whose the index is; the last descriptor is the page that says whose the arena is. 0: there is none.
    `proof`: what this client alone gets, by which it proves later that the connection was its own."""

    KIND: ClassVar[int] = 2
    epoch: bytes
    version: str
    domain: bytes
    arena_bytes: int
    index_bytes: int
    lease_ttl_s: float
    reservation_ttl_s: float
    verify: str
    keeps_tokens: bool
    staging_bytes: int
    protocol: int = 1
    remote_bytes: int = 0
    has_store: bool = False
    connection: int = 0
    life: int = 0
    proof: bytes = b""

    @property
    def descriptors(self) -> int:
        """How many an engine gets with it."""
        return 2 + (self.remote_bytes > 0) + (self.life > 0)


@dataclass(slots=True, unsafe_hash=True)
class Failure:
    """A refusal. After code `protocol` the daemon reads nothing more from the connection."""

    KIND: ClassVar[int] = 3
    code: str
    message: str


@dataclass(slots=True, unsafe_hash=True)
class Done:
    """A request was carried out, without a result."""

    KIND: ClassVar[int] = 4


@dataclass(slots=True, unsafe_hash=True)
class Acquire:
    """Lease what a hit of `chunks` chunks needs: the longest present prefix, or of a layout with groups all of it or nothing.
    Answered by Leased, whose columns have a row for each key of a rank.

    `keys`: of one group after the other, rank-major, those of its last chunks before the hit's end: all of a full group, as
    many as its window covers of a window group, the last one of a state group. The last key of each chain on each rank may
    stand for it where every chunk is in DRAM, LEAF_CHUNKS_MAX at most: nothing where that is not so. `chunks` 0: as many as
    there are keys, of a layout without groups. `owner`: the name of a node that is asked for what is neither here nor known
    elsewhere; empty: none.

    `set_of`: 0, or 1 + the number of a group of which `keys` are chunks, each alone, without a parent, SET_KEYS_MAX on all
    ranks at most: what is there of them is leased. `chunks` is 0 then, and no owner is named.
    """

    KIND: ClassVar[int] = 10
    keys: bytes
    chunks: int = 0
    owner: str = ""
    set_of: int = 0


@dataclass(slots=True, unsafe_hash=True)
class Leased:
    """The leased chunks. `lease` 0: none. A scheduler's lease carries no offsets and no slots. Of a set there is a row for each
    key of a rank; what is not leased, or was named before, has level NO_LEVEL in it and zeros, and `chunks` counts the others.

    `offsets`: of the bytes in their region; `slots`: of the words of each slot in the index, the region in the upper half of a
    u64 and the slot's number in the lower one.
    """

    KIND: ClassVar[int] = 11
    lease: int
    chunks: int
    offsets: bytes
    generations: bytes
    tiers: bytes
    slots: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class Renew:
    """Renew leases that are in use. `leases` is a column of u64, RENEWALS_MAX at most. Answered by Done."""

    KIND: ClassVar[int] = 13
    leases: bytes


@dataclass(slots=True, unsafe_hash=True)
class IssueTicket:
    """Ask for a ticket on a lease. `claims`: how often it may be claimed, CLAIMS_MAX at most; 0: once on each rank."""

    KIND: ClassVar[int] = 14
    lease: int
    claims: int = 0


@dataclass(slots=True, unsafe_hash=True)
class Ticket:
    """A ticket; empty when the lease has ended."""

    KIND: ClassVar[int] = 15
    ticket: bytes


@dataclass(slots=True, unsafe_hash=True)
class Claim:
    """Turn a ticket into a lease for the connection's rank; a scheduler ends it. Answered by Leased."""

    KIND: ClassVar[int] = 16
    ticket: bytes


@dataclass(slots=True, unsafe_hash=True)
class Reserve:
    """Reserve slots for the chunks of one save. Answered by Reserved.

    `runs`: of chunks of one group each, and of what part of them is written (see `reserve_runs`), in the order in which they
    are committed; `keys`: of one run after the other. `priorities` and `durations`: retention of each chunk, new or present
    (KEEP_PRIORITY: unchanged); both empty: all unchanged.
    """

    KIND: ClassVar[int] = 20
    runs: bytes
    keys: bytes
    priorities: bytes = b""
    durations: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class Reserved:
    """States (`SaveState`), offsets and generations, one for each key asked. `reservation` 0: nothing to write.

    `retained`: a `RetainState` for each key where the request has retention, else empty.
    """

    KIND: ClassVar[int] = 21
    reservation: int
    states: bytes
    offsets: bytes
    generations: bytes
    retained: bytes


@dataclass(slots=True, unsafe_hash=True)
class Commit:
    """Publish the next reserved chunks of a reservation, in the order of its runs.

    `checksums`: u32 [chunk][extent that is written], compared with the daemon's own where it has copied from staging. `tokens`:
    i32 [chunk][token] of those that follow each other, or empty. `scope`: of all of them, see `kvpool.keys`.
    """

    KIND: ClassVar[int] = 22
    reservation: int
    checksums: bytes
    tokens: bytes
    scope: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class Committed:
    """A `SaveState` for each chunk of the Commit: STORED, PART, EXPIRED, NO_PARENT or CHECKSUM. None where the reservation has
    ended."""

    KIND: ClassVar[int] = 23
    states: bytes


@dataclass(slots=True, unsafe_hash=True)
class ReportCorrupt:
    """A leased chunk's checksum did not match. The daemon checks the chunk itself and drops a bad one before Done."""

    KIND: ClassVar[int] = 25
    lease: int
    chunk: int


@dataclass(slots=True, unsafe_hash=True)
class Usage:
    """Usage of a client since its last report; see `protocol/usage.py` for the column. Never answered."""

    KIND: ClassVar[int] = 26
    counts: bytes


@dataclass(slots=True, unsafe_hash=True)
class Retain:
    """Set the retention of stored chunks, RETAIN_KEYS_MAX keys at most, rank-major as in Acquire. Answered by Retained."""

    KIND: ClassVar[int] = 50
    keys: bytes
    priorities: bytes
    durations: bytes


@dataclass(slots=True, unsafe_hash=True)
class Retained:
    """A `RetainState` for each key of one rank: the worst of the ranks'."""

    KIND: ClassVar[int] = 51
    states: bytes


@dataclass(slots=True, unsafe_hash=True)
class Announce:
    """Announce a hit of `chunks` chunks that will be requested soon; named as in Acquire, by all keys. Answered by Announced,
    before anything is read."""

    KIND: ClassVar[int] = 52
    keys: bytes
    chunks: int = 0


@dataclass(slots=True, unsafe_hash=True)
class Announced:
    """Numbers of leading chunks that are protected or being promoted, and of further ones that were found and clipped."""

    KIND: ClassVar[int] = 53
    chunks: int
    clipped: int


@dataclass(slots=True, unsafe_hash=True)
class Demote:
    """Demote hint: write chunks to the lower tier that will not be requested soon, and evict those from `first` on first from
    DRAM.

    `keys`: whole prefixes, rank-major as in Acquire, of which RETAIN_KEYS_MAX from `first` on at most. Answered by Retained.
    """

    KIND: ClassVar[int] = 54
    keys: bytes
    first: int


@dataclass(slots=True, unsafe_hash=True)
class AskInfo:
    """The daemon's identity and resources. Answered by Report."""

    KIND: ClassVar[int] = 30


@dataclass(slots=True, unsafe_hash=True)
class AskStats:
    """Counters by section. Answered by Report."""

    KIND: ClassVar[int] = 31


@dataclass(slots=True, unsafe_hash=True)
class Flush:
    """Drop chunks: of `model`, in `tier` (both: empty for any), unused for `older_than_s` seconds (negative: any).

    Answered by Report.
    """

    KIND: ClassVar[int] = 32
    model: str
    older_than_s: float
    tier: str


@dataclass(slots=True, unsafe_hash=True)
class DemoteAll:
    """Write every chunk that only DRAM has to the SSD tier, and checkpoint, within `timeout_s`. Answered by Report.

    `is_forced`: beyond the write budget too.
    """

    KIND: ClassVar[int] = 36
    timeout_s: float
    is_forced: bool = True


@dataclass(slots=True, unsafe_hash=True)
class Check:
    """Recount every invariant; the answer also has the ranges for `VerifyBytes`. Answered by Report."""

    KIND: ClassVar[int] = 33


@dataclass(slots=True, unsafe_hash=True)
class VerifyBytes:
    """Read the chunks at `places` (`verify_walk.py`; RECORDS_MAX at most) in that order, a slice of them and `chunks` at most.

    Answered by Report, which has how many of the places were examined.
    """

    KIND: ClassVar[int] = 37
    places: bytes
    chunks: int


@dataclass(slots=True, unsafe_hash=True)
class AskHitCurve:
    """Hit rates of LRU of these sizes for the daemon's requests; see `protocol/hit_curve.py` for the column. Answered by
    Report."""

    KIND: ClassVar[int] = 47
    capacities: bytes


@dataclass(slots=True, unsafe_hash=True)
class RetainKeys:
    """As Retain, by an operator: chunks of any namespace, one priority and duration (in seconds, 0: no end) for all.

    Answered by Retained.
    """

    KIND: ClassVar[int] = 56
    keys: bytes
    priority: int
    duration_s: float


@dataclass(slots=True, unsafe_hash=True)
class Report:
    """An answer for people: a map of plain values."""

    KIND: ClassVar[int] = 34
    values: dict[str, Any]
