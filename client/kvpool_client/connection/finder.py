"""Finder: lookups of one Pool. In shared memory, and for what that lacks in the store that nodes share, where there is one.

A lookup in shared memory costs no request. Chunks of the shared store are in no table: a lookup that ends before its last key
asks the daemon for the rest, once, and the daemon answers within `store.answer_timeout`. The next keys that the store did not
have are remembered, bounded, so that the same question is not asked again at once. Any thread.

Lock: `_lock` guards `_absent`, never held across a request.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvpool.clock import NS_PER_S, Clock, MonotonicClock
from kvpool.errors import KVPoolError
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import seeking as sk
from kvpool.types import STORE
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.lookups import look_up, look_up_each, most_chunks
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import KeyChain
from kvpool_client.results import Hit

ABSENT_MAX = 4096
WAIT_FRACTION = 0.5


class Finder:
    """See the module."""

    def __init__(
        self, layout: Layout, link: Link, counters: Counters, *, timeout_s: float, clock: Clock | None = None
    ) -> None:
        """`timeout_s`: of a round trip; the store gets WAIT_FRACTION of it, so that its slowness does not end the session."""
        self._layout = layout
        self._link = link
        self._counters = counters
        self._timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._absent: OrderedDict[bytes, int] = OrderedDict()  # until when; guarded by _lock

    def lookup(self, keys: KeyChain, owner: str = "", *, is_counted: bool = True) -> Hit:
        """See `Pool.lookup`. `is_counted`: in the usage that hit rates are made of."""
        session = self._link.session
        hit = look_up(session, keys, self._layout, owner)
        if session is None:
            return hit
        if session.welcome.has_store:
            hit = self._with_store(session, hit)
        if is_counted:
            self._counters.count_lookup(len(keys), hit.tiers.tobytes())
        return hit

    def _with_store(self, session: Session, hit: Hit) -> Hit:
        """The hit with what the shared store has behind it."""
        columns = hit.keys.columns()
        chunks, most = hit.chunks, most_chunks(columns)
        more = self._seek(session, [KeyColumn(column)[chunks:most] for column in columns]) if chunks < most else 0
        if not more:
            return hit
        tiers = np.concatenate([hit.tiers, np.full(more, STORE, np.uint8)])
        return Hit(chunks + more, (chunks + more) * self._layout.chunk_tokens, tiers, hit.keys)

    def lookup_each(self, chains: Sequence[KeyChain], *, is_counted: bool = True) -> list[Hit]:
        """The hits of leading chains of which this node has every chunk, in one lookup. No request. `is_counted`: as in
        `lookup`."""
        hits = look_up_each(self._link.session, chains, self._layout)
        if hits and is_counted:
            tiers = b"".join(hit.tiers.tobytes() for hit in hits)
            self._counters.count_lookup(len(tiers), tiers)
        return hits

    def _seek(self, session: Session, columns: list[KeyColumn]) -> int:
        """How many leading chunks of these the shared store has; nothing where it had not the first a moment ago."""
        now_ns = self._clock.now_ns()
        with self._lock:
            until_ns = self._absent.get(columns[0][0], 0)
        if until_ns > now_ns:
            return 0
        most = max(1, sk.SEEK_KEYS_MAX // len(columns))
        packed = b"".join(column[:most].packed for column in columns)
        try:
            sought = session.call(sk.Seek(packed, WAIT_FRACTION * self._timeout_s), sk.Sought)
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return 0
        found = min(sought.chunks, most, len(columns[0]))
        if found < len(columns[0]):
            self._note_absent(columns[0][found], now_ns + int(sought.remember_s * NS_PER_S))
        return found

    def _note_absent(self, key: bytes, until_ns: int) -> None:
        with self._lock:
            self._absent[key] = until_ns
            self._absent.move_to_end(key)
            if len(self._absent) > ABSENT_MAX:
                self._absent.popitem(last=False)
