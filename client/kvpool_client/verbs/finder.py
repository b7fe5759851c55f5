"""Finder: lookups of one Pool. In shared memory, and for what that lacks in the store that nodes share, where there is one.

A hit is the longest one that every group of the layout can serve; a plain layout is one full group. A full group serves any
prefix of its leading run. A window or a state serves an end before which its last chunks are all there. The search begins at
the end of the shortest full run, and has each window and state lower it to the last end that it can serve, until none does: the
greatest end that suits all, because each answer is the greatest one below.

A lookup in shared memory costs no request: it reads this node's index, and behind it the table of other nodes' chunks, which
are fetched with a lease. Chunks of the shared store are in no table: a lookup that ends before its last key asks the daemon for
the rest (`verbs/store_search.py`). A request may name a node that has the rest of its prompt, as a router or a proxy knows
before the table does: the rest is then taken for present there, and whether it is becomes known when it is leased. A hit is
never longer than one lease holds. Any thread.
"""

import logging
from collections.abc import Sequence

import numpy as np

from kvpool.clock import Clock
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.messages import HOLDS_MAX
from kvpool.states import DRAM, PEER
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.lease_bound import chunks_held, chunks_named
from kvpool_client.verbs.results import Hit
from kvpool_client.verbs.store_search import ELSEWHERE_MAX, Levels, StoreSearch, can_search

log = logging.getLogger(__name__)

_NO_TIERS = np.empty(0, np.uint8)


class Finder:
    """See the module."""

    def __init__(
        self, layout: Layout, link: Link, counters: Counters, *, timeout_s: float, clock: Clock | None = None
    ) -> None:
        """`timeout_s`: of a round trip. Logs a warning where leases have fewer holds than the windows of a long prompt need."""
        self._layout = layout
        self._link = link
        self._counters = counters
        ranks = len(layout.ranks)
        # By column: None for a full group, else how many chunks before a hit's end it needs.
        self._runs = [
            None if part.is_chained else part.chunks_of(m.KEYS_MAX)
            for part in layout.group_layouts
            for _ in range(ranks)
        ]
        self._full = [number for number, run in enumerate(self._runs) if run is None]
        self._others = [(number, run) for number, run in enumerate(self._runs) if run is not None]
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
                sum(run for _, run in self._others),
                len(layout.groups),
                ranks,
            )

    @property
    def has_windows(self) -> bool:
        """Whether a hit needs chunks of windows or states: it ends where they were stored for, and nowhere else."""
        return bool(self._others)

    def lookup(self, keys: KeyChain, owner: str = "", *, chunks_max: int | None = None, is_counted: bool = True) -> Hit:
        """See `Pool.lookup`. `is_counted`: in the usage that hit rates are made of."""
        session = self._link.session
        if session is None:
            return self.find(None, keys)
        hit = self.find_or_seek(session, keys, chunks_max, owner=owner)
        if is_counted:
            self._counters.count_lookup(len(keys), hit.tiers.tobytes())
        return hit

    def lookup_each(self, chains: Sequence[KeyChain], *, is_counted: bool = True) -> list[Hit]:
        """The hits of leading chains of which this node has every chunk, by one walk through its index for each rank. No
        request. `is_counted`: as in `lookup`. REQUIRES: no windows and states."""
        session = self._link.session
        if session is None or not chains:
            return []
        columns = zip(*(keys.columns() for keys in chains), strict=True)
        tiers = self._run(session, [b"".join(of_chains) for of_chains in columns])
        ends = np.cumsum([len(keys) for keys in chains])
        elsewhere = np.flatnonzero(tiers >= PEER)
        whole = int(np.searchsorted(ends, elsewhere[0] if len(elsewhere) else len(tiers), side="right"))
        hits = [
            self._hit(None, tiers[end - len(keys) : end], keys, len(keys))
            for keys, end in zip(chains[:whole], ends.tolist(), strict=False)
        ]
        if hits and is_counted:
            found = tiers[: ends[whole - 1]].tobytes()
            self._counters.count_lookup(len(found), found)
        return hits

    def find_or_seek(self, session: Session, keys: KeyChain, chunks_max: int | None = None, *, owner: str = "") -> Hit:
        """The hit with what the shared store has, where there is one, and all of it where an `owner` is named. Not counted."""
        most = self._most(keys, chunks_max)
        hit = self._find(session, keys, most)
        if hit.chunks >= most:
            return hit
        if owner and session.has_peers:
            tiers = np.concatenate([hit.tiers, np.full(most - hit.chunks, PEER, np.uint8)])
            return Hit(most, most * self._layout.chunk_tokens, tiers, keys, owner=owner, full_chunks=hit.full_chunks)
        if not can_search(session):
            return hit
        columns = [KeyColumn(column)[:most] for column in keys.columns()]
        tiers, full = self._store.search(session, columns, hit.tiers, hit.full_chunks)
        return hit if (len(tiers), full) == (hit.chunks, hit.full_chunks) else self._hit(session, tiers, keys, full)

    def find(
        self, session: Session | None, keys: KeyChain, chunks_max: int | None = None, *, is_here: bool = False
    ) -> Hit:
        """The hit, which is not counted; `is_here`: of this node's chunks alone. A miss while the daemon is away."""
        end = self._most(keys, chunks_max) if session is not None else 0
        return self._find(session, keys, end, is_here=is_here)

    def _find(self, session: Session | None, keys: KeyChain, end: int, *, is_here: bool = False) -> Hit:
        """The hit of `end` chunks at most."""
        if session is None or not end:
            return self._hit(session, _NO_TIERS, keys, 0)
        most = end
        columns = keys.columns()
        full_columns = [columns[number] for number in self._full] if self._others else columns
        tiers = self._run(session, full_columns)[:end] if full_columns else np.full(end, DRAM, np.uint8)
        if is_here and len(elsewhere := np.flatnonzero(tiers >= PEER)):
            tiers = tiers[: elsewhere[0]]
        full = len(tiers)
        if full and self._others:
            end, found = self._windows(session, columns, full, is_here=is_here)
            if sum(int((levels >= PEER).sum()) for levels in found) > ELSEWHERE_MAX:
                return self._find(session, keys, most, is_here=True)
            tiers = tiers[:end].copy()
            for levels in found:
                of_run = slice(end - len(levels), end)
                tiers[of_run] = np.maximum(tiers[of_run], levels)
        return self._hit(session, tiers, keys, full)

    def keys_of(self, keys: KeyChain, chunks: int) -> bytes:
        """The keys that a hit of so many chunks needs of each group, as a request names them."""
        return b"".join(
            KeyColumn(column)[0 if run is None else max(0, chunks - run) : chunks].packed
            for column, run in zip(keys.columns(), self._runs, strict=True)
        )

    def leaves_of(self, keys: KeyChain, chunks: int) -> bytes:
        """The same, with the last key of each full group's chain for all of it; none where that is no shorter, or for more
        chunks than may be named so."""
        if chunks == 1 or not 0 < chunks * len(self._full) <= m.LEAF_CHUNKS_MAX:
            return b""
        return b"".join(
            [
                KeyColumn(column)[max(0, chunks - (run or 1)) : chunks].packed
                for column, run in zip(keys.columns(), self._runs, strict=True)
            ]
        )

    def _most(self, keys: KeyChain, chunks_max: int | None) -> int:
        """How many chunks a hit may have."""
        return min(len(keys), self.chunks_max if chunks_max is None else min(chunks_max, self.chunks_max))

    def _run(self, session: Session, columns: Sequence[bytes]) -> Levels:
        """The level of each chunk of the leading run that all chains have, the slowest of theirs."""
        found = [session.index.lookup(column) for column in columns]
        if len(found) == 1:
            return np.frombuffer(found[0][1], np.uint8)
        shortest = min(count for count, _ in found)
        slowest: Levels = np.maximum.reduce([np.frombuffer(levels, np.uint8)[:shortest] for _, levels in found])
        return slowest

    def _windows(
        self, session: Session, columns: Sequence[bytes], end: int, *, is_here: bool
    ) -> tuple[int, list[Levels]]:
        """The last end, `end` at most, before which each window and state has its chunks, and their levels; 0 and none where
        there is none."""
        found, before = [b""] * len(self._others), -1
        while end and end != before:
            before = end
            for place, (number, run) in enumerate(self._others):
                end, found[place] = session.index.last_run(columns[number], end, run, is_here)
        return end, [np.frombuffer(levels, np.uint8) for levels in found] if end else []

    def _hit(self, session: Session | None, tiers: Levels, keys: KeyChain, full: int) -> Hit:
        chunks, pace = len(tiers), None
        if session is not None and chunks and tiers.item(chunks - 1) == PEER:
            pace = session.peer_pace(keys.columns()[0], chunks - 1)
        return Hit(chunks, chunks * self._layout.chunk_tokens, tiers, keys, pace, full_chunks=full)
