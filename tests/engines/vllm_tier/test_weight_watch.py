"""Weights that change in place: whichever call of the core may have changed them, nothing of old and new ones is mixed."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.tier.identity import Engine
from kvpool_client.vllm.tier.weight_watch import WeightWatch
from tests.engines.vllm_tier.region import Region, Start, keys_of
from tests.rigs.daemon import Daemon

RESET = "reset_prefix_cache(reset_connector=True)"


class Core:
    """vLLM's core: calls of its workers, and the share of blocks that requests have."""

    def __init__(self) -> None:
        self.manager = SimpleNamespace(usage=0.0)
        self.scheduler = SimpleNamespace(kv_cache_manager=self.manager)
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, timeout, args))
        if method == "fails":
            raise RuntimeError(method)
        return [len(self.calls)]

    def step(self, region: Region) -> None:
        """A step with a request, which ends with it."""
        self.manager.usage = 0.5
        region.jobs.weights.end_step()
        self.manager.usage = 0.0


@pytest.fixture
def core() -> Core:
    return Core()


def _starts(start_region: Start, daemon: Daemon, core: Core) -> Region:
    return start_region(daemon, engine=Engine(core=core))


def _serve(region: Region, core: Core, keys: list[bytes]) -> bool:
    """A request has these computed and offered; whether they were stored."""
    context = region.begin(keys)
    core.step(region)
    is_stored = region.store(keys, context).is_whole
    region.end(context)
    return is_stored


@pytest.mark.parametrize("method", ["update_weights", "reload_weights", "apply_model", "of_a_trainer", _serve])
def test_nothing_is_loaded_or_stored_from_a_change_on_until_a_reset(
    method: Any, daemon: Daemon, start_region: Start, core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    region, keys, later = _starts(start_region, daemon, core), keys_of(1, 4), keys_of(2, 4)
    assert _serve(region, core, keys)
    assert core.collective_rpc(method) == [1]
    assert region.found(region.begin(keys), keys) == [False] * 4, "they are of the old weights"
    assert not _serve(region, core, later), "vLLM may have computed them on KV of the old weights"
    assert region.counts()["refused_requests_new_weights"] == 2
    assert sum(RESET in line.getMessage() for line in caplog.records) == 1
    region.jobs.drain()
    assert region.found(region.begin(keys), keys) == [False] * 4
    assert _serve(region, core, keys)
    assert region.load(keys).is_whole
    assert region.counts().get("refused_requests_new_weights", 0) == 0
    other = start_region(daemon)
    assert other.found(other.begin(), [*keys, *later]) == [True] * 4 + [False] * 4, "those of the weights' files alone"


def test_requests_that_run_through_a_change_store_nothing(daemon: Daemon, start_region: Start, core: Core) -> None:
    region, keys = _starts(start_region, daemon, core), keys_of(1, 4)
    through = region.begin(keys)
    core.step(region)
    assert region.store(keys[:2], through).is_whole
    core.collective_rpc("update_weights")
    assert not region.store(keys[2:], through).is_whole
    assert region.load(keys[:2], through).good == ()
    region.jobs.drain()
    assert not region.store(keys[2:], through).is_whole
    assert region.found(region.begin(), keys) == [False] * 4


@pytest.mark.parametrize("queued", [False, True])
def test_a_change_behind_a_reset_needs_no_other_one(
    queued: bool, daemon: Daemon, start_region: Start, core: Core
) -> None:
    """As a trainer does it: pause, which resets, update, resume. Requests may come meanwhile, and wait."""
    region, keys = _starts(start_region, daemon, core), keys_of(1, 4)
    assert _serve(region, core, keys)
    region.jobs.drain()
    waiting = region.begin(keys) if queued else None
    region.jobs.weights.end_step()  # a step without requests
    core.collective_rpc("update_weights")
    core.collective_rpc("finish_weight_update")
    context = waiting or region.begin(keys)
    assert region.found(context, keys) == [False] * 4
    core.step(region)
    assert region.store(keys, context).is_whole
    assert region.load(keys).is_whole
    assert "refused_requests_new_weights" not in region.counts()


def test_a_reset_that_leaves_running_requests_their_blocks_is_none(
    daemon: Daemon, start_region: Start, core: Core
) -> None:
    region, keys = _starts(start_region, daemon, core), keys_of(1, 4)
    assert _serve(region, core, keys)
    core.manager.usage = 0.5
    region.jobs.drain()
    core.manager.usage = 0.0
    core.collective_rpc("update_weights")
    assert not _serve(region, core, keys)
    region.jobs.drain()
    assert _serve(region, core, keys)


def test_weights_that_are_loaded_before_the_first_step_are_those_of_this_start_alone(
    daemon: Daemon, start_region: Start, core: Core
) -> None:
    other, keys = start_region(daemon), keys_of(1, 4)
    assert other.store(keys).is_whole
    region = _starts(start_region, daemon, core)
    core.collective_rpc("of_a_trainer")
    assert region.found(region.begin(), keys) == [False] * 4
    assert _serve(region, core, keys_of(2, 4))
    assert region.load(keys_of(2, 4)).is_whole
    assert other.found(other.begin(), keys_of(2, 4)) == [False] * 4


def test_a_call_that_fails_may_have_changed_some_weights(daemon: Daemon, start_region: Start, core: Core) -> None:
    region, keys = _starts(start_region, daemon, core), keys_of(1, 4)
    assert _serve(region, core, keys)
    with pytest.raises(RuntimeError):
        core.collective_rpc("fails")
    assert region.found(region.begin(), keys) == [False] * 4


def test_a_call_that_leaves_weights_alone_changes_nothing(daemon: Daemon, start_region: Start, core: Core) -> None:
    region, keys = _starts(start_region, daemon, core), keys_of(1, 4)
    assert _serve(region, core, keys)
    assert core.collective_rpc("compute_weight_checksums", 1.0, args=(2,)) == [1]
    assert core.calls == [("compute_weight_checksums", 1.0, (2,))]
    assert region.load(keys).is_whole


def test_a_core_without_the_known_scheduler_counts_as_one_with_kv() -> None:
    seen: list[tuple[str, bool]] = []
    core = SimpleNamespace(collective_rpc=lambda _: None, scheduler=SimpleNamespace())
    WeightWatch(core, lambda name, has_kv: seen.append((name, has_kv)))
    core.collective_rpc("update_weights")
    assert seen == [("update_weights", True)]


def test_a_reset_that_leaves_old_kv_in_vllm_ends_nothing(daemon: Daemon, start_region: Start, core: Core) -> None:
    region, keys = _starts(start_region, daemon, core), keys_of(1, 4)
    assert _serve(region, core, keys)
    core.manager.usage = 0.5  # a request runs
    core.collective_rpc("update_weights")
    region.jobs.drain()  # vLLM's own cache stays, its connector is reset all the same
    context = region.begin(keys)  # it gets blocks of the old weights
    assert not region.store(keys, context).is_whole
    assert not any(region.found(region.begin(), keys))
    region.end(context)
    core.manager.usage = 0.0
    region.jobs.drain()
    assert _serve(region, core, keys)


def test_kv_that_was_loaded_for_no_step_is_old_kv_too(daemon: Daemon, start_region: Start, core: Core) -> None:
    keys = keys_of(1, 4)
    assert start_region(daemon).store(keys).is_whole  # by another engine, under the files' weights
    region = _starts(start_region, daemon, core)
    context = region.begin(keys)
    assert region.load(keys, context).is_whole
    region.end(context)  # aborted before a step; vLLM's region has the rows
    core.collective_rpc("update_weights")
    assert not _serve(region, core, keys)
    assert not any(region.found(region.begin(), keys))
    region.jobs.drain()
    assert _serve(region, core, keys)


def test_a_function_that_cannot_be_hashed_counts_as_a_change(daemon: Daemon, start_region: Start, core: Core) -> None:
    region, keys = _starts(start_region, daemon, core), keys_of(1, 4)
    assert _serve(region, core, keys)

    class Changes:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None:
            """Of a trainer."""

    assert core.collective_rpc(Changes())
    assert not _serve(region, core, keys)
