"""Chunk history: when and why chunks were removed, or why a save of them was declined. Bounded.

It has the latest entries; departures and refusals are bounded separately, so that neither crowds out the other. An entry is
past: whether a chunk is stored now, only the directory shows, and it stays when the chunk is stored again.
Control thread only; `now_ns` is an argument.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import islice
from mmap import mmap
from typing import Any, Generic, NamedTuple, TypeVar

from kvpool.clock import NS_PER_S
from kvpool.events import Cause
from kvpool.ids import NamespaceId
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.states import Level, SaveState

# At most so many chunks of one refused save are noted, from its first on: descendants of a refused chunk are refused with it.
REFUSALS_PER_SAVE = 16
_NOT_REFUSED = bytes([SaveState.PRESENT, SaveState.RESERVED])


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


class _Latest(Generic[Entry]):
    """What was noted last: keys in a ring, and one entry for those that were noted together.

    Noting is a copy of the keys, because every eviction notes some; people who ask for one key wait while it looks at all.
    Invariant: `_runs` has the entries of the last `count_max` keys, each with how many keys were noted up to its end.
    """

    def __init__(self, count_max: int) -> None:
        self._size = count_max
        self._keys = mmap(-1, packed_bytes(count_max))  # memory that is touched as it fills
        self._noted = 0
        self._runs: deque[tuple[int, Entry]] = deque()

    def __len__(self) -> int:
        return min(self._noted, self._size)

    def note(self, keys: KeyColumn, entry: Entry) -> None:
        """These keys were noted together."""
        size, ring = self._size, self._keys
        latest = keys.packed[-len(ring) :]
        at = (packed_bytes(self._noted) + len(keys.packed) - len(latest)) % len(ring)
        until_end = min(len(latest), len(ring) - at)
        ring[at : at + until_end] = latest[:until_end]
        ring[: len(latest) - until_end] = latest[until_end:]
        self._noted += len(keys)
        self._runs.append((self._noted, entry))
        while self._runs[0][0] <= self._noted - size:
            self._runs.popleft()

    def clear(self) -> None:
        """Drop all entries."""
        self._noted = 0
        self._runs.clear()

    def find(self, key: bytes) -> Entry | None:
        """The latest entry of a key."""
        places = self._places_of(key)
        if not places:
            return None
        newest = self._noted - 1 - min((self._noted - 1 - place) % self._size for place in places)
        return self._runs[bisect_right(self._runs, newest, key=_end_of)][1]

    def _places_of(self, key: bytes) -> list[int]:
        places, end, at = [], packed_bytes(len(self)), -1
        while (at := self._keys.find(key, at + 1, end)) >= 0:
            place, rest = divmod(at, packed_bytes(1))
            if not rest:
                places.append(place)
        return places


class ChunkHistory:
    """The latest departures and refusals by key, `count_max` of each."""

    def __init__(self, count_max: int) -> None:
        self._departures: _Latest[Departure] = _Latest(count_max)
        self._refusals: _Latest[Refusal] = _Latest(count_max)

    def __len__(self) -> int:
        return len(self._departures) + len(self._refusals)

    def note_departures(self, keys: KeyColumn, departure: Departure) -> None:
        """Chunks have left the pool together."""
        self._departures.note(keys, departure)

    def note_refusals(self, keys: KeyColumn, states: list[SaveState], now_ns: int, namespace: NamespaceId) -> None:
        """Note the first chunks of one save that were declined, REFUSALS_PER_SAVE at most."""
        assert len(keys) <= REFUSALS_PER_SAVE
        for key, state in zip(keys.parts(1), states, strict=True):
            self._refusals.note(key, Refusal(now_ns, state, namespace))

    def clear(self) -> None:
        """Drop all entries."""
        self._departures.clear()
        self._refusals.clear()

    def departure(self, key: bytes) -> Departure | None:
        """The chunk's latest departure, if it is known."""
        return self._departures.find(key)

    def refusal(self, key: bytes) -> Refusal | None:
        """The chunk's latest refusal, if it is known."""
        return self._refusals.find(key)

    def explain(self, key: bytes, place_of: Callable[[int], dict[str, str]], now_ns: int) -> dict[str, Any]:
        """Why a chunk is not stored, for people. `place_of`: the model of a namespace, and its group where it is one's."""
        departure, refusal = self.departure(key), self.refusal(key)
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


def first_refused(states: bytes) -> list[int]:
    """Indexes of the first declined chunks of a save, REFUSALS_PER_SAVE at most. `states`: a `SaveState` for each."""
    taken = len(states) - len(states.lstrip(_NOT_REFUSED))  # all of them, most of the time
    refused = (number for number in range(taken, len(states)) if states[number] not in _NOT_REFUSED)
    return list(islice(refused, REFUSALS_PER_SAVE))


def _end_of(run: tuple[int, object]) -> int:
    return run[0]


def _age_s(at_ns: int, now_ns: int) -> float:
    return round((now_ns - at_ns) / NS_PER_S, 3)
