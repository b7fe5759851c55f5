"""Retention: priorities and durations of stored chunks, set by engines, operators and hints.

Turns request columns into calls of the native directory, which has the priorities, expires them, and clips those beyond its
share. A retention request counts in every tier that has the chunk. A demote hint is the opposite: chunks that only DRAM has are
written to the lower tier at once, and DRAM evicts them first, while the lower tier retains them as before.

Control thread only; `now_ns` is an argument. Holds no state of its own.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import kvpool_native
from kvpool import failpoint
from kvpool.ids import DURATION_BYTES, NamespaceId
from kvpool.index.namespaces import Namespace
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.packed_numbers import pack_u32, u32_of
from kvpool.states import KEEP_PRIORITY, RetainState, SaveState
from kvpool.tiering.tiering import Tiering

# How long DRAM evicts an unused demoted chunk before others; then it is an ordinary chunk.
DEMOTED_MS = 600_000

HAVE_SLOTS = bytes([SaveState.PRESENT, SaveState.RESERVED])


class RetentionColumns(NamedTuple):
    """Retention of some chunks, in columns: a u8 priority and a u32 duration in milliseconds for each; both empty: none."""

    priorities: bytes
    durations: bytes

    @classmethod
    def of_each(cls, chunks: int, priority: int, *, duration_ms: int) -> "RetentionColumns":
        """The same for each of so many chunks."""
        return cls(bytes([priority]) * chunks, duration_ms.to_bytes(DURATION_BYTES, "little") * chunks)

    def part(self, first: int, end: int) -> "RetentionColumns":
        """The columns of the chunks from `first` up to `end`."""
        return RetentionColumns(
            self.priorities[first:end], self.durations[first * DURATION_BYTES : end * DURATION_BYTES]
        )

    def chosen(self, which: Sequence[int]) -> "RetentionColumns":
        """The columns of these chunks."""
        durations_ms = u32_of(self.durations)
        priorities = bytes([self.priorities[number] for number in which])
        return RetentionColumns(priorities, pack_u32([durations_ms[number] for number in which]))


NO_RETENTION = RetentionColumns(b"", b"")


class Retention:
    """Retention of chunks that are stored already."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        on_retained: Callable[[], None] = lambda: None,
    ) -> None:
        """`tiering`: the tiers below the directory's. `on_retained`: priorities may expire that were set now."""
        self._directory = directory
        self._tiering = tiering
        self._on_retained = on_retained

    def retain(self, session: EngineSession, keys: KeyColumn, wanted: RetentionColumns, now_ns: int) -> bytes:
        """Set the retention of chunks on every rank of the session: a `RetainState` for each, the worst of the ranks'.

        With groups it is that of the full ones: what windows and states have stored of the chunks is retained too.
        """
        failpoint.reach("daemon.retain.before", failpoint.refused)
        states = []
        for namespace, column in _by_rank(session, keys):
            states.append(self.retain_in(namespace, column, wanted, now_ns))
        return _of_chunks(session, states)

    def of_save(
        self, namespace: Namespace, keys: KeyColumn, states: bytes, wanted: RetentionColumns, *, now_ns: int
    ) -> bytes:
        """Retain chunks of a save, new or present, as it asks, in every tier: a `RetainState` for each.

        `states`: a `SaveState` for each of `keys`; those without a slot are ABSENT.
        """
        if not states.lstrip(HAVE_SLOTS):
            return self.retain_in(namespace, keys, wanted, now_ns)
        held = [number for number, state in enumerate(states) if state in HAVE_SLOTS]
        retained = bytearray([RetainState.ABSENT]) * len(states)
        if held:
            answer = self.retain_in(namespace, keys.chosen(held), wanted.chosen(held), now_ns)
            for number, state in zip(held, answer, strict=True):
                retained[number] = state
        return bytes(retained)

    def retain_in(self, namespace: Namespace, keys: KeyColumn, wanted: RetentionColumns, now_ns: int) -> bytes:
        """Set the retention of chunks of one namespace: a `RetainState` for each."""
        states = keep(self._directory, namespace.id, keys, wanted, now_ns=now_ns)
        self._tiering.remember_retention(keys, states)
        self._on_retained()
        return states

    def demote(self, session: EngineSession, keys: KeyColumn, *, parents: KeyColumn, first: int, now_ns: int) -> bytes:
        """Write chunks after `parents` to the lower tier, and have DRAM evict them first from `first` on, on every rank.

        `parents` has a key for each rank, or none at the root. `first` may be before the chunks or behind. Answers a
        `RetainState` for each that is given up, the worst of the ranks'; with groups as `retain`, and of windows and states
        chunks from `first` on alone are written, each by itself.
        """
        failpoint.reach("daemon.demote.asked", failpoint.refused)
        count = len(keys) // len(session.namespaces)
        first = min(max(0, first), count)
        above = list(parents) or [b""] * len(session.namespaces)
        wanted = RetentionColumns.of_each(count - first, 0, duration_ms=DEMOTED_MS)
        states = []
        for (namespace, column), parent in zip(_by_rank(session, keys), above, strict=True):
            chosen = column[first:]
            if namespace.layout.is_chained:
                self._tiering.demote(namespace, parent, column, now_ns)
            else:
                for key in chosen:
                    self._tiering.demote(namespace, b"", KeyColumn(key), now_ns)
            lower = self._tiering.retained(chosen)
            states.append(self._directory.retain(namespace.id, chosen.packed, *wanted, now_ns))
            self._tiering.restore_retention(namespace, lower, now_ns)
        self._on_retained()
        return _of_chunks(session, states)


def keep(
    directory: kvpool_native.Directory,
    namespace: NamespaceId,
    keys: KeyColumn,
    wanted: RetentionColumns,
    *,
    now_ns: int,
) -> bytes:
    """Set the retention of chunks, but for those with KEEP_PRIORITY, which stay as they are: a `RetainState` for each."""
    priorities = wanted.priorities
    if KEEP_PRIORITY not in priorities:
        return directory.retain(namespace, keys.packed, *wanted, now_ns)
    chosen = [number for number, priority in enumerate(priorities) if priority != KEEP_PRIORITY]
    states = bytearray([RetainState.ACCEPTED]) * len(priorities)
    if chosen:
        answer = directory.retain(namespace, keys.chosen(chosen).packed, *wanted.chosen(chosen), now_ns)
        for number, state in zip(chosen, answer, strict=True):
            states[number] = state
    return bytes(states)


def _by_rank(session: EngineSession, keys: KeyColumn) -> list[tuple[Namespace, KeyColumn]]:
    return list(zip(session.namespaces.values(), keys.by_rank(len(session.namespaces)), strict=True))


def _of_chunks(session: EngineSession, states: list[bytes]) -> bytes:
    """The state of each chunk, of those of each namespace: of the full groups where there are groups."""
    namespaces = session.namespaces.values()
    full = [column for column, one in zip(states, namespaces, strict=True) if one.layout.is_chained]
    return _worst(full) if full else _best(states)


def _best(states: list[bytes]) -> bytes:
    return states[0] if len(states) == 1 else bytes(map(min, *states))


def _worst(states: list[bytes]) -> bytes:
    return states[0] if len(states) == 1 else bytes(map(max, *states))
