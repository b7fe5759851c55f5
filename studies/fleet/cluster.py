"""Cluster: simulated nodes that serve one trace, with what a router, peers and a shared store change for them.

A request, in order:

1. The router's model names the node.
2. The node leases what it has: `SimulatedNode.load`, the daemon's own classes.
3. What follows is looked for in the remote index, if there are peers, and in the shared store, if there is one; the longer run
   is taken, of equals the peer's. It is moved only if that takes less time than to compute the blocks.
4. The peer leases them, which may shorten the run: the index was stale. The node stores what it gets, as a save does.
5. The rest is computed and stored.

Everything of a request happens at its time; the time that bytes take occupies links and disks, and is subtracted from what is
saved, but no later request waits for it. One thread.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import kvpool_native
from kvpool.clock import NS_PER_S, MonotonicClock
from kvpool.config.config import Config
from kvpool.journal.event_log import ChangeKind
from kvpool.key_column import KeyColumn
from kvpool.row_structs import struct_of
from kvpool_tools.sim.node import SimulatedNode
from kvpool_tools.sim.workload import Workload
from studies.fleet.cell import ClusterCell, ClusterOutcome
from studies.fleet.links import Links, Rates
from studies.fleet.remote_index import BlockChange, RemoteIndex
from studies.fleet.routers import FOLLOWS_EVENTS, make_router
from studies.fleet.sessions import sessions_of
from studies.fleet.shared_store import SharedStore

# Room for the changes of one request: a prompt's blocks, those that make room for them, and those that move between tiers.
FEED_CHANGES_MAX = 1 << 16
_ROW, _ = struct_of(kvpool_native.CHANGE_ROW, "key", "unused")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where blocks come from: a node, or the store (None)."""

    node: int | None
    blocks: int


@dataclass(frozen=True, slots=True)
class _Request:
    """A request at its node. `chain`: its full blocks."""

    node: int
    chain: Sequence[int]
    keys: KeyColumn
    now_ns: int

    @property
    def now_s(self) -> float:
        """Seconds since the trace's start."""
        return self.now_ns / NS_PER_S


class Cluster:
    """See the module. `outcome` is what has come of the requests so far."""

    def __init__(self, workload: Workload, cell: ClusterCell, config: Config) -> None:
        self._settings = settings = cell.settings
        self._keys = workload.keys()
        self._block_of = {self._keys[block].tobytes(): block for block in range(workload.unique)}
        self._feed = kvpool_native.ChangeFeed(FEED_CHANGES_MAX)
        self._nodes = [
            SimulatedNode(dram_blocks=cell.dram_blocks, ssd_blocks=cell.ssd_blocks, policy=cell.policy, config=config)
            for _ in range(cell.nodes)
        ]
        for node in self._nodes:
            node.report_to(self._feed)
        delay_ns = int(settings.event_delay_s * NS_PER_S)
        known = RemoteIndex(None, delay_ns)  # to the router
        self._router = make_router(
            settings.router, cell.nodes, settings.seed, known=known, block_compute_s=settings.block_compute_s
        )
        self._index: RemoteIndex | None = None
        if settings.has_peers and cell.nodes > 1:
            self._index = RemoteIndex(-(-settings.index_entries * cell.nodes // (cell.nodes - 1)), delay_ns)
        follows = [known] if settings.router == FOLLOWS_EVENTS else []
        self._tables = follows + ([self._index] if self._index is not None else [])
        self._store = SharedStore(settings.store_blocks) if settings.store_blocks else None
        rates = Rates(
            settings.network_bytes_per_s,
            settings.network_latency_s,
            settings.disk_bytes_per_s,
            settings.disk_latency_s,
        )
        self._links = Links(cell.nodes, rates)
        self._used: set[int] = set()
        self._changes_at: Counter[int] = Counter()  # by second
        self.outcome = ClusterOutcome()

    def __repr__(self) -> str:
        return f"<Cluster of {len(self._nodes)} nodes, {self.outcome.hits} hits>"

    def serve(self, session: int, asked: int, chain: Sequence[int], now_ns: int) -> None:
        """Serve one request: `chain` are its full blocks, of `asked` in all."""
        for table in self._tables:
            table.advance(now_ns)
        now_s = now_ns / NS_PER_S
        node = self._router.choose(session, chain, now_s)
        self._used.add(node)
        missed = asked
        if chain:
            request = _Request(node, chain, KeyColumn(self._keys[chain].tobytes()), now_ns)
            missed -= self._serve(request)
        self.outcome.missed += missed
        self._router.note_served(node, missed, now_s)

    def finish(self) -> ClusterOutcome:
        """The outcome, after the last request."""
        outcome, index = self.outcome, self._index
        outcome.nodes_used = len(self._used)
        outcome.ssd_blocks_written = sum(node.ssd_blocks_written for node in self._nodes)
        if index is not None:
            others = len(self._nodes) - 1
            outcome.index_entries = index.entries_peak * others // len(self._nodes)
            outcome.index_forgotten = index.forgotten
            outcome.holes += len(index.verify())
        outcome.changes_peak = max(self._changes_at.values(), default=0)
        outcome.holes += sum(len(node.verify()) for node in self._nodes)
        if outcome.trace_s:
            outcome.busiest_share = max(*self._links.sending_s, *self._links.receiving_s) / outcome.trace_s
        return outcome

    def _serve(self, request: _Request) -> int:
        """Serve the full blocks. Returns how many were hits."""
        outcome, node = self.outcome, self._nodes[request.node]
        hits = node.load(request.keys, request.now_ns)
        outcome.hits_dram += hits.dram
        outcome.hits_ssd += hits.ssd
        found = hits.dram + hits.ssd
        reading_s = self._read_disk(request.node, hits.ssd, request.now_s)
        loading_s = min(reading_s, hits.ssd * self._settings.block_compute_s)
        if found < len(request.chain):
            moved, moving_s = self._take_over(request, found)
            found += moved
            loading_s += moving_s
        node.store(request.keys, found, request.now_ns)
        outcome.saved_s += found * self._settings.block_compute_s - loading_s
        self._publish(request, found)
        return found

    def _take_over(self, request: _Request, first: int) -> tuple[int, float]:
        """Blocks from `first` on that come from another node or the store, and how long they take."""
        source = self._find(request, first)
        if not source.blocks:
            return 0, 0.0
        settings, now_s = self._settings, request.now_s
        estimated_s = self._links.estimate_s(
            source.blocks * settings.block_bytes, to=request.node, source=source.node, now_s=now_s
        )
        if estimated_s >= source.blocks * settings.block_compute_s:
            self.outcome.blocks_slow += source.blocks
            return 0, 0.0
        lease_s = 0.0
        if source.node is not None:
            source, lease_s = self._lease(request, first, source, source.node)
        if not source.blocks:
            return 0, settings.network_latency_s  # the answer that it has none
        placed = self._nodes[request.node].store(request.keys[: first + source.blocks], first, request.now_ns)
        if not placed:
            return 0, settings.network_latency_s
        size = placed * settings.block_bytes
        moving_s = self._links.move(size, to=request.node, source=source.node, now_s=now_s)
        if source.node is None:
            self.outcome.hits_store += placed
        else:
            self.outcome.hits_peer += placed
            self.outcome.pulls += 1
        return placed, lease_s + moving_s

    def _find(self, request: _Request, first: int) -> _Source:
        """The longest run of the blocks from `first` on that is known elsewhere."""
        rest = request.chain[first:]
        stored = self._store.count_leading(rest) if self._store is not None else 0
        if self._index is not None:
            owners = self._index.find(rest, asker=request.node)
            if owners.blocks and owners.blocks >= stored:
                node = min(owners.nodes, key=lambda node: (self._links.sending_until_s(node), node))
                return _Source(node, owners.blocks)
        return _Source(None, stored)

    def _lease(self, request: _Request, first: int, wanted: _Source, owner: int) -> tuple[_Source, float]:
        """What the owner still has of the wanted blocks, and how long it takes to read those on its disk."""
        assert self._index is not None
        end = first + wanted.blocks
        hits = self._nodes[owner].load(request.keys[:end], request.now_ns)
        self._report(owner, request.now_ns)
        offered = max(0, hits.dram + hits.ssd - first)
        if offered < wanted.blocks:
            self.outcome.blocks_stale += wanted.blocks - offered
            self._index.forget(request.chain[first + offered : end], owner)
        reading_s = self._read_disk(owner, min(hits.ssd, offered), request.now_s)
        return _Source(owner, offered), reading_s

    def _read_disk(self, node: int, blocks: int, now_s: float) -> float:
        return self._links.read_disk(blocks * self._settings.block_bytes, node=node, now_s=now_s) if blocks else 0.0

    def _publish(self, request: _Request, found: int) -> None:
        """Report what has changed at the node, and write to the store what it publishes there."""
        self._report(request.node, request.now_ns)
        if self._store is not None:
            count = len(request.chain) if self._settings.published == "all" else found
            self.outcome.blocks_to_store += self._store.publish(request.chain[:count])

    def _report(self, node: int, now_ns: int) -> None:
        """Have the changes of the node that has just worked known to the others."""
        if self._feed.waiting:
            has_gap, rows = self._feed.take(FEED_CHANGES_MAX)
            assert not has_gap
            self._note_changes(node, rows, now_ns)

    def _note_changes(self, node: int, rows: bytes, now_ns: int) -> None:
        self.outcome.events += len(self._nodes[node].runs_of(rows))
        changes = [
            BlockChange(self._block_of[key], kind == ChangeKind.ARRIVED)
            for key, _, _, _, kind, _, tiers, _, _, _ in _ROW.iter_unpack(rows)
            # Moves between the tiers of a node are events too, and change no entry.
            if kind == ChangeKind.ARRIVED or (kind == ChangeKind.LEFT and not tiers)
        ]
        self.outcome.changes += len(rows) // _ROW.size
        self._changes_at[now_ns // NS_PER_S] += len(rows) // _ROW.size
        for table in self._tables:
            table.publish(node, changes, now_ns)


def run_cluster(workload: Workload, cell: ClusterCell, config: Config) -> ClusterOutcome:
    """Serve every request of a trace."""
    cluster, sessions, clock = Cluster(workload, cell, config), sessions_of(workload), MonotonicClock()
    cluster.outcome.sessions = int(sessions.max()) + 1
    cluster.outcome.trace_s = float(workload.at_ns[-1] - workload.at_ns[0]) / NS_PER_S
    start_ns = clock.now_ns()
    columns = (sessions, workload.storable, workload.at_ns)
    requests = zip(workload.chains(), *(column.tolist() for column in columns), strict=True)
    for chain, session, storable, now_ns in requests:
        cluster.serve(session, len(chain), chain[:storable], now_ns)
    cluster.outcome.seconds = (clock.now_ns() - start_ns) / NS_PER_S
    return cluster.finish()
