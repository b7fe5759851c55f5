"""A clock that a test moves."""


class HandClock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self._now_ns = 1_000_000_000

    def now_ns(self) -> int:
        """The time that the test has set."""
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_ns += int(seconds * 1e9)
