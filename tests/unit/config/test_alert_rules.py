"""The alert rules: they parse, and every metric in them is exported."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool.config.config import OPTIONS
from kvpool.server.metrics.definitions import METRICS, sample_names
from kvpool.server.metrics.hbm_definitions import STATES as HBM_STATES
from kvpool.server.metrics.peer_definitions import STATES as PEER_STATES
from kvpool.tiering.admission import Admitted
from kvpool.tiers.base import TierState

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "configs" / "kvpool-alerts.yml"
EXPORTED = {name: metric for metric in METRICS for name in sample_names(metric)}
GROUPS = yaml.safe_load(ALERTS.read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_uses_exported_metrics(rule: dict[str, Any]) -> None:
    names = re.findall(r"\bkvpool_\w+", rule["expr"])
    assert names or rule["expr"].startswith("up{")
    assert set(names) <= set(EXPORTED), "no such metric"
    for name, label in re.findall(r"(kvpool_\w+)\{(\w+)=", rule["expr"]):
        assert label in EXPORTED[name].labels
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_rules_have_names_of_their_own_and_name_options_that_exist() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    for option in re.findall(r"\b(?:server|dram|ssd|events)\.[a-z_]+", ALERTS.read_text()):
        assert option in OPTIONS, f"{option} is no option"


def test_the_rules_follow_the_states_that_the_daemon_exports() -> None:
    expressions = " ".join(rule["expr"] for rule in RULES)
    states = {"starting", "ok", "readonly", "offline"}
    assert states == {state.name.lower() for state in TierState}
    assert set(re.findall(r'kvpool_ssd_state\{state="(\w+)"', expressions)) <= states
    assert set(HBM_STATES) <= states
    assert set(re.findall(r'kvpool_hbm_state\{state="(\w+)"', expressions)) <= set(HBM_STATES)
    assert set(re.findall(r'kvpool_peers\{state="(\w+)"', expressions)) <= set(PEER_STATES)
    assert set(re.findall(r'admitted="([^"]+)"', expressions)) <= {step.word for step in Admitted}


@pytest.mark.parametrize(
    "metric",
    [
        *("kvpool_healthy", "kvpool_ready", "kvpool_degraded", "kvpool_early_ends"),
        *(
            "kvpool_ssd_state",
            "kvpool_ssd_io_errors_total",
            "kvpool_ssd_dropped_rows_total",
            "kvpool_ssd_lost_rows_total",
        ),
        *("kvpool_checksum_failures_total", "kvpool_declined_chunks_total", "kvpool_expired_reservations_total"),
        *("kvpool_ssd_admission", "kvpool_event_gaps_total", "kvpool_refused_connections_total"),
        *("kvpool_failed_loads_total", "kvpool_peers", "kvpool_store_state", "kvpool_hbm_corrupt_chunks_total"),
    ],
)
def test_each_condition_that_operators_must_know_has_a_rule(metric: str) -> None:
    assert any(re.search(rf"\b{metric}\b", rule["expr"]) for rule in RULES)
