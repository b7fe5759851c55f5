"""Copy link: copies of leased chunks from an arena into a tier above it.

After a lease of a connection that can read the tier, the chunks after those that have copies are copied, as far as `Placement`
allows, part by part:

    due ──► reserved ──copied──► published, parents first ──► due with the next part
                └──failed──► the slots are free again, and the prefix is forgotten

While a part is copied its chunks have pins in the arena; a chunk that is dropped there meanwhile is not published here. A lease
waits for none of this. Bounds: prefixes that are due (the oldest is forgotten: it is only not copied), chunks started in a turn
of the control thread, and bytes under way.

Control thread only; no I/O. Invariants: each chunk under way has one pin in the arena's directory; each part one reservation in
the tier's, which ends after its last chunk was reported; a prefix has at most one part under way."""

import asyncio
from dataclasses import dataclass
from functools import partial

import kvpool_native
from kvpool.ids import HoldId, ReservationId
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import PART_CHUNKS
from kvpool.packed_numbers import pack_u32, pack_u64, u64_of
from kvpool.states import Level, SaveState
from kvpool.tiering.copies.due_prefixes import DuePrefixes
from kvpool.tiering.copies.placement import LeasedPrefix, Placement
from kvpool.tiering.copies.promotion_budget import PromotionBudget
from kvpool.tiering.link import ArenaSide, StockedLink
from kvpool.tiers.base import NOT_STARTED, Counters, Exported, Finished, Moves, Outcome

# Chunks whose copy starts in one turn of the control thread, at some 10 µs each for its slot, its pin and its row.
STARTED_AT_ONCE = 32
# At most this part of the tier is being written at a time, and pinned in the arena for it; and no more than keeps a device busy
# for some milliseconds (a guess).
COPYING_FRACTION = 8
COPYING_BYTES = 128 << 20


@dataclass(slots=True, eq=False)
class _Part:
    """Chunks of a prefix that are being copied. `pins`: in the arena."""

    prefix: LeasedPrefix
    reservation: ReservationId
    moves: Moves
    pins: list[HoldId]
    is_good: list[bool]
    ready: int = 0  # leading chunks that are copied
    stored: int = 0  # those of them that the tier's directory has accepted


class CopyLink(StockedLink[Exported]):
    """See the module."""

    def __init__(self, side: ArenaSide, tier: Exported, index: kvpool_native.IndexView) -> None:
        """`index`: has the checksums of the arena's chunks."""
        super().__init__(side, tier)
        self._copies = self.slots.directory
        self._index = index
        self._capacity_bytes = self.slots.capacity_bytes
        budget = PromotionBudget(self._capacity_bytes, side.arena.capacity_bytes)
        self._placement = Placement(self._arena, self._copies, budget)
        self._bytes_max = max(1, min(self._capacity_bytes // COPYING_FRACTION, COPYING_BYTES))
        self._due = DuePrefixes()
        self._turn: asyncio.Handle | None = None
        self._walk: kvpool_native.FlushWalk | None = None  # drops all copies, where the memory is lost
        self._parts: set[_Part] = set()  # under way
        self._bytes = 0
        self._pins = 0
        self._corrupt_in_arena = 0
        self.copied_chunks = 0
        self.failed_chunks = 0
        self._copied_bytes = 0
        side.namespaces.add_upper(self.slots)

    def __repr__(self) -> str:
        return f"<CopyLink to {self.tier!r}, {len(self._due)} due, {self._bytes} bytes under way>"

    @property
    def pins(self) -> int:
        """See `Link`: those of copies under way."""
        return self._pins

    @property
    def corrupt_in_arena(self) -> int:
        """See `Link`."""
        return self._corrupt_in_arena

    async def close(self) -> bool:
        """See `Link`."""
        self._due.clear()
        return await super().close()

    def note_lease(self, namespace: Namespace, hold: HoldId, *, is_set: bool) -> None:
        """A connection that can read the tier was granted a lease with this hold in the arena. `is_set`: on chunks that are
        each alone."""
        if not self.tier.can_copy:
            return
        for prefix in self._placement.note_lease(namespace, hold, is_set=is_set):
            self._due.add_prefix(prefix)
            self._wake()

    def find(self, hold: HoldId) -> kvpool_native.HoldColumns:
        """Where the copies of the chunks of a hold in the arena are now, a row each; generation 0: there is none."""
        return self._arena.copies([hold])

    def on_completed(self) -> None:
        """See `TierOwner`: settle finished chunks, then start what is due."""
        has_settled = self._settle_finished() > 0
        if self._due:
            self._wake()
        if has_settled:
            if not self.tier.can_copy and self._walk is None and self._copies.stats()["chunks"]:
                self._drop_all()  # copies that were being checked when the others were dropped
            self._on_settled()

    def on_lost(self) -> None:
        """See `TierOwner`: drop every copy, in parts."""
        self._due.clear()
        self._drop_all()

    def settle_part(self, part: _Part, finished: Finished) -> None:
        """Note that a chunk of a part was copied, or was not."""
        chunk = finished.chunk
        part.is_good[chunk] = finished.outcome is Outcome.DONE
        is_bad = finished.outcome is Outcome.BAD_SOURCE
        if is_bad and self._arena.drop(part.moves.keys[chunk], part.moves.generations[chunk]):
            # else it has left the arena while it was copied
            self._corrupt_in_arena += 1
            place = f"offset {part.moves.arena_offsets[chunk]} of the arena"
            self._bad_in_arena.note_bad_chunk(part.moves.keys[chunk], finished.fault, place)
        while part.ready < len(part.is_good) and part.is_good[part.ready]:
            part.ready += 1

    def finish(self, part: _Part, now_ns: int) -> None:
        """Publish the leading copies of a part whose last chunk was reported, and go on with its climb."""
        self._publish(part, now_ns)
        self._release(part, now_ns)
        self._parts.remove(part)
        self._pins -= len(part.pins)
        self._bytes -= self._size_of(part)
        self.failed_chunks += len(part.is_good) - part.stored
        part.prefix.copied += part.stored
        if not self.tier.can_copy:
            self._drop_all()
        elif part.stored == len(part.is_good):
            self._due.add_prefix(part.prefix)

    def stats(self) -> Counters:
        """See `Link`."""
        name, placement = self.tier.name, self._placement
        counted = self._copies.stats()
        return {
            f"{name}.chunks": counted["chunks"],
            f"{name}.used_bytes": counted["used_bytes"],
            f"{name}.capacity_bytes": self._capacity_bytes,
            f"{name}.evicted_chunks": counted["shed_chunks"] + counted["evicted_chunks"],
            f"{name}.withdrawn_chunks": counted["withdrawn_chunks"],
            f"{name}.promoted_chunks": self.copied_chunks,
            f"{name}.promoted_bytes": self._copied_bytes,
            f"{name}.failed_chunks": self.failed_chunks,
            f"{name}.promoting_bytes": self._bytes,
            f"{name}.waiting_prefixes": len(self._due),
            f"{name}.left_out_prefixes": self._due.left_out,
            f"{name}.leased_chunks": placement.leased_chunks,
            f"{name}.leased_bytes": placement.leased_bytes,
            f"{name}.served_chunks": placement.served_chunks,
            f"{name}.served_bytes": placement.served_bytes,
            f"{name}.checks_under_way": self.checksum_jobs.pins,
            f"{name}.corrupt_chunks": self.checksum_jobs.corrupt_chunks,
            f"{name}.bad_sources": self._corrupt_in_arena,
            **self.tier.stats(),
        }

    def verify(self, *, with_shared: bool = True) -> list[str]:
        """See `Link`."""
        problems = super().verify(with_shared=with_shared)
        pins = sum(len(part.pins) for part in self._parts)
        if pins != self._pins or sum(map(self._size_of, self._parts)) != self._bytes:
            problems.append(
                f"{self.tier.name}: {self._pins} pins and {self._bytes} bytes are counted, not those under way"
            )
        return problems

    def _size_of(self, part: _Part) -> int:
        return len(part.moves) * part.prefix.chunk_bytes

    def _wake(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Drop copies where the memory is lost, else start to copy some chunks."""
        self._turn = None
        if self._walk is None:
            has_more = self._start_some(self._clock.now_ns())
        else:
            has_more = self._walk.advance(PART_CHUNKS)
            self._walk = self._walk if has_more else None
        if has_more:
            self._wake()

    def _start_some(self, now_ns: int) -> bool:
        """Start to copy the next parts of what is due. Whether more can start now."""
        left = STARTED_AT_ONCE
        while left > 0 and self._due and self._has_room:
            started = self._start_part(self._due.take_prefix(), left, now_ns)
            if started is None:
                return False
            left -= max(1, started)
        return bool(self._due) and self._has_room

    @property
    def _has_room(self) -> bool:
        return self.tier.can_copy and self._bytes < self._bytes_max

    def _start_part(self, prefix: LeasedPrefix, chunks_max: int, now_ns: int) -> int | None:
        """Start to copy the next chunks of a prefix: how many. 0: no more of it is copied; None: the tier takes no more now."""
        chunks_max = min(chunks_max, max(1, (self._bytes_max - self._bytes) // prefix.chunk_bytes))
        size_class = self.slots.size_class_of(prefix.namespace.layout)
        made = self._placement.reserve(prefix, size_class, chunks_max, now_ns) if size_class is not None else None
        if made is None:
            return 0
        first = _leading(made.states, SaveState.PRESENT)
        taken = _leading(made.states[first:], SaveState.RESERVED)
        prefix.copied += first
        part = self._pinned_part(prefix, made, first, taken)
        job_id = self.tier.copy(prefix.namespace, part.moves) if part.pins else NOT_STARTED
        if not job_id:
            self._release(part, now_ns)
            if part.pins:
                self._due.add_prefix(prefix, is_next=True)
                return None
            if first == len(made.states):
                self._due.add_prefix(prefix)  # others have copied all of it meanwhile
            return 0
        self._pins += len(part.pins)
        self._bytes += self._size_of(part)
        self._placement.spend(len(part.pins), prefix.chunk_bytes)
        self._jobs.add_job(job_id, len(part.pins), partial(self.settle_part, part), partial(self.finish, part))
        self._parts.add(part)
        return len(part.pins)

    def _pinned_part(self, prefix: LeasedPrefix, made: kvpool_native.Reserved, first: int, taken: int) -> _Part:
        """Those of the `taken` reserved chunks that the arena has whole, with pins. The first one has index `first` in the
        answer."""
        pins: list[HoldId] = []
        keys = prefix.keys[prefix.copied : prefix.copied + taken]
        for key in keys:
            pin = self._arena.pin_key(prefix.namespace.id, key)
            if not pin:
                break
            pins.append(HoldId(pin))
        columns = self._arena.columns(pins)
        moves = Moves(
            keys=list(keys[: len(pins)]),
            parents=(),
            offsets=u64_of(made.offsets)[first : first + len(pins)].tolist(),
            generations=u64_of(columns.generations).tolist(),
            arena_offsets=u64_of(columns.offsets).tolist(),
            arena_slots=u64_of(columns.slots).tolist(),
        )
        return _Part(prefix, ReservationId(made.id), moves, pins, [False] * len(pins))

    def _release(self, part: _Part, now_ns: int) -> None:
        for pin in part.pins:
            self._arena.unpin(pin)
        if part.reservation:
            self._copies.end_reservation(part.reservation, now_ns)

    def _publish(self, part: _Part, now_ns: int) -> None:
        """Commit the leading copies of a part in the tier's directory, so that they are found there."""
        if not part.ready or not self.tier.can_copy:
            return
        extents, slots = part.prefix.namespace.layout.extents, part.moves.arena_slots[: part.ready]
        checksums = pack_u32([self._index.checksum_at(slot, extent) for slot in slots for extent in range(extents)])
        sources = pack_u64(part.moves.generations[: part.ready])
        states = self._copies.commit(part.reservation, 0, checksums, now_ns, sources=sources, source_level=Level.DRAM)
        part.stored = _leading(states, SaveState.STORED)
        self.copied_chunks += part.stored
        self._copied_bytes += part.stored * part.prefix.chunk_bytes

    def _note_closed(self) -> None:
        self.on_completed()
        if self._turn is not None:
            self._turn.cancel()
        super()._note_closed()

    def _drop_all(self) -> None:
        """Drop every copy that nobody holds or checks, in the next turns."""
        self._walk = kvpool_native.FlushWalk(self._copies, None, self._clock.now_ns())
        self._wake()


def _leading(states: bytes, state: SaveState) -> int:
    """How many leading chunks are in this state."""
    return len(states) - len(states.lstrip(bytes([state])))
