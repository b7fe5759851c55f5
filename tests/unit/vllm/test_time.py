"""Time and waiting in the vLLM connector: load time alone is measured, slow loads, steps without tokens."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.plan import LoadOrder, LoadOutcome, StepPlan, StepReport
from kvpool_client.vllm.scheduler.unverified_loads import STEPS_MAX, UnverifiedLoad, UnverifiedLoads
from kvpool_client.vllm.worker.fetch import Fetch

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_client.vllm.worker import saver as saver_module  # noqa: E402 - only where torch is
from tests.rigs.vllm.setting import StartEngine, start_engine  # noqa: E402 - likewise

__all__ = ["start_engine"]

ORDER = LoadOrder("request", (b"ticket",), 0, 2, ((1, 2),), bytes([1, 1]), is_async=False)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now


class SlowPool:
    """Claiming takes one second, each layer three, the rest five. It is also the lease, the load and its result."""

    chunks = chunks_so_far = 2
    reason = "complete"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def _take(self, seconds: int) -> Any:
        self._clock.now += seconds * 10**9
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
    clock = Clock()
    fetch = Fetch(ORDER, ticket=0, clock=clock)
    pool: Any = SlowPool(clock)
    memory: Any = SimpleNamespace(pool=pool, load=lambda lease, _order: pool.load(lease))
    fetch.begin(memory)
    for layer in range(2):
        clock.now += 100 * 10**9
        assert fetch.wait_layer(layer)
    clock.now += 100 * 10**9
    outcome = fetch.finish()
    assert outcome.is_complete
    assert outcome.seconds == 1 + 2 * 3 + 5


@pytest.mark.parametrize(("reason", "is_measured"), [("timeout", True), ("corrupt", False), ("gone", False)])
def test_a_load_that_ends_without_progress_counts_as_slow(
    reason: str, is_measured: bool, start_engine: StartEngine
) -> None:
    half = start_engine().scheduler._scheduler
    chunks = 1 + (2 << 20) // half._geometry.layout.chunk_bytes
    before = half._rates.rates().bytes_per_s[1]
    for step in range(1, 3):
        outcome = LoadOutcome(chunks, 0, reason, 10.0, bytes([1]) * chunks)
        report = StepReport(step, step, {"request": outcome})
        half.ended(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set(), invalid_block_ids=set()))
    assert (half._rates.rates().bytes_per_s[1] < before / 1000) == is_measured


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_step_without_tokens_waits_a_moment_for_the_loads_of_others(
    is_idle: bool, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = start_engine().workers[0]._worker
    future: Future[LoadOutcome] = Future()
    waited = []

    def wait(futures: list[Future[LoadOutcome]], timeout_s: float, _when: str) -> None:
        waited.append(timeout_s)
        futures[0].set_result(LoadOutcome(2, 2, "complete", 0.1, ORDER.tiers))

    monkeypatch.setattr(saver_module, "wait_for_futures", wait)
    half.begin(StepPlan(1, is_idle=is_idle))
    half._running.append((Fetch(ORDER, ticket=0, clock=Clock()), future))
    assert half.take_finished() == ({"request"} if is_idle else set())
    assert waited == ([saver_module.LOOK_S] if is_idle else [])
    half._running.clear()


def test_the_plan_records_whether_a_step_computes(start_engine: StartEngine) -> None:
    scheduler = start_engine().scheduler
    running = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    step: dict[str, Any] = {"scheduled_new_reqs": [], "scheduled_cached_reqs": running}
    assert scheduler.build_connector_meta(SimpleNamespace(**step, num_scheduled_tokens={})).is_idle
    assert not scheduler.build_connector_meta(SimpleNamespace(**step, num_scheduled_tokens={"other": 1})).is_idle


def test_a_load_that_is_never_reported_delays_nobody_for_ever() -> None:
    loads, hashes, entry = UnverifiedLoads(), [b"zero", b"one", b"two"], SimpleNamespace(tables=None)
    loads.add(UnverifiedLoad(1, 1, b"one", entry))  # type: ignore[arg-type]  # not looked into
    assert not loads.has_any_of(hashes, 1)
    assert loads.has_any_of(hashes, 2)
    assert not loads.has_any_of([b"zero", b"other", b"two"], 3)
    for step in range(2, STEPS_MAX + 1):
        loads.begin(step)
        assert loads.has_any_of(hashes, 3)
    loads.begin(STEPS_MAX + 1)
    assert not loads.has_any_of(hashes, 3)
