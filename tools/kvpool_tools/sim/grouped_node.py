"""Simulated node for a layout with groups: full layers, and layers with a window, without bytes.

The daemon's own classes as in `sim.node`, for one tier: the native directory, `Readers` with its leases over groups, `Writers`.
A request looks up as the client library does, leases what a hit needs of both groups, and stores the full layers of every block
and the window's before two ends: the prompt's, and the end to which the full layers alone were stored (the junction).

One thread. Invariant: between two calls of `serve` nothing is leased or reserved.
"""

from dataclasses import dataclass, replace
from typing import Any

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.config.config import Config
from kvpool.ids import CHECKSUM_BYTES, EPOCH_BYTES, ConnectionId
from kvpool.index.namespaces import Namespaces
from kvpool.index.parts import Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.layouts.groups import WINDOW, Group
from kvpool.pool.readers.readers import Readers
from kvpool.pool.readers.runs import Run
from kvpool.pool.writers.commit_columns import CommitColumns
from kvpool.pool.writers.retention import Retention
from kvpool.pool.writers.writers import Writers
from kvpool.states import SaveState
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.dram.tier import plan_geometry
from kvpool_tools.sim.node import CHUNK_BYTES, LAYOUT, MODEL, POLICIES, SEED, SimulatedArena, VirtualClock

# Each group's chunks are in segments of their own: so many make their shares fine enough.
SEGMENTS = 256
SEGMENT_CHUNKS_MIN = 8


@dataclass(frozen=True, slots=True)
class Request:
    """The keys of a prompt's blocks in each group, the root first."""

    full: KeyColumn
    window: KeyColumn


class GroupedNode:
    """A node with room for `blocks` blocks of all `layers` layers, of which `full_layers` are full and the others have a window
    of `window_blocks` blocks."""

    def __init__(
        self, *, blocks: int, window_blocks: int, full_layers: int, layers: int, policy: str, config: Config
    ) -> None:
        assert policy in POLICIES
        assert blocks > 0
        assert window_blocks > 0
        assert 0 < full_layers < layers
        layout = _layout_of(window_blocks, full_layers, layers)
        chunk_bytes = layers * CHUNK_BYTES
        capacity = blocks * chunk_bytes
        segment = max(SEGMENT_CHUNKS_MIN * chunk_bytes, capacity // SEGMENTS)
        smallest = min(full_layers, layers - full_layers) * CHUNK_BYTES
        dram = replace(config.dram, capacity=capacity, segment=segment, max_chunks=max(64, capacity // smallest))
        geometry = plan_geometry(dram)
        index = kvpool_native.Mapping.create("kvpool-simulated-index", geometry.index_bytes)
        self._clock = VirtualClock()
        self._directory = kvpool_native.Directory(None, index, geometry, bytes(EPOCH_BYTES), policy, SEED)
        self._directory.cap_retained(config.dram.retained_quota)
        for number in range(geometry.segments):
            self._directory.mark_segment_ready(number)
        self._index = kvpool_native.IndexView(index)
        arena = SimulatedArena(self._directory, capacity, dram.max_chunks)
        tiering = Tiering(arena, [], self._clock)
        server = config.server
        self._readers = Readers(
            self._directory, tiering, ttl_ns=int(server.lease_ttl * NS_PER_S), leases_max=server.max_leases
        )
        self._writers = Writers(
            self._directory,
            Retention(self._directory, tiering),
            ttl_ns=int(server.reservation_ttl * NS_PER_S),
            reservations_max=server.max_reservations,
        )
        self._window_blocks = window_blocks
        opened = Namespaces(self._directory).open_groups(MODEL, layout)
        self._session = EngineSession.over(ConnectionId(1), MODEL, layout, opened=opened, lease_ttl_ns=0)

    def __repr__(self) -> str:
        return f"<GroupedNode {self._directory.stats()['chunks']} chunks, {self._session.layout}>"

    def serve(self, request: Request, now_ns: int) -> int:
        """Serve one request: lease the hit, then store the rest. Returns the hit's blocks."""
        self._clock.set(now_ns)
        full = end = self._index.lookup(request.full.packed)[0]
        if end:
            end = self._index.last_run(request.window.packed, end, self._window_blocks)[0]
        hit = self._lease(request, end) if end else 0
        self._store(0, request.full.before(full), request.full[full:])
        for boundary in sorted({len(request.full), full} - {0, hit}):
            for chunk in range(max(0, boundary - self._window_blocks), boundary):
                self._store(1, b"", request.window[chunk : chunk + 1])
        return hit

    def verify(self) -> list[str]:
        """Broken invariants of every class, one line each."""
        return self._directory.verify() + self._readers.verify() + self._writers.verify()

    def _lease(self, request: Request, end: int) -> int:
        """Lease and release what a hit of so many blocks needs. Returns the blocks: all, or none."""
        now_ns = self._clock.now_ns()
        keys = (request.full[:end], request.window[max(0, end - self._window_blocks) : end])
        runs = [Run(part, column) for part, column in zip(self._session.parts, keys, strict=True)]
        task = self._readers.begin_task(self._session, runs, chunks=end)
        while task.advance(now_ns) is Step.MORE:
            pass
        grant = self._readers.grant(self._session, self._readers.take_holds(self._session, task), now_ns)
        if not grant.lease:
            task.release_holds(now_ns)
            return 0
        self._readers.release(self._session, grant.lease, now_ns)
        return end

    def _store(self, group: int, parent: bytes, keys: KeyColumn) -> None:
        """Store a group's chunks behind a parent; what is there already stays."""
        if not len(keys):
            return
        session, now_ns = self._session.of_group(group), self._clock.now_ns()
        slots = self._writers.reserve(session, parent, keys, now_ns, may_wait=False)
        assert slots is not None
        reserved = slots.states.count(SaveState.RESERVED)
        if reserved:
            checksums = bytes(reserved * session.layout.extents * CHECKSUM_BYTES)
            self._writers.commit_all(session, slots.reservation, CommitColumns(checksums), now_ns)


def _layout_of(window_blocks: int, full_layers: int, layers: int) -> Layout:
    geometry: dict[str, Any] = {
        "kv_heads": LAYOUT.kv_heads,
        "head_dim": LAYOUT.head_dim,
        "dtype": LAYOUT.dtype,
        "planes": LAYOUT.planes,
    }
    window = window_blocks * LAYOUT.chunk_tokens
    return Layout(
        chunk_tokens=LAYOUT.chunk_tokens,
        groups=(
            Group(layers=full_layers, **geometry),
            Group(kind=WINDOW, window=window, layers=layers - full_layers, **geometry),
        ),
    )
