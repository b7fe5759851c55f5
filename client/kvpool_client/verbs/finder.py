"""Finder: lookups of one Pool. In shared memory, and for what that lacks in the store that nodes share, where there is one.

A hit is the longest one that every group of the layout can serve; a plain layout is one full group. A full group serves any
prefix of its leading run. A window or a state serves an end before which its last chunks are all there. One native call seeks
it in shared memory (`native/shared_index/hit_needs.h`).

A lookup in shared memory costs no request: it reads this node's index, and behind it the table of other nodes' chunks, which
are fetched with a lease. Chunks of the shared store are in no table: a lookup that ends before its last key asks the daemon for
the rest (`verbs/store_search.py`). A request may name a node that has the rest of its prompt, as a router or a proxy knows
before the table does: the rest is then taken for present there, and whether it is becomes known when it is leased. A hit is
never longer than one lease holds. Any thread.
"""

import logging

import kvpool_native
from kvpool.clock import Clock
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.messages import HOLDS_MAX
from kvpool.states import PEER
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.lease_bound import chunks_held, chunks_named
from kvpool_client.verbs.results import Hit
from kvpool_client.verbs.store_search import ELSEWHERE_MAX, StoreSearch, can_search

log = logging.getLogger(__name__)

_PEER_ALONE = bytes([PEER])


class Finder:
    """See the module."""

    def __init__(
        self, layout: Layout, link: Link, counters: Counters, *, timeout_s: float, clock: Clock | None = None
    ) -> None:
        """`timeout_s`: of a round trip. Logs a warning where leases have fewer holds than the windows of a long prompt need."""
        self._layout = layout
        self._chunk_tokens = layout.chunk_tokens
        self._link = link
        self._counters = counters
        ranks = len(layout.ranks)
        # By column: None for a full group, else how many chunks before a hit's end it needs.
        self._runs = [
            None if part.is_chained else part.chunks_of(m.KEYS_MAX)
            for part in layout.group_layouts
            for _ in range(ranks)
        ]
        others = [run for run in self._runs if run is not None]
        self.has_windows = bool(others)  # of windows or states: a hit ends where they were stored for, and nowhere else
        self._chains = len(self._runs) - len(others)
        self._needs = kvpool_native.HitNeeds([run or 0 for run in self._runs], ELSEWHERE_MAX)
        self._store = StoreSearch(self._runs, link, timeout_s=timeout_s, clock=clock)
        named, held = chunks_named(layout, ranks), chunks_held(layout, ranks)
        self.chunks_max = min(named, held)
        if held < named:
            log.warning(
                "kvpool: hits end at %d tokens (%d chunks of %d): a lease has %d holds, one for each rank of a full group and "
                "one for each chunk of windows and states, which are up to %d in %d groups on %d ranks. Larger chunks, and "
                "head groups, which all ranks share, have longer hits",
                self.chunks_max * layout.chunk_tokens,
                self.chunks_max,
                layout.chunk_tokens,
                HOLDS_MAX,
                sum(others),
                len(layout.groups),
                ranks,
            )

    def lookup(self, keys: KeyChain, owner: str = "", *, chunks_max: int | None = None, is_counted: bool = True) -> Hit:
        """See `Pool.lookup`. `is_counted`: in the usage that hit rates are made of."""
        session = self._link.session
        if session is None:
            return Hit(0, 0, b"", keys)
        hit = self.find_or_seek(session, keys, chunks_max, owner=owner)
        if is_counted:
            self._counters.count_lookup(keys.chunks, hit.levels)
        return hit

    def find_or_seek(self, session: Session, keys: KeyChain, chunks_max: int | None = None, *, owner: str = "") -> Hit:
        """The hit with what the shared store has, where there is one, and all of it where an `owner` is named. Not counted."""
        most = keys.chunks
        if most > self.chunks_max:
            most = self.chunks_max
        if chunks_max is not None and most > chunks_max:
            most = chunks_max
        hit = self._find(session, keys, most)
        if hit.chunks >= most:
            return hit
        if owner and session.has_peers:
            levels = hit.levels + _PEER_ALONE * (most - hit.chunks)
            return Hit(most, most * self._chunk_tokens, levels, keys, owner=owner, full_chunks=hit.full_chunks)
        if not can_search(session):
            return hit
        columns = [KeyColumn(column)[:most] for column in keys.columns()]
        tiers, full = self._store.search(session, columns, hit.tiers, hit.full_chunks)
        chunks = len(tiers)
        if (chunks, full) == (hit.chunks, hit.full_chunks):
            return hit
        pace = session.peer_pace(keys.columns()[0], chunks - 1) if chunks and tiers[-1] == PEER else None
        return Hit(chunks, chunks * self._chunk_tokens, tiers.tobytes(), keys, pace, "", full)

    def find(
        self, session: Session | None, keys: KeyChain, chunks_max: int | None = None, *, is_here: bool = False
    ) -> Hit:
        """The hit, which is not counted; `is_here`: of this node's chunks alone. A miss while the daemon is away."""
        if session is None:
            return Hit(0, 0, b"", keys)
        most = min(keys.chunks, self.chunks_max if chunks_max is None else min(chunks_max, self.chunks_max))
        return self._find(session, keys, most, is_here=is_here)

    def _find(self, session: Session, keys: KeyChain, end: int, *, is_here: bool = False) -> Hit:
        """The hit of `end` chunks at most."""
        if not end:
            return Hit(0, 0, b"", keys)
        columns = keys.columns()
        levels, full = session.index.find_hit(self._needs, columns, end, is_here)
        chunks, pace = len(levels), None
        if levels and levels[-1] == PEER:
            pace = session.peer_pace(columns[0], chunks - 1)
        return Hit(chunks, chunks * self._chunk_tokens, levels, keys, pace, "", full)

    def keys_of(self, keys: KeyChain, chunks: int) -> bytes:
        """The keys that a hit of so many chunks needs of each group, as a request names them."""
        return self._needs.keys_of(keys.columns(), chunks, False)

    def leaves_of(self, keys: KeyChain, chunks: int) -> bytes:
        """The same, with the last key of each full group's chain for all of it; none where that is no shorter, or for more
        chunks than may be named so."""
        if chunks == 1 or not 0 < chunks * self._chains <= m.LEAF_CHUNKS_MAX:
            return b""
        return self._needs.keys_of(keys.columns(), chunks, True)
