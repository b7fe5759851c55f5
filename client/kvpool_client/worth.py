"""Whether a hit is worth taking: loading against computing, by measured rates.

`worthwhile_chunks` and `wait_limit_s` are pure; `SpeedBook` keeps the moving averages they are asked with. Invariant: a
decision takes a prefix, never a piece behind a gap; what is not known yet is taken, because only a load can measure it.
A tier that was declined drifts back to its first guess, so that it is tried again some day: a disk that was busy once is
not slow for ever. One thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.types import Level

# Bytes per second before anything was measured (guesses; they count until the first load has ended).
FIRST_GUESS = {Level.HBM: 20e9, Level.DRAM: 4e9, Level.SSD: 1e9, Level.PEER: 1e9}
# No medium is slower or faster than this; a measurement beyond it is a stall or an error of the clock.
RATE_MIN, RATE_MAX = 1e6, 1e12
PREFILL_MIN, PREFILL_MAX = 1.0, 1e7
# The last ten measurements make nine tenths of an average: quick enough for a tier that becomes busy (guess).
WEIGHT = 0.2
# A load has costs that do not grow with it, and what is small measures them alone (guesses).
SETUP_S = 0.01
BYTES_TO_MEASURE = 1 << 20
# Ten times too slow is forgotten after about 116 declined hits (guess).
DRIFT = 1.02


@dataclass(frozen=True, slots=True)
class Speeds:
    """What is known: bytes per second of each tier, and the engine's prefill in tokens per second (0: not known yet)."""

    bytes_per_s: Mapping[int, float]
    prefill_tokens_per_s: float


def worthwhile_chunks(levels: bytes, *, chunk_bytes: int, chunk_tokens: int, speeds: Speeds) -> int:
    """How many leading chunks of a hit to load; `levels` has the tier of each.

    The prefix that saves most time against computing it, the longer one of two equal ones. 0 where no prefix saves any.
    """
    if not speeds.prefill_tokens_per_s:
        return len(levels)
    compute_s = chunk_tokens / speeds.prefill_tokens_per_s
    best = 0
    saved_s = best_s = 0.0
    for taken, level in enumerate(levels, 1):
        saved_s += compute_s - chunk_bytes / speeds.bytes_per_s[level]
        if saved_s >= best_s:
            best, best_s = taken, saved_s
    return best


def wait_limit_s(missing_tokens: int, *, speeds: Speeds, longest_s: float) -> float:
    """How long to wait for chunks that another engine is just saving: never longer than computing them would take."""
    if not speeds.prefill_tokens_per_s:
        return longest_s
    return max(0.0, min(longest_s, missing_tokens / speeds.prefill_tokens_per_s))


class MovingRate:
    """A bounded moving average. Invariant: `least <= value <= most`."""

    def __init__(self, guess: float, *, least: float, most: float) -> None:
        self._guess = guess
        self._least = least
        self._most = most
        self._is_measured = False
        self.value = guess

    def __repr__(self) -> str:
        return f"<MovingRate {self.value:.3g}{'' if self._is_measured else ' guessed'}>"

    def add(self, amount: float, seconds: float) -> None:
        """One measurement; the first one replaces the guess."""
        if amount <= 0 or seconds <= 0:
            return
        sample = min(self._most, max(self._least, amount / seconds))
        self.value = self.value + WEIGHT * (sample - self.value) if self._is_measured else sample
        self._is_measured = True

    def drift(self) -> None:
        """One step up to the first guess, never above it."""
        self.value = max(self.value, min(self._guess, self.value * DRIFT))


class SpeedBook:
    """The rates of each tier and of the engine. Counts what was declined for them."""

    def __init__(self) -> None:
        self._tiers = {
            int(level): MovingRate(guess, least=RATE_MIN, most=RATE_MAX) for level, guess in FIRST_GUESS.items()
        }
        self._prefill = MovingRate(0.0, least=PREFILL_MIN, most=PREFILL_MAX)

    def speeds(self) -> Speeds:
        """What is known now."""
        return Speeds({level: rate.value for level, rate in self._tiers.items()}, self._prefill.value)

    def add_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` in `seconds`."""
        self._prefill.add(tokens, seconds)

    def add_load(self, levels: bytes, chunk_bytes: int, seconds: float) -> None:
        """A load of chunks at `levels` took `seconds`. Of several tiers the slowest one answers for the time of the rest."""
        present = sorted(set(levels), key=lambda level: self._tiers[level].value)
        if len(levels) * chunk_bytes < BYTES_TO_MEASURE:
            return
        seconds = max(seconds - SETUP_S, seconds / 10)
        others_s = sum(levels.count(level) * chunk_bytes / self._tiers[level].value for level in present[1:])
        slowest = present[0]
        # A tenth at least, so that a wrong rate of the others cannot make this tier look infinitely fast.
        self._tiers[slowest].add(levels.count(slowest) * chunk_bytes, max(seconds - others_s, seconds / 10))

    def decline(self, levels: bytes) -> None:
        """Chunks at `levels` were not taken: their tiers are forgotten a little."""
        for level in set(levels):
            self._tiers[level].drift()
