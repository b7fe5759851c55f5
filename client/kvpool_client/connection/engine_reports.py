"""Engine reports: requests that report to the daemon which chunks one block pool of this process has.

One source of a Pool's connection; which chunks are reported, and when, is its owner's decision. Towards a daemon that is too
old there is no session. Any thread; one report at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.errors import KVPoolError
from kvpool.ids import TOKEN_BYTES
from kvpool.keys import pack_scope
from kvpool.layout import Layout
from kvpool.protocol.records import engine_chunks as ec
from kvpool.protocol.records import messages as m
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session


@dataclass(frozen=True, slots=True)
class ReportedChunk:
    """A chunk that the block pool has. `parent`: the key before it, or the chain's root where it is the first one; `tokens`:
    i32 ids; `scope`: see `kvpool.keys`."""

    parent: bytes
    is_first: bool
    tokens: bytes
    scope: bytes


class EngineReports:
    """See the module."""

    def __init__(
        self, link: Link, layout: Layout, salt: bytes, roots_of: Callable[[bytes, str], tuple[bytes, ...]]
    ) -> None:
        """`salt`: the Pool's own; `roots_of`: the roots of a salt and an adapter, by rank."""
        self._link = link
        self._salt = salt
        self._roots_of = roots_of
        self._source = next(link.sources) % ec.SOURCES_MAX
        self.chunk_tokens = layout.chunk_tokens

    @property
    def chunks_max(self) -> int:
        """Chunks that fit a report; 0: not one does."""
        return min(ec.REPORT_CHUNKS_MAX, m.COMMIT_BYTES_MAX // (TOKEN_BYTES * self.chunk_tokens))

    @property
    def session(self) -> Session | None:
        """The living session."""
        return self._link.session

    def on_connected(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each connection; it must not wait."""
        self._link.connected_listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Call the listener no more."""
        self._link.connected_listeners.remove(listener)

    def note_failure(self, session: Session, error: KVPoolError) -> None:
        """Count a failed report, and have the Pool reconnect if its session has ended."""
        self._link.note_failure(session, error)

    def root(self, salt: bytes | None, adapter: str) -> bytes:
        """The root of a chain. `salt` None: the Pool's own."""
        return self._roots_of(self._salt if salt is None else salt, adapter)[0]

    def scope(self, salt: bytes | None, adapter: str) -> bytes:
        """The scope of a chain's chunks."""
        return pack_scope(adapter, self._salt if salt is None else salt)

    def send(
        self, session: Session, removed: Sequence[bytes], stored: Sequence[ReportedChunk], *, is_anew: bool
    ) -> bytes:
        """Report chunks that have gone and come: a `ReportState` for each of the latter. One round trip.

        Raises Refused or DaemonUnreachable.
        """
        scopes = list(dict.fromkeys(chunk.scope for chunk in stored))
        index = {scope: number for number, scope in enumerate(scopes)}
        request = ec.ReportChunks(
            self._source,
            is_anew,
            b"".join(removed),
            b"".join(chunk.parent for chunk in stored),
            bytes(chunk.is_first for chunk in stored),
            b"".join(chunk.tokens for chunk in stored),
            scopes,
            np.array([index[chunk.scope] for chunk in stored], dtype="<u2").tobytes(),
        )
        return session.call(request, ec.ChunksTaken).states
