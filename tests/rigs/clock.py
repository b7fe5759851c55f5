"""Clocks that a test moves."""

from kvpool.clock import NS_PER_S, MonotonicClock


class HandClock:
    """Stands still at `ns` until it is moved."""

    def __init__(self, ns: int = NS_PER_S) -> None:
        self.ns = ns

    def now_ns(self) -> int:
        """The time that the test has set."""
        return self.ns

    @property
    def now_s(self) -> float:
        """The same in seconds."""
        return self.ns / NS_PER_S

    @now_s.setter
    def now_s(self, seconds: float) -> None:
        self.ns = round(seconds * NS_PER_S)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.ns += round(seconds * NS_PER_S)


class LaterClock(MonotonicClock):
    """The time of day, or later on command."""

    def __init__(self) -> None:
        self.later_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.later_ns

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.later_ns += round(seconds * NS_PER_S)
