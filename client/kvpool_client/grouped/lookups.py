"""Lookups of prompts whose layout has groups: the longest hit that every group can serve, in shared memory.

A full group serves any prefix of its leading run. A window or a state serves an end before which its last chunks are all there.
The search begins at the end of the shortest full run, and has each window and state lower it to the last end that it can serve,
until none does: the greatest end that suits all, because each answer is the greatest one below.

Chunks that other nodes are known to have count, and are fetched with a lease. Nothing is sent, unless there is a shared store
to ask for more (`verbs/store_search.py`). A hit is never longer than one lease holds. Any thread.
"""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.messages import HOLDS_MAX
from kvpool.types import DRAM, PEER
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.lease_bound import chunks_held, chunks_named
from kvpool_client.verbs.results import Hit
from kvpool_client.verbs.store_search import ELSEWHERE_MAX, StoreSearch, can_search

log = logging.getLogger(__name__)

_NO_TIERS = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class GroupHit(Hit):
    """A Hit of a layout with groups, from `Pool.lookup`. `full_chunks`: what the full groups alone have; where that is more
    than `chunks`, windows and states stored at that end would make it a hit."""

    full_chunks: int = 0


class GroupFinder:
    """Looks prompts up for one Pool."""

    def __init__(self, layout: Layout, link: Link, counters: Counters, timeout_s: float) -> None:
        """`timeout_s`: of a round trip. Logs a warning where leases have fewer holds than the windows of a long prompt need."""
        self._layout = layout
        self._link = link
        self._counters = counters
        ranks = len(layout.ranks)
        roles = [part.group for part in layout.group_layouts for _ in range(ranks)]
        # By column: None for a full group, else how many chunks before a hit's end it needs.
        self._runs = [
            None if role is None or role.is_full else role.chunks_of(m.KEYS_MAX, layout.chunk_tokens) for role in roles
        ]
        named, held = chunks_named(layout, ranks), chunks_held(layout, ranks)
        self.chunks_max = min(named, held)
        self._store = StoreSearch(self._runs, link, timeout_s=timeout_s)
        if held < named:
            log.warning(
                "kvpool: hits end at %d tokens (%d chunks of %d): a lease has %d holds, one for each rank of a full group and "
                "one for each chunk of windows and states, which are up to %d in %d groups on %d ranks. Larger chunks, and "
                "head groups, which all ranks share, have longer hits",
                self.chunks_max * layout.chunk_tokens,
                self.chunks_max,
                layout.chunk_tokens,
                HOLDS_MAX,
                sum(run for run in self._runs if run is not None),
                len(layout.groups),
                len(layout.ranks),
            )

    def lookup(self, keys: KeyChain, chunks_max: int | None = None, *, is_counted: bool = True) -> GroupHit:
        """See `Pool.lookup`; of `chunks_max` chunks at most."""
        session = self._link.session
        if session is None:
            return self.find(None, keys)
        hit = self.find_or_seek(session, keys, chunks_max)
        if is_counted:
            self._counters.count_lookup(len(keys), hit.tiers.tobytes())
        return hit

    def find_or_seek(self, session: Session, keys: KeyChain, chunks_max: int | None = None) -> GroupHit:
        """The hit with what the shared store has, where there is one. Not counted."""
        hit = self.find(session, keys, chunks_max)
        most = self._most(keys, chunks_max)
        if hit.chunks >= most or not can_search(session):
            return hit
        columns = [KeyColumn(column)[:most] for column in keys.columns()]
        tiers, full = self._store.search(session, columns, hit.tiers, hit.full_chunks)
        return hit if (len(tiers), full) == (hit.chunks, hit.full_chunks) else self._hit(session, tiers, keys, full)

    def find(
        self, session: Session | None, keys: KeyChain, chunks_max: int | None = None, *, is_here: bool = False
    ) -> GroupHit:
        """The hit, which is not counted; `is_here`: of this node's chunks alone. A miss while the daemon is away."""
        end = full = self._most(keys, chunks_max) if session is not None else 0
        if session is None or not end:
            return self._hit(session, _NO_TIERS, keys, 0)
        columns = keys.columns()
        runs: list[npt.NDArray[np.uint8]] = []
        for column, run in zip(columns, self._runs, strict=True):
            if run is None:
                runs.append(_run(session, column, is_here=is_here))
                end = full = min(end, len(runs[-1]))
                if not end:
                    return self._hit(session, _NO_TIERS, keys, 0)
        tiers = np.maximum.reduce([run[:end] for run in runs]) if runs else np.full(end, DRAM, np.uint8)
        others = [(column, run) for column, run in zip(columns, self._runs, strict=True) if run is not None]
        found, before = [b""] * len(others), -1
        while end and end != before:
            before = end
            for number, (column, run) in enumerate(others):
                end, found[number] = session.index.last_run(column, end, run, is_here)
        elsewhere = sum(int((np.frombuffer(levels, np.uint8) >= PEER).sum()) for levels in found) if end else 0
        if elsewhere > ELSEWHERE_MAX:
            return self.find(session, keys, chunks_max, is_here=True)
        tiers = tiers[:end].copy()
        for levels in found if end else ():
            of_run = slice(end - len(levels), end)
            tiers[of_run] = np.maximum(tiers[of_run], np.frombuffer(levels, np.uint8))
        return self._hit(session, tiers, keys, full)

    def keys_of(self, keys: KeyChain, chunks: int) -> bytes:
        """The keys that a hit of so many chunks needs of each group, as a request names them."""
        columns = [KeyColumn(column) for column in keys.columns()]
        counts = [chunks if run is None else min(run, chunks) for run in self._runs]
        return b"".join(column[chunks - count : chunks].packed for column, count in zip(columns, counts, strict=True))

    def _most(self, keys: KeyChain, chunks_max: int | None) -> int:
        """How many chunks a hit may have."""
        return min(len(keys), self.chunks_max, len(keys) if chunks_max is None else chunks_max)

    def _hit(self, session: Session | None, tiers: npt.NDArray[np.uint8], keys: KeyChain, full: int) -> GroupHit:
        pace = None
        if session is not None and len(tiers) and tiers.item(len(tiers) - 1) == PEER:
            pace = session.peer_pace(keys.columns()[0], len(tiers) - 1)
        return GroupHit(len(tiers), len(tiers) * self._layout.chunk_tokens, tiers, keys, pace, full_chunks=full)


def _run(session: Session, column: bytes, *, is_here: bool) -> npt.NDArray[np.uint8]:
    """The level of each chunk of the leading run, of this node's chunks alone or of other nodes', too."""
    count, levels = session.index.lookup(column)
    if not count:
        return _NO_TIERS
    tiers = np.frombuffer(levels, np.uint8)
    elsewhere = np.flatnonzero(tiers >= PEER)
    return tiers[: elsewhere[0]] if is_here and len(elsewhere) else tiers
