"""Pace of one node: how long chunks of it take, measured by the pulls from it.

A pull waits for the offer, and then its bytes come. The wait is smoothed like TCP's round trip. The rate is that of all recent
pulls together, bytes by seconds, so that large pulls count for what they are; the seconds of a pull less one wait, because
connecting takes about as long as asking. A prior of a few bytes stands in both sums: it decides at first, and once the node has
been slow for a second it counts for nothing.

Both forget: with each pull what came many bytes or seconds before, and with time everything, so that a node which nobody asks
any more because it was slow is tried again. Reads the clock; one thread.
"""

import math

from kvpool.clock import NS_PER_S, Clock

MIB = 1 << 20
NS_PER_MIB_MAX = US_MAX = (1 << 32) - 1
# The prior (guesses): so many bytes at this rate, after this wait.
PRIOR_BYTES = 1.0 * MIB
PRIOR_BYTES_PER_S = 1e9
PRIOR_WAIT_S = 1e-3
# What was measured counts for half after this time, and for 1/e after so many bytes or seconds of later pulls (guesses).
HALF_S = 60.0
RECENT_BYTES = 256.0 * MIB
RECENT_S = 2.0
# Of the smoothed wait, the weight of the latest one: TCP's.
_WAIT_WEIGHT = 0.125


class Pace:
    """See the module. `answers`: how many were noted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bytes = 0.0
        self._seconds = 0.0
        self._wait_s = PRIOR_WAIT_S
        self._at_ns = clock.now_ns()
        self.answers = 0

    def __repr__(self) -> str:
        return f"<Pace {self.bytes_per_s / 1e6:.0f} MB/s after {self.wait_s * 1e3:.1f} ms>"

    @property
    def bytes_per_s(self) -> float:
        """The rate at which bytes come."""
        kept = self._kept()
        size = PRIOR_BYTES + kept * self._bytes
        return size / (PRIOR_BYTES / PRIOR_BYTES_PER_S + kept * self._seconds)

    @property
    def wait_s(self) -> float:
        """The time before the first byte."""
        return PRIOR_WAIT_S + self._kept() * (self._wait_s - PRIOR_WAIT_S)

    def cost_s(self, size: int) -> float:
        """How long so many bytes take."""
        return self.wait_s + size / self.bytes_per_s

    def note_answer(self, seconds: float) -> None:
        """The node has answered after so long, or it was given up then."""
        self._forget(0, 0.0)
        self.answers += 1
        self._wait_s += _WAIT_WEIGHT * (seconds - self._wait_s)

    def note_bytes(self, size: int, seconds: float) -> None:
        """A pull has ended so long after its offer, with so many bytes."""
        seconds = max(seconds - self.wait_s, seconds / 10)
        self._forget(size, seconds)
        self._bytes += size
        self._seconds += seconds

    def packed(self) -> tuple[int, int]:
        """Nanoseconds for each MiB, and microseconds before: as the table of remote chunks has them."""
        ns_per_mib = round(MIB * NS_PER_S / self.bytes_per_s)
        return min(max(1, ns_per_mib), NS_PER_MIB_MAX), min(round(self.wait_s * 1e6), US_MAX)

    def _kept(self) -> float:
        """The weight of what was measured, by its age."""
        return float(0.5 ** ((self._clock.now_ns() - self._at_ns) / NS_PER_S / HALF_S))

    def _forget(self, size: int, seconds: float) -> None:
        """Make room for a new measurement."""
        self._wait_s = self.wait_s
        later = size / RECENT_BYTES + seconds / RECENT_S
        kept = self._kept() * math.exp(-later)
        self._bytes *= kept
        self._seconds *= kept
        self._at_ns = self._clock.now_ns()
