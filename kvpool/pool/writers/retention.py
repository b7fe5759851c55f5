"""Retention: priorities and durations of stored chunks, set by engines, operators and hints.

Turns request columns into calls of the native directory, which has the priorities, expires them, and clips those beyond its
share. A retention request counts in every tier that has the chunk. A demote hint is the opposite: chunks that only DRAM has are
written to the lower tier at once, and DRAM evicts them first, while the lower tier retains them as before.

Control thread only; `now_ns` is an argument. Holds no state of its own.
"""

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.index.namespaces import Namespace
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.tiering.tiering import Tiering
from kvpool.types import DURATION_BYTES, KEEP_PRIORITY, RetainState

# How long DRAM evicts an unused demoted chunk before others; then it is an ordinary chunk.
DEMOTED_MS = 600_000


class Retention:
    """Wishes about chunks that are stored already."""

    def __init__(self, directory: kvpool_native.Directory, tiering: Tiering) -> None:
        self._directory = directory
        self._tiering = tiering

    def retain(
        self, session: EngineSession, keys: KeyColumn, priorities: bytes, durations: bytes, now_ns: int
    ) -> bytes:
        """Set the retention of chunks on every rank of the session: a `RetainState` for each, the worst of the ranks'."""
        failpoint.reach("daemon.retain.before", failpoint.refused)
        states = []
        for namespace, column in _by_rank(session, keys):
            states.append(keep(self._directory, namespace.id, column.packed, priorities, durations, now_ns))
            self._tiering.remember_retention(column, states[-1])
        return _worst(states)

    def retain_in(self, namespace: Namespace, keys: KeyColumn, priority: int, duration_ms: int, now_ns: int) -> bytes:
        """Set the retention of chunks of one namespace: a `RetainState` for each."""
        count = len(keys)
        durations = duration_ms.to_bytes(DURATION_BYTES, "little") * count
        states = self._directory.retain(namespace.id, keys.packed, bytes([priority]) * count, durations, now_ns)
        self._tiering.remember_retention(keys, states)
        return states

    def demote(self, session: EngineSession, parents: KeyColumn, keys: KeyColumn, first: int, now_ns: int) -> bytes:
        """Write chunks after `parents` to the lower tier, and have DRAM evict them first from `first` on, on every rank.

        `parents` has a key for each rank, or none at the root. `first` may be before the chunks or behind. Answers a
        `RetainState` for each that is given up, the worst of the ranks'.
        """
        failpoint.reach("daemon.demote.asked", failpoint.refused)
        count = len(keys) // len(session.namespaces)
        first = min(max(0, first), count)
        above = list(parents) or [b""] * len(session.namespaces)
        durations = DEMOTED_MS.to_bytes(DURATION_BYTES, "little") * (count - first)
        states = []
        for (namespace, column), parent in zip(_by_rank(session, keys), above, strict=True):
            self._tiering.demote(namespace, parent, column.packed, now_ns)
            chosen = column[first:]
            lower = self._tiering.retained(chosen)
            states.append(self._directory.retain(namespace.id, chosen.packed, bytes(count - first), durations, now_ns))
            self._tiering.restore_retention(namespace, lower, now_ns)
        return _worst(states)


def keep(
    directory: kvpool_native.Directory, namespace: int, keys: bytes, priorities: bytes, durations: bytes, now_ns: int
) -> bytes:
    """Set the retention of chunks, but for those with KEEP_PRIORITY, which stay as they are: a `RetainState` for each."""
    if KEEP_PRIORITY not in priorities:
        return directory.retain(namespace, keys, priorities, durations, now_ns)
    chosen = np.flatnonzero(np.frombuffer(priorities, np.uint8) != KEEP_PRIORITY)
    states = np.full(len(priorities), RetainState.ACCEPTED, np.uint8)
    if len(chosen):
        states[chosen] = np.frombuffer(
            directory.retain(
                namespace,
                KeyColumn(keys).chosen(chosen).packed,
                np.frombuffer(priorities, np.uint8)[chosen].tobytes(),
                np.frombuffer(durations, "<u4")[chosen].tobytes(),
                now_ns,
            ),
            np.uint8,
        )
    return states.tobytes()


def _by_rank(session: EngineSession, keys: KeyColumn) -> list[tuple[Namespace, KeyColumn]]:
    return list(zip(session.namespaces.values(), keys.by_rank(len(session.namespaces)), strict=True))


def _worst(states: list[bytes]) -> bytes:
    worst: bytes = np.maximum.reduce([np.frombuffer(column, np.uint8) for column in states]).tobytes()
    return worst
