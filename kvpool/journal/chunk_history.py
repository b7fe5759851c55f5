"""History of chunks that are not there: removed when and why, or not taken when they were offered. Bounded.

The newest fates are kept, whatever they are fates of; departures and refusals each have their own room, so that neither can
crowd out the other. A fate is a memory, not a truth: whether a chunk is stored the directory alone knows.
Control thread only; `now_ns` is an argument.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from kvpool.types import Cause, NamespaceId, SaveState

# Of one refused save only so many chunks are noted, from its first on: what follows a refused chunk is refused with it.
REFUSALS_PER_SAVE = 16


class Departure(NamedTuple):
    """A chunk left the pool."""

    at_ns: int
    cause: Cause
    level: int
    priority: int
    namespace: NamespaceId


class Refusal(NamedTuple):
    """A chunk was offered and not taken."""

    at_ns: int
    state: SaveState
    namespace: NamespaceId


Entry = TypeVar("Entry", Departure, Refusal)


class ChunkHistory:
    """The latest fates by key.

    Invariant: neither table holds more than `count_max` entries, and each is ordered by when its entry was noted.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # Not plain dicts: where their oldest entries go one by one, each look for the next passes all that went before.
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
        """The first chunks of one save that were not taken, REFUSALS_PER_SAVE at most."""
        assert len(keys) <= REFUSALS_PER_SAVE
        for key, state in zip(keys, states, strict=True):
            self._refusals.pop(key, None)
            self._refusals[key] = Refusal(now_ns, state, namespace)
        self._bound(self._refusals)

    def clear(self) -> None:
        """Remember nothing any more."""
        self._departures.clear()
        self._refusals.clear()

    def forget(self, keys: Sequence[bytes]) -> None:
        """The chunks are stored: what became of them before does not matter any more."""
        for table in (self._departures, self._refusals):
            if not table.keys().isdisjoint(keys):
                _forget(table, keys)

    def departure(self, key: bytes) -> Departure | None:
        """How the chunk left, if it is remembered."""
        return self._departures.get(key)

    def refusal(self, key: bytes) -> Refusal | None:
        """Why the chunk was not taken, if it is remembered."""
        return self._refusals.get(key)

    def _bound(self, table: OrderedDict[bytes, Entry]) -> None:
        for _ in range(len(table) - self._count_max):
            table.popitem(last=False)


def _forget(table: OrderedDict[bytes, Departure] | OrderedDict[bytes, Refusal], keys: Sequence[bytes]) -> None:
    for key in keys:
        table.pop(key, None)
