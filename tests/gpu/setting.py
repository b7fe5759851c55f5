"""Setting of a part: on the GPU, or a rehearsal on the emulated driver with small sizes and torch on the processor.

A part is a program. What it has measured it prints at once, one JSON object a line, and a run that is cut keeps it.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import kvpool_client as kv
from kvpool_tools.bench.measure import timed_s
from tests.rigs.daemon import wait_until
from tests.rigs.device import emulated

IS_REHEARSAL = not emulated.REAL
TORCH_DEVICE = "cpu" if IS_REHEARSAL else "cuda"
ROUNDS = 2 if IS_REHEARSAL else 7


def use_driver(method: str = "batch") -> None:
    """Have clients of this process use the driver, with one of its methods of copies."""
    os.environ.update(emulated.environment(method))


def figure(
    name: str, values: Sequence[float], unit: str, *, ratio: float | None = None, bar: float | None = None
) -> None:
    """Report the median and the spread of `values`. `ratio`: to what the device itself does in the same run, or what the name
    says; `bar`: what it has to reach."""
    row = {
        "name": name,
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "rounds": len(values),
        "unit": unit,
        "ratio": ratio,
        "bar": bar,
    }
    sys.stdout.write(json.dumps({"figure": row}) + "\n")
    sys.stdout.flush()


def seconds_of(work: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each round, after one that warms."""
    work()
    return [timed_s(work) for _ in range(rounds)]


def wait_registered(pool: kv.Pool, limit_s: float) -> float:
    """Seconds until the driver has registered what a Pool copies from: in the background, from the first load on."""
    began = time.perf_counter()
    registered = pool._copies._pinned
    wait_until(
        lambda: all(memory.is_pinned for memory in list(registered.values())), "the arena is registered", limit_s
    )
    return time.perf_counter() - began


def rates(seconds: Sequence[float], size: int) -> list[float]:
    """GB/s."""
    return [size / taken / 1e9 for taken in seconds]
