"""Collector: the metrics of a Scrape as Prometheus families, by the table of `definitions`.

Holds no state: each scrape is taken at one moment and shows only that moment. Runs on the HTTP threads.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvpool.server.metrics.definitions import METRICS
from kvpool.server.metrics.measurements import Scrape
from kvpool.server.metrics.metric import Histogram, Kind, Metric


class ScrapeCollector(Collector):
    """Answers each request with a fresh scrape. Errors of `take` are raised to the caller."""

    def __init__(self, take: Callable[[], Scrape]) -> None:
        self._take = take

    def describe(self) -> Iterable[Family]:
        """The families, without values."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterable[Family]:
        """The families with their values at one moment."""
        now = self._take()
        return [_filled(metric, now) for metric in METRICS]


def make_registry(take: Callable[[], Scrape]) -> CollectorRegistry:
    """The daemon's own registry: its metrics and those of its process."""
    registry = CollectorRegistry()
    registry.register(ScrapeCollector(take))
    ProcessCollector(registry=registry)
    return registry


AnyFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily


def _family(metric: Metric) -> AnyFamily:
    if metric.kind is Kind.INFO:
        return InfoMetricFamily(metric.name, metric.help)
    if metric.kind is Kind.COUNTER:
        return CounterMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
    if metric.kind is Kind.GAUGE:
        return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
    return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)


def _filled(metric: Metric, now: Scrape) -> Family:
    family = _family(metric)
    found = metric.read(now)
    if found is None:
        return family
    values = {(): found} if isinstance(found, (int, float, Histogram)) else found
    for labels, value in values.items():
        if isinstance(family, InfoMetricFamily):
            family.add_metric([], dict(zip(metric.labels, labels, strict=True)))
        elif isinstance(family, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            family.add_metric(list(labels), _buckets(value), value.sum)
        else:
            assert not isinstance(value, Histogram)
            family.add_metric(list(labels), value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts, as the format requires: `le` is an inclusive upper bound."""
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
