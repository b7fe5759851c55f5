"""Log pace: one line in a minute about what others can cause as often as they like, and a count of those left out.

The clock is an argument; one thread.
"""

from kvpool.clock import Clock, Deadline

INTERVAL_S = 60.0


class LogPace:
    """See the module."""

    __slots__ = ("_clock", "_left_out", "_until")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: Deadline | None = None
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<LogPace {self._left_out} left out>"

    @property
    def wait_s(self) -> float:
        """Seconds until a line may be logged."""
        return 0.0 if self._until is None else self._until.remaining_s()

    def take_line(self) -> str | None:
        """How the line ends that may be logged now; None: it is left out, and counted."""
        if self._until is not None and not self._until.has_passed():
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        self._until = Deadline(INTERVAL_S, self._clock)
        return f" ({left_out} lines like it were left out)" if left_out else ""
