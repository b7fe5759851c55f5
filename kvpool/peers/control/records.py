"""Records of the control plane between nodes: one frozen dataclass for each kind. docs/peer-protocol.md has the exchange.

A record's fields are its wire fields in order, each of one fixed type; the codec is the local protocol's. Columns are packed
little endian: keys 32 bytes each, checksums u32. Kinds and version are this wire's own. Pure; any thread.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvpool.ids import CHECKSUM_BYTES
from kvpool.keys import DOMAIN_TAG_BYTES as DOMAIN_TAG_BYTES
from kvpool.layout import Layout

MAGIC = b"KVPC"
# The versions that this node speaks. Which one a connection uses is the owner's choice, the newest that both speak. The format
# of streams goes with it (native/net/stream_format.h): 1 had a mark for each extent. 2 had no chunks that are alone.
OLDEST_VERSION = NEWEST_VERSION = 3
INCARNATION_BYTES = 16
NAME_BYTES_MAX = 256
ADDRESS_BYTES_MAX = 128
TEXT_BYTES_MAX = 512
PULL_KEYS_MAX = 16_384
# Of a Pull of a run of chunks without a parent: each is a hold of its own.
RUN_KEYS_MAX = 128
# Of a Pull of chunks that are alone, and what an Offer says of each.
SET_KEYS_MAX = 4096
ABSENT, HELD, LATER = range(3)
DEADLINE_MS_MAX = 600_000
CONNECTIONS_MAX = 16  # of one pull: the stream's own bound
# Of an Offer: an owner offers fewer chunks where the checksums of all would not fit a frame.
CHECKS_BYTES_MAX = 900_000
# Of a Stage: rows of a part, and parts that have ended.
STAGE_ROWS_MAX = 16_384
STAGE_PARTS_MAX = 64
STAGE_WAIT_MS_MAX = 10_000
PROTOCOL_BYTES_MAX = 16
LIFE_BYTES = 8
# Of a StageInto: NIXL's own description of an agent (335 bytes over TCP, more for each device), and what names its part there.
AGENT_BYTES_MAX = 4096
MARK_BYTES = 8
# Of a StageInto: from the end of its wait until its owner begins to write, and from there until nothing is written any more.
INTO_BEGIN_S, INTO_WRITE_S = 10.0, 60.0
# Of AskNear and Near: the tag of a host, the longest path of a unix socket, a daemon's epoch.
HOST_BYTES = 16
SOCKET_BYTES_MAX = 107
PLACE_BYTES = 8
# Of Changes: more than the journal joins to one event. Of Keys: a page.
FOLLOW_KEYS_MAX = 4096
WAIT_MS_MAX = 30_000
# The cursor of the last page.
NO_MORE_KEYS = -1


@dataclass(frozen=True, slots=True)
class Hello:
    """The first record of a connection in each direction: who speaks. The one asked answers with its own.

    `version`: from the puller the newest that it speaks, `oldest` to it; in the answer both are the chosen one. `incarnation`:
    names one life of the node's daemon. `stream`: the address for bulk data, empty for none. `domain`: the trust domain's tag.
    """

    KIND: ClassVar[int] = 1
    magic: bytes
    version: int
    oldest: int
    node: str
    incarnation: bytes
    stream: str
    domain: bytes


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask for the chunks of a chain from number `first` on; `keys`: of the whole chain, of the namespace (model, layout).
    Chunks of a window or a state have no parent: there `keys` are a run of them, each once, and `first` is 0. So it is with
    keys that `are_alone`, as those of a set: of any layout, and each is answered for itself.

    `pull`: the puller's number for it, which rises on a connection. `layout`: in wire form, of one rank. `scope`: as in the
    local protocol's Commit, empty where the puller does not know it. `deadline_ms`: from the arrival on. Answered by Offer or
    Refused.
    """

    KIND: ClassVar[int] = 10
    pull: int
    model: str
    layout: list[Any]
    scope: bytes
    first: int
    keys: bytes
    deadline_ms: int
    are_alone: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """So many chunks from the first one asked for are held for the puller until its Release or deadline; 0: nothing is held.
    Where the keys are alone, `present` has a byte for each of the first ones, as far as the owner has looked: HELD, and the
    chunk is among those held, in their order; ABSENT, and it is not here; LATER, and it may be, but there is no room for it
    now. Else it is empty; so it may be where nothing is held.

    `ticket`: to be presented once on each of `connections` stream connections to `address`, `tls://…` where they are encrypted.
    `checks`: CRC-32C [chunk][extent].
    """

    KIND: ClassVar[int] = 11
    pull: int
    chunks: int
    ticket: bytes
    connections: int
    address: str
    checks: bytes
    present: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """The puller needs the chunks of a Pull no longer, or no longer waits for its answer. Never answered."""

    KIND: ClassVar[int] = 12
    pull: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Have rows of a Pull copied to where TransferEngine can read them. A row is one extent of one chunk; those of an offer are
    numbered extent by extent: extent × chunks + chunk.

    `part`: the puller's number for what comes, which rises. `ended`: parts that are needed no longer, u32. `rows` may be 0,
    which asks whether anything would be staged. `protocol`: of the puller's TransferEngine. `wait_ms`: for the first row.
    Answered by Staged or Refused.
    """

    KIND: ClassVar[int] = 13
    pull: int
    part: int
    ended: bytes
    first: int
    rows: int
    protocol: str
    wait_ms: int


@dataclass(frozen=True, slots=True)
class StageInto:
    """Have rows of a Pull written into the puller's own buffer, by NIXL. The rest is as in a Stage; its Staged comes once they
    are there. Without rows a page is written, so that the connection is made.

    `agent`: NIXL's description of the puller's agent, as it gave it. `address`: in its memory. `mark`: what that agent is
    notified of behind the last byte.
    """

    KIND: ClassVar[int] = 18
    pull: int
    part: int
    ended: bytes
    first: int
    rows: int
    protocol: str
    wait_ms: int
    agent: bytes
    address: int
    mark: bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """The first rows of those asked for, one behind the other, until their Pull ends or a Stage says that the part has ended.
    There may be fewer than asked for, and none where nothing was there in time.

    `server`: the owner's TransferEngine, HOST:PORT, in its life `life`; the rows begin at `address` of its memory, after a
    StageInto of the puller's. `checks`: CRC-32C of each row. `gone`: a byte for each row, 1 where the chunk has gone and the
    row is none.
    """

    KIND: ClassVar[int] = 14
    pull: int
    part: int
    server: str
    life: bytes
    address: int
    checks: bytes
    gone: bytes


@dataclass(frozen=True, slots=True)
class AskNear:
    """Ask where the chunks of a Pull are in the memory of its owner, to copy them. `host`: the tag of the puller's host; an
    owner on another host refuses with `transport`. Answered by Near or Refused."""

    KIND: ClassVar[int] = 15
    pull: int
    host: bytes


@dataclass(frozen=True, slots=True)
class Near:
    """Where each chunk of an Offer is, until its Pull ends: arena offsets, slots and generations, u64, in the memory that the
    owner's unix socket `socket` hands out, whose index has this `epoch`."""

    KIND: ClassVar[int] = 16
    pull: int
    socket: str
    epoch: bytes
    offsets: bytes
    slots: bytes
    generations: bytes


@dataclass(frozen=True, slots=True)
class Wrong:
    """A chunk of a namespace (see Pull) came with bytes that are not those of its checksums. `parent`: the key before it in a
    chain; empty for the first one, and for one without a parent. Never answered."""

    KIND: ClassVar[int] = 17
    model: str
    layout: list[Any]
    parent: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was refused; `code` is a `RefusalCode`. It has changed nothing."""

    KIND: ClassVar[int] = 3
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask whether the node's event loop runs. Answered by Pong."""

    KIND: ClassVar[int] = 20


@dataclass(frozen=True, slots=True)
class Pong:
    """The node's loop runs, in this life."""

    KIND: ClassVar[int] = 21
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class AskChanges:
    """Ask which chunks have come and gone since event `last` of this life of the node, and since note `saves` of its saves (0:
    none of them is known). Answered by Changes at once where there are any, else when some come, or after `wait_ms`."""

    KIND: ClassVar[int] = 30
    last: int
    wait_ms: int
    saves: int


@dataclass(frozen=True, slots=True)
class Changes:
    """The node has `stored` and has `removed` no more, as of event `last`; no key is in both. In any of its tiers: a chunk that
    only moves between them is stored. Chunks of saves under way are stored too, without an event, and removed where the save is
    given up.

    `newest`: the id of its latest event. `is_gap`: events or notes since then are lost; there are no keys, and all have to be
    asked for. `saves`: the number of the last note about saves that is in it.
    """

    KIND: ClassVar[int] = 31
    last: int
    newest: int
    is_gap: bool
    stored: bytes
    removed: bytes
    saves: int


@dataclass(frozen=True, slots=True)
class AskKeys:
    """Ask for a page of the keys that the node has; `cursor` 0: the first one. Answered by Keys."""

    KIND: ClassVar[int] = 32
    cursor: int


@dataclass(frozen=True, slots=True)
class Keys:
    """A page: chunks that the node has at event `as_of`. `cursor`: of the next page, NO_MORE_KEYS for none; the same again, and
    no keys, where the node does not know at this moment."""

    KIND: ClassVar[int] = 33
    keys: bytes
    as_of: int
    cursor: int


AskFollow = AskChanges | AskKeys
FollowAnswer = Changes | Keys
# What waits for an answer on a link.
AnyStage = Stage | StageInto
Asked = Pull | AnyStage | AskNear | Ping | AskFollow
Request = Hello | Release | Wrong | Asked
Answer = Hello | Offer | Staged | Near | Refused | Pong | FollowAnswer


class RefusalCode:
    """Codes of Refused."""

    PROTOCOL = "protocol"  # a frame that is none, or a record with impossible values
    KIND = "kind"  # a record that is not known, or not a request
    VERSION = "version"  # no version that both speak
    DOMAIN = "domain"  # another trust domain
    HELLO = "hello"  # a request before Hello, or from a connection that was forgotten
    SELF = "self"  # the node itself
    NAME = "name"  # another node of this name is connected
    REPEATED = "repeated"  # a sequence number or a pull that was used before
    BUSY = "busy"  # too many unanswered requests of this peer, or too many connections
    RATE = "rate"  # too many frames of this peer in a second
    STOPPING = "stopping"  # the node is about to end
    TRANSPORT = "transport"  # no TransferEngine here, or one of another protocol; or no memory shared with the node
    UNWRITTEN = "unwritten"  # a StageInto whose write has failed: some of it may be there
    FAILED = "failed"  # the node could not serve it, for a reason that it has logged


REFUSAL_CODES = tuple(sorted(value for name, value in vars(RefusalCode).items() if name.isupper()))


def offered_chunks_max(extents: int) -> int:
    """The most chunks of so many extents that an Offer has room for the checksums of."""
    return CHECKS_BYTES_MAX // (CHECKSUM_BYTES * extents)


def keys_max(layout: Layout, *, are_alone: bool) -> int:
    """The most keys of a Pull."""
    if are_alone:
        return SET_KEYS_MAX
    return PULL_KEYS_MAX if layout.is_chained else RUN_KEYS_MAX


def pulled_chunks_max(layout: Layout) -> int:
    """The most chunks that one Pull brings."""
    most = offered_chunks_max(layout.extents)
    return most if layout.is_chained else min(RUN_KEYS_MAX, most)
