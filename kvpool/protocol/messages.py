"""The records that travel: one frozen dataclass for each kind of frame.

A record's fields are its wire fields in order, and each has one fixed type: `decode_as` refuses anything else.
Columns are packed little endian: keys 32 bytes each, offsets and generations u64, states and tiers u8, checksums u32.
Requests carry a sequence number that the answer repeats; `Usage` alone is never answered. Any thread.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from kvpool.errors import ProtocolError
from kvpool.protocol import frames
from kvpool.types import KEY_BYTES

MAGIC = b"KVPL"
PROTOCOL_VERSION = 1
KEYS_MAX = 30_000
RENEWALS_MAX = 4096
COMMIT_BYTES_MAX = 900_000
PLACES_MAX = 512
FATES_MAX = 256

ROLE_ENGINE = "engine"
ROLE_ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a connection. An admin sends an empty layout."""

    KIND: ClassVar[int] = 1
    magic: bytes
    version: int
    role: str
    model: str
    layout: list[Any]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The daemon's answer to Hello. An engine gets the arena's and the index's file descriptors with it."""

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


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal. After code `protocol` the daemon reads nothing more from the connection."""

    KIND: ClassVar[int] = 3
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Done:
    """A request was carried out and has nothing to tell."""

    KIND: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lease the longest present prefix of `keys`; rank-major when the layout stands for several ranks."""

    KIND: ClassVar[int] = 10
    keys: bytes


@dataclass(frozen=True, slots=True)
class AcquireLeaves:
    """Lease the `chunks` chunks that end in `leaves`, a key for each rank. Answered by Leased: all of them or nothing.

    A chunk key names its whole prefix, so 32 bytes stand for it; when it is not whole any more, Acquire finds the rest.
    """

    KIND: ClassVar[int] = 17
    leaves: bytes
    chunks: int


@dataclass(frozen=True, slots=True)
class Leased:
    """What was leased. `lease` 0: nothing. A scheduler's lease carries no offsets."""

    KIND: ClassVar[int] = 11
    lease: int
    chunks: int
    offsets: bytes
    generations: bytes
    tiers: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """End a lease. Answered by Done, also when it had ended before."""

    KIND: ClassVar[int] = 12
    lease: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Say that leases are in use. `leases` is a column of u64, RENEWALS_MAX at most. Answered by Done."""

    KIND: ClassVar[int] = 13
    leases: bytes


@dataclass(frozen=True, slots=True)
class IssueTicket:
    """Ask for a ticket on a lease."""

    KIND: ClassVar[int] = 14
    lease: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket; empty when the lease has ended."""

    KIND: ClassVar[int] = 15
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """Turn a ticket into a lease for the connection's rank. Answered by Leased."""

    KIND: ClassVar[int] = 16
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve slots for chunks `keys`, whose first one follows `parent` (empty: the first chunk of a prompt)."""

    KIND: ClassVar[int] = 20
    parent: bytes
    keys: bytes


@dataclass(frozen=True, slots=True)
class Reserved:
    """States (`SaveState`), offsets and generations, one for each key asked. `reservation` 0: nothing to write."""

    KIND: ClassVar[int] = 21
    reservation: int
    states: bytes
    offsets: bytes
    generations: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish the next reserved chunks of a reservation, in order.

    `checksums`: u32 [chunk][layer]. `tokens`: i32 [chunk][token], or empty.
    """

    KIND: ClassVar[int] = 22
    reservation: int
    checksums: bytes
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    """A `SaveState` for each chunk of the Commit: STORED, EXPIRED or NO_PARENT."""

    KIND: ClassVar[int] = 23
    states: bytes


@dataclass(frozen=True, slots=True)
class End:
    """End a reservation: what was not committed is given up, and its writer writes no more. Answered by Done."""

    KIND: ClassVar[int] = 24
    reservation: int


@dataclass(frozen=True, slots=True)
class ReportCorrupt:
    """A leased chunk's checksum did not match. The daemon looks itself and drops a bad chunk before Done."""

    KIND: ClassVar[int] = 25
    lease: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a client did since its last report; see `usage` for the column. Never answered: it may wait for nobody."""

    KIND: ClassVar[int] = 26
    counts: bytes


@dataclass(frozen=True, slots=True)
class AskInfo:
    """What the daemon is and uses. Answered by Report."""

    KIND: ClassVar[int] = 30


@dataclass(frozen=True, slots=True)
class AskStats:
    """Counters by section. Answered by Report."""

    KIND: ClassVar[int] = 31


@dataclass(frozen=True, slots=True)
class Flush:
    """Drop chunks: of `model`, in `tier` (both: empty for any), unused for `older_than_s` seconds (negative: any).

    Answered by Report.
    """

    KIND: ClassVar[int] = 32
    model: str
    older_than_s: float
    tier: str


@dataclass(frozen=True, slots=True)
class WriteDown:
    """Have the SSD tier keep what DRAM alone has, and checkpoint, within `timeout_s`. Answered by Report."""

    KIND: ClassVar[int] = 36
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """Recount every invariant; says too where `VerifyBytes` may look. Answered by Report."""

    KIND: ClassVar[int] = 33


@dataclass(frozen=True, slots=True)
class VerifyBytes:
    """Read the chunks at `places` (see `places`; PLACES_MAX at most) in that order, a slice of them and `chunks` at most.

    Answered by Report, which says at how many of the places it has looked.
    """

    KIND: ClassVar[int] = 37
    places: bytes
    chunks: int


@dataclass(frozen=True, slots=True)
class AskHitCurve:
    """What LRU of these sizes would hit of what is asked for; see `hit_curve` for the column. Answered by Report."""

    KIND: ClassVar[int] = 47
    capacities: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """An answer for people: a map of plain values."""

    KIND: ClassVar[int] = 34
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AskEvents:
    """The events behind id `last` (-1: from the first) of an incarnation (empty: this one, whichever it is).

    An operator may wait `wait_s` for the next one; an engine is answered at once. Answered by Events.
    """

    KIND: ClassVar[int] = 40
    incarnation: bytes
    last: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Events:
    """Some events (see `event_columns`), up to id `last`, and the namespaces that they name.

    After a gap there are none, and `last` is the newest id: what is stored a snapshot tells. `oldest`: the first id kept.
    """

    KIND: ClassVar[int] = 41
    incarnation: bytes
    last: int
    oldest: int
    is_gap: bool
    events: bytes
    namespaces: bytes


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Some chunks that the pool has; `cursor` 0 begins. Answered by SnapshotPage."""

    KIND: ClassVar[int] = 42
    cursor: int


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """Some chunks as they are at event `as_of`; `cursor` asks for more, -1 when there are none.

    Whoever applies the events up to `as_of` first and then the chunks, page after page, has what the pool has.
    """

    KIND: ClassVar[int] = 43
    incarnation: bytes
    as_of: int
    cursor: int
    chunks: bytes
    namespaces: bytes


@dataclass(frozen=True, slots=True)
class AskFates:
    """What became of chunks: `keys`, FATES_MAX at most. Answered by Report."""

    KIND: ClassVar[int] = 44
    keys: bytes


@dataclass(frozen=True, slots=True)
class AskNamespaces:
    """The namespaces from number `first` on, as many as fit. Answered by NamespaceList."""

    KIND: ClassVar[int] = 45
    first: int


@dataclass(frozen=True, slots=True)
class NamespaceList:
    """Namespaces (see `event_columns`); none when there are no more."""

    KIND: ClassVar[int] = 46
    namespaces: bytes


Record = TypeVar("Record")
_TYPES: dict[type[Any], tuple[type[Any], ...]] = {}


def encode(record: object, sequence: int) -> bytes:
    """The frame that carries `record`."""
    values: list[object] = [getattr(record, name) for name in record.__slots__]  # type: ignore[attr-defined]  # slots dataclass
    return frames.encode(record.KIND, sequence, values)  # type: ignore[attr-defined]  # every record has KIND


def decode_as(record: type[Record], values: list[object]) -> Record:
    """The record in a frame's fields. Raises ProtocolError unless number and types are exactly its own."""
    types = _TYPES.get(record)
    if types is None:
        types = _TYPES[record] = _field_types(record)
    if len(values) != len(types):
        raise ProtocolError(f"{record.__name__} has {len(values)} fields, expected {len(types)}")
    for value, expected in zip(values, types, strict=True):
        if type(value) is not expected:
            raise ProtocolError(
                f"{record.__name__} has a field of {type(value).__name__}, expected {expected.__name__}"
            )
    return record(*values)


def check_keys(keys: bytes, *, ranks: int) -> None:
    """Raises ProtocolError unless `keys` is a column of whole keys for each of `ranks`, within KEYS_MAX."""
    count, rest = divmod(len(keys), KEY_BYTES * ranks)
    if rest or not 0 < count * ranks <= KEYS_MAX:
        expected = f"a multiple of {KEY_BYTES * ranks} for at most {KEYS_MAX} keys"
        raise ProtocolError(f"keys column has {len(keys)} bytes, expected {expected}")


def _field_types(record: type[Any]) -> tuple[type[Any], ...]:
    hints = get_type_hints(record)
    return tuple(getattr(hints[field.name], "__origin__", hints[field.name]) for field in fields(record))
