"""Pulled names: the token ids of chunks that are on their way from another node or a shared store, until these have come.

Chunks come in any order, and a router is sent an event of one only behind that of the one before it: each chain is named from
its beginning, as far as it has come, and after the journal has its landings, which are events without ids. Control thread only.
Bounded: chains beyond CHAINS_MAX, and ids beyond BYTES_MAX, are left out, and with them the events.
"""

from collections import deque
from dataclasses import dataclass

import kvpool_native
from kvpool.clock import Clock, Deadline
from kvpool.ids import NamespaceId
from kvpool.journal.journal import Journal
from kvpool.key_column import KeyColumn

BYTES_MAX = 64 << 20
# Each is looked at whenever something has come: all of them take a millisecond.
CHAINS_MAX = 1024
# Longer than any pull: what is before a chain may never be named.
WAIT_S = 120.0


@dataclass(slots=True)
class _Named:
    namespace: NamespaceId
    keys: KeyColumn
    tokens: bytes
    until: Deadline


class PulledNames:
    """See the module. Invariant: `_bytes` is the size of the ids that wait."""

    def __init__(self, directory: kvpool_native.Directory, journal: Journal, clock: Clock) -> None:
        """`directory`: the arena's."""
        self._clock = clock
        self._directory = directory
        self._journal = journal
        journal.listen(self.name_arrived, dict, list)
        self._waiting: deque[_Named] = deque()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<PulledNames {len(self._waiting)} chains wait>"

    def __len__(self) -> int:
        return len(self._waiting)

    def add_run(self, namespace: NamespaceId, keys: KeyColumn, tokens: bytes) -> None:
        """Name consecutive chunks of a namespace, as far as they have come; the others when they have."""
        if self._bytes + len(tokens) <= BYTES_MAX and len(self._waiting) < CHAINS_MAX:
            self._bytes += len(tokens)
            self._waiting.append(_Named(namespace, keys, tokens, Deadline(WAIT_S, self._clock)))
            self.name_arrived()

    def name_arrived(self) -> None:
        """Chunks have come, or have failed, or the journal has been written."""
        if self._journal.is_behind:
            return  # it calls this again
        for _ in range(len(self._waiting)):
            named = self._waiting.popleft()
            if self._advance(named):
                self._waiting.append(named)
            else:
                self._bytes -= len(named.tokens)

    def _advance(self, named: _Named) -> bool:
        """Name what has come. Whether something is still on its way."""
        count = len(named.keys)
        size = len(named.tokens) // count
        done, is_waiting = 0, False
        for most in (1, count):  # as a rule nothing has come, and the ids of all are not to be read for that
            keys, tokens = named.keys[:most].packed, named.tokens[: most * size]
            done, is_waiting = self._directory.name_tokens(named.namespace, keys, tokens)
            if done < most:
                break
        if done and is_waiting:
            named.keys, named.tokens = named.keys[done:], named.tokens[done * size :]
            self._bytes -= done * size
        return is_waiting and not named.until.has_passed()
