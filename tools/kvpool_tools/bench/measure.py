"""Timing for the benchmarks: durations in, medians with their spread out. Main thread of a command only.

A spread is the pair [p10, p90] of what its median stands for: of a latency's samples, else of the rounds. CPU time is read by a
process's clock (nanoseconds, all its threads), of this process or of another one on this machine.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SPREAD = (0.10, 0.90)
_CPU_CLOCK = 2


def timed_s(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cpu_seconds(pid: int | None = None) -> float:
    """CPU time of a process (None: this one), all its threads. Raises ProcessLookupError when there is none."""
    # The kernel's name for the clock of a process: its number, inverted, with the kind of clock in the low three bits.
    clock = (~(os.getpid() if pid is None else pid) << 3) | _CPU_CLOCK
    try:
        return time.clock_gettime(clock)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} has no clock: {error.strerror}") from error


def timed_with_cpu_s(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds that one call takes, and CPU seconds that this process spends in it, all threads."""
    before = time.process_time()
    seconds = timed_s(call)
    return seconds, time.process_time() - before


def median(values: Sequence[float]) -> float:
    """The middle value; 0 of none."""
    return percentile(values, 0.5)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, between two of them if need be; 0 of none."""
    return float(np.quantile(values, share)) if len(values) else 0.0


def spread(values: Sequence[float], digits: int = 2) -> list[float]:
    """[p10, p90]."""
    return [round(percentile(values, share), digits) for share in SPREAD]


def rates(name: str, values: Sequence[float]) -> dict[str, object]:
    """Columns of a rate: its median in GB/s, and its spread."""
    return {f"{name}_gb_per_s": round(median(values), 2), f"{name}_spread_gb_per_s": spread(values)}


def quantiles_us(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """Columns of a latency in microseconds: p50 and p99. `name` is empty, or ends with an underscore."""
    return {
        f"{name}p50_us": round(median(seconds) * 1e6, 1),
        f"{name}p99_us": round(percentile(seconds, 0.99) * 1e6, 1),
    }


def latencies(name: str, seconds: Sequence[float], **more: object) -> dict[str, object]:
    """A row of a latency: p50, p99 and spread in microseconds."""
    microseconds = [value * 1e6 for value in seconds]
    return {
        "name": name,
        **quantiles_us("", seconds),
        "p50_spread_us": spread(microseconds, 1),
        "samples": len(seconds),
        **more,
    }


@dataclass(frozen=True, slots=True)
class Bars:
    """What a row may have at most: microseconds, times its floor, microseconds of the daemon's CPU; None: no bar."""

    us: float | None = None
    times_floor: float | None = None
    daemon_cpu_us: float | None = None


@dataclass(slots=True)
class _Taken:
    """Of one name, an entry for each counted round: seconds of its calls, and CPU seconds of a call here and in the daemon."""

    seconds: list[list[float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    daemon_cpu_s: list[float] = field(default_factory=list)


class Rounds:
    """Calls that take turns, round by round: what disturbs the machine falls on all of them, and on their floors.

    Invariant: each name has an entry for each round but the first, which warms and is not counted.
    """

    def __init__(self, rounds: int, advance: Callable[[int], None]) -> None:
        self._rounds, self._advance = rounds, advance
        self._taken: dict[str, _Taken] = defaultdict(_Taken)

    def run(self, calls: Mapping[str, tuple[Callable[[], list[float]], Callable[[], float] | None]]) -> None:
        """Every round. By name: what makes some calls and returns the seconds of each, and the clock of the daemon's CPU."""
        for number in range(self._rounds):
            for name, (call, clock) in calls.items():
                before_s, daemon_before_s = time.process_time(), clock() if clock else 0.0
                seconds = call()
                used_s, daemon_used_s = time.process_time() - before_s, (clock() if clock else 0.0) - daemon_before_s
                if number:
                    taken = self._taken[name]
                    taken.seconds.append(seconds)
                    taken.cpu_s.append(used_s / len(seconds))
                    taken.daemon_cpu_s.append(daemon_used_s / len(seconds) if clock else 0.0)
            self._advance(self._rounds)

    def row(self, name: str, floor: str, bars: Bars = Bars()) -> dict[str, object]:
        """A row: the latency, its ratio to the floor of the same round, and the CPU time of a call. A floor is its own."""
        taken = self._taken[name]
        times = [
            median(own) / median(least) for own, least in zip(taken.seconds, self._taken[floor].seconds, strict=True)
        ]
        daemon_us = [seconds * 1e6 for seconds in taken.daemon_cpu_s]
        return latencies(
            name,
            [one for some in taken.seconds for one in some],
            bar_us=bars.us,
            times_floor=round(median(times), 2),
            times_floor_spread=spread(times),
            times_floor_bar=bars.times_floor,
            cpu_us=round(median(taken.cpu_s) * 1e6, 1),
            daemon_cpu_us=round(median(daemon_us), 1),
            daemon_cpu_spread_us=spread(daemon_us, 1),
            daemon_cpu_bar_us=bars.daemon_cpu_us,
        )
