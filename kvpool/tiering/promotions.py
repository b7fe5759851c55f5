"""Promotions: chunks of a lower tier that are read into the arena, for a request that leases or announces them.

A lease covers the longest prefix that arena and tier have together (`pool/readers/chain_holds.py`). Chunks that only the tier
has get slots in the arena and are read into them. Every connection may lease them at once, and loads each extent after it has
landed.

    RESERVED ──read──► LANDED
        └──failed──► dropped with its descendants; a chunk with bad bytes in the lower tier is dropped there too

Control thread only; no I/O. Invariant: each promotion under way has one hold in the directory of each of the two tiers, and
releases both after its last chunk was reported. `kept`: pins in the lower tier's directory on what is to be promoted soon.
"""

from dataclasses import dataclass, replace
from functools import partial

import kvpool_native
from kvpool import failpoint
from kvpool.clock import Clock
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.packed_numbers import u64_of
from kvpool.states import SaveState
from kvpool.tiering.landings import Landings, leading
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiers.bad_chunk_log import BadChunkLog
from kvpool.tiers.base import NOT_STARTED, Finished, JobId, Moves, Outcome, Readable
from kvpool.tiers.jobs import Jobs
from kvpool.tiers.slots import NO_RUN, Run

GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chunks to promote: `keys` after `parent` (empty: the root). The first one has index `first` in the lower tier's run.
    `peer`: the other node that has asked for them, within `PeerAllowance`. Chunks that `are_alone` have no parent, and none of
    them waits for another one."""

    namespace: Namespace
    parent: bytes
    keys: KeyColumn
    first: int = 0
    is_urgent: bool = True
    peer: ConnectionId | None = None
    are_alone: bool = False


class Promotions:
    """All promotions under way from one tier."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        lower: Readable,
        clock: Clock,
        *,
        jobs: Jobs,
        for_peers: PeerAllowance,
        bad_chunk_log: BadChunkLog,
    ) -> None:
        """`directory`: the arena's. `bad_chunk_log`: of the lower tier's."""
        self.for_peers = for_peers
        self._directory = directory
        self._lower = lower
        self._jobs = jobs
        self._bad_chunk_log = bad_chunk_log
        self._landings = Landings(directory, lower.name, clock)
        self._under_way = 0
        self.kept = 0

    def __repr__(self) -> str:
        return f"<Promotions {self._under_way} jobs>"

    def __len__(self) -> int:
        return self._under_way

    @property
    def holds(self) -> int:
        """Holds that promotions have in the arena's directory, and as many in the lower tier's."""
        return self._under_way

    @property
    def promoted_chunks(self) -> int:
        """Chunks that have landed."""
        return self._landings.chunks

    @property
    def failed_chunks(self) -> int:
        """Chunks that have not."""
        return self._landings.failed_chunks

    def find(self, namespace: Namespace, keys: KeyColumn, chunks: int, *, parent: bytes) -> Run:
        """The lower tier's run of the chunks after `parent`. The arena has `chunks` of them."""
        if not self._lower.can_read:
            return NO_RUN
        run = self._lower.slots.find(namespace.id, keys, parent=parent)
        if run.chunks > chunks:
            failpoint.reach("daemon.promote.held")
        return run

    def keep_each(self, namespace: Namespace, keys: KeyColumn) -> HoldId:
        """Keep those of these chunks that the lower tier has from leaving it, until `let_go`: 0 where it has none. No use."""
        pin = (
            HoldId(self._lower.slots.directory.pin_keys(namespace.id, keys.packed))
            if self._lower.can_read
            else HoldId(0)
        )
        self.kept += bool(pin)
        return pin

    def let_go(self, pin: HoldId) -> None:
        """End what `keep_each` has begun."""
        self._lower.slots.directory.unpin(pin)
        self.kept -= 1

    def promote_each(self, wanted: Wanted, now_ns: int) -> list[int]:
        """Start to read those of chunks that are alone which the tier has: which of the wanted ones these are. In the arena or
        on its way is what has got a slot. REQUIRES: `first` is 0."""
        assert wanted.are_alone
        if not self._lower.can_read:
            return []
        keys, places = wanted.keys, list(range(len(wanted.keys)))
        (held,) = self._lower.slots.directory.hold_each([wanted.namespace.id], [keys.packed], [places], None, 0)
        if held.places:
            failpoint.reach("daemon.promote.held")
            self.promote(replace(wanted, keys=keys.chosen(held.places)), HoldId(held.id), now_ns)
        return held.places

    def promote(self, wanted: Wanted, below: HoldId, now_ns: int) -> int:
        """Start to read the wanted chunks: how many leading ones are in the arena or being promoted.

        Takes over `below`, the hold on the run in the lower tier. Urgent chunks are read first.
        """
        placed, is_under_way = 0, False
        if wanted.peer is not None:
            allowed = self.for_peers.chunks(wanted.peer, wanted.namespace.layout.stored_bytes)
            wanted = replace(wanted, keys=wanted.keys[:allowed])
        if wanted.keys:
            namespace, keys = wanted.namespace, wanted.keys.packed
            lower, first = self._lower.slots.directory, wanted.first
            sources = lower.columns([below]).generations[
                first * GENERATION_BYTES : (first + len(wanted.keys)) * GENERATION_BYTES
            ]
            levels = bytes([lower.level]) * len(wanted.keys)
            made = self._directory.promote(
                namespace.id,
                namespace.size_class,
                wanted.parent,
                keys,
                now_ns,
                levels,
                sources,
                are_alone=wanted.are_alone,
            )
            placed = leading(made.states)
            reserved = [number for number, state in enumerate(made.states) if state == SaveState.RESERVED]
            if reserved:
                is_under_way = self._read(wanted, reserved, made, below)
                placed = placed if is_under_way else min(placed, reserved[0])
            if made.id and not is_under_way:
                self._directory.release(made.id, now_ns)
        if below and not is_under_way:
            self._lower.slots.directory.release(below, now_ns)
        return placed

    def settle_chunk(self, moves: Moves, generations: list[int], finished: Finished) -> None:
        """Note that a chunk has landed, with its token ids if known, or failed. `generations`: of the slots in the arena."""
        key = moves.keys[finished.chunk]
        if self._landings.settle_chunk(key, generations[finished.chunk], finished):
            self._lower.touch(key)
        elif finished.outcome is Outcome.BAD_SOURCE:
            place = self._lower.slots.place_of(moves.offsets[finished.chunk])
            self._bad_chunk_log.note_bad_chunk(key, finished.fault, place)

    def _end(self, hold: HoldId, hold_below: HoldId, allowed: tuple[ConnectionId, int] | None, now_ns: int) -> None:
        """A job has ended: release its holds, so that both tiers may evict its chunks. `allowed`: the bytes of a node's
        allowance that it had."""
        if allowed is not None:
            self.for_peers.give_back(*allowed)
        self._under_way -= 1
        self._directory.release(hold, now_ns)
        self._lower.slots.directory.release(hold_below, now_ns)

    def _read(self, wanted: Wanted, reserved: list[int], made: kvpool_native.Reserved, hold_below: HoldId) -> bool:
        """Start to read the reserved chunks. False when the tier takes no job now: then their slots are given up."""
        below = self._lower.slots.directory.columns([hold_below])
        generations, offsets, slots = u64_of(made.generations), u64_of(made.offsets), u64_of(made.slots)
        fresh = [generations[number] for number in reserved]
        below_offsets, below_generations = u64_of(below.offsets), u64_of(below.generations)
        keys = list(wanted.keys.chosen(reserved))
        moves = Moves(
            keys=keys,
            parents=[b""] * len(keys),
            offsets=[below_offsets[wanted.first + number] for number in reserved],
            generations=[below_generations[wanted.first + number] for number in reserved],
            arena_offsets=[offsets[number] for number in reserved],
            arena_slots=[slots[number] for number in reserved],
        )
        job_id = self._start(wanted, moves)
        if not job_id:
            self._landings.give_up(keys, fresh)
            return False
        allowed: tuple[ConnectionId, int] | None = None
        if wanted.peer is not None:
            allowed = wanted.peer, len(moves) * wanted.namespace.layout.stored_bytes
            self.for_peers.take_bytes(*allowed)
        end = partial(self._end, HoldId(made.id), hold_below, allowed)
        self._jobs.add_job(job_id, len(moves), partial(self.settle_chunk, moves, fresh), end)
        self._under_way += 1
        return True

    def _start(self, wanted: Wanted, moves: Moves) -> JobId:
        try:
            failpoint.reach("daemon.promote.before_read")
        except OSError:
            return NOT_STARTED
        return self._lower.read(wanted.namespace, moves, is_urgent=wanted.is_urgent)
