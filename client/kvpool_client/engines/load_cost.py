"""Cost of loading a hit against computing it, by measured rates.

`chunks_to_load` and `wait_limit_s` are pure; `RateEstimator` holds the rates they use. A rate is the median of the last few
measurements, so that one stalled load changes nothing, and a few in a row show that a tier has become slow. Invariants: a
decision loads a prefix, never a part behind a gap; a tier without measurements is loaded from, because only a load can measure
it. A tier that is declined is measured again after a while, by a part of a hit that is small enough to cost little: a disk may
have been busy only once. What the daemon has measured of the one node that has a hit's chunks counts before what was
measured of all of them. Time is an argument. One thread.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.clock import NS_PER_S
from kvpool.types import Level
from kvpool_client.connection.peer_pace import PeerPace

# Bytes per second before anything was measured (guesses; each counts as one measurement of the first few).
FIRST_GUESS = {Level.HBM: 20e9, Level.DRAM: 4e9, Level.SSD: 1e9, Level.PEER: 1e9, Level.STORE: 1e9}
# No medium is slower or faster than this; a measurement beyond it is a stall or an error of the clock.
RATE_MIN, RATE_MAX = 1e6, 1e12
PREFILL_MIN, PREFILL_MAX = 1.0, 1e7
# Odd: two stalled loads of five change nothing, and three loads show that a tier has become slow (guess).
MEASUREMENTS = 5
# A load has fixed costs, and a small load measures nothing else (guesses).
SETUP_S = 0.01
BYTES_TO_MEASURE = 1 << 20
# What is loaded from a declined tier to measure it: large beside the fixed costs (guess). First after this time, then after
# twice the time, until a measurement is good.
PROBE_BYTES = 4 << 20
FIRST_PROBE_S = 30.0
LAST_PROBE_S = 960.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of each tier, and the engine's prefill in tokens per second (0: not measured yet)."""

    bytes_per_s: Mapping[int, float]
    prefill_tokens_per_s: float


def chunks_to_load(
    levels: bytes, *, chunk_bytes: int, chunk_tokens: int, rates: Rates, peer_pace: PeerPace | None = None
) -> int:
    """How many leading chunks of a hit to load; `levels` has the tier of each. `peer_pace`: of the node that has those at level
    PEER, where it was measured.

    The prefix that saves most time against computing it, the longer one of two equal ones. 0 where no prefix saves any.
    """
    if not rates.prefill_tokens_per_s:
        return len(levels)
    compute_s = chunk_tokens / rates.prefill_tokens_per_s
    best = 0
    saved_s = best_s = 0.0
    bytes_per_s, waits_s = rates.bytes_per_s, 0.0
    if peer_pace is not None:
        bytes_per_s, waits_s = {**bytes_per_s, Level.PEER: peer_pace.bytes_per_s}, peer_pace.wait_s
    for taken, level in enumerate(levels, 1):
        saved_s += compute_s - chunk_bytes / bytes_per_s[level]
        if level == Level.PEER:
            saved_s, waits_s = saved_s - waits_s, 0.0  # once, before the first of them
        if saved_s >= best_s:
            best, best_s = taken, saved_s
    return best


def wait_limit_s(missing_tokens: int, *, rates: Rates, longest_s: float) -> float:
    """How long to wait for chunks that another engine is just saving: never longer than computing them would take."""
    if not rates.prefill_tokens_per_s:
        return longest_s
    return max(0.0, min(longest_s, missing_tokens / rates.prefill_tokens_per_s))


class MedianRate:
    """The median of the last `MEASUREMENTS` rates, the faster of the two in the middle; `guess` 0: no value at first.

    Invariant: `value` is 0, the guess, or within `least` and `most`.
    """

    def __init__(self, guess: float, *, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self._rates = deque([guess] if guess else [], maxlen=MEASUREMENTS)

    def __repr__(self) -> str:
        return f"<MedianRate {self.value:.3g} of {len(self._rates)}>"

    @property
    def value(self) -> float:
        """The current estimate."""
        return sorted(self._rates)[len(self._rates) // 2] if self._rates else 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Add one measurement."""
        if amount > 0 and seconds > 0:
            self._rates.append(min(self._most, max(self._least, amount / seconds)))

    def forget(self) -> None:
        """Drop all measurements: the next one decides alone."""
        self._rates.clear()


class Probe:
    """Schedule of measurements of a declined tier. Invariant: `_pause_s` is in FIRST_PROBE_S..LAST_PROBE_S."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PROBE_S
        self._due_ns: int | None = None
        self.is_under_way = False

    def is_due(self, now_ns: int) -> bool:
        """Whether to measure now; if so, the next time is later. The first call begins to count the time."""
        if self._due_ns is None:
            self._due_ns = now_ns + int(self._pause_s * NS_PER_S)
        if now_ns < self._due_ns:
            return False
        self._pause_s = min(2 * self._pause_s, LAST_PROBE_S)
        self._due_ns = now_ns + int(self._pause_s * NS_PER_S)
        self.is_under_way = True
        return True

    def rest(self) -> None:
        """Stop measuring: hits of this tier are loaded anyway."""
        self._pause_s = FIRST_PROBE_S
        self._due_ns = None


class RateEstimator:
    """Rates of each tier and of the engine, and the loads that they justify."""

    def __init__(self) -> None:
        self._tiers = {
            int(level): MedianRate(guess, least=RATE_MIN, most=RATE_MAX) for level, guess in FIRST_GUESS.items()
        }
        self._probes = {int(level): Probe() for level in FIRST_GUESS}
        self._prefill = MedianRate(0.0, least=PREFILL_MIN, most=PREFILL_MAX)

    def rates(self) -> Rates:
        """The current rates."""
        return Rates({level: rate.value for level, rate in self._tiers.items()}, self._prefill.value)

    def plan_load(
        self, levels: bytes, *, chunk_bytes: int, chunk_tokens: int, now_ns: int, peer_pace: PeerPace | None = None
    ) -> int:
        """How many leading chunks of a hit to load: those that save time, and at times a few more that measure a tier."""
        count = chunks_to_load(
            levels, chunk_bytes=chunk_bytes, chunk_tokens=chunk_tokens, rates=self.rates(), peer_pace=peer_pace
        )
        for level in set(levels[:count]):
            self._probes[level].rest()
        probed = -(-PROBE_BYTES // chunk_bytes)
        if len(levels) - count >= probed and self._probes[levels[count]].is_due(now_ns):
            return count + probed
        return count

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
        if self._probes[slowest].is_under_way:
            self._probes[slowest].is_under_way = False
            self._tiers[slowest].forget()
        # A tenth at least, so that a wrong rate of the others cannot make this tier look infinitely fast.
        self._tiers[slowest].add(levels.count(slowest) * chunk_bytes, max(seconds - others_s, seconds / 10))
