"""Engine chunks: chunks that engines have in block pools of their own, as they report them. Level 0 of the event stream.

    connection ─┬─ source 0 ── chunks it reported, each with the number of its own that follow it
                └─ source 1 ── …                    a chunk is at level 0 while at least one source has it

A source is one block pool of one connection; it reports whole prefixes, and may take back only what it has reported itself. A
source ends with its connection, or begins anew; what it had is dropped in parts (`drop_some`), because it may be much.

A record of what clients say, not of bytes: no chunk here can be leased, pulled or flushed, and it ends with the connection. So
it is no tier. The daemon's own copies in the memory of a device have a directory like those of DRAM and SSD, with the same
level in its rows: `engine_level` joins both, so that a chunk leaves level 0 when neither the directory nor a source has it.

Bounded, because engines choose how much they report and the daemon stores token ids for readers that come later: BYTES_MAX in
all, of which a connection has at most half of what the others leave, and a user its share. A chunk beyond that is declined: it
is not at level 0, and nothing else changes.

A key belongs to the namespace that reported it first. Where the daemon stores it in another one, the record is void: the
bytes that are here count.

Control thread only. No clock. Invariants: `_chunks` has exactly the chunks of all tables, each with the tables that have it as
its sources; `_slots` has each at its slot; the byte counts are the sums over the tables.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.errors import InvalidArgument
from kvpool.ids import ConnectionId, NamespaceId
from kvpool.key_column import KeyColumn
from kvpool.keys import Scope

# A guess: 36,000 chunks of 256 tokens for the first engine, fifteen times what 80 GB of a device have of a model of 8 B.
BYTES_MAX = 128 << 20
# What a chunk takes besides its token ids (measured: 720 bytes, and 120 for each further source).
CHUNK_BYTES = 800
CONNECTION_SHARE = 0.5


class Source(NamedTuple):
    """One block pool of a connection. `user`: whose share counts it, if anybody's."""

    connection: ConnectionId
    number: int
    user: int | None = None


class EngineChunk(NamedTuple):
    """A chunk as a source reports it. `parent`: empty for the first one of a prompt; `tokens`: i32 ids, or none."""

    key: bytes
    parent: bytes
    tokens: bytes
    scope: Scope

    @property
    def size(self) -> int:
        """Bytes that the record counts for it."""
        return CHUNK_BYTES + len(self.tokens) + len(self.scope.adapter)


@dataclass(slots=True, eq=False)
class _Table:
    """What one source has reported, in order: what each chunk takes, its parent as the source has named it, and how many of the
    source's chunks follow it."""

    source: Source
    sizes: dict[bytes, int] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    children: Counter[bytes] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Record:
    """A chunk that some source has."""

    chunk: EngineChunk
    namespace: NamespaceId
    slot: int
    sources: set[_Table]
    is_void: bool = False


class EngineChunks:
    """See the module."""

    def __init__(self, user_quota: float, bytes_max: int = BYTES_MAX) -> None:
        """`user_quota`: one user's share of what the others leave."""
        self._user_quota = user_quota
        self._bytes_max = bytes_max
        self._chunks: dict[bytes, Record] = {}
        self._slots: list[Record | None] = []
        self._free: list[int] = []
        self._tables: dict[ConnectionId, dict[int, _Table]] = {}
        self._ending: deque[_Table] = deque()
        self._bytes = 0
        self._bytes_of: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return len(self._chunks)

    def __repr__(self) -> str:
        return f"<EngineChunks {len(self)} of {len(self._tables)} connections, {self._bytes} bytes>"

    @property
    def used_bytes(self) -> int:
        """What counts for the bound."""
        return self._bytes

    @property
    def is_ending(self) -> bool:
        """Whether chunks of sources that have ended are still to be dropped."""
        return bool(self._ending)

    def get(self, key: bytes) -> Record | None:
        """The record of a chunk."""
        return self._chunks.get(key)

    def has(self, key: bytes, namespace: int) -> bool:
        """Whether a source has this chunk of a namespace."""
        record = self._chunks.get(key)
        return record is not None and not record.is_void and record.namespace == namespace

    def has_reported(self, source: Source, key: bytes) -> bool:
        """Whether this source has it."""
        table = self._table_of(source)
        return table is not None and key in table.sizes

    def has_room(self, source: Source, chunk: EngineChunk) -> bool:
        """Whether one more chunk of the source is within the bounds."""
        return all(
            self._bytes_of[holder] + chunk.size <= share * (self._bytes_max - self._bytes + self._bytes_of[holder])
            for holder, share in self._holders_of(source)
        )

    def add_chunk(self, source: Source, namespace: NamespaceId, chunk: EngineChunk) -> Record | None:
        """The source has the chunk from now on: its record, where no source had it before.

        REQUIRES: room; the source has its parent, and not yet the chunk; no other namespace has its key.
        """
        table = self._tables.setdefault(source.connection, {}).setdefault(source.number, _Table(source))
        assert chunk.key not in table.sizes
        assert not chunk.parent or chunk.parent in table.sizes
        table.sizes[chunk.key], table.parents[chunk.key] = chunk.size, chunk.parent
        if chunk.parent:
            table.children[chunk.parent] += 1
        self._count(source, chunk.size)
        record = self._chunks.get(chunk.key)
        if record is not None:
            assert record.namespace == namespace
            record.sources.add(table)
            return None
        slot = self._free.pop() if self._free else len(self._slots)
        record = self._chunks[chunk.key] = Record(chunk, namespace, slot, {table})
        if slot == len(self._slots):
            self._slots.append(record)
        else:
            self._slots[slot] = record
        return record

    def check_removal(self, source: Source, keys: KeyColumn) -> None:
        """Raises InvalidArgument unless the source has each of these, and nothing that follows one when its turn comes."""
        table = self._table_of(source)
        gone: set[bytes] = set()
        children: Counter[bytes] = Counter()
        for key in keys:
            if table is None or key not in table.sizes or key in gone:
                raise InvalidArgument(
                    f"chunk {key.hex()} is removed, expected one that source {source.number} of this connection has reported"
                )
            left = table.children[key] - children[key]
            if left:
                raise InvalidArgument(
                    f"chunk {key.hex()} is removed before {left} that follow it, expected chunks before their parents"
                )
            gone.add(key)
            children[table.parents[key]] += 1

    def remove(self, source: Source, key: bytes) -> Record | None:
        """The source has the chunk no more: its record, where no other has it. REQUIRES: `check_removal`."""
        table = self._table_of(source)
        assert table is not None
        record = self._drop(table, key, table.sizes.pop(key))
        if not table.sizes:
            self._forget(source)
        return record

    def drop_source(self, source: Source) -> None:
        """What the source has reported is dropped by `drop_some`; it begins anew."""
        table = self._table_of(source)
        if table is not None:
            self._forget(source)
            self._ending.append(table)

    def end_connection(self, connection: ConnectionId) -> None:
        """All sources of a connection end."""
        self._ending.extend(self._tables.pop(connection, {}).values())

    def drop_some(self, limit: int) -> list[Record]:
        """Drop chunks of sources that have ended, children first: the records of those that no source has now."""
        gone: list[Record] = []
        while self._ending and limit:
            table = self._ending[0]
            record = self._drop(
                table, *table.sizes.popitem()
            )  # the latest: `reversed` would pass over all that are gone
            limit -= 1
            if record is not None:
                gone.append(record)
            if not table.sizes:
                self._ending.popleft()
        return gone

    def drop_ending(self) -> None:
        """Drop all chunks of sources that have ended."""
        while self._ending:
            self.drop_some(len(self._ending[0].sizes))

    def page(self, slot: int, most: int) -> tuple[list[Record], int]:
        """Records from a slot on, `most` slots at most, and the slot after them; 0 where there are none."""
        end = slot + most
        records = [record for record in self._slots[slot:end] if record is not None and not record.is_void]
        return records, end if end < len(self._slots) else 0

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        problems = []
        tables = [*self._ending, *(table for numbers in self._tables.values() for table in numbers.values())]
        found: dict[bytes, set[_Table]] = {}
        sizes: Counter[tuple[str, int]] = Counter()
        for table in tables:
            if not table.sizes:
                problems.append(f"engine chunks: source {table.source} has a table without chunks")
            for key in table.sizes:
                found.setdefault(key, set()).add(table)
            for holder, _ in self._holders_of(table.source):
                sizes[holder] += sum(table.sizes.values())
        if found != {key: record.sources for key, record in self._chunks.items()}:
            problems.append("engine chunks: the records and the sources' tables differ")
        if +self._bytes_of != +sizes or self._bytes != sum(sum(table.sizes.values()) for table in tables):
            problems.append("engine chunks: their bytes are miscounted")
        if any(self._slots[record.slot] is not record for record in self._chunks.values()):
            problems.append("engine chunks: one is not at its slot")
        if len(self._slots) - len(self._free) != len(self._chunks):
            problems.append("engine chunks: a slot is neither used nor free, or both")
        return problems

    def _drop(self, table: _Table, key: bytes, size: int) -> Record | None:
        """A chunk that has left a table."""
        record = self._chunks[key]
        self._count(table.source, -size)
        table.children.pop(key, None)
        parent = table.parents.pop(key)
        if parent:
            table.children[parent] -= 1
        record.sources.remove(table)
        if record.sources:
            return None
        del self._chunks[key]
        self._slots[record.slot] = None
        self._free.append(record.slot)
        return record

    def _table_of(self, source: Source) -> _Table | None:
        return self._tables.get(source.connection, {}).get(source.number)

    def _forget(self, source: Source) -> None:
        numbers = self._tables[source.connection]
        del numbers[source.number]
        if not numbers:
            del self._tables[source.connection]

    def _holders_of(self, source: Source) -> list[tuple[tuple[str, int], float]]:
        """Whose bytes count a source's chunks, and the share of each of what the others leave."""
        connection = ("connection", source.connection), CONNECTION_SHARE
        return [connection] if source.user is None else [connection, (("user", source.user), self._user_quota)]

    def _count(self, source: Source, size: int) -> None:
        self._bytes += size
        for holder, _ in self._holders_of(source):
            self._bytes_of[holder] += size
            if not self._bytes_of[holder]:
                del self._bytes_of[holder]
