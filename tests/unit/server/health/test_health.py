"""Health from observations: probes, threads, and the time since."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.ids import EPOCH_BYTES
from kvpool.pool.pool import Pool
from kvpool.server.health.health import Health
from kvpool.server.health.probe_result import ProbeResult
from kvpool.tiers.dram.prefault import Prefault
from kvpool.tiers.dram.tier import DramTier, plan_geometry
from tests.rigs.clock import HandClock
from tests.rigs.daemon import wait_until


class FakePool:
    def __init__(self) -> None:
        self.broken: list[str] = []

    def problems(self) -> list[str]:
        return self.broken


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def health(pool: FakePool, clock: HandClock) -> Health:
    return Health(pool.problems, clock, probe_every_s=10.0)


def _result(clock: HandClock, failure: str = "") -> ProbeResult:
    return ProbeResult(failure, clock.now_ns(), 0.002)


def test_ready_begins_with_the_first_good_probe_and_ends_with_draining(health: Health, clock: HandClock) -> None:
    assert (health.state(), health.report().is_ready) == ("starting", False)
    health.begin_serving()
    assert (health.state(), health.report().is_ready, health.report().is_healthy) == ("starting", False, True)
    health.note_probe(_result(clock))
    clock.advance(3)
    report = health.report()
    assert (health.state(), report.is_ready, report.problems) == ("ready", True, ())
    assert report.probe_age_s == pytest.approx(3)
    assert report.probe_latency_s == 0.002
    health.begin_draining()
    assert (health.state(), health.report().is_ready, health.report().is_healthy) == ("draining", False, True)


def test_a_failed_probe_is_a_problem_until_a_good_one(health: Health, clock: HandClock) -> None:
    health.begin_serving()
    health.note_probe(_result(clock, "no answer"))
    assert health.report().problems == ("self-probe: no answer",)
    assert (health.state(), health.report().is_ready, health.report().is_healthy) == ("unhealthy", False, False)
    health.note_probe(_result(clock))
    assert health.state() == "ready"


@pytest.mark.parametrize("is_probed_before", [True, False])
def test_a_missing_probe_is_a_problem(health: Health, clock: HandClock, is_probed_before: bool) -> None:
    clock.advance(1000)
    assert health.report().is_healthy, "nothing is expected before the daemon serves"
    health.begin_serving()
    if is_probed_before:
        health.note_probe(_result(clock))
    clock.advance(49)
    assert health.report().is_healthy
    clock.advance(2)
    assert health.report().problems == ("self-probe: none has ended for 51 s",)


def test_without_a_probe_ready_is_serving_with_living_threads(pool: FakePool, clock: HandClock) -> None:
    health = Health(pool.problems, clock)
    health.begin_serving()
    clock.advance(1000)
    report = health.report()
    assert (report.is_ready, report.problems, report.probe_age_s, report.probe_latency_s) == (True, (), None, None)


@pytest.mark.parametrize(
    ("watchdog_s", "probe_every_s", "expected"),
    [(None, None, None), (None, 10.0, 10.0), (30.0, None, 10.0), (3.0, 10.0, 1.0), (300.0, None, 10.0)],
)
def test_the_probe_runs_only_while_somebody_watches(
    pool: FakePool, clock: HandClock, watchdog_s: float | None, probe_every_s: float | None, expected: float | None
) -> None:
    health = Health(pool.problems, clock, watchdog_interval_s=watchdog_s, probe_every_s=probe_every_s)
    assert health.probe_interval_s == expected


@pytest.fixture
def real_pool(tmp_path: Path) -> Iterator[Pool]:
    config = load_config(None, [f"server.socket={tmp_path}/kvpool.sock", "dram.capacity=1MiB", "dram.huge_pages=off"])
    pool = Pool(config, MonotonicClock())
    yield pool
    pool._workers.stop()


def _die(result: object) -> None:
    raise SystemExit


def test_the_pool_reports_a_lost_outcome(real_pool: Pool) -> None:
    assert real_pool.problems() == []
    assert real_pool._workers.submit(os.getpid, _die)
    wait_until(
        lambda: real_pool.problems() == ["transfer: the outcome of a job was lost"], "the lost outcome is reported"
    )


def test_the_pool_reports_pre_faulting_that_ended_early(real_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DramTier) -> int | None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(DramTier, "prefault_next", fail)
    config = load_config(None, ["dram.huge_pages=off", "dram.capacity=1MiB", "dram.segment=1MiB"]).dram
    tier = DramTier(plan_geometry(config), config, bytes(EPOCH_BYTES))
    real_pool._prefault = Prefault(tier, 1, lambda segment: None)
    real_pool._prefault.stop()
    assert real_pool.problems() == ["dram: pre-faulting ended early: [Errno 12] Cannot allocate memory"]


def test_a_drained_daemon_is_probed_and_ready_again_when_that_is_undone(health: Health, clock: HandClock) -> None:
    health.begin_serving()
    health.note_probe(_result(clock))
    health.note_drained(is_on=True)
    assert (health.state(), health.report().is_ready, health.report().is_healthy) == ("draining", False, True)
    clock.advance(1000)
    assert health.state() == "unhealthy", "no probe has ended for too long"
    health.note_probe(_result(clock))
    health.note_drained(is_on=False)
    assert (health.state(), health.report().is_ready) == ("ready", True)
