"""The table of metrics: names by the rules of Prometheus, a value for each, and the page and dashboard that follow it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvpool.peers.control.records import REFUSAL_CODES
from kvpool.server.health.health import HealthReport
from kvpool.server.metrics.collector import ScrapeCollector, make_registry
from kvpool.server.metrics.definitions import METRICS, PROCESS_METRICS, sample_names
from kvpool.server.metrics.measurements import Scrape
from kvpool.server.metrics.metric import Histogram, Kind, Metric
from kvpool.server.metrics.page import render
from kvpool.server.metrics.peer_definitions import NODES_MAX
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.service import VERBS
from kvpool.states import LoadReason
from kvpool.tiering.admission import DECLINED
from kvpool.usage import ClientFailures, Measurements, ModelUsage, SparseUsage
from kvpool_native import Directory, DirectoryGeometry, Mapping

ROOT = Path(__file__).parents[4]
UNITS = {"seconds", "bytes", "tokens", "chunks", "slots", "segments", "leases", "tickets", "reservations"}
UNITS |= {"connections", "namespaces", "jobs", "events", "messages"}
_COUNTS = ModelUsage(
    lookups=3,
    lookup_tokens=20,
    lookup_bytes=20,
    hit_tokens=(0, 5, 7, 0, 0),
    hit_bytes=(0, 5, 7, 0, 0),
    sparse=SparseUsage(recalls=2, kv_heads=4, query_heads=8, kept_mass_millionths=7_500_000),
)


def _directory() -> dict[str, Any]:
    geometry = DirectoryGeometry.plan(1 << 20, 1 << 20, 100)
    arena, index = Mapping.create("arena", geometry.arena_bytes), Mapping.create("index", geometry.index_bytes)
    directory = Directory(arena, index, geometry, bytes(16))
    directory.add_class(8192, 2)
    return directory.stats()


# What each part of a node counts.
COUNTS = {
    "ssd": """
        chunks used_bytes capacity_bytes demoted_chunks promoted_chunks evicted_chunks read_bytes written_bytes
        io_errors corrupt_chunks read_back_chunks bad_writes io_distrusted unanswered_s demotion_failed_chunks
        promotion_failed_chunks waiting_reads waiting_writes waiting_checks waiting_rows dropped_rows lost_rows
        write_budget_left_bytes admission_tightenings unrestored_chunks lost_chunks checkpoints
    """,
    "hbm": """
        chunks used_bytes capacity_bytes leased_bytes served_chunks served_bytes promoted_chunks promoted_bytes
        failed_chunks evicted_chunks withdrawn_chunks left_out_prefixes corrupt_chunks
    """,
    "store": """
        queries late_answers pulled_chunks read_bytes gone_objects wrong_objects published_chunks published_bytes
        unpublished_full unpublished_failed unpublished_left_out late_transfers process_starts suspensions
    """,
    "events": """
        written dropped gaps buffered_bytes published published_messages replayed_messages published_snapshots
        publish_errors engine_chunks engine_chunk_record_bytes declined_engine_chunks refused_routers bad_requests
        unsent_replays ended_connections
    """,
    "peer": """
        pulled_chunks failed_chunks read_bytes offers.sent_bytes pulls_under_way failed_pulls_refused
        failed_pulls_unanswered failed_pulls_empty failed_pulls_queue_full failed_pulls_unencrypted failed_pulls_foreign
        failed_pulls_other_transport shm.pulls tcp.pulls rdma.pulls rdma.serving rdma.refused rdma.quarantined_bytes
        rdma.failed_reads rdma.late_reads rdma.process_starts offers.pulls_served offers.pulls_empty
        offers.pulls_refused known_chunks known_evicted_chunks known_left_out_chunks followed.snapshots followed.gaps
        members.failed_refreshes members.refused links.failed_handshakes asked.refused_handshakes
        asked.silent_connections asked.crowded_connections
    """,
}


def _counts(part: str, value: int, *further: str) -> dict[str, Any]:
    return {f"{part}.{name}": value for name in (*COUNTS[part].split(), *further)}


def _snapshot(models: dict[str, ModelUsage] | None = None) -> Scrape:
    held = ("leases", "tickets", "reservations", "namespaces", "staging_bytes")
    joint = ("joint_chunks", "joint_bytes", "joint_stored_chunks", "joint_expired_chunks")
    index = dict.fromkeys((*held, *joint, "expired_leases", "expired_reservations"), 1)
    announced = dict.fromkeys(("announced_bytes", "announced_chunks", "announcements_clipped_chunks"), 1)
    server = ("accepted_connections", "refused_connections", "protocol_errors", "transfer_waiting_jobs", "uptime_s")
    measured = Measurements(
        server=dict.fromkeys(server, 2),
        index={**index, **announced, "checksum_failures": 1, "corrupt_reports": 1, "verified_chunks": 1},
        directory=_directory(),
        capacity_bytes=1 << 20,
        resident_bytes=4096,
        huge_bytes=0,
        is_settling=False,
        models={"m": _COUNTS} if models is None else models,
        events=_counts("events", 4),
        tiers={
            "hbm": {"hbm.state": "ok", **_counts("hbm", 6)},
            "ssd": {
                "ssd.state": "ok",
                "ssd.admission": "all",
                **_counts("ssd", 3, *(f"declined_{reason}" for reason in DECLINED)),
            },
            "peer": _counts("peer", 5, *(f"asked.refused.{code}" for code in REFUSAL_CODES)),
            "store": {"store.state": "ok", **_counts("store", 5)},
        },
        classes={"ssd": [{"chunk_bytes": 8192, "extents": 2, "slots_used": 1, "slots": 3}]},
        failures=ClientFailures({LoadReason.GONE.name.lower(): 1}, {"aborted": 2}, 3, 4),
        chunks=0,
        evicted_chunks=0,
        held={"held.leased_bytes": 1, "held.reserved_bytes": 2, "held.zombie_bytes": 3},
        held_by_model={"m": 6},
        held_by_user={"1000": 4, "tickets": 2},
    )
    times = RequestTimes(VERBS)
    times.add_time(10, 7_000)
    times.add_time(10, 3_000_000_000)
    return Scrape(
        build={"version": "1", "checksum": "c", "key_hash": "k"},
        pool=measured,
        connections={"engine": 1, "admin": 0},
        verbs=times.verbs(),
        health=HealthReport(True, False, ("p",), 1.5, 0.25),
        peers=tuple(_row(number) for number in range(NODES_MAX + 3)),
    )


def _row(number: int) -> dict[str, Any]:
    counts = dict.fromkeys(("known_chunks", "pulls", "failures", "read_bytes", "bytes_per_s", "latency_us"), number)
    return {"node": "any\nname", "address": f"tcp://10.0.0.{number}:1", "state": "following", **counts}


def _text(now: Scrape) -> str:
    registry = CollectorRegistry()
    registry.register(ScrapeCollector(lambda: now))
    return generate_latest(registry).decode()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"kvpool_[a-z][a-z0-9_]*[a-z]", metric.name)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))
    last = metric.name.rsplit("_", 1)[1]
    assert metric.unit == (last if last in UNITS else "")
    assert metric.unit == "seconds" or metric.kind is not Kind.HISTOGRAM
    assert metric.help.endswith(".")
    assert "le" not in metric.labels
    assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_has_a_value_with_its_labels(metric: Metric) -> None:
    found = metric.read(_snapshot())
    if not metric.labels:
        assert isinstance(found, (int, float, Histogram))
        return
    assert isinstance(found, dict)
    assert found
    assert all(len(labels) == len(metric.labels) for labels in found)


def test_no_name_is_given_twice() -> None:
    names = [name for metric in METRICS for name in sample_names(metric)]
    assert len(names) == len(set(names))


def test_openmetrics_can_be_parsed_and_holds_every_metric() -> None:
    text = generate_openmetrics(make_registry(_snapshot)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS:
        assert families[metric.name].type == metric.kind.value
        assert families[metric.name].unit == metric.unit
        assert families[metric.name].documentation == metric.help
        found = {sample.name for sample in families[metric.name].samples}
        assert found == set(sample_names(metric))
    assert {f"{name}_total" for name in families} | set(families) >= set(PROCESS_METRICS)


def test_a_scrape_takes_one_snapshot() -> None:
    taken = []

    def take() -> Scrape:
        taken.append(1)
        return _snapshot()

    generate_latest(make_registry(take))
    assert len(taken) == 1


def test_a_large_fleet_has_a_bounded_number_of_labels_and_all_its_members_are_counted() -> None:
    now = _snapshot()
    by_node = [metric for metric in METRICS if metric.labels == ("peer",)]
    assert len(by_node) == 6
    for metric in by_node:
        values = metric.read(now)
        assert isinstance(values, dict)
        assert len(values) == NODES_MAX
        assert values["10.0.0.7:1",] == (7e-6 if metric.unit == "seconds" else 7)
    assert f'kvpool_peers{{state="following"}} {NODES_MAX + 3:.1f}' in _text(now)


def test_a_daemon_without_peers_has_no_metrics_of_them() -> None:
    now = _snapshot()
    before_the_start: dict[str, dict[str, int]] = {"peer": {}}
    for tiers in ({}, before_the_start):
        alone = _text(replace(now, pool=replace(now.pool, tiers=tiers), peers=()))
        assert "kvpool_peer_" not in "".join(line for line in alone.splitlines() if not line.startswith("#"))
        assert "kvpool_chunks 0.0" in alone


def test_the_page_equals_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == render(), "stale: run make docs"
