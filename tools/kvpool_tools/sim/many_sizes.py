"""Pool of many models with chunks of different sizes, without bytes: the work of its control thread, for measurements.

The daemon's own classes, as in `sim.node`, but with as many models as there are chunk sizes, and driven by single saves instead
of a trace. One thread.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

import kvpool_native
from kvpool.config.config import load_config
from kvpool.ids import CHECKSUM_BYTES, EPOCH_BYTES, ConnectionId
from kvpool.index.namespaces import Namespaces
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.layout import Layout
from kvpool.pool.writers.commit_columns import CommitColumns
from kvpool.pool.writers.retention import NO_RETENTION, Retention, RetentionColumns
from kvpool.pool.writers.writers import Writers
from kvpool.states import SaveState, WriteOrder
from kvpool.tiering.link import ArenaSide
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.dram.tier import plan_geometry
from kvpool_tools.sim.metadata_tier import MetadataTier
from kvpool_tools.sim.node import SEED, SimulatedArena, VirtualClock

SEGMENT_BYTES = 64 << 20
TICK_NS = 1_000_000


class ManySizes:
    """A pool's control thread without bytes: models of different chunk sizes, and a lower tier whose jobs are done at once."""

    def __init__(self, layouts: list[Layout], *, capacity: int, max_chunks: int, watermark: float) -> None:
        config = load_config(None, [f"ssd.watermark={watermark}", "dram.retained_quota=1"])
        config = replace(
            config, dram=replace(config.dram, capacity=capacity), ssd=replace(config.ssd, capacity=capacity)
        )
        dram = replace(config.dram, segment=SEGMENT_BYTES, max_chunks=max_chunks)
        geometry = plan_geometry(dram, further_entries=2 * max_chunks)
        index = kvpool_native.Mapping.create("kvpool-bench-index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(None, index, geometry, bytes(EPOCH_BYTES), "class-queues", SEED)
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        self._clock = VirtualClock()
        namespaces = Namespaces(self.directory)
        largest = max(layout.stored_bytes for layout in layouts)
        self._tier = MetadataTier(config, blocks=max_chunks // len(layouts), chunk_bytes=largest, segments=len(layouts))
        arena = SimulatedArena(self.directory, capacity, max_chunks)
        self._link = LowerLink(ArenaSide(arena, namespaces, self._clock), self._tier)
        self._tiering = Tiering(arena, [self._link], self._clock)
        self._writers = Writers(
            self.directory, Retention(self.directory, self._tiering), ttl_ns=10**12, reservations_max=10
        )
        self._sessions = [
            EngineSession(ConnectionId(1), layout, f"model-{number}", namespaces.open_ranks(f"model-{number}", layout))
            for number, layout in enumerate(layouts)
        ]
        self._draws = np.random.default_rng(1)

    def save(self, model: int, chunks: int, priority: int | None = None) -> None:
        """Reserve and commit a new chain."""
        session, keys = self._sessions[model], KeyColumn(self._draws.bytes(packed_bytes(chunks)))
        now_ns = self._clock.now_ns() + TICK_NS
        self._clock.set(now_ns)
        wanted = NO_RETENTION if priority is None else RetentionColumns.of_each(chunks, priority, duration_ms=0)
        reserved_slots = self._writers.reserve(session, b"", keys, now_ns, may_wait=False, wanted=wanted)
        assert reserved_slots is not None
        reserved = reserved_slots.states.count(SaveState.RESERVED)
        if reserved:
            checksums = bytes(CHECKSUM_BYTES * session.layout.extents * reserved)
            self._writers.commit_all(session, reserved_slots.reservation, CommitColumns(checksums), now_ns)

    def look_for_demotions(self) -> None:
        """Run the control thread's work after each commit."""
        self._link.run()

    def wait_written(self) -> None:
        """Wait until nothing is being written."""
        while self._tier.has_finished:
            self._link.on_completed()

    def demote_all(self, turn: Callable[[Callable[[], int | None]], int | None]) -> None:
        """Have the lower tier store everything. `turn` does one turn's work and returns its result."""
        self._link.demotions.forget_written()
        while True:
            if not turn(lambda: self._link.demotions.run_all(self._clock.now_ns(), WriteOrder.COLDEST)):
                if not self._tier.has_finished:
                    return
                turn(self._link.on_completed)
