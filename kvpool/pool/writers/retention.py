"""Retention: what engines, operators and hints say of how long stored chunks are worth keeping.

Cuts what travels into what the native directory is asked; the directory keeps priorities, lets them lapse, and clips what would
be kept beyond its share. A wish counts in every tier that has the chunk. To demote is the opposite wish: what DRAM alone has is
written down at once, and DRAM gives those chunks up first, while below they are kept as they were.

Control thread only; `now_ns` is an argument. Holds no state of its own.
"""

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.index.namespaces import Namespace
from kvpool.index.sessions import EngineSession
from kvpool.tiering.demotions import Demotions
from kvpool.tiers.base import SlowerTier
from kvpool.types import DURATION_BYTES, KEEP_PRIORITY, KEY_BYTES, RetainState

# How long DRAM gives a demoted chunk up before others if nobody uses it; then it is one like any other.
DEMOTED_MS = 600_000


class Retention:
    """Wishes about chunks that are stored already. `demotions` and `slower`: of the slower tier, where there is one."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        demotions: Demotions | None = None,
        slower: SlowerTier | None = None,
    ) -> None:
        self._directory = directory
        self._demotions = demotions
        self._slower = slower

    def retain(self, session: EngineSession, keys: bytes, priorities: bytes, durations: bytes, now_ns: int) -> bytes:
        """Keep chunks with these on every rank of the session: a `RetainState` for each, the worst of the ranks'."""
        failpoint.reach("daemon.retain.before", failpoint.refused)
        states = []
        for namespace, column in _by_rank(session, keys, len(priorities)):
            states.append(keep(self._directory, namespace.id, column, priorities, durations, now_ns))
            self.remember_in_lower_tier(column, states[-1])
        return _worst(states)

    def retain_in(self, namespace: Namespace, keys: bytes, priority: int, duration_ms: int, now_ns: int) -> bytes:
        """Keep chunks of one namespace with this: a `RetainState` for each."""
        count = len(keys) // KEY_BYTES
        durations = duration_ms.to_bytes(DURATION_BYTES, "little") * count
        states = self._directory.retain(namespace.id, keys, bytes([priority]) * count, durations, now_ns)
        self.remember_in_lower_tier(keys, states)
        return states

    def demote(self, session: EngineSession, parents: bytes, keys: bytes, first: int, now_ns: int) -> bytes:
        """Write chunks behind `parents` down, and have DRAM give them up first from `first` on, on every rank.

        `first` may be before them or behind. Answers a `RetainState` for each that is given up, the worst of the ranks'.
        """
        failpoint.reach("daemon.demote.asked", failpoint.refused)
        count = len(keys) // KEY_BYTES // len(session.namespaces)
        first = min(max(0, first), count)
        above = (
            _by_rank(session, parents, 1)
            if parents
            else [(namespace, b"") for namespace in session.namespaces.values()]
        )
        durations = DEMOTED_MS.to_bytes(DURATION_BYTES, "little") * (count - first)
        states = []
        for (namespace, column), (_, parent) in zip(_by_rank(session, keys, count), above, strict=True):
            if self._demotions is not None:
                self._demotions.write(namespace, parent, column, now_ns)
            chosen = column[first * KEY_BYTES :]
            retained = self._retained_in_lower_tier(chosen)
            states.append(self._directory.retain(namespace.id, chosen, bytes(count - first), durations, now_ns))
            if self._slower is not None and retained:
                lower = b"".join(key for key, _, _ in retained)
                priorities = bytes(priority for _, priority, _ in retained)
                lasting = b"".join(duration.to_bytes(DURATION_BYTES, "little") for _, _, duration in retained)
                self._slower.directory.retain(namespace.id, lower, priorities, lasting, now_ns)
        return _worst(states)

    def remember_in_lower_tier(self, keys: bytes, states: bytes) -> None:
        """Have what these chunks are kept with outlive the daemon, as far as the slower tier has them.

        `states`: a `RetainState` for each; an ABSENT one may be another namespace's.
        """
        if self._slower is None:
            return
        for number, state in enumerate(states):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            if state != RetainState.ABSENT and self._slower.directory.retention(key) is not None:
                self._slower.touch(key)

    def _retained_in_lower_tier(self, column: bytes) -> list[tuple[bytes, int, int]]:
        """Those of the keys that the slower tier has, and with what it keeps each."""
        if self._slower is None:
            return []
        keys = [column[at : at + KEY_BYTES] for at in range(0, len(column), KEY_BYTES)]
        found = [(key, self._slower.directory.retention(key)) for key in keys]
        return [(key, *retained) for key, retained in found if retained is not None]


def keep(
    directory: kvpool_native.Directory, namespace: int, keys: bytes, priorities: bytes, durations: bytes, now_ns: int
) -> bytes:
    """Keep chunks with these, but for those of KEEP_PRIORITY, which stay as they are: a `RetainState` for each."""
    if KEEP_PRIORITY not in priorities:
        return directory.retain(namespace, keys, priorities, durations, now_ns)
    chosen = np.flatnonzero(np.frombuffer(priorities, np.uint8) != KEEP_PRIORITY)
    states = np.full(len(priorities), RetainState.ACCEPTED, np.uint8)
    if len(chosen):
        states[chosen] = np.frombuffer(
            directory.retain(
                namespace,
                np.frombuffer(keys, "V32")[chosen].tobytes(),
                np.frombuffer(priorities, np.uint8)[chosen].tobytes(),
                np.frombuffer(durations, "<u4")[chosen].tobytes(),
                now_ns,
            ),
            np.uint8,
        )
    return states.tobytes()


def part_of(keys: bytes, ranks: int, part: slice) -> bytes:
    """A part of each rank's chunks, of keys of one rank after those of another."""
    length = len(keys) // ranks
    columns = [keys[rank * length : (rank + 1) * length] for rank in range(ranks)]
    return b"".join(column[part.start * KEY_BYTES : part.stop * KEY_BYTES] for column in columns)


def _by_rank(session: EngineSession, keys: bytes, count: int) -> list[tuple[Namespace, bytes]]:
    length = KEY_BYTES * count
    return [
        (namespace, keys[rank * length : (rank + 1) * length])
        for rank, namespace in enumerate(session.namespaces.values())
    ]


def _worst(states: list[bytes]) -> bytes:
    worst: bytes = np.maximum.reduce([np.frombuffer(column, np.uint8) for column in states]).tobytes()
    return worst
