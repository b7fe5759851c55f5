"""Leases from the daemon: for a hit, or for a ticket. And what to ask for a promise of a hit.

One round trip; a second one where some of the hit was evicted since the lookup, and two more where that was of windows. Every
failure of the daemon gives an empty lease. Any thread.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kvpool import failpoint
from kvpool.clock import Deadline, MonotonicClock
from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.states import DRAM, PEER, STORE
from kvpool_client.arguments import check_hit
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.peer_pace import FIRST_PEER_PACE, PeerPace
from kvpool_client.connection.session import Session
from kvpool_client.connection.token_names import name_tokens
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.lease import Lease, LeaseHold
from kvpool_client.verbs.leased_rows import chunk_ranges, levels_by_chunk
from kvpool_client.verbs.results import Hit

TICKET_BYTES_MAX = 256
NO_LEASE = m.Leased(lease=0, chunks=0, offsets=b"", generations=b"", tiers=b"")
_now_ns = MonotonicClock.now_ns


class LeaseFetcher:
    """Fetches the leases of one Pool."""

    def __init__(
        self,
        namespace: Namespace,
        link: Link,
        counters: Counters,
        *,
        finder: Finder,
        estimate_s: Callable[[int], float],
        timeout_s: float,
    ) -> None:
        """`estimate_s`: how long it takes to load a hit of so many chunks."""
        self._namespace = namespace
        self._layout = namespace.layout
        self._link = link
        self._counters = counters
        self._finder = finder
        self._estimate_s = estimate_s
        self._timeout_s = timeout_s

    def check(self, hit: Hit) -> None:
        """Check that a hit is of keys of this Pool's namespace. Raises InvalidArgument."""
        check_hit(hit, self._namespace)

    def acquire(self, hit: Hit) -> Lease:
        """Lease what a hit needs, or what is left of it; see `Pool.acquire`."""
        session = self._link.session
        if session is None or not hit.chunks:
            return self._lease(None, NO_LEASE)
        begun_ns = asked_ns = _now_ns()
        left_s = self._timeout_s
        for wanted, request in self._requests(hit):
            leased = self._ask(session, request, left_s) if left_s >= self._timeout_s / 2 else None
            if leased is None:
                break
            if leased.chunks:
                if PEER in leased.tiers:
                    levels = self._levels_under_way(session, wanted, leased.chunks, leased.tiers)
                    leased = replace(leased, tiers=levels)
                return self._lease(session, leased, wanted.peer_pace or FIRST_PEER_PACE, asked_ns=asked_ns)
            # Not for the first one: to set another time for the socket than every call has is a system call.
            left_s = Deadline(self._timeout_s, since_ns=begun_ns).remaining_s()
            asked_ns = _now_ns()
        return self._lease(None, NO_LEASE)

    def promises_of(self, hit: Hit, tickets: int, claims: int) -> Iterator[tuple[Hit, pr.Promise]]:
        """What to ask for a promise of a hit, one after the other until something is promised; nothing for an empty one. Asks
        no store."""
        for wanted, request in self._requests(hit, seeks=False) if hit.chunks else ():
            yield wanted, pr.Promise(request.keys, request.chunks, request.owner, tickets, claims)

    def rows_of(self, chunks: int) -> int:
        """How many levels a promise of so many chunks has."""
        return self._layout.rows_of(chunks)

    def promised_levels(self, hit: Hit, promised: pr.Promised) -> bytes:
        """The level of each chunk of a promise. Raises ProtocolError where it has not one for each row."""
        count = self.rows_of(promised.chunks)
        if len(promised.tiers) != count:
            raise ProtocolError(
                f"a promise of {promised.chunks} chunks has {len(promised.tiers)} levels, expected {count}"
            )
        levels = promised.tiers
        if PEER in levels:
            levels = self._levels_under_way(self._link.session, hit, promised.chunks, levels)
        return levels_by_chunk(self._layout, promised.chunks, levels).tobytes()

    def claim(self, ticket: bytes) -> Lease:
        """The lease that a ticket stands for."""
        session = self._link.session
        if session is None or not 0 < len(ticket) <= TICKET_BYTES_MAX:
            return self._lease(None, NO_LEASE)
        asked_ns = _now_ns()
        leased = self._ask(session, m.Claim(ticket), self._timeout_s)
        return self._lease(session, leased or NO_LEASE, asked_ns=asked_ns)

    def _ask(self, session: Session, request: m.Acquire | m.Claim, left_s: float) -> m.Leased | None:
        """The daemon's answer; None where it does not answer."""
        try:
            leased = session.call(request, m.Leased, left_s)
            failpoint.reach("client.acquire.after", failpoint.unreachable)
            self._check_rows(leased, None if isinstance(request, m.Claim) else request.chunks)
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return None
        self._counters.count("acquired_chunks", leased.chunks)
        return leased

    def _check_rows(self, leased: m.Leased, asked: int | None) -> None:
        """Raises ProtocolError for a lease of more chunks than were asked for, or without a level for each row."""
        if asked is not None and leased.chunks > asked:
            raise ProtocolError(f"a lease has {leased.chunks} chunks, expected at most {asked}")
        rows = self._layout.rows_of(leased.chunks)
        if len(leased.tiers) != rows:
            raise ProtocolError(f"a lease of {leased.chunks} chunks has {len(leased.tiers)} levels, expected {rows}")

    def _lease(
        self,
        session: Session | None,
        leased: m.Leased,
        peer_pace: PeerPace = FIRST_PEER_PACE,
        *,
        asked_ns: int = 0,
    ) -> Lease:
        hold = LeaseHold(session if leased.chunks else None, leased, namespace=self._namespace, asked_ns=asked_ns)
        return Lease(hold, estimate_s=self._estimate_s, peer_pace=peer_pace)

    def _requests(self, hit: Hit, *, seeks: bool = True) -> Iterator[tuple[Hit, m.Acquire]]:
        """What to ask for to lease a hit, one after the other until something is leased. `seeks`: the shared store may be
        asked, which takes its time."""
        # A daemon whose DRAM has not all of the chunks must know the key of each, to fetch the others or find those it has.
        leaves = self._finder.leaves_of(hit.keys, hit.chunks) if hit.levels[hit.chunks - 1] <= DRAM else b""
        further = self._requests_by_key(hit, seeks=seeks)
        return itertools.chain([(hit, m.Acquire(leaves, hit.chunks))], further) if leaves else further

    def _requests_by_key(self, hit: Hit, *, seeks: bool) -> Iterator[tuple[Hit, m.Acquire]]:
        finder, chunks = self._finder, hit.chunks
        yield hit, m.Acquire(finder.keys_of(hit.keys, chunks), chunks, hit.owner)
        for other in self._other_hits(hit, seeks=seeks) if finder.has_windows else ():
            if other.chunks:
                yield other, m.Acquire(finder.keys_of(other.keys, other.chunks), other.chunks)

    def _other_hits(self, hit: Hit, *, seeks: bool) -> Iterator[Hit]:
        """What may be leased where a hit with windows could not be, of which the daemon leases all or nothing. What other nodes
        or the store were known to have may be gone, or they do not answer: then a shorter hit, and at last what is one on this
        node alone."""
        finder, session = self._finder, self._link.session
        if session is None:
            return
        if hit.chunks_here == hit.chunks:
            yield finder.find(session, hit.keys, hit.chunks)
            return
        if seeks and STORE in hit.levels:  # it may have it still: the daemon remembers an answer briefly
            yield finder.find_or_seek(session, hit.keys, hit.chunks)
        else:
            yield finder.find(session, hit.keys, hit.chunks - 1)
        yield finder.find(session, hit.keys, hit.chunks, is_here=True)

    def _levels_under_way(self, session: Session | None, hit: Hit, chunks: int, levels: bytes) -> bytes:
        """The level of each row of a lease with chunks that are on their way, which all count as another node's, with that of
        those that the shared store gives."""
        self._name_tokens(session, hit, levels)
        wanted = np.concatenate([hit.tiers[part.start : part.stop] for part in chunk_ranges(self._layout, chunks)])
        found = np.frombuffer(levels, np.uint8).copy()
        found[(found == PEER) & (wanted == STORE)] = STORE
        return found.tobytes()

    def _name_tokens(self, session: Session | None, hit: Hit, levels: bytes) -> None:
        if not self._layout.groups:  # with groups the rows are not those of the prompt's chunks in order
            name_tokens(session, hit, levels)
