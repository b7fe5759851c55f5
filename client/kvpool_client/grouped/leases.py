"""Leases over all groups of a layout: one lease of the daemon, with rows for the chunks of each group. Any thread."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.types import DRAM, PEER, STORE
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.peer_pace import FIRST_PEER_PACE, PeerPace
from kvpool_client.connection.session import Session
from kvpool_client.grouped.lookups import GroupFinder
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.lease import Lease, LeaseHold
from kvpool_client.verbs.lease_fetcher import NO_LEASE, LeaseFetcher, check_levels
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.results import Hit

_WORD_BYTES = 8


class GroupLease(Lease):
    """Lease of a hit's chunks in every group of a layout: what `Pool.acquire` and `Pool.claim` answer where it has groups.

    As a `Lease`, but `Pool.groups.load` loads it. `ranges`: for each group the `range` of chunk numbers that a load needs: of a
    full group all, of windows and states the last ones. Threads: any.
    """

    hold: "GroupHold"

    def __init__(self, hold: "GroupHold", *, estimate_s: Callable[[int], float], peer_pace: PeerPace) -> None:
        super().__init__(hold, estimate_s=estimate_s, peer_pace=peer_pace)
        self.ranges = hold.ranges


class GroupHold(LeaseHold):
    """The hold of a lease with rows for the chunks of each group. `ranges`: the chunks of each."""

    def __init__(self, session: Session | None, leased: m.Leased, *, namespace: Namespace) -> None:
        super().__init__(session, leased, namespace=namespace)
        self.ranges = chunk_ranges(self.layout, leased.chunks)

    @property
    def tiers(self) -> npt.NDArray[np.uint8]:
        """The level of each chunk when it was leased: the slowest of its groups', DRAM where none needs it."""
        rows = np.frombuffer(self._leased.tiers, np.uint8)
        found, is_needed = np.zeros(self.chunks, np.uint8), np.zeros(self.chunks, np.bool_)
        for chunks in self.ranges:
            of_group, rows = rows[: len(chunks)], rows[len(chunks) :]
            found[chunks.start : chunks.stop] = np.maximum(found[chunks.start : chunks.stop], of_group)
            is_needed[chunks.start : chunks.stop] = True
        found[~is_needed] = DRAM
        return found

    def rows_of(self, group: int) -> "GroupRows":
        """The rows of one group, as a hold on its chunks."""
        return GroupRows(self, group)


class GroupRows(LeaseHold):
    """The rows of one group of a lease: a hold on the last chunks of its range, counted from their first one.

    It lives and ends with the whole lease.
    """

    def __init__(self, whole: GroupHold, group: int) -> None:
        chunks = whole.ranges[group]
        self._first = sum(len(before) for before in whole.ranges[:group])
        words = slice(self._first * _WORD_BYTES, (self._first + len(chunks)) * _WORD_BYTES)
        leased = whole._leased
        rows = m.Leased(
            leased.lease,
            len(chunks),
            leased.offsets[words],
            leased.generations[words],
            leased.tiers[self._first : self._first + len(chunks)],
            leased.slots[words],
        )
        own = whole.namespace._replace(layout=whole.layout.of_group(group))
        super().__init__(whole.session, rows, namespace=own)
        self._whole = whole

    def __del__(self) -> None:
        pass  # the whole lease ends

    @property
    def is_live(self) -> bool:
        """Whether the whole lease lives."""
        return self._whole.is_live

    def place_of(self, chunk: int) -> tuple[int, int]:
        """The lease's id, and the row of a chunk, counted from the first of these rows, among all of the lease."""
        return self.id, self._first + chunk

    def begin_load(self, load: Load) -> bool:
        """Have the whole lease's release wait for this load."""
        return self._whole.begin_load(load)

    def end_load(self, load: Load) -> None:
        """The load has ended."""
        self._whole.end_load(load)


class GroupLeaseFetcher(LeaseFetcher):
    """Fetches the leases of one Pool whose layout has groups."""

    def __init__(
        self,
        namespace: Namespace,
        link: Link,
        counters: Counters,
        *,
        finder: GroupFinder,
        estimate_s: Callable[[int], float],
        timeout_s: float,
    ) -> None:
        super().__init__(namespace, link, counters, estimate_s=estimate_s, timeout_s=timeout_s)
        self._finder = finder

    def acquire(self, hit: Hit) -> Lease:
        """Lease what a hit needs of every group; where some of it was evicted since, what is a hit now, if anything is.

        What other nodes or the store were known to have may be gone, or they do not answer: then a shorter hit, and at last
        what is one on this node alone.
        """
        session = self._link.session
        if session is None or not hit.chunks:
            return self._lease(None, NO_LEASE)
        deadline = Deadline(self._timeout_s)
        wanted, others = hit, self._other_hits(session, hit)
        leased = self._ask(session, self._request(wanted), self._timeout_s)
        while leased is not None and not leased.chunks and (now := next(others, None)) is not None:
            left_s = deadline.remaining_s()
            if left_s < self._timeout_s / 2:
                break
            if now.chunks > 0:
                wanted = now
                leased = self._ask(session, self._request(wanted), left_s)
        return self._lease(session, _from_store(self._namespace.layout, leased or NO_LEASE, wanted))

    def promises_of(self, hit: Hit, tickets: int, claims: int) -> Iterator[tuple[Hit, pr.Promise]]:
        """What to ask for a promise of a hit, one after the other until something is promised; nothing for an empty one. Asks
        no store."""
        if not hit.chunks:
            return
        yield hit, self._promise(hit, tickets, claims)
        session = self._link.session
        for now in self._other_hits(session, hit, seeks=False) if session is not None else ():
            if now.chunks:
                yield now, self._promise(now, tickets, claims)

    def promised_levels(self, hit: Hit, promised: pr.Promised) -> bytes:
        """The level of each chunk of a promise. Raises ProtocolError where it has not one for each row."""
        check_levels(promised, sum(map(len, chunk_ranges(self._namespace.layout, promised.chunks))))
        leased = _from_store(self._namespace.layout, m.Leased(0, promised.chunks, b"", b"", promised.tiers), hit)
        return self._lease(None, leased).tiers.tobytes()

    def _promise(self, hit: Hit, tickets: int, claims: int) -> pr.Promise:
        return pr.Promise(self._finder.keys_of(hit.keys, hit.chunks), hit.chunks, "", tickets, claims)

    def _other_hits(self, session: Session, hit: Hit, *, seeks: bool = True) -> Iterator[Hit]:
        """What may be leased where a hit could not be. `seeks`: the shared store may be asked, which takes its time."""
        if hit.chunks_here == hit.chunks:
            yield self._finder.find(session, hit.keys, hit.chunks)
            return
        if seeks and STORE in hit.tiers.tobytes():  # it may have it still: the daemon remembers an answer briefly
            yield self._finder.find_or_seek(session, hit.keys, hit.chunks)
        else:
            yield self._finder.find(session, hit.keys, hit.chunks - 1)
        yield self._finder.find(session, hit.keys, hit.chunks, is_here=True)

    def _lease(self, session: Session | None, leased: m.Leased, peer_pace: PeerPace = FIRST_PEER_PACE) -> Lease:
        hold = GroupHold(session if leased.chunks else None, leased, namespace=self._namespace)
        return GroupLease(hold, estimate_s=self._estimate_s, peer_pace=peer_pace)

    def _request(self, hit: Hit) -> m.Acquire:
        return m.Acquire(self._finder.keys_of(hit.keys, hit.chunks), hit.chunks)


def _from_store(layout: Layout, leased: m.Leased, hit: Hit) -> m.Leased:
    """The lease with the level of chunks that the shared store was to give: on their way they count as another node's."""
    if STORE not in hit.tiers[: leased.chunks].tobytes():
        return leased
    wanted = np.concatenate([hit.tiers[chunks.start : chunks.stop] for chunks in chunk_ranges(layout, leased.chunks)])
    found = np.frombuffer(leased.tiers, np.uint8).copy()
    found[(found == PEER) & (wanted == STORE)] = STORE
    return replace(leased, tiers=found.tobytes())


def chunk_ranges(layout: Layout, chunks: int) -> tuple[range, ...]:
    """The chunks of each group that a hit of so many needs."""
    roles = [part.group for part in layout.group_layouts]
    return tuple(
        range(chunks - role.chunks_of(chunks, layout.chunk_tokens), chunks) for role in roles if role is not None
    )
