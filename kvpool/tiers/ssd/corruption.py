"""Corruption guard: counts corrupt chunks of the SSD tier, and suspends it when there are too many for chance.

One corrupt chunk is a miss, and an earlier process may have left half-written ones. CHUNKS corrupt ones of this process within
WINDOW_S show that the disk, or the path to it, changes bytes: then the tier is suspended for REST_S, and unhealthy until it is
retried.

Any thread may read it, the control thread changes it. `now_ns` is an argument.
"""

from collections import deque

from kvpool.clock import NS_PER_S
from kvpool.tiers.ssd.status import SsdStatus

CHUNKS = 3
WINDOW_S = 60
REST_S = 60.0
REASON = f"{CHUNKS} chunks within {WINDOW_S} s were not what had been written"


class CorruptionGuard:
    """See the module. `is_tripped`: there were too many corrupt chunks since the tier was last retried."""

    def __init__(self) -> None:
        self._latest_ns: deque[int] = deque(maxlen=CHUNKS)
        self._last_of_before = 0
        self.is_tripped = False

    def begin_life(self, last_generation: int) -> None:
        """Note the last generation of earlier processes: chunks of this one have greater ones."""
        self._last_of_before = last_generation

    def note_result(self, status: SsdStatus, generation: int, now_ns: int) -> bool:
        """Note the result of a chunk's read or write. Whether to suspend the tier now."""
        is_changed = status == SsdStatus.BAD_CHECKSUM and generation > self._last_of_before
        if not is_changed and status != SsdStatus.BAD_WRITE:
            return False
        self._latest_ns.append(now_ns)
        if len(self._latest_ns) < CHUNKS or now_ns - self._latest_ns[0] > WINDOW_S * NS_PER_S:
            return False
        self._latest_ns.clear()
        self.is_tripped = True
        return True

    def end_rest(self) -> None:
        """End the suspension: the tier is retried."""
        self.is_tripped = False

    def problems(self) -> list[str]:
        """The problem in one line, for people."""
        return [f"ssd: {REASON}: check the disk and the kernel's log"] if self.is_tripped else []
