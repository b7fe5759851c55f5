"""Leases from the daemon: for a hit, or for a ticket. And what to ask for a promise of a hit.

One round trip, or two where some of the hit was evicted since the lookup; one in any case where a part of it is on another
node. Every failure of the daemon gives an empty lease. Any thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvpool import failpoint
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError, ProtocolError
from kvpool.key_column import KeyColumn
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.types import PEER, STORE
from kvpool_client.arguments import check_hit
from kvpool_client.connection.batching import call_each
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.peer_pace import FIRST_PEER_PACE, PeerPace
from kvpool_client.connection.session import Session
from kvpool_client.connection.token_names import name_tokens
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.lease import Lease, LeaseHold
from kvpool_client.verbs.results import Hit

TICKET_BYTES_MAX = 256
NO_LEASE = m.Leased(lease=0, chunks=0, offsets=b"", generations=b"", tiers=b"")


class LeaseFetcher:
    """Fetches the leases of one Pool."""

    def __init__(
        self,
        namespace: Namespace,
        link: Link,
        counters: Counters,
        *,
        estimate_s: Callable[[int], float],
        timeout_s: float,
    ) -> None:
        self._namespace = namespace
        self._link = link
        self._counters = counters
        self._estimate_s = estimate_s
        self._timeout_s = timeout_s
        self._chunks_max = m.KEYS_MAX // len(namespace.layout.ranks)

    def check(self, hit: Hit) -> None:
        """Check that a hit is of keys of this Pool's namespace. Raises InvalidArgument."""
        check_hit(hit, self._namespace)

    def acquire(self, hit: Hit) -> Lease:
        """Lease a hit's chunks, or the longest prefix of them that is still stored; see `Pool.acquire`."""
        session = self._link.session
        chunks = min(hit.chunks, self._chunks_max)
        if session is None or not chunks:
            return self._lease(None, NO_LEASE)
        columns = hit.keys.columns()
        left_s = self._timeout_s
        # A daemon that has not all of the chunks must know the key of each, to fetch the others or find those it has.
        is_all_here = hit.tiers.item(chunks - 1) < PEER
        if is_all_here and chunks * len(columns) <= m.LEAF_CHUNKS_MAX:
            deadline = Deadline(left_s)
            leased = self._ask(session, m.Acquire(_leaves(columns, chunks), chunks), left_s)
            left_s = deadline.remaining_s()
            if leased is None or leased.chunks or left_s < self._timeout_s / 2:
                return self._lease(session, leased or NO_LEASE)
        leased = self._ask(session, m.Acquire(hit.keys.leading(chunks).packed, chunks, hit.owner), left_s) or NO_LEASE
        name_tokens(session, hit, leased.tiers)
        levels = _from_store(leased.tiers, hit)
        leased = leased if levels is leased.tiers else replace(leased, tiers=levels)
        return self._lease(session, leased, hit.peer_pace or FIRST_PEER_PACE)

    def acquire_each(self, hits: Sequence[Hit]) -> list[Lease]:
        """A lease for each hit, all in one round trip."""
        session = self._link.session
        wanted = [number for number, hit in enumerate(hits) if 0 < hit.chunks <= self._chunks_max]
        leased = dict.fromkeys(range(len(hits)), NO_LEASE)
        if session is not None and wanted:
            requests = [
                m.Acquire(hit.keys.leading(hit.chunks).packed, hit.chunks) for hit in (hits[at] for at in wanted)
            ]
            try:
                answers = call_each(session, requests, m.Leased)
                failpoint.reach("client.acquire.after", failpoint.unreachable)
                leased.update({number: answer for number, answer in zip(wanted, answers, strict=True) if answer})
                for number in wanted:
                    name_tokens(session, hits[number], leased[number].tiers)
            except KVPoolError as error:
                self._link.note_failure(session, error)
        self._counters.count("acquired_chunks", sum(answer.chunks for answer in leased.values()))
        return [
            self._lease(session, leased[number], hit.peer_pace or FIRST_PEER_PACE) for number, hit in enumerate(hits)
        ]

    def promises_of(self, hit: Hit, tickets: int, claims: int) -> Iterator[tuple[Hit, pr.Promise]]:
        """What to ask for a promise of a hit, one after the other until something is promised; nothing for an empty one."""
        chunks = min(hit.chunks, self._chunks_max)
        if not chunks:
            return
        columns = hit.keys.columns()
        if hit.tiers.item(chunks - 1) < PEER and chunks * len(columns) <= m.LEAF_CHUNKS_MAX:
            yield hit, pr.Promise(_leaves(columns, chunks), chunks, "", tickets, claims)
        yield hit, pr.Promise(hit.keys.leading(chunks).packed, chunks, hit.owner, tickets, claims)

    def promised_levels(self, hit: Hit, promised: pr.Promised) -> bytes:
        """The level of each chunk of a promise. Raises ProtocolError where it has not one for each."""
        check_levels(promised, promised.chunks)
        name_tokens(self._link.session, hit, promised.tiers)
        return _from_store(promised.tiers, hit)

    def claim(self, ticket: bytes) -> Lease:
        """The lease that a ticket stands for."""
        session = self._link.session
        if session is None or not 0 < len(ticket) <= TICKET_BYTES_MAX:
            return self._lease(None, NO_LEASE)
        return self._lease(session, self._ask(session, m.Claim(ticket), self._timeout_s) or NO_LEASE)

    def _ask(self, session: Session, request: m.Acquire | m.Claim, left_s: float) -> m.Leased | None:
        """The daemon's answer; None where it does not answer."""
        try:
            leased = session.call(request, m.Leased, left_s)
            failpoint.reach("client.acquire.after", failpoint.unreachable)
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return None
        self._counters.count("acquired_chunks", leased.chunks)
        return leased

    def _lease(self, session: Session | None, leased: m.Leased, peer_pace: PeerPace = FIRST_PEER_PACE) -> Lease:
        hold = LeaseHold(session if leased.chunks else None, leased, namespace=self._namespace)
        return Lease(hold, estimate_s=self._estimate_s, peer_pace=peer_pace)


def check_levels(promised: pr.Promised, count: int) -> None:
    """Raises ProtocolError unless a promise has so many levels."""
    if len(promised.tiers) != count:
        raise ProtocolError(f"a promise of {promised.chunks} chunks has {len(promised.tiers)} levels, expected {count}")


def _leaves(columns: Sequence[bytes], chunks: int) -> bytes:
    return b"".join(KeyColumn(column)[chunks - 1] for column in columns)


def _from_store(levels: bytes, hit: Hit) -> bytes:
    """The levels of leased chunks, with that of those that the shared store was to give: on their way they count as another
    node's."""
    if PEER not in levels:
        return levels
    found = np.frombuffer(levels, np.uint8).copy()
    found[(found == PEER) & (hit.tiers[: len(found)] == STORE)] = STORE
    return found.tobytes()
