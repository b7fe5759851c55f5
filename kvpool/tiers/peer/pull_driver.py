"""Pull driver: brings the chunks of each pull, part by part, from one node after the other.

A node is asked for all that is left, and offers what it has and has room for; when that has come it is asked for the rest. One
that does not answer, refuses, or offers nothing is asked after the others for a while, and the next one that has the chunks is
asked for the same pull; one that has no room for it now is asked again, until the pull's deadline. A chunk that fails after a
extent of it has landed ends a chain there: the extent may be in use already.

Pulls take turns at each node, OPEN of them at once: an owner keeps a bounded number of offers for one node, and the others wait
in line here. Loop thread only; bytes are received by the transports' threads. Every wait has a deadline.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

from kvpool.clock import NS_PER_S, Clock, Deadline
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import KVPoolError, PeerUnreachable, Refused
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from kvpool.peers.asking import AT_ONCE, SHARE, Asking, NodeTurns, Turns
from kvpool.peers.circuit_breaker import BreakerState, Permit
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.tiers.base import Finished, Outcome
from kvpool.tiers.peer.node_records import NodeRecords
from kvpool.tiers.peer.pulls import Part, Pull, Pulls
from kvpool.tiers.peer.recent_misses import WRONG_S, RecentMisses
from kvpool.tiers.remote import Asker
from kvpool.transfer.stream_address import stream_of
from kvpool.transfer.transport import ChunkEnd, Order, Region, Transport

log = logging.getLogger(__name__)

# Faults of a path or a node: one that has several of them in a row is not asked for a while.
BROKEN = ("unreachable", "closed", "broken", "stalled", "late", "format", "checksum", "untrusted")
# What may become of a request, each with a counter.
PULL_FAULTS = (
    "refused",
    "busy",
    "unanswered",
    "unasked",
    "unencrypted",
    "empty",
    "queue_full",
    "foreign",
    "other_transport",
)
# Faults that pass by themselves: the same node may be asked again a moment later, where no other has the chunks.
BUSY = ("busy", "full", "trial")
PAUSE_S = 0.05
# So long a pull waits for room at a node from which nothing comes meanwhile: an engine waits for it (guess).
BUSY_S = 2.0
# Beside its own time a pull has that of its bytes at this rate, and so many are under way at once (guesses).
LEAST_BYTES_PER_S = 50 << 20
PULLS_MAX = 4096
# The longest wait for a first turn (guess): a line moves as fast as the pulls before it come, each of which has a deadline.
LINE_S = 60.0
# Pulls of one node that are asked for or received at once: fewer than the offers that an owner keeps for one node.
OPEN = Turns(4 * AT_ONCE, 0, SHARE)


# Of chunks that came with wrong bytes: those that their node is asked to compare. It compares few at a time.
REPORTED_AT_ONCE = 8


class PullDriver:
    """See the module. `counts`: what became of requests, by `PULL_FAULTS`. `read_bytes`: of chunks that have come."""

    def __init__(
        self,
        pulls: Pulls,
        chunks: RemoteChunks,
        link_of: Callable[[NodeName], PeerLink | None],
        *,
        nodes: NodeRecords,
        transports: Sequence[Transport],
        config: PeerConfig,
        clock: Clock,
        find_next: Callable[[Pull], NodeName | None],
        on_ended: Callable[[], None],
    ) -> None:
        """`find_next`: another node to be asked for what is left of a pull. `on_ended`: chunks have ended."""
        self._pulls = pulls
        self._chunks = chunks
        self._link_of = link_of
        self._nodes = nodes
        self._transports = tuple(transports)
        self._config = config
        self._clock = clock
        self._find_next = find_next
        self._on_ended = on_ended
        self._asking = Asking(clock)
        self._open = NodeTurns(OPEN)
        self._misses = RecentMisses(clock)
        self._wrong = RecentMisses(clock, WRONG_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.read_bytes = 0
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<PullDriver {self._pulls!r}>"

    def start(self) -> None:
        """Begin to serve. REQUIRES: a running event loop."""
        for transport in self._transports:
            transport.start(self._take_outcomes)

    async def close(self) -> bool:
        """End everything. False where a thread is left waiting for the network: then its chunks have not ended."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        has_ended = all([await transport.close() for transport in self._transports])
        if has_ended:
            for pull in self._pulls.all():
                self._pulls.fail(pull, Outcome.CANCELLED, "cancelled")
        self._on_ended()
        return has_ended

    def may_name(self, asker: Asker, node: str, key: bytes) -> bool:
        """Whether a node that a request names is asked for a chunk now: it has not just lacked it, and few others of the
        request's connection wait for it."""
        if self._misses.has(node, key) or self._asking.is_crowded(node, asker):
            self.counts["unasked"] += 1
            return False
        return True

    def begin_pull(self, pull: Pull) -> None:
        """Begin to bring a pull's chunks."""
        self._enter(pull)
        task = asyncio.get_running_loop().create_task(self._bring(pull))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, pull: Pull) -> None:
        fault = ""
        try:
            while pull.left:
                wanted = len(pull.wanted)
                fault = await self._bring_part(pull)
                # No chunk alone takes others along: the node is asked for those that it has not been asked for, or has later.
                if pull.are_alone and 0 < len(pull.wanted) < wanted:
                    fault = ""
                elif not pull.wanted:
                    fault = fault or "gone"
                is_busy = fault in BUSY
                if fault and not self._turn_to_next(pull, may_come_back=is_busy) and not (is_busy and pull.left):
                    break
                if is_busy and not self._may_wait(pull):
                    break
                if is_busy:
                    await asyncio.sleep(PAUSE_S)
                if pull.left:
                    self._enter(pull)
        except asyncio.CancelledError:
            if pull.part is None:
                self._pulls.fail(pull, Outcome.CANCELLED, "cancelled")
            raise
        if pull.left:
            self._pulls.fail(pull, Outcome.FAILED, fault)
        self._on_ended()

    def _may_wait(self, pull: Pull) -> bool:
        """Whether a pull waits on for room at its node: not long, unless chunks of other pulls come from there meanwhile."""
        if self._is_closed or pull.deadline.has_passed():
            return False
        pull.busy = pull.busy or Deadline(BUSY_S, self._clock)
        moving = self._nodes.of(pull.node).moving
        return not pull.busy.has_passed() or (moving is not None and not moving.has_passed())

    def _enter(self, pull: Pull) -> None:
        if pull.is_named:
            self._asking.enter(pull.node, pull.asker)

    async def _bring_part(self, pull: Pull) -> str:
        """Ask the pull's node for what is left, and wait until what it offers has ended. Why it is not asked again; empty: it
        is."""
        node, connection = pull.node, pull.asker.connection
        is_asked = False
        try:
            await self._open.begin_turn(node, connection)
            try:
                link = self._link_of(NodeName(node))
                breaker = self._nodes.of(node).breaker
                if link is None or self._is_late(pull):
                    return "gone" if link is None else "late"
                permit = breaker.ask_permit()
                if permit is None:
                    return "trial" if breaker.state is BreakerState.HALF_OPEN else "gone"
                is_asked = True
                return await self._ask(pull, link, permit)
            finally:
                self._open.end_turn(node, connection)
        finally:
            if pull.is_named and not is_asked:
                self._asking.leave(node, pull.asker)

    def _is_late(self, pull: Pull) -> bool:
        """Whether a pull has waited too long for its turn, or its chunks come too slowly. Its time for these begins with its
        first turn, and anew whenever chunks have come, or are known to be absent at its node."""
        left, absent = pull.clocked
        is_further = pull.left != left or len(pull.absent) > absent
        if is_further and not (left < 0 and pull.deadline.has_passed()):
            pull.clocked, pull.busy = (pull.left, len(pull.absent)), None
            timeout_s = self._timeout_s(pull)
            pull.deadline = Deadline(self._config.answer_timeout + timeout_s, self._clock)
        return pull.deadline.has_passed()

    def _timeout_s(self, pull: Pull) -> float:
        """The longest time for the chunks of a pull that are left."""
        return self._config.pull_timeout + pull.left * pull.layout.stored_bytes / LEAST_BYTES_PER_S

    async def _ask(self, pull: Pull, link: PeerLink, permit: Permit) -> str:
        """Ask for the chunks of a pull that are left, and receive what is offered of them."""
        record, left_s = self._nodes.of(pull.node), max(0.001, pull.deadline.remaining_s())
        timeout_s = min(left_s, self._timeout_s(pull))
        answer_s = min(left_s, self._config.answer_timeout)
        wanted = pull.wanted
        request = self._request_of(pull, wanted, link, int((answer_s + timeout_s) * 1000))
        fault, asked_ns = "", self._clock.now_ns()
        any(transport.expect(pull.node, link, len(wanted)) for transport in self._transports)
        try:
            offer: r.Offer = await self._asking.ask_node(
                link, pull.node, request, answer_s, asker=pull.asker, is_named=pull.is_named
            )
        except PeerUnreachable as error:
            if answer_s < self._config.answer_timeout:  # it was not given its time
                record.breaker.succeed(permit)
                return "late"
            record.breaker.fail(permit)
            fault = self._defer(pull, "unanswered", str(error))
        except KVPoolError as error:
            record.breaker.succeed(permit)
            is_busy = isinstance(error, Refused) and error.code == r.RefusalCode.BUSY
            fault = self._defer(pull, "busy" if is_busy else "refused", str(error))
        begun_ns = self._clock.now_ns()
        record.pace.note_answer((begun_ns - asked_ns) / NS_PER_S)
        if fault:
            return fault
        offered = self._offered_of(pull, wanted, offer)
        part = Part(offered, begun_ns, False, asyncio.get_running_loop().create_future())
        try:
            fault = await self._take_offer(pull, part, link, offer, timeout_s=timeout_s)
            if not fault:
                await part.over
                fault = part.fault
            return fault
        finally:
            self._end_part(pull, part, link, offer.pull, permit=permit)

    def _request_of(self, pull: Pull, wanted: Sequence[int], link: PeerLink, deadline_ms: int) -> Callable[[], r.Pull]:
        # A chain is named from its beginning, chunks without a parent by themselves.
        is_chain = pull.layout.is_chained and not pull.are_alone
        before = [*pull.before, *pull.moves.keys[: pull.first]] if is_chain else []
        most = len(wanted) if is_chain or pull.are_alone else r.pulled_chunks_max(pull.layout)
        keys = KeyColumn.of([*before, *[pull.moves.keys[chunk] for chunk in wanted[:most]]]).packed
        model, layout, are_alone = pull.namespace.model, list(pull.layout.to_wire()), pull.are_alone
        return lambda: r.Pull(link.next_pull(), model, layout, b"", len(before), keys, deadline_ms, are_alone)

    def _offered_of(self, pull: Pull, wanted: Sequence[int], offer: r.Offer) -> Sequence[int]:
        """Which of the chunks that a node was asked for it offers. Those alone that it does not have are noted as absent."""
        if not pull.are_alone:
            return wanted[: offer.chunks]
        looked_at = wanted[: len(offer.present)] if offer.present else wanted
        states = zip_longest(looked_at, offer.present, fillvalue=r.ABSENT)
        absent = [chunk for chunk, state in states if state == r.ABSENT]
        for chunk in absent:
            self._decline(pull, chunk)
        pull.absent.update(absent)
        return [chunk for chunk, state in zip(wanted, offer.present, strict=False) if state == r.HELD]

    async def _take_offer(self, pull: Pull, part: Part, link: PeerLink, offer: r.Offer, *, timeout_s: float) -> str:
        """Begin to receive what is offered. Why that is not; empty: it is."""
        address = stream_of(link.member.endpoint, offer.address)
        if not offer.chunks and r.LATER in offer.present:
            self.counts["busy"] += 1
            self._fail(pull, f"has no room to offer any of {offer.present.count(r.LATER)} chunks now")
            return "busy"
        if not offer.chunks:
            self.counts["empty"] += 1
            if pull.is_named:
                self._misses.note_miss(pull.node, pull.moves.keys[pull.first])
            else:
                self._defer(pull, "", f"had none of {pull.left} chunks that it had announced")
            if not pull.are_alone:
                self._decline(pull, pull.first)
            return "gone"
        if self._config.encrypt and not (address and address.is_encrypted):
            text = "would send chunks unencrypted: peer.encrypt is true here, not there"
            return self._defer(pull, "unencrypted", text, is_wrong=True)
        if address is None:
            text = f"offers chunks at {offer.address}, expected its own host"
            return self._defer(pull, "foreign", text, is_wrong=True)
        order = Order(
            node=pull.node,
            link=link,
            offer=offer,
            address=address,
            into=Region(*pull.columns(part.chunks)),
            extents=pull.layout.extents,
            extent_bytes=pull.layout.extent_bytes,
            stall_s=self._config.stall_timeout,
            timeout_s=min(timeout_s, max(0.001, pull.deadline.remaining_s())),
        )
        if not await self._receive(pull, part, order):
            self.counts["queue_full"] += 1
            return "full"
        return ""

    async def _receive(self, pull: Pull, part: Part, order: Order) -> bool:
        """Begin to receive by the first transport that can. Whether one can."""
        deadline, part.is_coming = Deadline(order.timeout_s, self._clock), order.is_coming
        part.address = order.offer.address
        for transport in self._transports:
            is_protected = transport.capabilities.is_encrypted or not order.address.is_encrypted
            if is_protected and await transport.accepts(order):
                received = transport.submit(replace(order, timeout_s=max(0.001, deadline.remaining_s())))
                if received:
                    self._pulls.receive(pull, part, (transport.name, received))
                    return True
        return False

    def _end_part(self, pull: Pull, part: Part, link: PeerLink, number: int, *, permit: Permit) -> None:
        """Nothing of a part is received any more, or the driver ends."""
        link.release(number)
        record = self._nodes.of(pull.node)
        (record.breaker.fail if part.is_broken else record.breaker.succeed)(permit)
        record.read_bytes += part.received_bytes
        if part.fault:
            self.counts[part.fault] += part.fault in PULL_FAULTS
            self._fail(pull, part.fault)
            if not part.is_not_there_yet:
                record.defer(self._clock)
        if part.fault == "unreachable" or part.received_bytes:
            record.unreachable = part.address if part.fault == "unreachable" else ""
        if part.received[1]:
            record.pace.note_bytes(part.received_bytes, (self._clock.now_ns() - part.begun_ns) / NS_PER_S)
            self._chunks.set_pace(NodeName(pull.node), record.pace.packed())
        if part.received[1] and not part.left:
            self._pulls.end_part(pull, part)
            self._on_ended()

    def _turn_to_next(self, pull: Pull, *, may_come_back: bool) -> bool:
        """Have another node asked for what is left of a pull. Whether there is one. `may_come_back`: the former one may be
        asked again."""
        if self._is_closed or pull.is_cut or not pull.left or pull.deadline.has_passed():
            return False
        node = self._find_next(pull)
        if node is not None:
            self._pulls.turn_to(pull, node, may_come_back=may_come_back)
        return node is not None

    def _defer(self, pull: Pull, fault: str, error: str, *, is_wrong: bool = False) -> str:
        """A node has brought less than it seemed to have: `error` says why. `is_wrong`: its operator has to do something."""
        record = self._nodes.of(pull.node)
        self._fail(pull, error)
        record.defer(self._clock)
        if fault:
            self.counts[fault] += 1
            end = record.faults.take_line()
            if end is not None and is_wrong:
                log.warning("peer %s %s%s", pull.node, error, end)
            elif end is not None:
                log.info("peer %s was asked for %d chunks: %s%s", pull.node, pull.left, error, end)
        return fault

    def _fail(self, pull: Pull, error: str) -> None:
        """A pull has failed at its node, perhaps for a moment."""
        self._nodes.of(pull.node).fail(error, is_first=not pull.has_failed)
        pull.has_failed = True

    def _decline(self, pull: Pull, chunk: int) -> None:
        """The node does not have this chunk now. Later ones may be there: nothing is found behind it."""
        self._chunks.decline(NodeName(pull.node), pull.namespace.id, pull.moves.keys[chunk], self._clock.now_ns())

    def _take_outcomes(self) -> None:
        """Report what the native threads have received."""
        ended = [(transport.name, one) for transport in self._transports for one in transport.completed()]
        wrong: list[tuple[Pull, int]] = []
        for name, one in ended:
            pull = self._pulls.of_received((name, one.job))
            part = None if pull is None else pull.part
            if pull is None or part is None:
                continue
            outcome, chunk = Outcome(one.ending), part.chunks[one.chunk]
            is_first_fault, part.fault = not part.fault, part.fault or one.fault
            is_not_there_yet = part.is_coming and one.fault == "late"
            is_excused = is_not_there_yet or self._was_wrong(pull, chunk, one)
            part.is_broken |= one.fault in BROKEN and not is_excused
            if outcome is Outcome.BAD_SOURCE or (is_not_there_yet and is_first_fault):
                self._decline(pull, chunk)
            size = pull.layout.stored_bytes if outcome is Outcome.DONE else 0
            if size:
                self._nodes.of(pull.node).moving = Deadline(BUSY_S, self._clock)
            self.read_bytes += size
            part.received_bytes += size
            if one.is_unmarked and not self._is_closed:
                self._pulls.give_back(pull)
                continue
            part.has_failed |= outcome is not Outcome.DONE
            if one.fault == "checksum":
                wrong.append((pull, chunk))
            self._pulls.report(pull, Finished(pull.job, chunk, outcome, one.fault))
        for pull, chunk in wrong[:REPORTED_AT_ONCE]:
            self._report_wrong(pull, chunk)
        self._on_ended()

    def _report_wrong(self, pull: Pull, chunk: int) -> None:
        """Have the node compare a chunk that came with wrong bytes: it may have it so."""
        link = self._link_of(NodeName(pull.node))
        if link is not None:
            layout, parent = list(pull.layout.to_wire()), pull.moves.parents[chunk]
            link.report_wrong(r.Wrong(pull.namespace.model, layout, parent, pull.moves.keys[chunk]))

    def _was_wrong(self, pull: Pull, chunk: int, one: ChunkEnd) -> bool:
        """Whether a chunk has come with wrong bytes from its node as it has before."""
        if one.fault != "checksum":
            return False
        key = pull.moves.keys[chunk]
        is_known = self._wrong.has(pull.node, key)
        self._wrong.note_miss(pull.node, key)
        return is_known
