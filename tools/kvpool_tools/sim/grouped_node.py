"""Simulated node for a layout with groups: full layers, and layers with a window, without bytes.

A `SimulatedPool` of one tier, with its leases over groups.
A request looks up as the client library does, leases what a hit needs of both groups, and stores the full layers of every block
and the window's before two ends: the prompt's, and the end to which the full layers alone were stored (the junction).

One thread. Invariant: between two calls of `serve` nothing is leased or reserved.
"""

from dataclasses import dataclass, replace
from typing import Any

from kvpool.config.config import Config
from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.layouts.groups import WINDOW, Group
from kvpool.pool.readers.runs import Run
from kvpool.tiers.dram.tier import plan_geometry
from kvpool_tools.sim.pool import CHUNK_BYTES, LAYOUT, MODEL, POLICIES, SimulatedPool

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
        self._pool = SimulatedPool(replace(config, dram=dram), plan_geometry(dram), policy=policy)
        self._window_blocks = window_blocks
        opened = self._pool.namespaces.open_groups(MODEL, layout)
        self._session = EngineSession.over(ConnectionId(1), MODEL, layout, opened=opened, lease_ttl_ns=0)

    def __repr__(self) -> str:
        return f"<GroupedNode {self._pool.directory.stats()['chunks']} chunks, {self._session.layout}>"

    def serve(self, request: Request, now_ns: int) -> int:
        """Serve one request: lease the hit, then store the rest. Returns the hit's blocks."""
        self._pool.clock.set(now_ns)
        full = end = len(self._pool.index.lookup(request.full.packed))
        if end:
            end = self._pool.index.last_run(request.window.packed, end, self._window_blocks)[0]
        hit = self._lease(request, end) if end else 0
        self._store(0, request.full.before(full), request.full[full:])
        for boundary in sorted({len(request.full), full} - {0, hit}):
            for chunk in range(max(0, boundary - self._window_blocks), boundary):
                self._store(1, b"", request.window[chunk : chunk + 1])
        return hit

    def verify(self) -> list[str]:
        """Broken invariants of every class, one line each."""
        return self._pool.verify()

    def _lease(self, request: Request, end: int) -> int:
        """Lease and release what a hit of so many blocks needs. Returns the blocks: all, or none."""
        keys = (request.full[:end], request.window[max(0, end - self._window_blocks) : end])
        runs = [Run(part, column) for part, column in zip(self._session.parts, keys, strict=True)]
        grant = self._pool.lease(self._session, runs, end, may_wait=False)
        if grant is None or not grant.lease:
            return 0
        self._pool.readers.release(self._session, grant.lease, self._pool.clock.now_ns())
        return end

    def _store(self, group: int, parent: bytes, keys: KeyColumn) -> None:
        """Store a group's chunks behind a parent; what is there already stays."""
        if len(keys):
            self._pool.save(self._session.of_group(group), parent, keys)


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
