"""Simulated pool: a daemon's own classes without bytes, over one directory, on a clock that the caller sets.

The native directory without an arena, `Readers` and `Writers`, and the links to lower tiers that the caller makes. No decision
is made here. One thread. Invariant: between two calls nothing of a request is held.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.config.config import Config
from kvpool.ids import CHECKSUM_BYTES, EPOCH_BYTES
from kvpool.index.namespaces import Namespaces
from kvpool.index.parts import Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.pool.readers.readers import Readers
from kvpool.pool.readers.runs import Run
from kvpool.pool.writers.commit_columns import CommitColumns
from kvpool.pool.writers.reserve_task import ReservedSlots
from kvpool.pool.writers.retention import NO_RETENTION, Retention, RetentionColumns
from kvpool.pool.writers.writers import Writers
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.messages import Leased
from kvpool.states import SaveState
from kvpool.tiering.link import ArenaSide
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiering.tiering import Tiering

# A simulated chunk is as small as a slot can be: sizes are counts of blocks.
LAYOUT = Layout(layers=1, planes=1, kv_heads=1, head_dim=8, dtype="uint8", chunk_tokens=512)
CHUNK_BYTES = LAYOUT.stored_bytes
MODEL = "simulated"
# The eviction policies that the native directory has, its default first.
POLICIES = ("class-queues", "lru")
# Seed of the policy's sample: a simulation gives the same result each time.
SEED = bytes(range(16))


class VirtualClock:
    """A clock that stays where it is set. Invariant: it never goes backwards."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since the trace's start."""
        return self._now_ns

    def set(self, now_ns: int) -> None:
        """Go on to a later time."""
        assert now_ns >= self._now_ns
        self._now_ns = now_ns


@dataclass(frozen=True, slots=True)
class SimulatedArena:
    """An arena without memory; see `ArenaTier`."""

    directory: kvpool_native.Directory
    capacity_bytes: int
    max_chunks: int


def _no_links(_side: ArenaSide) -> list[LowerLink]:
    """Links of a pool without lower tiers."""
    return []


class SimulatedPool:
    """See the module. `make_links`: the links to its lower tiers, from the arena's side of them."""

    def __init__(
        self,
        config: Config,
        geometry: kvpool_native.DirectoryGeometry,
        *,
        policy: str,
        make_links: Callable[[ArenaSide], list[LowerLink]] = _no_links,
    ) -> None:
        index = kvpool_native.Mapping.create("kvpool-simulated-index", geometry.index_bytes)
        self.clock = VirtualClock()
        self.directory = kvpool_native.Directory(None, index, geometry, bytes(EPOCH_BYTES), policy, SEED)
        self.directory.cap_retained(config.dram.retained_quota)
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        self.index = kvpool_native.IndexView(index)
        self.namespaces = Namespaces(self.directory)
        arena = SimulatedArena(self.directory, config.dram.capacity, geometry.max_chunks)
        self.links = make_links(ArenaSide(arena, self.namespaces, self.clock))
        self.tiering = Tiering(arena, self.links, self.clock)
        server = config.server
        self.readers = Readers(
            self.directory, self.tiering, ttl_ns=int(server.lease_ttl * NS_PER_S), leases_max=server.max_leases
        )
        self.writers = Writers(
            self.directory,
            Retention(self.directory, self.tiering),
            ttl_ns=int(server.reservation_ttl * NS_PER_S),
            reservations_max=server.max_reservations,
        )

    def lease(self, session: EngineSession, runs: Sequence[Run], chunks: int, *, may_wait: bool) -> Leased | None:
        """Lease a hit of so many chunks; None where it could wait for room."""
        now_ns = self.clock.now_ns()
        request = m.Acquire(b"".join(run.packed for run in runs), chunks)
        taken = self.readers.hold_at_once(session, request, now_ns, holder=session.holder)
        if taken is not None:
            return self.readers.grant(session, taken, now_ns)
        task = self.readers.begin_task(session, runs, chunks=chunks)
        with self.tiering.protecting(may_wait):
            while (step := task.advance(now_ns)) is Step.MORE:
                pass
        grant = None
        if step is not Step.WAIT or not may_wait:
            grant = self.readers.grant(session, self.readers.take_holds(session, task), now_ns)
        task.release_holds(now_ns)
        return grant

    def save(
        self,
        session: EngineSession,
        parent: bytes,
        keys: KeyColumn,
        *,
        may_wait: bool = False,
        wanted: RetentionColumns = NO_RETENTION,
    ) -> ReservedSlots | None:
        """Store chunks behind a parent; what was there already stays. The slots as they were reserved; None, and nothing is
        stored, where it could wait for room."""
        now_ns = self.clock.now_ns()
        with self.tiering.protecting(may_wait):
            slots = self.writers.reserve(session, parent, keys, now_ns, may_wait=may_wait, wanted=wanted)
        reserved = slots.states.count(SaveState.RESERVED) if slots is not None else 0
        if slots is not None and reserved:
            checksums = bytes(reserved * session.layout.extents * CHECKSUM_BYTES)
            self.writers.commit_all(session, slots.reservation, CommitColumns(checksums), now_ns)
        return slots

    def verify(self) -> list[str]:
        """Broken invariants of every class, one line each: holes would be among them."""
        return self.directory.verify() + self.readers.verify() + self.writers.verify() + self.tiering.verify()
