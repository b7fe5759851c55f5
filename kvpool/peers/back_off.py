"""Back-off: how long to wait after the n-th failure in a row. Exponential, bounded, with jitter.

The jitter keeps nodes that failed in one moment from coming back in one moment: a delay is uniform between half of the
exponential one and all of it. The source of randomness is passed in (tests seed it). Reads no clock and never sleeps; one
thread.
"""

from dataclasses import dataclass
from typing import Protocol


class Uniform(Protocol):
    """A source of randomness, such as `random.Random`."""

    def random(self) -> float:
        """A number in 0 ≤ x < 1."""
        ...


@dataclass(frozen=True, slots=True)
class BackOffSettings:
    """The delay after the first failure, and the bound of all."""

    first_s: float = 0.25
    most_s: float = 30.0

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.most_s


class BackOff:
    """Delays of one retried thing. `failures`: in a row, until now."""

    __slots__ = ("_random", "_settings", "failures")

    def __init__(self, settings: BackOffSettings, random: Uniform) -> None:
        self._settings = settings
        self._random = random
        self.failures = 0

    def fail(self) -> float:
        """Count a failure. Returns the seconds to wait before the next attempt."""
        self.failures += 1
        # 2**1023 is the largest power that a float can be.
        delay_s = min(self._settings.most_s, self._settings.first_s * 2.0 ** min(self.failures - 1, 1000))
        return delay_s * (0.5 + 0.5 * self._random.random())

    def succeed(self) -> None:
        """Begin again at the shortest delay."""
        self.failures = 0
