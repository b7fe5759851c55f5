"""Time and waiting in the vLLM connector: load time alone is measured, slow loads, steps without tokens."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.plan import LoadOrder, LoadOutcome, StepPlan, StepReport
from kvpool_client.vllm.scheduler.unverified_loads import STEPS_MAX, UnverifiedLoad, UnverifiedLoads
from kvpool_client.vllm.worker import saver as saver_module
from kvpool_client.vllm.worker.divided_time import DividedTime
from kvpool_client.vllm.worker.fetch import Fetch
from tests.rigs.clock import HandClock
from tests.rigs.vllm.setting import StartEngine

ORDER = LoadOrder("request", (b"ticket",), 0, 2, ((1, 2),), bytes([1, 1]), is_async=False, may_be_cut=True)


class SlowPool:
    """Claiming takes one second, each layer three, the rest five. It is also the lease, the load and its result."""

    chunks = chunks_so_far = 2
    reason = "complete"

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock

    def _take(self, seconds: int) -> Any:
        self._clock.ns += seconds * 10**9
        return self

    def claim(self, _ticket: bytes) -> Any:
        return self._take(1)

    def load(self, *_: object, **__: object) -> Any:
        return self

    def wait_layer(self, _layer: int) -> bool:
        return bool(self._take(3))

    def wait(self) -> Any:
        return self._take(5)

    def release(self) -> None:
        pass


def test_computing_between_two_layers_is_not_counted_as_load_time() -> None:
    clock = HandClock(0)
    fetch = Fetch(ORDER, ticket=0, clock=clock, divided=DividedTime(clock))
    memory = slow_memory(clock)
    fetch.begin_load(memory)
    for layer in range(2):
        clock.ns += 100 * 10**9
        assert fetch.wait_layer(layer)
    clock.ns += 100 * 10**9
    outcome = fetch.finish()
    assert outcome.is_complete
    assert outcome.seconds == outcome.cost_s == 1 + 2 * 3 + 5


def slow_memory(clock: HandClock) -> Any:
    pool: Any = SlowPool(clock)
    return SimpleNamespace(pool=pool, load=lambda lease, _order: pool.load(lease))


@pytest.mark.parametrize(("may_be_cut", "brought"), [(True, 2), (False, 0)])
def test_a_load_that_may_not_be_cut_has_brought_all_or_nothing(may_be_cut: bool, brought: int) -> None:
    clock = HandClock(0)
    order = replace(ORDER, chunks=3, may_be_cut=may_be_cut)
    fetch = Fetch(order, ticket=0, clock=clock, divided=DividedTime(clock))
    pool: Any = SlowPool(clock)
    leased = SimpleNamespace(chunks=3, release=pool.release)
    fetch.begin_load(SimpleNamespace(pool=SimpleNamespace(claim=lambda _: leased), load=lambda *_: pool))  # type: ignore[arg-type]
    assert fetch.finish().chunks == brought


def test_loads_that_a_step_waits_for_together_cost_the_time_that_passes() -> None:
    """Both bring their layers while the first one is waited for: neither is twice as slow, nor is the other one free."""
    clock = HandClock(0)
    divided = DividedTime(clock)
    one, other = (Fetch(ORDER, ticket=0, clock=clock, divided=divided) for _ in range(2))
    one.begin_load(slow_memory(clock))
    other.begin_load(SimpleNamespace(pool=StandingPool(), load=lambda lease, _order: lease))  # type: ignore[arg-type]
    for layer in range(2):
        assert one.wait_layer(layer)
        clock.ns += 100 * 10**9
        assert other.wait_layer(layer)
    outcomes = [one.finish(), other.finish()]
    assert [outcome.seconds for outcome in outcomes] == [1 + 2 * 3 + 5, 0]
    assert [outcome.cost_s for outcome in outcomes] == [1 + 3 + 2.5, 3 + 2.5]


class StandingPool(SlowPool):
    """Everything is there when it is waited for."""

    def __init__(self) -> None:
        super().__init__(HandClock(0))


def test_loads_at_the_same_time_cost_together_what_passes() -> None:
    clock = HandClock(0)
    divided = DividedTime(clock)
    first = divided.begin_load()
    with divided.waiting():
        clock.ns += 4 * 10**9
        second = divided.begin_load()
        with divided.waiting():
            clock.ns += 6 * 10**9
        assert divided.end_load(second) == 3
        clock.ns += 2 * 10**9
    clock.ns += 50 * 10**9
    assert divided.end_load(first) == 4 + 3 + 2
    assert "0 under way, 0 waited for" in repr(divided)


def test_a_load_that_fails_to_begin_is_not_under_way_any_more() -> None:
    clock = HandClock(0)
    divided = DividedTime(clock)

    def broken(_ticket: bytes) -> Any:
        raise RuntimeError("a defect")

    fetch = Fetch(ORDER, ticket=0, clock=clock, divided=divided)
    with pytest.raises(RuntimeError):
        fetch.begin_load(SimpleNamespace(pool=SimpleNamespace(claim=broken)))  # type: ignore[arg-type]
    assert "1 under way, 0 waited for" in repr(divided)
    fetch.release()
    fetch.release()
    assert "0 under way" in repr(divided)


@pytest.mark.parametrize(("chunks", "of_all_s"), [(8, 2.0), (6, 4.0), (5, 8.0), (4, 8.0), (0, 8.0)])
def test_a_load_that_came_too_late_counts_by_the_pace_of_the_chunks_that_came(chunks: int, of_all_s: float) -> None:
    """Four chunks behind four that the engine has: of none the pace is one chunk's at most."""
    outcome = LoadOutcome(8, chunks, "timeout", 9.0, bytes([2]) * 4, 2.0)
    assert outcome.cost_of_all_s == of_all_s


@pytest.mark.parametrize(("reason", "is_measured"), [("timeout", True), ("corrupt", False), ("gone", False)])
def test_a_load_that_ends_without_progress_counts_as_slow(reason: str, is_measured: bool, start: StartEngine) -> None:
    half = start().scheduler._scheduler
    chunks = 1 + (2 << 20) // half._geometry.layout.chunk_bytes
    before = half._rates.rates().bytes_per_s[1]
    for step in range(1, 3):
        outcome = LoadOutcome(chunks, 0, reason, 10.0, bytes([1]) * chunks, 10.0)
        report = StepReport(step, step, {"request": outcome})
        half.ended(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set(), invalid_block_ids=set()))
    assert (half._rates.rates().bytes_per_s[1] < before / 1000) == is_measured


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_step_without_tokens_waits_a_moment_for_the_loads_of_others(
    is_idle: bool, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = start().workers[0]._worker
    future: Future[LoadOutcome] = Future()
    waited = []

    def wait(futures: list[Future[LoadOutcome]], timeout_s: float, _when: str) -> None:
        waited.append(timeout_s)
        futures[0].set_result(LoadOutcome(2, 2, "complete", 0.1, ORDER.tiers, 0.1))

    monkeypatch.setattr(saver_module, "wait_for_futures", wait)
    half.begin_step(StepPlan(1, is_idle=is_idle))
    half._running.append((Fetch(ORDER, ticket=0, clock=HandClock(0), divided=DividedTime(HandClock(0))), future))
    assert half.take_finished() == ({"request"} if is_idle else set())
    assert waited == ([saver_module.LOOK_S] if is_idle else [])
    half._running.clear()


def test_the_plan_records_whether_a_step_computes(start: StartEngine) -> None:
    scheduler = start().scheduler
    running = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    step: dict[str, Any] = {"scheduled_new_reqs": [], "scheduled_cached_reqs": running}
    assert scheduler.build_connector_meta(
        SimpleNamespace(**step, num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    ).is_idle
    assert not scheduler.build_connector_meta(
        SimpleNamespace(**step, num_scheduled_tokens={"other": 1}, total_num_scheduled_tokens=1)
    ).is_idle


def test_a_load_that_is_never_reported_delays_nobody_for_ever() -> None:
    loads, hashes, entry = UnverifiedLoads(), [b"zero", b"one", b"two"], SimpleNamespace(tables=None)
    loads.add_load(UnverifiedLoad(1, 1, b"one", entry))  # type: ignore[arg-type]  # not looked into
    assert not loads.has_any_of(hashes, 1)
    assert loads.has_any_of(hashes, 2)
    assert not loads.has_any_of([b"zero", b"other", b"two"], 3)
    for step in range(2, STEPS_MAX + 1):
        loads.begin_step(step)
        assert loads.has_any_of(hashes, 3)
    loads.begin_step(STEPS_MAX + 1)
    assert not loads.has_any_of(hashes, 3)
