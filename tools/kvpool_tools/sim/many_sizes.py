"""Pool of many models with chunks of different sizes, without bytes: the work of its control thread, for measurements.

A `SimulatedPool` with as many models as there are chunk sizes, driven by single saves instead of a trace. One thread.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvpool.config.config import load_config
from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.layout import Layout
from kvpool.pool.writers.retention import NO_RETENTION, RetentionColumns
from kvpool.states import WriteOrder
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiers.dram.tier import plan_geometry
from kvpool_tools.sim.metadata_tier import MetadataTier
from kvpool_tools.sim.pool import POLICIES, SimulatedPool

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
        largest = max(layout.stored_bytes for layout in layouts)
        self._tier = MetadataTier(config, blocks=max_chunks // len(layouts), chunk_bytes=largest, segments=len(layouts))
        self._pool = pool = SimulatedPool(
            config,
            plan_geometry(dram, further_entries=2 * max_chunks),
            policy=POLICIES[0],
            make_links=lambda side: [LowerLink(side, self._tier)],
        )
        self.directory = pool.directory
        (self._link,) = pool.links
        self._sessions = [
            EngineSession(
                ConnectionId(1), layout, f"model-{number}", pool.namespaces.open_ranks(f"model-{number}", layout)
            )
            for number, layout in enumerate(layouts)
        ]
        self._draws = np.random.default_rng(1)

    def save(self, model: int, chunks: int, priority: int | None = None) -> None:
        """Reserve and commit a new chain."""
        session, keys = self._sessions[model], KeyColumn(self._draws.bytes(packed_bytes(chunks)))
        self._pool.clock.set(self._pool.clock.now_ns() + TICK_NS)
        wanted = NO_RETENTION if priority is None else RetentionColumns.of_each(chunks, priority, duration_ms=0)
        self._pool.save(session, b"", keys, wanted=wanted)

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
            if not turn(lambda: self._link.demotions.run_all(self._pool.clock.now_ns(), WriteOrder.COLDEST)):
                if not self._tier.has_finished:
                    return
                turn(self._link.on_completed)
