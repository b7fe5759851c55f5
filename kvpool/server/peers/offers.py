"""Offers: chunks of this node that others pull, each under a lease like an engine's until its bytes are sent.

    Pull ──lease──► OFFERED ──all is sent, released, late, forgotten──► the native offer ends ──► the lease is released
       └──nothing here──► an empty Offer

Chunks behind the leased ones that an engine is just saving are offered too, and sent extent by extent as they come. They are
leased when they are committed; until then nothing holds them, and of a save that is given up the puller gets no whole chunk.
Such an offer has a thread for as long as the save takes: beyond all threads but one, saves are not offered.

Another node is served by the verbs that engines have: a session of its own for each model and layout that it is just pulling,
whose leases expire, and end with it. All sessions of one key count together, for a share of the offers and of DRAM, and so do
all other nodes. What it asks for is promoted from the lower tiers here, never pulled from a third node. No new model or layout
is made for it. Leasing for others takes a share of the loop's time at most, so that engines' requests come first. Loop thread
only; the bytes are sent by the server's threads, straight from the arena.

Invariant: a lease is released only after its native offer has ended, so that no thread reads a slot that may have other bytes.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import kvpool_native
from kvpool.clock import Clock, Deadline
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import KVPoolError
from kvpool.ids import TICKET_BYTES
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.packed_numbers import pack_u64, u64_of
from kvpool.peers.control import records as r
from kvpool.peers.control.pullers import Puller
from kvpool.peers.loop_share import LoopShare
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.server.descriptor_room import PeerRoom
from kvpool.server.peers.doubts import Doubts
from kvpool.server.peers.near_offers import NearOffers
from kvpool.server.peers.puller_connections import PullerConnection, PullerConnections
from kvpool.states import DRAM, Level
from kvpool.transfer.engine.engine import Engine, PullingNode
from kvpool.transfer.engine.served_parts import OfferedChunks, ServedParts

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

STOP_TIMEOUT_S = 10.0
# Of the loop's time, for all pulls of all peers.
LOOP_SHARE = 0.2
OFFERS_MAX = 256
# Of the arena, what one peer is offered at once where `peer.offered` does not say.
OFFERED_PART = 4
# How long a stranger's connection to the stream listener may take to name a ticket.
HELLO_TIMEOUT_S = 2.0
# One peer has at most a quarter of all offers: one that never receives what it asks for leaves the others theirs.
PEER_PART = 4
# How long a pull waits for the end of other offers to its node: less than its answer may take (guess).
ROOM_S = 0.5
_WORD = 8
_NO_KEYS = KeyColumn(b"")


@dataclass(slots=True)
class _Offered:
    """A native offer of `size` bytes. `lease`: what it sends, from chunk `base` of its chain on; `ticket`: by which it is
    withdrawn. `is_leasing`: a task asks for more."""

    puller: int
    pull: int
    ticket: bytes
    session: EngineSession
    lease: int
    base: int
    unleased: KeyColumn  # all of the chain, while chunks of it are being saved; else none
    size: int
    is_leasing: bool = False


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is offered of a lease: offsets, slots and generations, u64. `base`, `unleased`: as in `_Offered`; `are_saved`: some
    are just being saved; `present`: as in an Offer."""

    lease: int
    columns: tuple[bytes, bytes, bytes]
    base: int = 0
    unleased: KeyColumn = _NO_KEYS
    are_saved: bool = False
    present: bytes = b""


class _NoRoomNow(KVPoolError):
    """What was asked for is here, and cannot be offered before other offers end."""


class Offers:
    """See the module, and `PullService`. Listens from the constructor on; raises OSError."""

    def __init__(
        self,
        pool: Pool,
        config: PeerConfig,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        *,
        room: PeerRoom,
        engine: Engine | None = None,
        near: NearOffers | None = None,
    ) -> None:
        """`engine`: by which chunks are served too, beside the stream. `near`: who may copy them out of this node's memory."""
        self._pool = pool
        self._config = config
        self._clock = clock
        self._loop = loop
        memory = pool.memory
        self._peer_bytes_max = config.offered or memory.arena.size // OFFERED_PART
        assert config.stream is not None
        host, _, port = config.stream.endpoint.removeprefix("tcp://").rpartition(":")
        self._index = kvpool_native.IndexView(memory.index)
        self._server = kvpool_native.ExtentServer(
            memory.arena,
            memory.index,
            host.strip("[]"),
            int(port),
            threads=config.threads,
            offers_max=OFFERS_MAX,
            strangers_max=room.stream_strangers,
            connections_max=room.streams,
            hello_timeout_s=HELLO_TIMEOUT_S,
            stall_s=config.stall_timeout,
            peer_bytes_per_s=config.rate,
            encrypted=config.encrypt,
        )
        self._parts = (
            None
            if engine is None
            else ServedParts(
                engine,
                memory.arena,
                self._index,
                self._checks_of,
                threads=config.threads,
                bytes_per_s=config.rate,
                stall_s=config.stall_timeout,
                clock=clock,
            )
        )
        self._near = near
        self.stream = f"{'tls' if config.encrypt else 'tcp'}://{host}:{self._server.port}"
        self._connections = PullerConnections(pool)
        self._offered: dict[int, _Offered] = {}
        self._counts: Counter[str] = Counter()
        self._ended: asyncio.Future[None] | None = None  # set when offers have ended, for who waits
        self._leasing: set[asyncio.Task[None]] = set()
        pool.journal.listen(self._lease_saved, dict, list)
        self._share = LoopShare(LOOP_SHARE, clock)
        self._doubts = Doubts(pool, self._connections, clock)
        loop.add_reader(self._server.fileno(), self._settle)

    def __repr__(self) -> str:
        return f"<Offers at {self.stream}, {len(self._offered)} under way>"

    def serve(self, puller: Puller, pull: r.Pull, answer: Callable[[r.Offer | r.Refused], bool]) -> None:
        """See `PullService`."""
        connection = self._connections.of(puller)
        task = self._loop.create_task(self._serve(puller, connection, pull, answer))
        connection.tasks[pull.pull] = task
        task.add_done_callback(lambda _: self._served(puller.number, pull.pull))

    def stage(self, puller: Puller, stage: r.AnyStage, answer: Callable[[r.Staged | r.Refused], bool]) -> None:
        """See `PullService`."""
        if self._parts is None:
            answer(r.Refused(r.RefusalCode.TRANSPORT, "this node has neither TransferEngine nor NIXL"))
            return
        connection = self._connections.find(puller.number)
        offer = None if connection is None else connection.offered.get(stage.pull)
        self._parts.serve(offer, stage, answer, puller=PullingNode(puller.node, puller.counted, puller.host))

    def near(self, puller: Puller, ask: r.AskNear) -> r.Near | r.Refused:
        """See `PullService`."""
        if self._near is None:
            return r.Refused(r.RefusalCode.TRANSPORT, "this node's memory is for its own engines alone")
        connection = self._connections.find(puller.number)
        return self._near.answer(None if connection is None else connection.offered.get(ask.pull), ask)

    def check(self, puller: Puller, wrong: r.Wrong) -> None:
        """See `PullService`."""
        connection = self._connections.find(puller.number)
        if connection is not None:
            self._doubts.compare_chunk(connection, wrong)

    def release(self, puller: Puller, pull: int) -> None:
        """See `PullService`."""
        connection = self._connections.find(puller.number)
        if connection is None:
            return
        if pull in connection.tasks:
            connection.tasks[pull].cancel()
        if pull in connection.offered:
            number = connection.offered[pull]
            connection.released.add(number)
            self._server.withdraw(self._offered[number].ticket)

    def forget(self, puller: Puller) -> None:
        """See `PullService`."""
        connection = self._connections.find(puller.number)
        if connection is None:
            return
        connection.is_gone = True
        for task in connection.tasks.values():
            task.cancel()
        for number in connection.offered.values():
            self._server.withdraw(self._offered[number].ticket)
        self._connections.drop_where_over(puller.number)

    async def close(self) -> bool:
        """End everything. False where a thread is left waiting for the network."""
        tasks = [*self._leasing, *(task for one in self._connections.all() for task in one.tasks.values())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._doubts.close()
        self._loop.remove_reader(self._server.fileno())
        has_ended = await self._loop.run_in_executor(None, self._server.stop, STOP_TIMEOUT_S)
        self._settle()
        if self._parts is not None:
            await self._loop.run_in_executor(None, self._parts.close)
        for connection in self._connections.all():
            connection.is_gone = True
            self._connections.drop_where_over(connection.number)
        return has_ended

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        native = self._server.stats()
        return {
            "offers": len(self._offered),
            "sent_bytes": native["sent_bytes"] + (self._parts.served_bytes if self._parts is not None else 0),
            **{
                f"strangers_{name}": native[name]
                for name in ("bad_hello", "unencrypted", "untrusted", "bad_ticket", "repeated", "silent", "crowded")
            },
            "shm": self._near.given if self._near is not None else 0,
            "compared_chunks": self._doubts.compared,
            **{f"pulls_{name}": self._counts[name] for name in ("served", "empty", "refused")},
        }

    async def _serve(
        self, puller: Puller, connection: PullerConnection, pull: r.Pull, answer: Callable[[r.Offer | r.Refused], bool]
    ) -> None:
        deadline = Deadline(pull.deadline_ms / 1000, self._clock)
        session: EngineSession | None = None
        try:
            session = self._connections.begin_use(connection, pull)
            offer = None if session is None else await self._offer(puller, connection, session, pull, deadline=deadline)
        except KVPoolError as error:
            self._counts["refused"] += 1
            code = r.RefusalCode.BUSY if isinstance(error, _NoRoomNow) else r.RefusalCode.FAILED
            answer(r.Refused(code, str(error)[: r.TEXT_BYTES_MAX // 4]))
            return
        finally:
            if session is not None:
                self._connections.end_use(connection, session)
        offer = offer or _offer_of_none(pull)
        self._counts["served" if offer.chunks else "empty"] += 1
        is_sent = answer(offer)
        if offer.chunks and not is_sent:
            self._server.withdraw(offer.ticket)

    async def _offer(
        self, puller: Puller, connection: PullerConnection, session: EngineSession, pull: r.Pull, *, deadline: Deadline
    ) -> r.Offer | None:
        """Lease what is here of the chunks that are asked for, and have them sent to who has the ticket."""
        if connection.peer.offers >= OFFERS_MAX // PEER_PART:
            raise _NoRoomNow("the node has as many offers for this one as one node may have")
        until = Deadline(min(ROOM_S, deadline.remaining_s()), self._clock)
        while True:
            refusal = "what the node has released is not over"
            # It asks for the next part of a chain behind that, which needs its bytes and leases.
            if not connection.released or until.has_passed():
                refusal, offer = await self._offer_some(puller, connection, session, pull, deadline=deadline)
                if not refusal:
                    return offer
            if until.has_passed():
                raise _NoRoomNow(refusal)
            self._ended = self._ended or self._loop.create_future()
            await asyncio.wait([self._ended], timeout=until.remaining_s())

    async def _offer_some(
        self, puller: Puller, connection: PullerConnection, session: EngineSession, pull: r.Pull, *, deadline: Deadline
    ) -> tuple[str, r.Offer | None]:
        """Offer as many of the chunks as there is room for; or why that has to wait until other offers of the node end."""
        peer, most = connection.peer, self._peer_bytes_max
        chunk_bytes = session.own.layout.extents * session.own.layout.extent_bytes
        # One in any case, where the node is offered nothing else.
        fitting = max((most - peer.offered_bytes) // chunk_bytes, 0 if peer.offered_bytes else 1)
        fitting = min(fitting, r.offered_chunks_max(session.own.layout.extents))
        if fitting <= 0:
            return f"the node is offered as much as peer.offered allows, {most} bytes", None
        keys = KeyColumn(pull.keys)[: pull.first + fitting]
        reserved = (len(keys) - pull.first) * chunk_bytes  # from others that ask meanwhile
        peer.offered_bytes += reserved
        try:
            if pull.are_alone:
                base, (leased, left_out) = 0, await self._drive(self._pool.chains.lease_set(session, keys))
            else:
                (base, leased), left_out = await self._lease(session, pull, keys), ()
            with self._share.used():
                chosen = (
                    _chosen_alone(leased, left_out)
                    if pull.are_alone
                    else self._chosen_of_chain(session, pull, keys, base=base, leased=leased)
                )
                offer = self._offer_chosen(puller, connection, session, pull, chosen=chosen, deadline=deadline)
        finally:
            peer.offered_bytes -= reserved
        # What others have now, or are about to have, is free a moment later.
        has_others = bool(self._offered) or sum(len(one.tasks) for one in self._connections.all()) > 1
        is_left = bool(left_out) if pull.are_alone else self._is_stored(session, keys, base + leased.chunks)
        if offer is None and has_others and is_left:
            return "other nodes lease as much as peer.leased_quota and dram.connection_quota allow", None
        self._wake_waiting()  # less may be offered than was reserved
        return "", offer or _offer_of_none(pull, chosen.present)

    def _is_stored(self, session: EngineSession, keys: KeyColumn, chunk: int) -> bool:
        return self._pool.chains.readers.is_stored(session, keys, chunk, self._clock.now_ns())

    async def _lease(self, session: EngineSession, pull: r.Pull, keys: KeyColumn) -> tuple[int, m.Leased]:
        """A lease on the chunks that are asked for, and from which chunk on it is. What is before them is not leased, if DRAM
        has it; what a lower tier has of that is promoted for them, as much at once as may be leased."""
        base = pull.first if self._has_parent(session, pull) else 0
        while True:
            leased = await self._drive(self._pool.chains.acquire_for_peer(session, keys, base))
            end = base + leased.chunks
            if end > pull.first or not leased.chunks or not session.layout.is_chained:
                return base, leased
            self._end_lease(session, leased.lease)
            base = end

    def _has_parent(self, session: EngineSession, pull: r.Pull) -> bool:
        """Whether DRAM has the chunk of a chain before those that are asked for."""
        if not pull.first or not session.layout.is_chained:
            return False
        levels = self._index.lookup(KeyColumn(pull.keys)[pull.first - 1])
        return len(levels) > 0 and levels[0] == DRAM

    def _wake_waiting(self) -> None:
        """There may be room now."""
        if self._ended is not None:
            self._ended.set_result(None)
            self._ended = None

    def _chosen_of_chain(
        self, session: EngineSession, pull: r.Pull, keys: KeyColumn, *, base: int, leased: m.Leased
    ) -> _Chosen:
        """What is offered of what is leased from chunk `base` on, with what is being saved behind it. REQUIRES: the same turn
        as the lease."""
        # What this node is itself pulling is not offered: two nodes that ask each other would wait for each other.
        coming = leased.tiers.find(Level.PEER)
        here = leased.chunks if coming < 0 else coming
        # In the same turn as the lease ends: what was committed before is in it, what is committed later is found here.
        behind = keys[base + leased.chunks :] if here == leased.chunks and self._has_thread_for_saves else keys[:0]
        saved = self._pool.chains.writers.followed.find(session, keys.before(base + here), behind)
        end = base + here + len(saved.offsets) // _WORD
        rows_of = slice((pull.first - base) * _WORD, (max(end, pull.first) - base) * _WORD)
        columns = (
            (leased.offsets[: here * _WORD] + saved.offsets)[rows_of],
            (leased.slots[: here * _WORD] + saved.slots)[rows_of],
            (leased.generations[: here * _WORD] + saved.generations)[rows_of],
        )
        unleased = keys[:end] if end > base + leased.chunks else keys[:0]
        return _Chosen(leased.lease, columns, base, unleased, are_saved=bool(saved.offsets))

    def _offer_chosen(
        self,
        puller: Puller,
        connection: PullerConnection,
        session: EngineSession,
        pull: r.Pull,
        *,
        chosen: _Chosen,
        deadline: Deadline,
    ) -> r.Offer | None:
        """Offer these chunks; None where there are none. REQUIRES: the same turn as the lease."""
        layout, columns = session.own.layout, chosen.columns
        chunks = len(columns[0]) // _WORD
        if not chunks:
            self._end_lease(session, chosen.lease)
            return None
        ticket = os.urandom(TICKET_BYTES)
        # A stream that waits for an engine's extents is given one thread, not several.
        connections = 1 if chosen.are_saved else min(self._config.connections, chunks)
        timeout_s = max(0.001, min(deadline.remaining_s(), session.lease_ttl_ns / 1e9 / 2))
        number, refusal = self._server.offer(
            ticket,
            self._index,
            *columns,
            extents=layout.extents,
            extent_bytes=layout.extent_bytes,
            connections=connections,
            peer=connection.peer.number,
            timeout_s=timeout_s,
        )
        if not number:
            self._end_lease(session, chosen.lease)
            raise KVPoolError(f"the node offers no more now (reason {refusal})")
        self._connections.use(connection, session)
        size = chunks * layout.extents * layout.extent_bytes
        self._offered[number] = _Offered(
            puller.number, pull.pull, ticket, session, chosen.lease, chosen.base, chosen.unleased, size
        )
        connection.peer.offers += 1
        connection.peer.offered_bytes += size
        connection.offered[pull.pull] = number
        offered = OfferedChunks(columns, layout.extents, layout.extent_bytes)
        checks = self._checks_of(offered)
        if self._parts is not None:
            self._parts.add_offer(number, connection.name, offered, checks)
        if self._near is not None:
            self._near.add_offer(number, columns)
        return r.Offer(pull.pull, chunks, ticket, connections, self.stream, checks, chosen.present)

    @property
    def _has_thread_for_saves(self) -> bool:
        return sum(bool(one.unleased) for one in self._offered.values()) < max(1, self._config.threads - 1)

    def _checks_of(self, chunks: OfferedChunks) -> bytes:
        """Checksums of chunks whose extents have all landed; else none."""
        extents, extent_bytes = chunks.extents, chunks.extent_bytes
        return self._server.checks(self._index, *chunks.columns, extents=extents, extent_bytes=extent_bytes)

    def _lease_saved(self) -> None:
        """New events: what is offered while it is saved may be committed now."""
        for number, offered in self._offered.items():
            if offered.unleased and not offered.is_leasing:
                offered.is_leasing = True
                task = self._loop.create_task(self._lease_more(number, offered))
                self._leasing.add(task)
                task.add_done_callback(self._leasing.discard)

    async def _lease_more(self, number: int, offered: _Offered) -> None:
        """Lease what has been committed of an offer, in place of the lease that it has."""
        if number not in self._offered:
            return
        connection = self._connections[offered.puller]
        self._connections.use(connection, offered.session)
        try:
            await self._exchange_lease(number, offered)
        except KVPoolError as error:  # it goes on without: the puller finds what leaves its slot
            log.info("chunks that were saved while they were offered are not leased: %s", error)
        finally:
            offered.is_leasing = False
            self._connections.end_use(connection, offered.session)
            self._connections.drop_where_over(offered.puller)

    async def _exchange_lease(self, number: int, offered: _Offered) -> None:
        taken = self._pool.chains.acquire_for_peer(offered.session, offered.unleased, offered.base)
        leased = await self._drive(taken)
        if number not in self._offered:
            self._end_lease(offered.session, leased.lease)
            return
        before, offered.lease = offered.lease, leased.lease
        self._end_lease(offered.session, before)
        if offered.base + leased.chunks == len(offered.unleased):
            offered.unleased = offered.unleased[:0]

    async def _drive(self, parts: Parts[Answer]) -> Answer:
        """The answer to a request that is served in parts; other work goes on between them."""
        while True:
            while wait_s := self._share.wait_s:
                await asyncio.sleep(wait_s)
            try:
                with self._share.used():
                    awaited = next(parts)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            await (asyncio.sleep(0) if awaited is None else awaited)

    def _served(self, number: int, pull: int) -> None:
        self._connections[number].tasks.pop(pull, None)
        self._connections.drop_where_over(number)

    def _settle(self) -> None:
        """Release the leases of offers that have ended."""
        for ended in self._server.take_outcomes():
            offered = self._offered.pop(ended.offer)
            if self._parts is not None:
                self._parts.drop(ended.offer)
            if self._near is not None:
                self._near.drop(ended.offer)
            connection = self._connections[offered.puller]
            connection.peer.offers -= 1
            connection.peer.offered_bytes -= offered.size
            connection.offered.pop(offered.pull, None)
            connection.released.discard(ended.offer)
            self._end_lease(offered.session, offered.lease)
            self._connections.end_use(connection, offered.session)
            self._connections.drop_where_over(offered.puller)
        self._wake_waiting()

    def _end_lease(self, session: EngineSession, lease: int) -> None:
        """Release a lease. One that cannot be released ends by its time to live, or with its session."""
        if not lease:
            return
        try:
            self._pool.leases.release(session, lease)
        except KVPoolError as error:
            log.warning("a lease for another node was not released, and ends with its session: %s", error)


def _offer_of_none(pull: r.Pull, present: bytes = b"") -> r.Offer:
    """An offer that holds nothing. `present`: of the keys that were looked at."""
    return r.Offer(pull.pull, 0, b"", 0, "", b"", present)


def _chosen_alone(leased: m.Leased, left_out: Sequence[int]) -> _Chosen:
    """What is offered of chunks that are each alone: those that are leased, but for what this node is itself pulling."""
    rows = [row for row, level in enumerate(leased.tiers) if level not in (m.NO_LEVEL, Level.PEER)]
    present = bytearray([r.ABSENT]) * len(leased.tiers)
    for row in rows:
        present[row] = r.HELD
    for row in left_out:
        present[row] = r.LATER
    offsets, slots, generations = map(u64_of, (leased.offsets, leased.slots, leased.generations))
    columns = [pack_u64([column[row] for row in rows]) for column in (offsets, slots, generations)]
    return _Chosen(leased.lease, (columns[0], columns[1], columns[2]), present=bytes(present))
