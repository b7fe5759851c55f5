"""First start of a tier: weights that are still being read then are known later, and it connects by itself, once."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvpool_client.vllm.tier.row_store import RowStore
from tests.engines.vllm_tier.region import Start, keys_of, spec_of
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.held_weights import HeldWeights


@pytest.fixture
def late_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWeights]:
    """Weights whose reading waits, until they are released."""
    monkeypatch.setattr("kvpool_client.engines.weights.process_began_ns", lambda: 1 << 62)
    monkeypatch.setattr("kvpool_client.engines.weights.START_WAIT_S", 0.0)
    weights = HeldWeights(tmp_path / "model", b"1" * 4096)
    weights.hold()
    yield weights
    weights.release()


class CountedRows(RowStore):
    """Row stores that were made and closed since. `goes_on`: each is made when it is set."""

    begun: ClassVar[list[int]] = []
    closed: ClassVar[list[RowStore]] = []
    goes_on: ClassVar[threading.Event] = threading.Event()

    def __init__(self, *given: Any, **named: Any) -> None:
        self.begun.append(threading.get_ident())
        assert self.goes_on.wait(60)
        super().__init__(*given, **named)

    def close(self) -> None:
        self.closed.append(self)
        super().close()


@pytest.fixture
def made_rows(monkeypatch: pytest.MonkeyPatch) -> type[CountedRows]:
    """Counts from nothing."""
    CountedRows.begun.clear()
    CountedRows.closed.clear()
    CountedRows.goes_on.set()
    monkeypatch.setattr("kvpool_client.vllm.tier.tier_jobs.RowStore", CountedRows)
    return CountedRows


def test_until_the_weights_are_read_everything_misses_and_no_call_waits(
    daemon: Daemon, start_region: Start, late_weights: HeldWeights, made_rows: type[CountedRows]
) -> None:
    region = start_region(daemon, revision="", spec=spec_of(late_weights.path))
    keys = keys_of(1, 3)
    assert not region.store(keys).is_whole
    assert region.found(region.begin(keys), keys) == [False] * 3
    assert region.counts()["refused_requests_reading"] == 2
    assert made_rows.begun == []
    late_weights.release()
    # The first request after that finds it connected.
    wait_until(lambda: "connected" in repr(region.jobs), "the weights are read")
    assert region.store(keys).is_whole
    assert region.load(keys).is_whole
    assert len(made_rows.begun) == 1
    assert made_rows.begun[0] != threading.get_ident()


def test_weights_that_are_read_after_the_end_connect_nothing(
    daemon: Daemon, start_region: Start, late_weights: HeldWeights, made_rows: type[CountedRows]
) -> None:
    region = start_region(daemon, revision="", spec=spec_of(late_weights.path))
    region.jobs.close()
    late_weights.release()
    assert made_rows.begun == []
    assert repr(region.jobs).startswith("<TierJobs reading")


def test_a_tier_that_ends_while_it_connects_leaves_no_connection(
    daemon: Daemon, start_region: Start, late_weights: HeldWeights, made_rows: type[CountedRows]
) -> None:
    made_rows.goes_on.clear()
    region = start_region(daemon, revision="", spec=spec_of(late_weights.path))
    late_weights.release()
    wait_until(lambda: len(made_rows.begun) == 1, "it connects")
    ending = threading.Thread(target=region.jobs.close)
    ending.start()
    keys = keys_of(1, 1)
    assert not region.store(keys).is_whole
    made_rows.goes_on.set()
    ending.join(60)
    assert not ending.is_alive()
    assert len(made_rows.closed) == len(made_rows.begun) == 1


def test_a_moment_without_a_thread_costs_only_the_requests_until_the_next_attempt(
    daemon: Daemon, start_region: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [RuntimeError("can't start new thread"), OSError(24, "Too many open files")]

    class LackingRows(RowStore):
        def __init__(self, *given: Any, **named: Any) -> None:
            if lacking:
                raise lacking.pop()
            super().__init__(*given, **named)

    monkeypatch.setattr("kvpool_client.vllm.tier.tier_jobs.RowStore", LackingRows)
    monkeypatch.setattr("kvpool_client.vllm.tier.tier_jobs.RETRY_S", 0.0)
    region = start_region(daemon, revision="lacking")
    keys = keys_of(1, 3)
    assert not region.store(keys).is_whole
    wait_until(lambda: region.store(keys).is_whole, "a later request has connected")
    assert region.found(region.begin(keys), keys) == [True] * 3
