"""Corruption guard: chunks of the SSD tier that differed, and when that is too many to be chance.

One bad chunk is a miss. CHUNKS within WINDOW_S say that the disk, or the way to it, changes bytes: nothing more is written
there for REST_S, and the tier counts as unhealthy as long, and then until it is tried again without another.

Any thread may ask; the control thread notes. `now_ns` is an argument.
"""

from collections import deque

from kvpool.clock import NS_PER_S

CHUNKS = 3
WINDOW_S = 60
REST_S = 60.0


class CorruptionGuard:
    """See the module."""

    def __init__(self) -> None:
        self._latest_ns: deque[int] = deque(maxlen=CHUNKS)
        self._tripped_ns: int | None = None

    def note(self, now_ns: int) -> bool:
        """A chunk was read, or read back, otherwise than it was written. Whether the tier is to rest."""
        self._latest_ns.append(now_ns)
        if len(self._latest_ns) < CHUNKS or now_ns - self._latest_ns[0] > WINDOW_S * NS_PER_S:
            return False
        self._latest_ns.clear()
        self._tripped_ns = now_ns
        return True

    def problem(self, now_ns: int) -> str:
        """What is wrong, for people; empty where nothing is."""
        if self._tripped_ns is None or now_ns - self._tripped_ns > REST_S * NS_PER_S:
            return ""
        return f"ssd: {CHUNKS} chunks within {WINDOW_S} s were not what had been written: check the disk and the kernel's log"
