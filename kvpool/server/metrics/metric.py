"""Metric: one row of the table of metrics, and where its values come from. Values; any thread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvpool.server.metrics.measurements import Scrape


class Kind(Enum):
    """A metric's type in the exposition formats."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by bucket, not cumulated: one for each of `bounds`, and one for values above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


Value = float | Histogram
# A value, or a value for each combination of labels.
Values = float | Mapping[tuple[str, ...], Value]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `read` gives its values; those of a metric without labels, a number or nothing at all."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Scrape], Values | Histogram | None]
    unit: str = ""
    labels: tuple[str, ...] = ()


def counter(name: str, help: str, read: Callable[[Scrape], Values | None], unit: str = "", *labels: str) -> Metric:
    """A number that only grows."""
    return Metric(name, Kind.COUNTER, help, read, unit, labels)


def gauge(name: str, help: str, read: Callable[[Scrape], Values | None], unit: str = "", *labels: str) -> Metric:
    """A number of this moment."""
    return Metric(name, Kind.GAUGE, help, read, unit, labels)
