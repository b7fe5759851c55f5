"""Finder: lookups of one Pool. In shared memory, and for what that lacks in the store that nodes share, where there is one.

A lookup in shared memory costs no request. Chunks of the shared store are in no table: a lookup that ends before its last key
asks the daemon for the rest, once (`store_search`). Any thread.
"""

from collections.abc import Sequence

from kvpool.clock import Clock
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.lookups import look_up, look_up_each, most_chunks
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.results import Hit
from kvpool_client.verbs.store_search import StoreSearch, can_search


class Finder:
    """See the module."""

    def __init__(
        self, layout: Layout, link: Link, counters: Counters, *, timeout_s: float, clock: Clock | None = None
    ) -> None:
        """`timeout_s`: of a round trip."""
        self._layout = layout
        self._link = link
        self._counters = counters
        self._store = StoreSearch([None] * len(layout.ranks), link, timeout_s=timeout_s, clock=clock)

    def lookup(self, keys: KeyChain, owner: str = "", *, is_counted: bool = True) -> Hit:
        """See `Pool.lookup`. `is_counted`: in the usage that hit rates are made of."""
        session = self._link.session
        hit = look_up(session, keys, self._layout, owner)
        if session is None:
            return hit
        if can_search(session):
            hit = self._with_store(session, hit)
        if is_counted:
            self._counters.count_lookup(len(keys), hit.tiers.tobytes())
        return hit

    def _with_store(self, session: Session, hit: Hit) -> Hit:
        """The hit with what the shared store has behind it."""
        columns = hit.keys.columns()
        most = most_chunks(columns)
        if hit.chunks == most:
            return hit
        tiers, chunks = self._store.search(
            session, [KeyColumn(column)[:most] for column in columns], hit.tiers, hit.chunks
        )
        return hit if chunks == hit.chunks else Hit(chunks, chunks * self._layout.chunk_tokens, tiers, hit.keys)

    def lookup_each(self, chains: Sequence[KeyChain], *, is_counted: bool = True) -> list[Hit]:
        """The hits of leading chains of which this node has every chunk, in one lookup. No request. `is_counted`: as in
        `lookup`."""
        hits = look_up_each(self._link.session, chains, self._layout)
        if hits and is_counted:
            tiers = b"".join(hit.tiers.tobytes() for hit in hits)
            self._counters.count_lookup(len(tiers), tiers)
        return hits
