"""Joint chunks: chunks of which several connections write a part each, and which of their extents are written, or stored.

    extent   free ──reserve──► writing ──commit──► stored        a chunk is complete when all its extents are stored
              ▲                   │
              └─────abort─────────┘

    chain    open ──every chunk complete, from the first one on──► published
              └──nobody has written for its time──► expired ──nobody may write any more──► ended

A chain is the run of chunks that one reservation of the directory has: its slots are taken once, whoever fills them. Records
without I/O or clock; `pool.writers.joint_saves` decides. Control thread only.

Invariant: no extent of a chunk is both `writing` and `stored`; sets of extents are bits of an integer, by number.
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.ids import CHECKSUM_BYTES, ConnectionId, NamespaceId, ReservationId
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.states import SaveState

_WORD = 8


@dataclass(slots=True, eq=False)
class JointChunk:
    """A chunk that is not published. `place`: in its chain; `owner`: whose part was its first. `checksums`: u32, of the extents
    that are stored; `tokens`: its token ids and scope, of the first part that has given them. `is_waiting`: it is committed,
    and found when the chunk before its chain is."""

    key: bytes
    chain: "JointChain"
    place: int
    owner: ConnectionId
    offset: int
    generation: int
    writing: int = 0
    stored: int = 0
    checksums: "array[int] | None" = None
    tokens: bytes = b""
    is_waiting: bool = False

    def store(self, part: "Part", checksums: "memoryview[int]", tokens: bytes) -> None:
        """Count a part's extents as stored, with a checksum for each."""
        assert not self.stored & part.mask
        if self.checksums is None:
            self.checksums = array("I", bytes(CHECKSUM_BYTES * self.chain.extents))
        own = memoryview(self.checksums)
        for group, place in enumerate(part.places):
            own[place] = checksums[group :: len(part.places)]
        self.stored |= part.mask
        self.tokens = self.tokens or tokens

    def reserve_part(self, part: "Part") -> SaveState:
        """Reserve a part's extents: all of them or none."""
        if self.stored & part.mask == part.mask:
            return SaveState.PART
        if (self.stored | self.writing) & part.mask:
            return SaveState.PENDING
        self.writing |= part.mask
        self.chain.open += 1
        part.chunks.append(self)
        return SaveState.RESERVED

    def close(self, part: "Part") -> None:
        """A part no longer writes its extents."""
        assert self.writing & part.mask == part.mask
        self.writing &= ~part.mask
        self.chain.open -= 1

    @property
    def is_complete(self) -> bool:
        """Whether every extent is stored."""
        return self.stored == (1 << self.chain.extents) - 1


@dataclass(slots=True, eq=False)
class JointChain:
    """A run of chunks behind `parent` under one reservation of the directory. `published`: how many leading ones are; `open`:
    how often a part of one of its chunks is being written; `active_ns`: when a part was last reserved or committed; `began_ns`:
    when it began, or a chunk of it was last published."""

    reservation: ReservationId
    namespace: NamespaceId
    parent: bytes
    extents: int
    slot_bytes: int
    began_ns: int
    active_ns: int
    chunks: list[JointChunk] = field(default_factory=list)
    published: int = 0
    open: int = 0
    is_expired: bool = False

    @property
    def incomplete(self) -> int:
        """Chunks that are not published."""
        return len(self.chunks) - self.published

    @property
    def has_stored(self) -> bool:
        """Whether a part of a chunk is stored that is not published."""
        return any(chunk.stored for chunk in self.chunks[self.published :])

    def key_before(self, place: int) -> bytes:
        """The key that the chunk at a place follows."""
        return self.chunks[place - 1].key if place else self.parent


@dataclass(slots=True, eq=False)
class Part:
    """What one save of a share writes: the extents `numbers` of each of `chunks`, of which the first `committed` are stored.
    `places`: those of each of its head groups among a chunk's. `is_taken`: its task has made a reservation of it, or has ended
    it."""

    id: ReservationId
    owner: ConnectionId
    numbers: tuple[int, ...]
    places: tuple[slice, ...]
    mask: int
    chunks: list[JointChunk] = field(default_factory=list)
    committed: int = 0
    is_taken: bool = False

    @classmethod
    def of(cls, number: ReservationId, owner: ConnectionId, share: Share, layout: Layout) -> "Part":
        """The part that has the extents of a share."""
        run = (1 << share.groups) - 1
        mask = 0
        for layer in range(share.first_layer, share.first_layer + share.layers):
            mask |= run << (layer * layout.head_groups + share.first_group)
        begin, end = (layer * layout.head_groups for layer in (share.first_layer, share.first_layer + share.layers))
        groups = range(share.first_group, share.first_group + share.groups)
        places = tuple(slice(begin + group, end, layout.head_groups) for group in groups)
        return cls(number, owner, share.extents(layout), places, mask)

    def next(self, count: int | None = None) -> list[JointChunk]:
        """Its next chunks that it may still write; None: all of them."""
        return self.chunks[self.committed : None if count is None else self.committed + count]


class Rows(Protocol):
    """States, offsets and generations of leading keys of a request: u8 and columns of u64."""

    @property
    def states(self) -> bytes | bytearray:
        """A state for each."""
        ...

    @property
    def offsets(self) -> bytes | bytearray:
        """Where each lies."""
        ...

    @property
    def generations(self) -> bytes | bytearray:
        """Of its slot; 0: it has none."""
        ...


class Placed:
    """States, offsets and generations of leading keys of a request. A row with generation 0 closes it: behind a chunk that has
    no slot nothing can be stored."""

    def __init__(self) -> None:
        self.states = bytearray()
        self.offsets = bytearray()
        self.generations = bytearray()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self.states)

    def append_answer(self, state: int, offset: int, generation: int) -> None:
        """Answer the next key."""
        assert not self.is_closed
        self.states.append(state)
        self.offsets += offset.to_bytes(_WORD, "little")
        self.generations += generation.to_bytes(_WORD, "little")
        self.is_closed = not generation

    def add_rows(self, rows: "Rows") -> None:
        """Answer the next keys as these rows do. Closes nothing."""
        self.states += rows.states
        self.offsets += rows.offsets
        self.generations += rows.generations

    def fill(self, count: int) -> None:
        """Answer all further keys of a closed one."""
        missing = count - len(self.states)
        self.states += bytes([SaveState.NO_PARENT]) * missing
        self.offsets += bytes(_WORD * missing)
        self.generations += bytes(_WORD * missing)
