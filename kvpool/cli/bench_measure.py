"""Timing for the benchmarks: durations in, medians with their spread out. Main thread of a command only."""

import resource
import statistics
import time
from collections.abc import Callable, Sequence


def timed_s(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cpu_seconds() -> float:
    """CPU time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> str:
    """Smallest to largest."""
    return f"{min(values):.2f}..{max(values):.2f}"


def latencies(name: str, seconds: Sequence[float], **more: object) -> dict[str, object]:
    """A row of a latency: p50 and p99 in microseconds."""
    row: dict[str, object] = {
        "name": name,
        "p50_us": round(median(seconds) * 1e6, 1),
        "p99_us": round(percentile(seconds, 0.99) * 1e6, 1),
        "samples": len(seconds),
    }
    return {**row, **more}
