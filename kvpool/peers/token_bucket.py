"""Token bucket: a rate with a burst. The clock is an argument; one thread."""

from kvpool.clock import NS_PER_S, Clock


class TokenBucket:
    """At most `burst` at once, and `per_s` in each second after it.

    Invariant: 0 ≤ tokens ≤ burst.
    """

    __slots__ = ("_at_ns", "_burst", "_clock", "_per_ns", "_tokens")

    def __init__(self, per_s: float, burst: float, clock: Clock) -> None:
        assert per_s > 0
        assert burst >= 1
        self._per_ns = per_s / NS_PER_S
        self._burst = self._tokens = float(burst)
        self._clock = clock
        self._at_ns = clock.now_ns()

    def take_tokens(self, count: float = 1) -> bool:
        """Take tokens. Whether there were so many; nothing is taken where there were not."""
        now_ns = self._clock.now_ns()
        self._tokens = min(self._burst, self._tokens + (now_ns - self._at_ns) * self._per_ns)
        self._at_ns = now_ns
        if self._tokens < count:
            return False
        self._tokens -= count
        return True

    @property
    def wait_s(self) -> float:
        """Seconds until there is a token, as of the last `take`."""
        return max(0.0, 1 - self._tokens) / self._per_ns / NS_PER_S
