"""Joint saves: chunks that several connections fill, each its part of every chunk's extents.

No extent has two writers, and none that is stored is written again.

The directory has one writer for a slot. Here that is a chain (`index.joint_chunks`): the first part reserves it, later parts
join it, and longer ones extend it. A chunk is published when all its extents are stored and all chunks before it are; with it
come those behind that are complete already. It counts for the connection that began the chain, once, however many parts it has;
in what may be incomplete it counts for the one that had the first part of it.

A chain that nobody has written for a time to live expires with its stored parts, and one of which nothing was published does
after `LIFE_TTLS` of them: then its chunks are out of sight, and their slots are free when no part may be written any more. A
chain of which nothing is stored or written ends at once. Decides nothing about deadlines of parts: they are in `Reservations`.
Control thread only; `now_ns` is an argument.

Invariant: the chains' `open` count the chunks that `_parts` may still write; `_unpublished` has the chains of which more is
complete than was published at once.
"""

import sys
from collections import deque
from collections.abc import Callable
from itertools import groupby, takewhile
from typing import NamedTuple

import kvpool_native
from kvpool.config.config import DramConfig
from kvpool.ids import CHECKSUM_BYTES, ReservationId
from kvpool.index.joint_chunks import JointChain, JointChunk, Part, Placed
from kvpool.index.namespaces import SIZE_CLASSES_MAX, Namespace
from kvpool.index.namespaces_by_user import Geometry
from kvpool.index.parts import JOINT_CHUNKS
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import Offsets
from kvpool.key_column import KeyColumn
from kvpool.layouts.share import Share
from kvpool.packed_numbers import pack_u64, u32_of, u64_of
from kvpool.pool.writers.commit_columns import CommitColumns
from kvpool.pool.writers.ending_reservations import EndingReservations
from kvpool.pool.writers.joint_chains import JointChains
from kvpool.states import SaveState

# Numbers of parts: far above those of the directory, which rise from 1.
FIRST_PART = 1 << 40
# Who goes on reserving parts cannot keep a chain for ever: it ends after so many times to live. A guess: ranks are seconds
# apart.
LIFE_TTLS = 4
# Chunks of chains that expire in one call: a chunk takes about a microsecond. A chain itself costs as much as some chunks.
EXPIRED_AT_ONCE = 512
EXPIRED_COST = 16
# Chunks of a part that are ended in one call.
ENDED_AT_ONCE = 1024
# Incomplete chunks cannot be evicted: they leave half of DRAM to others, whoever has begun them.
DRAM_PART = 2
# Chunks of a chain: to take one out of sight costs a millisecond. A longer save continues when these are published.
CHAIN_CHUNKS_MAX = 4096
# Chunks published in one call: as long as a turn takes.
PUBLISHED_AT_ONCE = 256


class _Row(NamedTuple):
    """What the directory answers for a key."""

    key: bytes
    state: int
    offset: int
    generation: int


class JointSaves:
    """See the module. Incomplete chunks of all connections together have at most a `DRAM_PART`th of DRAM, and those of one
    connection its share of what the others leave of that."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        ending_reservations: EndingReservations,
        *,
        ttl_ns: int,
        dram: DramConfig | None,
        on_backlog: Callable[[], None] | None = None,
    ) -> None:
        """`dram`: its capacity and a connection's share; None: no bounds. `on_backlog`: has `end_more` called soon; without it
        everything is ended at once."""
        self._directory = directory
        self._ending_reservations = ending_reservations
        self._ttl_ns = ttl_ns
        self._next_id = FIRST_PART
        self._parts: dict[ReservationId, Part] = {}
        capacity, share = (dram.capacity, dram.connection_quota) if dram is not None else (sys.maxsize, 1.0)
        self._chains = JointChains(capacity // DRAM_PART, share)
        self._slot_bytes: dict[Geometry, int] = {}
        self._unpublished: dict[ReservationId, JointChain] = {}
        self._on_backlog = on_backlog
        self._ending: dict[ReservationId, Part] = {}
        self._is_expiring = False  # there is more to expire
        self._is_abandoned = False  # nobody who has completed them publishes what is complete
        self.expired_chunks = 0
        self.published_chunks = 0
        self.carried_chunks = 0  # published by the commit of a chunk before them

    def __repr__(self) -> str:
        return f"<JointSaves {self._chains.incomplete_chunks} chunks, {len(self._parts)} parts>"

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def has_backlog(self) -> bool:
        """Whether `end_more` has more to end, to expire or to publish."""
        return self._is_expiring or bool(self._ending) or (self._is_abandoned and bool(self._unpublished))

    @property
    def are_unpublished(self) -> bool:
        """Whether chunks are complete and not published, because they were too many for one call: see `publish_more`."""
        return bool(self._unpublished)

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of chains, from now on."""
        self._ttl_ns = ttl_ns

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {
            "joint_chunks": self._chains.incomplete_chunks,
            "joint_bytes": self._chains.incomplete_bytes,
            "joint_stored_chunks": self.published_chunks,
            "joint_expired_chunks": self.expired_chunks,
        }

    def begin_part(self, session: EngineSession, share: Share) -> Part:
        """A part without chunks. REQUIRES: the session's layout has the share, and no summaries."""
        part = Part.of(ReservationId(self._next_id), session.connection, share, session.own.layout)
        self._next_id += 1
        self._parts[part.id] = part
        return part

    def place(
        self,
        part: Part,
        own: Namespace,
        parent: bytes,
        keys: KeyColumn,
        *,
        now_ns: int,
        may_wait: bool,
        present: deque[ReservationId] | None = None,
    ) -> Placed:
        """Reserve the part's extents of the chunks that follow `parent`, of those where nobody has them: a row for each key, or
        fewer where (if it may) it must wait for room. `present`: gets reservations that hold what is there already."""
        placed = Placed()
        while len(placed) < len(keys) and not placed.is_closed:
            above, rest = keys.before(len(placed), parent), keys[len(placed) :]
            found = self._chains.find(own.id, rest[0])
            if found is not None and self._is_dropped(found.chain, rest[:1], now_ns):
                self._expire(found.chain, now_ns)  # with a chunk before it that was given up
                continue
            if found is not None:
                self._join(part, found, above, rest, placed=placed, now_ns=now_ns)
            elif self._reserve(
                part, own, above, rest, placed=placed, now_ns=now_ns, may_wait=may_wait, present=present
            ):
                break
        if placed.is_closed:
            placed.fill(len(keys))
        return placed

    def commit(self, part_id: ReservationId, columns: CommitColumns, now_ns: int) -> bytes:
        """Count the next chunks of a part as stored, and publish what is complete. A state for each: STORED, PART or EXPIRED.
        `columns`: u32 [chunk][extent of the part], and tokens with their scope."""
        part = self._parts[part_id]
        sums, size = u32_of(columns.checksums), len(part.numbers)
        count = len(sums) // size
        chunks = part.next(count)
        token_bytes = len(columns.tokens) // count
        for number, chunk in enumerate(chunks):
            chunk.close(part)
            if not chunk.chain.is_expired:
                own_tokens = columns.tokens[number * token_bytes : (number + 1) * token_bytes]
                chunk.store(part, sums[number * size : (number + 1) * size], own_tokens)
                self._chains.note_active(chunk.chain, now_ns)
        part.committed += count
        before = self.published_chunks
        chains = {id(chunk.chain): chunk.chain for chunk in chunks}
        for chain in chains.values():
            self._publish(chain, now_ns)
            self._look(chain, now_ns)
        own = sum(chunk.place < chunk.chain.published for chunk in chunks)
        self.carried_chunks += self.published_chunks - before - own
        return bytes(_state_of(chunk) for chunk in chunks)

    def skip(self, part_id: ReservationId, count: int, now_ns: int) -> None:
        """Give up the next `count` chunks of a part, into which nothing is written any more."""
        part = self._parts[part_id]
        chunks = part.next(count)
        part.committed += len(chunks)
        self._give_up(part, chunks, now_ns)

    def offsets(self, part_id: ReservationId, offsets: Offsets, extents: range, extent_bytes: int) -> bytes:
        """Where these extents of a part lie, counted among its own, in the slots at `offsets`: u64 [slot][extent]."""
        within = [number * extent_bytes for number in self._parts[part_id].numbers[extents.start : extents.stop]]
        return pack_u64([offset + at for offset in offsets for at in within])

    def end_part(self, part_id: ReservationId, now_ns: int, *, is_asked: bool = True) -> None:
        """End a part, whose writer no longer writes: what it has not stored is free for others. A short one that is asked for
        ends at once."""
        self._ending[part_id] = self._parts[part_id]
        if is_asked or self._on_backlog is None:
            self.go_on_with(part_id, now_ns)
        if self._on_backlog is not None:
            if part_id in self._ending:
                self._on_backlog()
            return
        while part_id in self._ending:
            self.go_on_with(part_id, now_ns)

    def is_ending(self, part_id: ReservationId) -> bool:
        """Whether a part has ended, and not all that it had is free yet."""
        return part_id in self._ending

    def go_on_with(self, part_id: ReservationId, now_ns: int) -> None:
        """End more of a part that has ended."""
        part = self._ending.get(part_id)
        if part is None:
            return
        chunks = part.next(2)
        are_alone = len(chunks) > 1 and chunks[0].chain is not chunks[1].chain  # those without a parent
        self.skip(part_id, JOINT_CHUNKS if are_alone else ENDED_AT_ONCE, now_ns)
        if part.committed >= len(part.chunks):
            del self._ending[part_id], self._parts[part_id]

    def end_more(self, now_ns: int) -> None:
        """End, expire or publish a bounded number of chunks."""
        if self._ending:
            self.go_on_with(next(iter(self._ending)), now_ns)
        elif self._is_expiring:
            self.expire(now_ns)
        elif self._unpublished:
            self.publish_more(now_ns)
        self._is_abandoned = self._is_abandoned and bool(self._unpublished)

    def expire(self, now_ns: int) -> None:
        """Expire the chains that nobody has written for too long, or that are too old: a bounded number."""
        left = EXPIRED_AT_ONCE
        idle_since_ns, began_ns = now_ns - self._ttl_ns, now_ns - LIFE_TTLS * self._ttl_ns
        while left > 0 and (chain := self._chains.next_due(idle_since_ns, began_ns)) is not None:
            left -= EXPIRED_COST + chain.incomplete
            self._expire(chain, now_ns)
        self._is_expiring = left <= 0
        if self._is_expiring and self._on_backlog is not None:
            self._on_backlog()

    def publish_more(self, now_ns: int) -> int:
        """Publish some of what is complete and was not published: how many chunks."""
        before = self.published_chunks
        _, chain = self._unpublished.popitem()
        self._publish(chain, now_ns)
        self._look(chain, now_ns)
        return self.published_chunks - before

    def publish_later(self) -> None:
        """Have `end_more` publish what is complete: its last writer ends before it has."""
        if self._unpublished and self._on_backlog is not None:
            self._is_abandoned = True
            self._on_backlog()

    def verify(self, reservations: set[ReservationId]) -> list[str]:
        """Broken invariants, one line each. `reservations`: those that are known."""
        taken = {part.id for part in self._parts.values() if part.is_taken}
        unknown = taken - reservations - set(self._ending)
        problems = [f"joint saves: {len(unknown)} parts of no reservation"] if unknown else []
        return problems + self._chains.verify(self._parts.values())

    def _join(
        self, part: Part, first: JointChunk, above: bytes, keys: KeyColumn, *, placed: Placed, now_ns: int
    ) -> None:
        """Reserve extents of a chain's chunks from `first` on, as far as the keys go the same way."""
        chain = first.chain
        if chain.key_before(first.place) != above:
            placed.append_answer(SaveState.NO_PARENT, 0, 0)
            return
        for key, chunk in zip(keys, chain.chunks[first.place : first.place + len(keys)], strict=False):
            if chunk.key != key:
                return  # another prompt: a chain of its own, behind a chunk that is not there yet
            state = chunk.reserve_part(part)
            if state == SaveState.RESERVED:
                self._chains.note_active(chain, now_ns)
            placed.append_answer(state, chunk.offset, chunk.generation)

    def _is_dropped(self, chain: JointChain, key: KeyColumn, now_ns: int) -> bool:
        """Whether the directory has none of a chain's chunks any more: it refuses whatever would follow them."""
        return bool(self._directory.reserve_more(chain.reservation, key.packed, now_ns, 0, 0).states)

    def _reserve(
        self,
        part: Part,
        own: Namespace,
        above: bytes,
        keys: KeyColumn,
        *,
        placed: Placed,
        now_ns: int,
        may_wait: bool,
        present: deque[ReservationId] | None,
    ) -> bool:
        """Slots for chunks that no chain has: of a new chain, or of the one that they follow. Whether it must wait for room."""
        before = self._chains.find(own.id, above)
        chain = before.chain if before is not None and before.chain.chunks[-1] is before else None
        room = CHAIN_CHUNKS_MAX - (len(chain.chunks) if chain is not None else 0)
        known = sum(1 for _ in takewhile(lambda key: self._chains.find(own.id, key) is None, keys))
        asked = keys[: min(room, known, self._room_for(part, own, keys))]
        if not asked:
            placed.append_answer(SaveState.QUOTA if room else SaveState.NO_PARENT, 0, 0)
            return False
        made = None
        if chain is not None:
            made = self._directory.reserve_more(
                chain.reservation, asked.packed, now_ns, may_wait=may_wait, is_run=True, is_joint=True
            )
            if made.states[:1] == bytes([SaveState.PENDING]):  # a whole save goes on behind this chain
                chain = made = None
        if made is None:
            made = self._directory.reserve(
                own.id,
                own.size_class,
                above,
                asked.packed,
                now_ns,
                part.owner,
                may_wait=may_wait,
                is_kept=present is not None,
                is_joint=True,
            )
        for row in _rows_of(asked, made):
            if row.state == SaveState.RESERVED:
                chain = chain or self._chains.open(made.id, own, above, now_ns, slot_bytes=self._slot_bytes_of(own))
                added = self._chains.add_chunk(chain, row.key, part.owner, offset=row.offset, generation=row.generation)
                added.reserve_part(part)
                self._chains.note_active(chain, now_ns)
            placed.append_answer(row.state, row.offset, row.generation)
            above = row.key
            if placed.is_closed:
                break
        if len(placed) < len(keys) and made.states[-1:] == bytes([SaveState.RESERVED]):
            dropped = self._chains.find(own.id, keys[len(made.states)])
            if dropped is not None:
                self._expire(dropped.chain, now_ns)  # the directory has it no more: it would have what precedes it
        if chain is None and made.id:
            if present is not None:
                present.append(ReservationId(made.id))
            else:
                self._directory.end_reservation(made.id, now_ns)  # what is present was merely touched
        return len(made.states) < len(asked)

    def _room_for(self, part: Part, own: Namespace, keys: KeyColumn) -> int:
        """How many leading keys may be reserved: those that have a slot take no room."""
        room = self._chains.room_for(part.owner, own, self._slot_bytes_of(own))
        if room >= len(keys):
            return len(keys)
        return room + sum(1 for _ in takewhile(lambda key: self._directory.place_of(key)[1], keys))

    def _slot_bytes_of(self, own: Namespace) -> int:
        """Memory of a chunk's slot."""
        if own.geometry not in self._slot_bytes:
            if len(self._slot_bytes) >= SIZE_CLASSES_MAX:
                self._slot_bytes.clear()
            self._slot_bytes[own.geometry] = self._directory.stats()["classes"][own.size_class]["slot_bytes"]
        return self._slot_bytes[own.geometry]

    def _give_up(self, part: Part, chunks: list[JointChunk], now_ns: int) -> None:
        for chunk in chunks:
            chunk.close(part)
        for chain in {id(chunk.chain): chunk.chain for chunk in chunks}.values():
            self._look(chain, now_ns)

    def _publish(self, chain: JointChain, now_ns: int) -> None:
        """Publish complete chunks behind what is published. A chain that the directory has dropped expires."""
        if chain.is_expired:
            return
        behind = chain.chunks[chain.published : chain.published + PUBLISHED_AT_ONCE + 1]
        ready = list(takewhile(lambda chunk: chunk.is_complete, behind))
        if len(ready) > PUBLISHED_AT_ONCE:
            del ready[PUBLISHED_AT_ONCE:]
            self._unpublished[chain.reservation] = chain
        # The ids of chunks in one call have one length.
        for _, run in groupby(ready, lambda chunk: len(chunk.tokens)):
            chunks = list(run)
            sums = b"".join(chunk.checksums.tobytes() for chunk in chunks if chunk.checksums is not None)
            assert len(sums) == len(chunks) * chain.extents * CHECKSUM_BYTES
            tokens = b"".join(chunk.tokens for chunk in chunks)
            states = self._directory.commit(chain.reservation, chain.published, sums, now_ns, tokens)
            stored = len(states) - len(states.lstrip(bytes([SaveState.STORED, SaveState.PART])))
            for chunk, state in zip(chunks, states, strict=True):
                chunk.is_waiting = state == SaveState.PART
            self._chains.publish(chain, stored, now_ns)
            self.published_chunks += stored
            if stored < len(states):
                self._expire(chain, now_ns)
                return

    def _look(self, chain: JointChain, now_ns: int) -> None:
        """End a chain that nobody writes, and that is published, expired, or of which nothing is stored."""
        if chain.open or chain not in self._chains:
            return
        if not chain.is_expired and chain.incomplete and chain.has_stored:
            return
        self._chains.forget_chain(chain)
        self._unpublished.pop(chain.reservation, None)
        self._ending_reservations.end_reservation(chain.reservation, len(chain.chunks), now_ns)

    def _expire(self, chain: JointChain, now_ns: int) -> None:
        """Take a chain's chunks out of sight. Its slots are free once nobody writes them."""
        self._chains.hide(chain)
        chain.is_expired = True
        self.expired_chunks += chain.incomplete
        self._ending_reservations.expire(chain.reservation, [(chain.reservation, len(chain.chunks))], now_ns)
        self._look(chain, now_ns)


def _state_of(chunk: JointChunk) -> SaveState:
    """The state of a chunk of which a part has just been committed."""
    if chunk.place < chunk.chain.published:
        return SaveState.PART if chunk.is_waiting else SaveState.STORED
    return SaveState.EXPIRED if chunk.chain.is_expired else SaveState.PART


def _rows_of(keys: KeyColumn, made: kvpool_native.Reserved) -> list[_Row]:
    columns = made.states, u64_of(made.offsets), u64_of(made.generations)
    return [_Row(*row) for row in zip(keys, *columns, strict=False)]
