"""Results of rounds against a raw floor: rates, ratios, latencies and CPU seconds of one direction.

A round is raw, measured and raw again; its ratio is to the mean of the two raw passes, so that a disk that is slower for a
while is slower for all three. Main thread of a command only.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool_tools.bench.measure import median, quantiles_us, rates, spread

BAR = 0.95
# Below this a chunk's own costs count: the bar is for chunks from here on.
BAR_BYTES_MIN = 1 << 20

# Seconds, with CPU seconds of the process that did the work.
Timed = tuple[float, float]


@dataclass(slots=True)
class Rounds:
    """Rounds of one direction that counted. Invariant: `rates_gb` and `ratios` have one entry for each, `raw_gb` two."""

    raw_gb: list[float] = field(default_factory=list)
    rates_gb: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    raw_one_s: list[float] = field(default_factory=list)
    one_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    raw_cpu_s: float = 0.0
    moved_bytes: int = 0

    def add_round(self, moved_bytes: int, floors: Sequence[Timed], measured: Timed) -> None:
        """Count one round of `moved_bytes` in each of its passes."""
        assert len(floors) == 2
        self.raw_gb += [moved_bytes / seconds / 1e9 for seconds, _ in floors]
        self.rates_gb.append(moved_bytes / measured[0] / 1e9)
        self.ratios.append(sum(seconds for seconds, _ in floors) / 2 / measured[0])
        self.raw_cpu_s += sum(cpu_s for _, cpu_s in floors) / 2
        self.cpu_s += measured[1]
        self.moved_bytes += moved_bytes

    def add_one(self, raw_s: float, seconds: float) -> None:
        """Count the move of one chunk alone."""
        self.raw_one_s.append(raw_s)
        self.one_s.append(seconds)

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return median(self.ratios)

    def columns(self, name: str, chunk_bytes: int) -> dict[str, Any]:
        """Columns of this direction: `name` is demote or promote."""
        gb = self.moved_bytes / 1e9
        ones = {**quantiles_us(f"raw_{name}_one_", self.raw_one_s), **quantiles_us(f"{name}_one_", self.one_s)}
        return {
            **rates(f"raw_{name}", self.raw_gb),
            **rates(name, self.rates_gb),
            f"{name}_ratio": round(self.ratio, 3),
            f"{name}_ratio_spread": spread(self.ratios),
            f"{name}_bar": BAR if chunk_bytes >= BAR_BYTES_MIN else None,
            **(ones if self.one_s else {}),
            f"raw_{name}_cpu_seconds_per_gb": round(self.raw_cpu_s / gb, 3),
            f"{name}_cpu_seconds_per_gb": round(self.cpu_s / gb, 3),
        }


def timed_raw(raw: Callable[[], float]) -> Timed:
    """A raw pass, which returns its own seconds without those of its threads' start, with CPU seconds of this process."""
    before_s = time.process_time()
    seconds = raw()
    return seconds, time.process_time() - before_s
