"""The Grafana dashboard: it asks for exported metrics with labels that they have, and shows all that an operator watches."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.server.metrics.definitions import METRICS, PROCESS_METRICS, sample_names

DASHBOARD = json.loads((Path(__file__).parents[4] / "configs" / "grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPORTED = {name: metric for metric in METRICS for name in sample_names(metric)}
# Labels that Prometheus adds, or a bucket has.
FURTHER_LABELS = {"instance", "job", "le"}
# Exported metrics that no panel shows, with the reason.
NEEDS_NO_PANEL = {
    "kvpool_usage_reports": "how often clients report says nothing of the pool",
    "kvpool_usage_clamped_values": "of a client that reports what cannot be",
    "kvpool_eviction_by_age": "the policy's own choice",
    "kvpool_dram_settling": "lasts for seconds after a start",
    "kvpool_slots": "kvpool_slot_bytes is on a panel",
    "kvpool_ssd_unrestored_chunks": "changes at a start alone",
    "kvpool_ssd_checkpoints": "as often as ssd.checkpoint_interval says",
    "kvpool_ssd_read_back_chunks": "what a distrusted disk costs; kvpool_ssd_io_distrusted is on a panel",
    "kvpool_hbm_left_out_prefixes": "prefixes that are looked at with their next lease",
    "kvpool_peer_node_known_chunks": "`kvpoolctl peers` shows it; their sum is on a panel",
    "kvpool_uptime_seconds": "a start shows in every counter",
}


def _queries() -> list[str]:
    variables = [one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one]
    return [target["expr"] for panel in PANELS for target in panel["targets"]] + variables


def _names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:kvpool|process)_\w+", query))


def test_every_metric_that_a_panel_asks_for_is_exported() -> None:
    asked = {name for query in _queries() for name in _names_in(query)}
    assert asked <= set(EXPORTED) | set(PROCESS_METRICS)
    assert len(asked) > 150


def test_every_exported_metric_is_on_a_panel_or_needs_none() -> None:
    shown = {name for panel in PANELS for target in panel["targets"] for name in _names_in(target["expr"])}
    without = {metric.name for metric in METRICS if not shown & set(sample_names(metric))}
    assert without == set(NEEDS_NO_PANEL)


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_uses_labels_that_its_metrics_have(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    for target in panel["targets"]:
        query, legend = target["expr"], target["legendFormat"]
        assert query.count("(") == query.count(")")
        metrics = [EXPORTED[name] for name in _names_in(query) & set(EXPORTED)]
        known = FURTHER_LABELS | {label for metric in metrics for label in metric.labels}
        grouped = {label for labels in re.findall(r"by \(([\w, ]+)\)", query) for label in labels.split(", ")}
        assert grouped | set(re.findall(r"(\w+)=", query)) <= known, query
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= (grouped or FURTHER_LABELS), "one line for each"


def test_panels_have_titles_and_numbers_of_their_own() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize(
    "title", ["SSD tier", "Device tier", "Other nodes", "Shared store", "Tenants: who holds memory"]
)
def test_each_part_of_a_node_has_a_row(title: str) -> None:
    assert title in [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
