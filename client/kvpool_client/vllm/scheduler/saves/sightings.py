"""Sighting counts: how many requests have had a chunk. A chunk seen once may never be seen again, and need not be stored.

A bounded memory by block hash; the oldest entry is dropped first, of one request the tail before the root. It never leaves the
process. The scheduler's thread.
"""

from collections import OrderedDict
from collections.abc import Sequence

SIGHTINGS_MAX = 1 << 17
HASH_BYTES = 16


class SightingCounts:
    """See the module. `wanted`: how often a chunk is seen before it is stored; 1: at once, and nothing is counted."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SightingCounts of {len(self._counts)} chunks>"

    def see(self, hashes: Sequence[bytes]) -> None:
        """Count a request with these chunks, in the order of its prompt."""
        if self._wanted <= 1:
            return
        for value in reversed(hashes):
            known = bytes(value[:HASH_BYTES])
            self._counts[known] = self._counts.pop(known, 0) + 1
        while len(self._counts) > SIGHTINGS_MAX:
            self._counts.popitem(last=False)

    def ready(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these chunks have been seen often enough."""
        if self._wanted <= 1:
            return len(hashes)
        are_ready = (self._counts.get(bytes(value[:HASH_BYTES]), 0) >= self._wanted for value in hashes)
        return next((number for number, is_ready in enumerate(are_ready) if not is_ready), len(hashes))
