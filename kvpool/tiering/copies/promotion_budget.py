"""Promotion budget: how many bytes may be moved up into a tier, measured by what it has served.

Chunks that were used again below are worth a place above only if they are used there. Without a bound a small tier is filled
anew with each long prompt, and evicts what it has before that is used: on a trace of agents a device tier of 0.1 % of the
blocks took in 77 bytes for each byte that it served. A bound by what is served is small where moving does not pay and large
where it does, and it needs no frequencies and no window.

But copies also leave because the arena evicts their chunks. A tier that has lost all of them serves nothing, and would earn
nothing for ever: so a part of what it did not serve counts too, as a trial. A tier as large as the arena would get TRIED of
these bytes, a smaller one its share.

    room of the tier, once              ┐
    EARNED for each byte served         ├──► left ──► bytes moved up
    TRIED · share for each byte missed  ┘

`kvpool_tools.sim` chose both numbers (docs/sizing.md): on three traces and for three sizes of a device fewer than two bytes are
moved for each byte served, but for a device of 43 blocks on one of them. Metadata only; no clock. Control thread only.
Invariants: 0 <= left <= capacity; all bytes spent are at most what the drawing says.
"""

# Below 1 a large tier fills slowly, above 2 it may move more than twice what it serves.
EARNED = 1.2
# With 0.03 a tier of a fiftieth of the arena tries too little to find what is used again on one of the traces: 2.5 bytes moved
# for each served, and 0.06 % of the hits instead of 0.23 %.
TRIED = 0.1


class PromotionBudget:
    """See the module. `capacity`: of the tier that the bytes are moved into; `below`: of the arena."""

    def __init__(self, capacity: int, below: int) -> None:
        assert capacity > 0
        assert below > 0
        self._capacity = capacity
        self._tried = TRIED * min(1.0, capacity / below)
        self._left = float(capacity)

    def __repr__(self) -> str:
        return f"<PromotionBudget {self._left:.0f} of {self._capacity} bytes>"

    def earn(self, *, served_bytes: int, missed_bytes: int) -> None:
        """The tier has served so many bytes, and not served others that the arena has."""
        earned = EARNED * served_bytes + self._tried * missed_bytes
        self._left = min(float(self._capacity), self._left + earned)

    def affordable(self, chunk_bytes: int) -> int:
        """How many chunks of that size may be moved up now."""
        return int(self._left // chunk_bytes)

    def spend(self, moved_bytes: int) -> None:
        """Count bytes as moved. REQUIRES: they were affordable."""
        assert moved_bytes <= self._left
        self._left -= moved_bytes
