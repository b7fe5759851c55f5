"""Chunk history: when and why chunks were removed, or why a save of them was declined. Bounded.

It has the latest entries; departures and refusals are bounded separately, so that neither crowds out the other. An entry is
past: whether a chunk is stored now, only the directory shows.
Control thread only; `now_ns` is an argument.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvpool.clock import NS_PER_S
from kvpool.events import Cause
from kvpool.ids import NamespaceId
from kvpool.states import Level, SaveState

# At most so many chunks of one refused save are noted, from its first on: descendants of a refused chunk are refused with it.
REFUSALS_PER_SAVE = 16


class Departure(NamedTuple):
    """A chunk left the pool."""

    at_ns: int
    cause: Cause
    level: int
    priority: int
    namespace: NamespaceId


class Refusal(NamedTuple):
    """A save of a chunk was declined."""

    at_ns: int
    state: SaveState
    namespace: NamespaceId


Entry = TypeVar("Entry", Departure, Refusal)


class ChunkHistory:
    """The latest departures and refusals by key.

    Invariant: neither table holds more than `count_max` entries, and each is ordered by when its entry was noted.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # Not plain dicts: removing their oldest entries one by one takes quadratic time.
        self._departures: OrderedDict[bytes, Departure] = OrderedDict()
        self._refusals: OrderedDict[bytes, Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._departures) + len(self._refusals)

    def note_departures(self, keys: Sequence[bytes], departure: Departure) -> None:
        """Chunks have left the pool together."""
        table = self._departures
        if not table.keys().isdisjoint(keys):
            _forget(table, keys)
        for key in keys:
            table[key] = departure
        self._bound(table)

    def note_refusals(self, keys: list[bytes], states: list[SaveState], now_ns: int, namespace: NamespaceId) -> None:
        """Note the first chunks of one save that were declined, REFUSALS_PER_SAVE at most."""
        assert len(keys) <= REFUSALS_PER_SAVE
        for key, state in zip(keys, states, strict=True):
            self._refusals.pop(key, None)
            self._refusals[key] = Refusal(now_ns, state, namespace)
        self._bound(self._refusals)

    def clear(self) -> None:
        """Drop all entries."""
        self._departures.clear()
        self._refusals.clear()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop the entries of chunks that are stored again."""
        for table in (self._departures, self._refusals):
            if not table.keys().isdisjoint(keys):
                _forget(table, keys)

    def departure(self, key: bytes) -> Departure | None:
        """The chunk's departure, if it is known."""
        return self._departures.get(key)

    def refusal(self, key: bytes) -> Refusal | None:
        """The chunk's refusal, if it is known."""
        return self._refusals.get(key)

    def explain(self, key: bytes, place_of: Callable[[int], dict[str, str]], now_ns: int) -> dict[str, Any]:
        """Why a chunk is not stored, for people. `place_of`: the model of a namespace, and its group where it is one's."""
        departure, refusal = self._departures.get(key), self._refusals.get(key)
        if refusal is not None and (departure is None or refusal.at_ns > departure.at_ns):
            return {
                "state": "declined",
                "reason": refusal.state.reason,
                "age_s": _age_s(refusal.at_ns, now_ns),
                **place_of(refusal.namespace),
            }
        if departure is None:
            return {"state": "unknown"}
        return {
            "state": "removed",
            "reason": departure.cause.name.lower().replace("_", "-"),
            "tier": Level(departure.level).name.lower(),
            "priority": departure.priority,
            "age_s": _age_s(departure.at_ns, now_ns),
            **place_of(departure.namespace),
        }

    def _bound(self, table: OrderedDict[bytes, Entry]) -> None:
        for _ in range(len(table) - self._count_max):
            table.popitem(last=False)


def first_refused(states: bytes) -> list[int]:
    """Indexes of the first declined chunks of a save, REFUSALS_PER_SAVE at most. `states`: a `SaveState` for each."""
    codes = np.frombuffer(states, np.uint8)
    refused = np.flatnonzero((codes != SaveState.PRESENT) & (codes != SaveState.RESERVED))
    found: list[int] = refused[:REFUSALS_PER_SAVE].tolist()
    return found


def _age_s(at_ns: int, now_ns: int) -> float:
    return round((now_ns - at_ns) / NS_PER_S, 3)


def _forget(table: OrderedDict[bytes, Departure] | OrderedDict[bytes, Refusal], keys: Sequence[bytes]) -> None:
    for key in keys:
        table.pop(key, None)
