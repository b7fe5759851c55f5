"""Pending chunks: those that other writers are just saving, or that are on their way from another tier.

The daemon stores a chunk once; a second save gets the state `pending` while the first one writes, or while the chunk comes
from disk or another node, which may fail. Shared memory shows whether that is still so, so that waiting takes no request. Any
thread.
"""

import threading

from kvpool.clock import Deadline
from kvpool.key_column import KeyColumn
from kvpool.states import Level
from kvpool_client.connection.session import Session

# Polling interval: it begins short and grows by half each time, because a save takes a millisecond or a forward pass.
FIRST_LOOK_S = 0.0005
LAST_LOOK_S = 0.01


class PendingChunks:
    """`keys`: those of the chunks that were pending when a save was asked for."""

    def __init__(self, session: Session | None, keys: KeyColumn) -> None:
        self._session = session
        self._keys = list(keys) if keys.packed else []

    def __len__(self) -> int:
        return len(self._keys)

    def are_under_way(self) -> bool:
        """Whether any of them is still being written. Reads shared memory; never waits."""
        session = self._session
        return session is not None and session.is_alive and any(map(session.index.is_being_written, self._keys))

    def are_stored(self) -> list[bool]:
        """Whether each of them is stored now. Reads shared memory; never waits."""
        is_there = self._session is not None and self._session.is_alive
        return [is_there and self._is_stored(key) for key in self._keys]

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is being written, or the time is over. Whether all of them are stored."""
        if not self._keys:
            return True
        if self._session is None:
            return False
        deadline, pause_s, left = Deadline(timeout_s), FIRST_LOOK_S, self._keys
        while self._session.is_alive:
            left = [key for key in left if self._session.index.is_being_written(key)]
            if not left:
                return all(map(self._is_stored, self._keys))
            if deadline.has_passed():
                break
            threading.Event().wait(min(pause_s, deadline.remaining_s()))
            pause_s = min(LAST_LOOK_S, 1.5 * pause_s)
        return False

    def _is_stored(self, key: bytes) -> bool:
        """Whether this node has the chunk: its writer may have failed, and another node have it."""
        assert self._session is not None
        return any(level < Level.PEER for level in self._session.index.lookup(key))
