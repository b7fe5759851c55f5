"""The connector's numbers as counters: one each, with labels for tier and reason."""

import re
from pathlib import Path
from typing import Any

from kvpool_client.vllm.prometheus import COUNTERS, FAMILIES, SUMS, PrometheusCounters
from kvpool_client.vllm.tier import metrics as tier_metrics

ADAPTER = Path(__file__).parents[4] / "client/kvpool_client/vllm"
TIER = ADAPTER / "tier"  # it has metrics of its own


class Counter:
    """As `prometheus_client` has it, as far as it is used."""

    made: dict[str, "Counter"]

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        assert documentation.endswith(".")
        self.labelnames = labelnames
        self.values: dict[tuple[Any, ...], float] = {}
        self.made[name] = self

    def labels(self, *values: object) -> "Labelled":
        assert len(values) == len(self.labelnames)
        return Labelled(self, values)


class Labelled:
    """A counter with its labels."""

    def __init__(self, counter: Counter, values: tuple[object, ...]) -> None:
        self._counter = counter
        self._values = values

    def inc(self, amount: float) -> None:
        self._counter.values[self._values] = self._counter.values.get(self._values, 0) + amount


def counters() -> tuple[PrometheusCounters, dict[str, Counter]]:
    """For two engines, and what was made for them."""
    made: dict[str, Counter] = {}
    Counter.made = made
    engines: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
    return PrometheusCounters({Counter: Counter}, ["model_name", "engine"], engines), made  # type: ignore[dict-item]  # a stand-in


def test_counts_of_one_kind_share_a_counter_and_have_a_label() -> None:
    metrics, made = counters()
    metrics.observe({"hit_tokens": 700, "hit_tokens_dram": 500, "hit_tokens_ssd": 200, "saved_chunks": 3})
    metrics.observe({"hit_tokens_dram": 1, "declined_tokens_slower_than_computing_ssd": 64}, 1)
    assert made["vllm:kvpool_hit_tokens"].values == {
        ("model", "0", "dram"): 500,
        ("model", "0", "ssd"): 200,
        ("model", "1", "dram"): 1,
    }
    assert made["vllm:kvpool_saved_chunks"].values == {("model", "0"): 3}
    assert made["vllm:kvpool_declined_tokens"].values == {("model", "1", "slower_than_computing_ssd"): 64}


def test_every_number_that_a_half_counts_has_a_counter() -> None:
    families = tuple(f"{name}_" for name, _, _ in FAMILIES)
    files = [path for path in sorted(ADAPTER.rglob("*.py")) if path.parent != TIER]
    text = "".join(path.read_text() for path in files)
    names = set(re.findall(r'(?:tally\.|self\._)count\(\s*f?"(\w+)', text)) | {
        f"{name}_" for name in re.findall(r'by_level\("(\w+)"', text)
    }
    assert len(names) > 12
    assert {name for name in names if name not in COUNTERS and not name.startswith(families)} == SUMS


def test_every_number_that_the_tier_counts_has_a_counter() -> None:
    text = "".join(path.read_text() for path in sorted(TIER.glob("*.py")))
    names = re.findall(r'(?:count\(|counts\[|Counter\()\s*f?"(\w+)', text) + re.findall(r"Counter\((\w+)=", text)
    for arguments in re.findall(r"counts\.update\(([^)]*)\)", text):
        names += re.findall(r"(\w+)=", arguments)
    assert len(names) > 6
    defined = tier_metrics.definitions(lambda **words: words)
    assert [name for name in names if tier_metrics.metric_of(name)[0] not in defined] == []
