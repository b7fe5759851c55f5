"""Timing for the benchmarks: durations in, medians with their spread out. Main thread of a command only.

A spread is the pair [p10, p90] of the same samples whose median it stands beside. CPU time is read by a process's clock
(nanoseconds, all its threads), of this process or of another one on this machine.
"""

import os
import time
from collections.abc import Callable, Sequence

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
        "spread_us": spread(microseconds, 1),
        "samples": len(seconds),
        **more,
    }
