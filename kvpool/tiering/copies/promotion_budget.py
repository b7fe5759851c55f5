"""Promotion budget: how many bytes may be moved up into a tier, measured by what it has served.

Chunks that were used again below are worth a place above only if they are used there. Without a bound a small tier is filled
anew with each long prompt, and evicts what it has before that is used: on a trace of agents a device tier of 0.1 % of the
blocks took in 77 bytes for each byte that it served. A bound by what is served is small where moving does not pay and large
where it does, and it needs no frequencies and no window. `kvpool.sim` chose the share (docs/sizing.md).

    room of the tier, once          EARNED for each byte served ──► left ──► bytes moved up

Metadata only; no clock. Control thread only. Invariants: 0 <= left <= capacity; all bytes spent are at most the capacity and
EARNED for each byte served.
"""

# Below 1 a large tier fills slowly, above 2 it may move more than twice what it serves.
EARNED = 1.5


class PromotionBudget:
    """See the module. `capacity`: of the tier that the bytes are moved into."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._left = float(capacity)

    def __repr__(self) -> str:
        return f"<PromotionBudget {self._left:.0f} of {self._capacity} bytes>"

    def earn(self, served_bytes: int) -> None:
        """The tier has served so many bytes."""
        self._left = min(float(self._capacity), self._left + EARNED * served_bytes)

    def affordable(self, chunk_bytes: int) -> int:
        """How many chunks of that size may be moved up now."""
        return int(self._left // chunk_bytes)

    def spend(self, moved_bytes: int) -> None:
        """Count bytes as moved. REQUIRES: they were affordable."""
        assert moved_bytes <= self._left
        self._left -= moved_bytes
