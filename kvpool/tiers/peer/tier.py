"""Peer tier: chunks that other nodes have, asked for over the control plane and received by a transport.

A pull asks the one node that seems to have most, which takes a lease and offers what it has; native threads then bring layer
0 of all chunks first, straight into the slots, compare each layer with its checksum and announce it (docs/peer-protocol.md).
Every wait has a deadline, and all that does not come is a miss. A node that fails is not asked for a while (`circuit_breaker`).

Loop thread only; bytes are received by the queue's threads.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import kvpool_native
from kvpool.clock import NS_PER_S, Clock, Deadline
from kvpool.config.config import Config
from kvpool.errors import KVPoolError, PeerUnreachable
from kvpool.index.namespaces import Namespace
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from kvpool.peers.asking import Asking, share_of
from kvpool.peers.back_off import Uniform
from kvpool.peers.circuit_breaker import BreakerState, Permit
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.tiers.base import (
    NOT_STARTED,
    UNOWNED,
    ArenaMemory,
    Counters,
    Finished,
    Info,
    JobId,
    Moves,
    Outcome,
    TierOwner,
)
from kvpool.tiers.peer.node_records import NodeRecords
from kvpool.tiers.peer.pulls import Pull, Pulls, end_nothing
from kvpool.tiers.peer.recent_misses import WRONG_S, RecentMisses
from kvpool.tiers.peer.settings import PeerTierSettings
from kvpool.tiers.remote import Asker, PullOrder, RemoteRun
from kvpool.transfer.stream_address import StreamAddress, stream_of
from kvpool.transfer.stream_transport import StreamTransport
from kvpool.transfer.transport import ChunkEnd, Order, Region, Transport
from kvpool.types import Level

log = logging.getLogger(__name__)

NAME = "peer"
# Between two times that paces are published though nothing was pulled.
PUBLISH_S = 5.0
# Faults of a path or a node: one that has several of them in a row is not asked for a while.
BROKEN = ("unreachable", "closed", "broken", "stalled", "late", "format", "checksum", "untrusted")
# What may become of a request, each with a counter.
_PULL_FAULTS = ("refused", "unanswered", "unasked", "unencrypted", "empty", "queue_full", "foreign", "other_transport")


class _Silent:
    """The nodes that are not asked now."""

    def __init__(self, tier: "PeerTier") -> None:
        self._tier = tier

    def __contains__(self, node: object) -> bool:
        return self._tier.is_silent(NodeName(str(node)))


class PeerTier:
    """See the module, and `RemoteTier`. `link_of`: the link to a node, if there is one."""

    name = NAME
    level = Level.PEER

    def __init__(
        self,
        memory: ArenaMemory,
        chunks: RemoteChunks,
        link_of: Callable[[NodeName], PeerLink | None],
        *,
        settings: PeerTierSettings,
        clock: Clock,
        random: Uniform,
        transports: Sequence[Transport] = (),
    ) -> None:
        """`transports`: ways by which chunks may come beside the stream, the best one first."""
        self._chunks = chunks
        self._link_of = link_of
        self._settings = settings
        self._clock = clock
        self._index = kvpool_native.IndexView(memory.index)
        self._pulls = Pulls(kvpool_native.LandingBoard(memory.index))
        stream = StreamTransport(memory.arena, memory.index, threads=settings.threads, jobs_max=settings.pulls_max)
        self._transports = (*transports, stream)
        self.nodes = NodeRecords(settings.breaker, settings.pace, clock=clock, random=random)
        self._publishing: asyncio.TimerHandle | None = None
        self._asking, self._misses = Asking(clock), RecentMisses(clock)
        self._wrong = RecentMisses(clock, WRONG_S)
        self._answers: set[asyncio.Task[None]] = set()
        self._owner: TierOwner = UNOWNED
        self.fleet_stats: Callable[[], dict[str, int]] = dict  # counters of what serves others and follows them
        self.fleet_problems: Callable[[], list[str]] = list  # shortcomings of these, one line each; any thread
        self._is_closed = False
        self._read_bytes = 0
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<PeerTier {self._pulls!r}>"

    def start(self, owner: TierOwner) -> None:
        """See `RemoteTier`."""
        self._owner = owner
        for transport in self._transports:
            transport.start(self._take_outcomes)
        self._publish_paces()

    async def close(self) -> bool:
        """See `RemoteTier`."""
        self._is_closed = True
        if self._publishing is not None:
            self._publishing.cancel()
        for task in self._answers:
            task.cancel()
        if self._answers:
            await asyncio.wait(self._answers)
        has_ended = all([await transport.close() for transport in self._transports])
        if has_ended:
            for pull in self._pulls.all():
                self._pulls.fail(pull, 0, Outcome.CANCELLED, "cancelled")
        self._owner.on_completed()
        return has_ended

    def reconfigure(self, config: Config) -> None:
        """See `RemoteTier`: nothing of it changes at run time."""

    def note_life(self, node: NodeName, life: bytes) -> None:
        """A node is connected. What failed in another life says nothing about this one."""
        record = self.nodes.find(node)
        if record is not None and record.life != life:
            record.life = life
            record.breaker.reset()
        if (link := self._link_of(node)) is not None:
            for transport in self._transports:
                transport.meet(node, link)

    def find(self, namespace: Namespace, keys: KeyColumn, first: int) -> RemoteRun:
        """See `RemoteTier`."""
        if self._is_closed or len(keys) <= first:
            return RemoteRun(first)
        run = self._chunks.find(keys, first, _Silent(self), namespace=namespace.id, now_ns=self._clock.now_ns())
        version = _version_of(self._link_of(run.node))
        return RemoteRun(first + min(run.chunks, r.pulled_chunks_max(version, namespace.layout)), run.node)

    def find_at(self, asker: Asker, keys: KeyColumn, first: int) -> RemoteRun:
        """See `RemoteTier`."""
        node = asker.owner
        if self._is_closed or len(keys) <= first or self.is_silent(NodeName(node)):
            return RemoteRun(first)
        if self._misses.has(node, keys[first]) or self._asking.is_crowded(node, asker):
            self._counts["unasked"] += 1
            return RemoteRun(first)
        return RemoteRun(len(keys), node, is_named=True)

    def is_silent(self, node: NodeName) -> bool:
        """Whether a node is not asked now: it is not connected, or has failed."""
        link, record = self._link_of(node), self.nodes.find(node)
        if link is None or link.life is None:
            return True
        breaker = None if record is None else record.breaker
        return breaker is not None and breaker.state is not BreakerState.CLOSED and breaker.retry_s > 0

    def read(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        """See `RemoteTier`."""
        link = self._link_of(NodeName(order.run.node))
        keys, layout = len(order.before) + len(moves), namespace.layout
        if self._is_closed or link is None or keys > r.keys_max(layout) or not self._has_room_for(order.asker):
            return NOT_STARTED
        if _version_of(link) < r.oldest_version_for(layout, keys) or (order.before and not layout.is_chained):
            return NOT_STARTED  # the node could not read the request, or would refuse it
        record = self.nodes.of(order.run.node)
        permit = record.breaker.ask()
        if permit is None:
            return NOT_STARTED
        record.pulls += 1
        record.life = b"" if link.life is None else link.life.incarnation
        timeout_s = self._settings.answer_s + self._settings.timeout_s(len(moves) * layout.stored_bytes)
        pull = self._pulls.begin(order, namespace, moves, Deadline(timeout_s, self._clock))
        self._start_asking(pull, link, permit)
        return pull.job

    def completed(self) -> list[Finished]:
        """See `RemoteTier`."""
        return self._pulls.take_ended()

    def stats(self) -> Counters:
        """See `RemoteTier`."""
        chunks = self._chunks.stats()
        return {
            f"{NAME}.read_bytes": self._read_bytes,
            **{f"{NAME}.known_{name}": count for name, count in chunks.items()},
            **{f"{NAME}.pulls_{name}": self._counts[name] for name in _PULL_FAULTS},
            **{f"{NAME}.{name}": count for name, count in self.fleet_stats().items()},
            **{
                f"{NAME}.{transport.name}.{name}": count
                for transport in self._transports
                for name, count in transport.stats().items()
            },
            f"{NAME}.nodes_suspended": sum(
                record.breaker.state is not BreakerState.CLOSED for _, record in self.nodes.all()
            ),
        }

    def info(self) -> Info:
        """See `RemoteTier`."""
        used = {
            f"{NAME}_{transport.name}_{name}": value
            for transport in self._transports
            for name, value in transport.info().items()
        }
        return {"peer_index_bytes": self._chunks.mapping.size, **used}

    def verify(self) -> list[str]:
        """See `RemoteTier`."""
        return self._pulls.verify() + [fault for transport in self._transports for fault in transport.verify()]

    def problems(self) -> list[str]:
        """See `RemoteTier`."""
        return []

    def shortcomings(self) -> list[str]:
        """See `RemoteTier`."""
        return self.fleet_problems()

    def _publish_paces(self) -> None:
        """Show clients how long chunks of each node take. Now and then, because what was measured counts less with time."""
        for node, record in self.nodes.all():
            self._chunks.set_pace(NodeName(node), record.pace.packed())
        self._publishing = asyncio.get_running_loop().call_later(PUBLISH_S, self._publish_paces)

    def _start_asking(self, pull: Pull, link: PeerLink, permit: Permit) -> None:
        if pull.is_named:
            self._asking.enter(pull.node, pull.asker)
        task = asyncio.get_running_loop().create_task(self._ask(pull, link, permit))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _go_on(self, pull: Pull) -> None:
        """A part of a pull has ended: ask for what is left, or where some of it has not come, give that up."""
        ended = pull.first + pull.offered
        pull.end()
        pull.end = end_nothing
        pull.first, pull.offered, pull.received_bytes = ended, 0, 0
        link = self._link_of(NodeName(pull.node))
        may_go_on = not (pull.fault or self._is_closed or pull.deadline.has_passed() or link is None)
        permit = self.nodes.of(pull.node).breaker.ask() if may_go_on else None
        if link is None or permit is None:
            self._give_up(pull, pull.first, Outcome.FAILED, pull.fault or "gone")
        else:
            self._start_asking(pull, link, permit)

    async def _ask(self, pull: Pull, link: PeerLink, permit: Permit) -> None:
        """Ask for the chunks of a pull that are left, and begin to receive what is offered of them."""
        record, left_s = self.nodes.of(pull.node), max(0.001, pull.deadline.remaining_s())
        timeout_s = min(left_s, self._settings.timeout_s(pull.left * pull.layout.stored_bytes))
        answer_s = min(left_s, self._settings.answer_s)
        # A chain is named from its beginning, chunks without a parent by themselves.
        before = [*pull.before, *pull.moves.keys[: pull.first]] if pull.layout.is_chained else []
        keys = KeyColumn.of([*before, *pull.moves.keys[pull.first :]]).packed
        deadline_ms = int((answer_s + timeout_s) * 1000)
        model, layout = pull.namespace.model, list(pull.layout.to_wire())

        def request() -> r.Pull:
            return r.Pull(link.next_pull(), model, layout, b"", len(before), keys, deadline_ms)

        fault, asked_ns = "", self._clock.now_ns()
        try:
            offer: r.Offer = await self._asking.ask(
                link, pull.node, request, answer_s, asker=pull.asker, is_named=pull.is_named
            )
        except PeerUnreachable as error:
            record.breaker.fail(permit)
            record.fail(str(error))
            fault = "unanswered"
            self._log(pull, logging.INFO, f"was asked for {pull.left} chunks: {error}")
        except KVPoolError as error:
            record.breaker.succeed(permit)
            record.fail(str(error))
            fault = "refused"
            self._log(pull, logging.INFO, f"was asked for {pull.left} chunks: {error}")
        except asyncio.CancelledError:
            self._pulls.fail(pull, pull.first, Outcome.CANCELLED, "cancelled")
            raise
        pull.begun_ns = self._clock.now_ns()
        record.pace.note_answer((pull.begun_ns - asked_ns) / NS_PER_S)
        if fault:
            self._counts[fault] += 1
            self._give_up(pull, pull.first, Outcome.FAILED, fault)
            return
        pull.end = lambda: self._end(pull, link, offer.pull, permit)
        address = stream_of(link.member.endpoint, offer.address)
        if offer.chunks and self._settings.is_encrypted and not (address and address.is_encrypted):
            self._refuse(pull, "unencrypted", "would send chunks unencrypted: peer.encrypt is true here, not there")
        elif offer.chunks and address is None:
            self._refuse(pull, "foreign", f"offers chunks at {offer.address}, expected its own host")
        elif address is None or not offer.chunks:
            self._counts["empty"] += 1
            self._decline(pull, pull.first)
            self._give_up(pull, pull.first, Outcome.FAILED, "gone")
        elif not await self._receive(pull, self._order_of(pull, link, offer, address, timeout_s=timeout_s)):
            self._counts["queue_full"] += 1
            self._give_up(pull, pull.first, Outcome.FAILED, "full")

    def _order_of(
        self, pull: Pull, link: PeerLink, offer: r.Offer, address: StreamAddress, *, timeout_s: float
    ) -> Order:
        return Order(
            node=pull.node,
            link=link,
            offer=offer,
            address=address,
            into=Region(*pull.columns(offer.chunks)),
            layers=pull.layout.extents,
            layer_bytes=pull.layout.extent_bytes,
            stall_s=self._settings.stall_s,
            timeout_s=min(timeout_s, max(0.001, pull.deadline.remaining_s())),
        )

    async def _receive(self, pull: Pull, order: Order) -> bool:
        """Begin to receive by the first transport that can. Whether one can."""
        deadline, pull.is_coming = Deadline(order.timeout_s, self._clock), order.is_coming
        pull.offered = order.offer.chunks
        for transport in self._transports:
            is_protected = transport.capabilities.is_encrypted or not order.address.is_encrypted
            if is_protected and await transport.accepts(order):
                received = transport.submit(replace(order, timeout_s=max(0.001, deadline.remaining_s())))
                if received:
                    self._pulls.receive(pull, (transport.name, received))
                    return True
        return False

    def _log(self, pull: Pull, level: int, fault: str) -> None:
        """What a node has done wrong, which it may do for each pull."""
        end = self.nodes.of(pull.node).faults.take()
        if end is not None:
            log.log(level, "peer %s %s%s", pull.node, fault, end)

    def _refuse(self, pull: Pull, fault: str, error: str) -> None:
        """What the node offers is not received: `error` says why."""
        self._log(pull, logging.WARNING, error)
        self.nodes.of(pull.node).fail(error)
        pull.is_broken = True
        self._counts[fault] += 1
        self._give_up(pull, pull.first, Outcome.FAILED, fault)

    def _give_up(self, pull: Pull, first: int, outcome: Outcome, fault: str) -> None:
        self._pulls.fail(pull, first, outcome, fault)
        self._owner.on_completed()

    def _has_room_for(self, asker: Asker) -> bool:
        """Whether one more pull may be under way for the request's connection: it leaves others a share."""
        own = self._pulls.count_of(asker.connection)
        return share_of(own, len(self._pulls) - own, self._settings.pulls_max)

    def _decline(self, pull: Pull, chunk: int) -> None:
        """The node does not have this chunk now. Later ones may be there: nothing is found behind it."""
        if pull.is_named:
            self._misses.note(pull.node, pull.moves.keys[chunk])
        self._chunks.decline(NodeName(pull.node), pull.namespace.id, pull.moves.keys[chunk], self._clock.now_ns())

    def _end(self, pull: Pull, link: PeerLink, number: int, permit: Permit) -> None:
        link.release(number)
        record = self.nodes.of(pull.node)
        (record.breaker.fail if pull.is_broken else record.breaker.succeed)(permit)
        record.read_bytes += pull.received_bytes
        if pull.fault:
            record.fail(pull.fault)
            self._counts[pull.fault] += pull.fault in _PULL_FAULTS
        if pull.received[1]:
            record.pace.note_bytes(pull.received_bytes, (self._clock.now_ns() - pull.begun_ns) / NS_PER_S)
            self._chunks.set_pace(NodeName(pull.node), record.pace.packed())

    def _take_outcomes(self) -> None:
        """Report what the native threads have received."""
        ended = [(transport.name, one) for transport in self._transports for one in transport.completed()]
        for name, one in ended:
            pull = self._pulls.of_received((name, one.job))
            if pull is None:
                continue
            outcome = Outcome(one.ending)
            # No fault of the node: what it waits for takes longer.
            is_not_there_yet = pull.is_coming and one.fault == "late"
            is_excused = is_not_there_yet or self._was_wrong(pull, one)
            pull.is_broken |= one.fault in BROKEN and not is_excused
            chunk = pull.first + one.chunk
            if outcome is Outcome.BAD_SOURCE or (is_not_there_yet and not pull.fault):
                self._decline(pull, chunk)
            size = pull.layout.stored_bytes if outcome is Outcome.DONE else 0
            self._read_bytes += size
            pull.received_bytes += size
            pull.fault = pull.fault or one.fault
            self._pulls.report(pull, Finished(pull.job, chunk, outcome, one.fault))
            if pull.is_part_over:
                self._go_on(pull)
        self._owner.on_completed()

    def _was_wrong(self, pull: Pull, one: ChunkEnd) -> bool:
        """Whether a chunk has come with wrong bytes from its node as it has before."""
        if one.fault != "checksum":
            return False
        key = pull.moves.keys[pull.first + one.chunk]
        is_known = self._wrong.has(pull.node, key)
        self._wrong.note(pull.node, key)
        return is_known


def _version_of(link: PeerLink | None) -> int:
    """The version that a node is asked in."""
    return r.OLDEST_VERSION if link is None or link.life is None else link.life.version
