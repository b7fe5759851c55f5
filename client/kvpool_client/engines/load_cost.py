"""Cost of loading a hit against computing it, by measured times.

`chunks_to_load` and `wait_limit_s` are pure; `RateEstimator` holds the times they use. A load of a tier takes a set-up and a
time for its bytes, a step of the engine the same for its tokens; `FittedTime` takes both apart by medians of the last few
measurements, so that one stalled load changes nothing, and a few in a row show that a tier has become slow. Invariants: a
decision loads a prefix, never a part behind a gap; a tier without measurements goes by a guess. A tier that is declined is
measured again after a while, by a part of a hit that is small enough to cost little: a disk may have been busy only once. What
the daemon has measured of the one node that has a hit's chunks counts before what was measured of all of them. Time is an
argument. One thread.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, permutations

from kvpool.clock import NS_PER_S
from kvpool.states import Level
from kvpool_client.connection.peer_pace import PeerPace

# Bytes per second before anything was measured (guesses; each counts as one measurement of the first few, of GUESSED_BYTES).
FIRST_GUESS = {Level.HBM: 20e9, Level.DRAM: 4e9, Level.SSD: 1e9, Level.PEER: 1e9, Level.STORE: 1e9}
# No medium is slower or faster than this; a measurement beyond it is a stall or an error of the clock.
RATE_MIN, RATE_MAX = 1e6, 1e12
PREFILL_MIN, PREFILL_MAX = 1.0, 1e7
# Odd: two stalled loads of five change nothing, and three loads show that a tier has become slow (guess).
MEASUREMENTS = 5
GUESSED_BYTES = 4 << 20
# No set-up is longer than this: what a load takes beyond it is the time of its bytes (guess).
SETUP_MAX_S = 0.1
# Between measurements of nearly the same amount chance alone decides.
AMOUNTS_APART = 2
# A smaller load shows its set-up and nothing of the tier (guess).
BYTES_TO_MEASURE = 1 << 20
# What is loaded from a declined tier to measure it: large beside the fixed costs (guess). First after this time, then after
# twice the time, until a measurement is good.
PROBE_BYTES = 4 << 20
FIRST_PROBE_S = 30.0
LAST_PROBE_S = 960.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of each tier, the engine's prefill in tokens per second (0: not measured yet), and what a load from each
    tier takes in addition, whatever its size (a tier that is not named: nothing)."""

    bytes_per_s: Mapping[int, float]
    prefill_tokens_per_s: float
    setup_s: Mapping[int, float] = field(default_factory=dict)


def chunks_to_load(
    levels: bytes,
    *,
    chunk_bytes: int,
    chunk_tokens: int,
    rates: Rates,
    peer_pace: PeerPace | None = None,
    may_cut: bool = True,
) -> int:
    """How many leading chunks of a hit to load; `levels` has the tier of each. `peer_pace`: of the node that has those at level
    PEER, where it was measured. `may_cut`: a part of the hit may be loaded, else all of it or nothing.

    The prefix that saves most time against computing it, the longer one of two equal ones. 0 where no prefix saves any. A load
    has one set-up: the longest one of its tiers.
    """
    if not rates.prefill_tokens_per_s:
        return len(levels)
    compute_s = chunk_tokens / rates.prefill_tokens_per_s
    best = 0
    saved_s = best_s = begun_s = 0.0
    bytes_per_s, setup_s = rates.bytes_per_s, rates.setup_s
    if peer_pace is not None:
        bytes_per_s = {**bytes_per_s, Level.PEER: peer_pace.bytes_per_s}
        setup_s = {**setup_s, Level.PEER: peer_pace.wait_s}
    taken = 0
    for level, run in groupby(levels):
        # Each chunk of a run saves the same: all of the run is the best part of it, or none.
        count = sum(1 for _ in run)
        taken += count
        saved_s += count * (compute_s - chunk_bytes / bytes_per_s[level])
        longer_s = setup_s.get(level, 0.0) - begun_s
        if longer_s > 0:
            saved_s, begun_s = saved_s - longer_s, begun_s + longer_s
        if saved_s >= best_s and (may_cut or taken == len(levels)):
            best, best_s = taken, saved_s
    return best


def wait_limit_s(missing_tokens: int, *, rates: Rates, longest_s: float) -> float:
    """How long to wait for chunks that another engine is just saving: never longer than computing them would take."""
    if not rates.prefill_tokens_per_s:
        return longest_s
    return max(0.0, min(longest_s, missing_tokens / rates.prefill_tokens_per_s))


class MedianRate:
    """The median of the last `MEASUREMENTS` rates, the faster of the two in the middle; 0 before the first.

    Invariant: `value` is 0, or within `least` and `most`.
    """

    def __init__(self, *, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self._rates: deque[float] = deque(maxlen=MEASUREMENTS)

    def __repr__(self) -> str:
        return f"<MedianRate {self.value:.3g} of {len(self._rates)}>"

    @property
    def value(self) -> float:
        """The current estimate."""
        return -_median(-rate for rate in self._rates) if self._rates else 0.0

    def add_measurement(self, amount: float, seconds: float) -> None:
        """Add one measurement."""
        if amount > 0 and seconds > 0:
            self._rates.append(min(self._most, max(self._least, amount / seconds)))


class FittedTime:
    """The time that an amount takes, `setup_s + amount / rate`, as the last `MEASUREMENTS` show it.

    The rate is the median of the slopes between measurements of different amounts, and of the expected slope, once for each
    measurement; the set-up is the median of what they took beyond that. So one stall moves neither, and measurements of one
    amount alone change the expected rate only where its set-up would be below 0 or beyond SETUP_MAX_S. Expected is the rate so
    far, at first `guess`; without a guess the rate of a whole measurement, its set-up included.

    Invariant: `rate` is within `least` and `most`, or 0 without guess and measurement; `setup_s` is in 0..SETUP_MAX_S.
    """

    def __init__(self, guess: float, *, least: float, most: float) -> None:
        self._guess = guess
        self._least = least
        self._most = most
        self._measured: deque[tuple[float, float]] = deque(maxlen=MEASUREMENTS)
        self.forget()
        if guess:
            self._measured.append((GUESSED_BYTES, GUESSED_BYTES / guess))

    def __repr__(self) -> str:
        return f"<FittedTime {self.setup_s:.3g} s and {self.rate:.3g} of {self.count}>"

    @property
    def count(self) -> int:
        """How many measurements it has, a guess included."""
        return len(self._measured)

    def add_measurement(self, amount: float, seconds: float) -> None:
        """Add one measurement."""
        if amount > 0 and seconds > 0:
            self._measured.append((amount, seconds))
            self._fit()

    def is_disproved_by(self, amount: float, seconds: float) -> bool:
        """Whether a measurement took so little that this cannot be right: a stall makes a load slower, and nothing makes one
        faster."""
        return 2 * seconds < max(self.setup_s, amount / self.rate)

    def forget(self) -> None:
        """Drop all measurements: the next one decides alone."""
        self._measured.clear()
        self.rate, self.setup_s = self._guess, 0.0

    def _fit(self) -> None:
        measured = self._measured
        expected = 1 / self.rate if self._guess else _median(seconds / amount for amount, seconds in measured)
        slopes = [
            (more_s - less_s) / (more - less)
            for (less, less_s), (more, more_s) in permutations(measured, 2)
            if more >= AMOUNTS_APART * less
        ]
        slope = self._bounded(_median([*slopes, *[expected] * len(measured)]))
        setup_s = _median(seconds - slope * amount for amount, seconds in measured)
        self.setup_s = min(SETUP_MAX_S, max(0.0, setup_s))
        if self.setup_s != setup_s:
            slope = self._bounded(_median((seconds - self.setup_s) / amount for amount, seconds in measured))
        self.rate = 1 / slope

    def _bounded(self, slope: float) -> float:
        return min(1 / self._least, max(1 / self._most, slope))


def _median(values: Iterable[float]) -> float:
    """The median, of two in the middle the lower one. REQUIRES: there is a value."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class Probe:
    """Schedule of measurements of a declined tier. Invariant: `_pause_s` is in FIRST_PROBE_S..LAST_PROBE_S."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PROBE_S
        self._due_ns: int | None = None
        self.is_under_way = False

    def is_due(self, now_ns: int, *, is_small: bool) -> bool:
        """Whether to measure now; if so, the next time is later. The first call begins to count the time. A hit that is too
        small to measure well is taken when no larger one has come in as much time again."""
        if self._due_ns is None:
            self._due_ns = now_ns + int(self._pause_s * NS_PER_S)
        if now_ns < self._due_ns + int(self._pause_s * NS_PER_S) * is_small:
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
            int(level): FittedTime(guess, least=RATE_MIN, most=RATE_MAX) for level, guess in FIRST_GUESS.items()
        }
        self._probes = {int(level): Probe() for level in FIRST_GUESS}
        self._prefill = FittedTime(0.0, least=PREFILL_MIN, most=PREFILL_MAX)
        self._least_prefill = MedianRate(least=PREFILL_MIN, most=PREFILL_MAX)
        self._rates: Rates | None = None  # None: something was measured since they were made

    def rates(self) -> Rates:
        """The current rates. While prefill was hardly measured, it is not slower than what the engine has computed at least."""
        if self._rates is None:
            self._rates = self._current()
        return self._rates

    def _current(self) -> Rates:
        prefill = self._prefill.rate
        if self._prefill.count <= MEASUREMENTS // 2:
            prefill = max(prefill, self._least_prefill.value)
        return Rates(
            {level: tier.rate for level, tier in self._tiers.items()},
            prefill,
            {level: tier.setup_s for level, tier in self._tiers.items()},
        )

    def plan_load(
        self,
        levels: bytes,
        *,
        chunk_bytes: int,
        chunk_tokens: int,
        now_ns: int,
        peer_pace: PeerPace | None = None,
        may_cut: bool = True,
    ) -> int:
        """How many leading chunks of a hit to load: those that save time, and at times a few more that measure a tier. A hit
        that may not be cut is loaded as a whole for that."""
        count = chunks_to_load(
            levels,
            chunk_bytes=chunk_bytes,
            chunk_tokens=chunk_tokens,
            rates=self.rates(),
            peer_pace=peer_pace,
            may_cut=may_cut,
        )
        for level in set(levels[:count]):
            self._probes[level].rest()
        probed = min(-(-PROBE_BYTES // chunk_bytes) if may_cut else len(levels), len(levels) - count)
        is_small = probed * chunk_bytes < PROBE_BYTES
        if probed and self._probes[levels[count]].is_due(now_ns, is_small=is_small):
            return count + probed
        return count

    def add_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` of prompts in `seconds`, and nothing else in that time."""
        self._prefill.add_measurement(tokens, seconds)
        self._rates = None

    def add_least_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` of any kind in `seconds`: it would have computed no fewer of a long prompt."""
        self._least_prefill.add_measurement(tokens, seconds)
        self._rates = None

    def add_load(self, levels: bytes, chunk_bytes: int, seconds: float) -> None:
        """A load of chunks at `levels` took `seconds`. Of several tiers the slowest one answers for the time of the rest."""
        if not levels:
            return
        self._rates = None
        slowest, *others = sorted(set(levels), key=lambda level: self._tiers[level].rate)
        tier, probe = self._tiers[slowest], self._probes[slowest]
        others_s = sum(levels.count(level) * chunk_bytes / self._tiers[level].rate for level in others)
        size = levels.count(slowest) * chunk_bytes
        # A tenth at least, so that a wrong rate of the others cannot make this tier look infinitely fast.
        seconds = max(seconds - others_s, seconds / 10)
        is_measured = len(levels) * chunk_bytes >= BYTES_TO_MEASURE
        if probe.is_under_way:
            probe.is_under_way = False
            if tier.is_disproved_by(size, seconds):
                tier.forget()
                is_measured = True
        if is_measured:
            tier.add_measurement(size, seconds)
