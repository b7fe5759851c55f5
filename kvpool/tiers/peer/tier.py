"""Peer tier: chunks that other nodes have, asked for over the control plane and received by a transport.

A pull asks the node from which the chunks are here first, which takes a lease and offers what it has; native threads then bring
extent 0 of all chunks first, straight into the slots, compare each extent with its checksum and announce it
(docs/peer-protocol.md). What one node does not bring the next one is asked for (`pull_driver`), and all that does not come is a
miss. A node that fails is not asked for a while (`circuit_breaker`).

Loop thread only; bytes are received by the queue's threads.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Sequence

import kvpool_native
from kvpool.clock import Clock, Deadline
from kvpool.config.peer_options import PeerConfig
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.index.remote_chunks import RemoteRun as RemoteChunksRun
from kvpool.key_column import KeyColumn
from kvpool.peers.back_off import Uniform
from kvpool.peers.circuit_breaker import BreakerState
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.states import Level
from kvpool.tiers.base import NOT_STARTED, UNOWNED, ArenaMemory, Counters, Finished, Info, JobId, Moves, TierOwner
from kvpool.tiers.peer.choice import choose_run
from kvpool.tiers.peer.node_records import NodeRecords
from kvpool.tiers.peer.pace import Pace
from kvpool.tiers.peer.pull_driver import LINE_S, PULL_FAULTS, PULLS_MAX, PullDriver
from kvpool.tiers.peer.pulls import Pull, Pulls
from kvpool.tiers.remote import Asker, PullOrder, RemoteRun
from kvpool.transfer.stream_transport import StreamTransport
from kvpool.transfer.transport import Transport

NAME = "peer"
# Between two times that paces are published though nothing was pulled.
PUBLISH_S = 5.0


class _Silent:
    """The nodes that are not asked now, and `others`."""

    def __init__(self, tier: "PeerTier", others: Collection[str] = ()) -> None:
        self._tier = tier
        self._others = others

    def __contains__(self, node: object) -> bool:
        return node in self._others or self._tier.is_silent(NodeName(str(node)))


class PeerTier:
    """See the module, and `Remote`. `link_of`: the link to a node, if there is one."""

    name = NAME
    level = Level.PEER

    def __init__(
        self,
        memory: ArenaMemory,
        chunks: RemoteChunks,
        link_of: Callable[[NodeName], PeerLink | None],
        *,
        config: PeerConfig,
        clock: Clock,
        random: Uniform,
        transports: Sequence[Transport] = (),
    ) -> None:
        """`transports`: ways by which chunks may come beside the stream, the best one first."""
        self._chunks = chunks
        self._link_of = link_of
        self._clock = clock
        self._index = kvpool_native.IndexView(memory.index)
        self._pulls = Pulls(kvpool_native.LandingBoard(memory.index))
        stream = StreamTransport(
            memory.arena,
            memory.index,
            threads=config.threads,
            jobs_max=PULLS_MAX,
            connections=config.connections,
        )
        self._transports = (*transports, stream)
        self.nodes = NodeRecords(clock, random)
        self._publishing: asyncio.TimerHandle | None = None
        self._unmeasured = Pace(clock)
        self._driver = PullDriver(
            self._pulls,
            chunks,
            link_of,
            nodes=self.nodes,
            transports=self._transports,
            config=config,
            clock=clock,
            find_next=self._find_next,
            on_ended=lambda: self._owner.on_completed(),
        )
        self._owner: TierOwner = UNOWNED
        self.fleet_stats: Callable[[], dict[str, int]] = dict  # counters of what serves others and follows them
        self.fleet_problems: Callable[[], list[str]] = list  # shortcomings of these, one line each; any thread
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<PeerTier {self._pulls!r}>"

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:  # noqa: ARG002 - nothing is restored
        """See `Tier`."""
        self._owner = owner
        self._driver.start()
        self._publish_paces()

    async def close(self) -> bool:
        """See `Tier`."""
        self._is_closed = True
        if self._publishing is not None:
            self._publishing.cancel()
        return await self._driver.close()

    def note_life(self, node: NodeName, life: bytes) -> None:
        """A node is connected. What failed in another life says nothing about this one."""
        record = self.nodes.find(node)
        if record is not None and record.life != life:
            record.begin_life(life)
        if (link := self._link_of(node)) is not None:
            for transport in self._transports:
                transport.meet(node, link)

    def find(self, namespace: Namespace, keys: KeyColumn, first: int) -> RemoteRun:
        """See `Remote`. Of several runs the one by which the chunks are here first; nodes that have brought less than they
        seemed to have only where no other has the first chunk. Of a chain no more than a Pull may name."""
        keys = keys[: r.PULL_KEYS_MAX] if namespace.layout.is_chained else keys
        if self._is_closed or len(keys) <= first:
            return RemoteRun(first)
        run = self._choose(namespace, keys, first, _Silent(self))
        return RemoteRun(first) if run is None else RemoteRun(first + run.chunks, run.node)

    def find_at(self, asker: Asker, keys: KeyColumn, first: int) -> RemoteRun:
        """See `Remote`. No more than a Pull may name."""
        node, keys = asker.owner, keys[: r.PULL_KEYS_MAX]
        if self._is_closed or len(keys) <= first or self.is_silent(NodeName(node)):
            return RemoteRun(first)
        if not self._driver.may_name(asker, node, keys[first]):
            return RemoteRun(first)
        return RemoteRun(len(keys), node, is_named=True)

    def find_each(self, namespace: Namespace, keys: KeyColumn) -> list[tuple[str, list[int]]]:
        """See `Remote`."""
        return [] if self._is_closed else self._spread(namespace, keys, _Silent(self))

    def is_silent(self, node: NodeName) -> bool:
        """Whether a node is not asked now: it is not connected, or has failed."""
        link, record = self._link_of(node), self.nodes.find(node)
        if link is None or link.life is None:
            return True
        breaker = None if record is None else record.breaker
        return breaker is not None and breaker.state is not BreakerState.CLOSED and breaker.retry_s > 0

    def read(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        """See `Remote`."""
        node, layout = NodeName(order.run.node), namespace.layout
        keys = len(order.before) + len(moves)
        most = r.keys_max(layout, are_alone=order.are_alone)
        if self._is_closed or keys > most or (order.before and (order.are_alone or not layout.is_chained)):
            return NOT_STARTED
        if self.is_silent(node):
            return NOT_STARTED
        link, record = self._link_of(node), self.nodes.of(node)
        record.pulls += 1
        record.life = b"" if link is None or link.life is None else link.life.incarnation
        pull = self._pulls.begin_pull(order, namespace, moves, Deadline(LINE_S, self._clock))
        self._driver.begin_pull(pull)
        return pull.job

    def completed(self) -> list[Finished]:
        """See `Tier`."""
        return self._pulls.take_ended()

    def stats(self) -> Counters:
        """See `Tier`."""
        chunks = self._chunks.stats()
        return {
            f"{NAME}.read_bytes": self._driver.read_bytes,
            **{f"{NAME}.known_{name}": count for name, count in chunks.items()},
            **{f"{NAME}.failed_pulls_{name}": self._driver.counts[name] for name in PULL_FAULTS},
            **{f"{NAME}.{name}": count for name, count in self.fleet_stats().items()},
            **{
                f"{NAME}.{transport.name}.{name}": count
                for transport in self._transports
                for name, count in transport.stats().items()
            },
            f"{NAME}.suspended_nodes": sum(
                record.breaker.state is not BreakerState.CLOSED for _, record in self.nodes.all()
            ),
        }

    def info(self) -> Info:
        """See `Tier`."""
        used = {
            f"{NAME}_{transport.name}_{name}": value
            for transport in self._transports
            for name, value in transport.info().items()
        }
        return {"peer_index_bytes": self._chunks.mapping.size, **used}

    def verify(self) -> list[str]:
        """See `Tier`."""
        return self._pulls.verify() + [fault for transport in self._transports for fault in transport.verify()]

    def problems(self) -> list[str]:
        """See `Tier`."""
        return []

    def shortcomings(self) -> list[str]:
        """See `Tier`."""
        return self.fleet_problems()

    def _publish_paces(self) -> None:
        """Show clients how long chunks of each node take. Now and then, because what was measured counts less with time."""
        for node, record in self.nodes.all():
            self._chunks.set_pace(NodeName(node), record.pace.packed())
        self._publishing = asyncio.get_running_loop().call_later(PUBLISH_S, self._publish_paces)

    def _choose(
        self, namespace: Namespace, keys: KeyColumn, first: int, avoid: Container[NodeName]
    ) -> RemoteChunksRun | None:
        runs = self._chunks.runs(keys, first, avoid, namespace=namespace.id, now_ns=self._clock.now_ns())
        runs = [self._cut(namespace, run) for run in runs]
        chunk_bytes = namespace.layout.stored_bytes

        def cost_s(node: NodeName, chunks: int) -> float:
            return self._cost_s(node, chunks * chunk_bytes)

        return choose_run([run for run in runs if not self.nodes.is_deferred(run.node)] or runs, cost_s)

    def _cut(self, namespace: Namespace, run: RemoteChunksRun) -> RemoteChunksRun:
        """As much of a run as one pull may name: a chain whole, of chunks without a parent a bounded number."""
        if namespace.layout.is_chained:
            return run
        most = r.pulled_chunks_max(namespace.layout)
        return RemoteChunksRun(run.node, min(run.chunks, most))

    def _find_next(self, pull: Pull) -> NodeName | None:
        """The node to be asked for what is left of a pull, after those that were."""
        silent = _Silent(self, {pull.node, *pull.tried})
        if pull.are_alone:
            keys = KeyColumn.of([pull.moves.keys[chunk] for chunk in pull.rest])
            node = next((NodeName(name) for name, _ in self._spread(pull.namespace, keys, silent)), None)
        else:
            run = self._choose(pull.namespace, KeyColumn.of(pull.moves.keys[pull.first :]), 0, silent)
            node = None if run is None else run.node
        if node is not None:
            self.nodes.of(node).pulls += 1
        return node

    def _spread(self, namespace: Namespace, keys: KeyColumn, avoid: Container[NodeName]) -> list[tuple[str, list[int]]]:
        """Which nodes are asked for which of these chunks, each alone: of those that have a chunk the one that has most of them
        all; of equals the one from which these come first. Nodes that have brought less than they seemed to have come last."""
        by_node = self._chunks.keys_by_node(keys, avoid, namespace=namespace.id, now_ns=self._clock.now_ns())
        size = namespace.layout.stored_bytes

        def place(node: NodeName) -> tuple[bool, int, float]:
            count = len(by_node[node])
            return self.nodes.is_deferred(node), -count, self._cost_s(node, count * size)

        spread: list[tuple[str, list[int]]] = []
        left = set(range(len(keys)))
        for node in sorted(by_node, key=place):
            taken = [number for number in by_node[node] if number in left]
            if taken:
                spread.append((node, taken))
                left.difference_update(taken)
        return spread

    def _cost_s(self, node: NodeName, size: int) -> float:
        """How long so many bytes more of a node take."""
        record = self.nodes.find(node)
        pace = self._unmeasured if record is None else record.pace
        return pace.cost_s(self._pulls.bytes_of(node) + size)
