"""The name of the model that SGLang serves: what is part of it, what is refused, and where refusals are counted."""

import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.clock import NS_PER_S
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.weights import Revision
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.sglang import Settings
from kvpool_client.sglang.names import DRAFT_FIELDS, MODEL_FIELDS, named, server_args_of_process, with_draft
from tests.engines.sglang.standin import Controller, HostPool, PoolTransfer, page_keys
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.held_weights import HeldWeights, begun_now, held_weights

__all__ = ["begun_now", "held_weights"]
pytestmark = pytest.mark.usefixtures("begun_now")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Start = Callable[..., Controller]
READER = WeightsReader(DigestMemory(None), logging.getLogger(__name__))


def _revision(settings: dict[str, Any] | None = None, environment: dict[str, str] | None = None, **fields: Any) -> str:
    """The revision for these arguments of SGLang's; the refusal if they have none."""
    args = types.SimpleNamespace(**{"model_path": "org/tiny", "revision": COMMIT, **fields})
    read = Settings.read({"interface_v1": 1, **(settings or {})}, "served")
    found, refusal = named(read, "served", args, environment or {"HF_HOME": "/no/such"})
    return refusal or known(found)


def known(revision: Revision | None) -> str:
    """The revision, once the files were read."""
    assert revision is not None
    revision.begin_reading(READER)
    assert all(reading.wait(60) for reading in revision.readings)
    return revision.find() or ""


def _model(directory: Path, seed: int) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "model.bin").write_bytes(np.random.default_rng(seed).bytes(20000))
    return str(directory)


def test_equal_engines_have_one_name_and_other_weights_another(tmp_path: Path) -> None:
    here = _revision(model_path=_model(tmp_path / "a", 0))
    assert here == _revision(model_path=str(tmp_path / "a"))
    assert here != _revision(model_path=_model(tmp_path / "a", 1))
    assert _revision() == _revision() != _revision(revision=COMMIT[::-1])


def test_weights_that_have_changed_since_the_process_began_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, clock = _model(tmp_path / "a", 0), "kvpool_client.engines.weights.process_began_ns"
    monkeypatch.setattr(clock, lambda: (tmp_path / "a" / "model.bin").stat().st_ctime_ns - NS_PER_S)
    for refusal in (_revision(model_path=place), _draft_revision(speculative_draft_model_path=place)):
        assert refusal.startswith("weights: ")
        assert "model.bin' has changed since the engine started" in refusal
        assert "set revision" in refusal
    assert "changed" not in _revision({"revision": "7"}, model_path=place)


@pytest.mark.parametrize("field", MODEL_FIELDS)
def test_arguments_that_change_kv_are_in_the_name(field: str) -> None:
    changed: dict[str, Any] = {field: "fp8"}
    assert _revision(**changed) != _revision()
    assert _revision({"revision": "7"}, **changed) != _revision({"revision": "7"})


@pytest.mark.parametrize("field", ["context_length", "served_model_name", "mem_fraction_static", "port"])
def test_arguments_that_change_no_kv_are_not_in_the_name(field: str) -> None:
    changed: dict[str, Any] = {field: "7"}
    assert _revision(**changed) == _revision()


def test_random_weights_are_named_by_their_seed() -> None:
    assert _revision(load_format="dummy", random_seed=1) == _revision(load_format="dummy", random_seed=1)
    assert _revision(load_format="dummy", random_seed=1) != _revision(load_format="dummy", random_seed=2)


def _draft_revision(operator: str = "", **fields: Any) -> str:
    given = {"speculative_draft_model_path": "org/draft", "speculative_draft_model_revision": COMMIT, **fields}
    target = Revision({}, weights="target")
    found, refusal = with_draft(target, operator, types.SimpleNamespace(**given), {"HF_HOME": "/no/such"})
    return refusal or known(found)


@pytest.mark.parametrize("field", [*DRAFT_FIELDS, "speculative_draft_model_revision"])
def test_arguments_that_change_a_drafts_kv_are_in_its_name(field: str) -> None:
    assert _draft_revision(**{field: COMMIT[::-1]}) != _draft_revision() == _draft_revision()


def test_a_draft_that_nothing_identifies_needs_the_operators_revision(tmp_path: Path) -> None:
    assert "set revision" in _draft_revision(speculative_draft_model_path=None)
    assert "set revision" in _draft_revision(speculative_draft_model_revision=None)
    assert "set revision" not in _draft_revision("7", speculative_draft_model_revision=None)
    of_files = _draft_revision(speculative_draft_model_path=_model(tmp_path / "a", 0))
    assert of_files != _draft_revision(speculative_draft_model_path=_model(tmp_path / "a", 1))
    dummy: dict[str, Any] = {"speculative_draft_load_format": "dummy", "load_format": "auto"}
    assert _draft_revision(**dummy, random_seed=1) != _draft_revision(**dummy, random_seed=2)


def test_the_arguments_are_read_from_sglangs_own_object(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_args_of_process() is None

    def unset() -> None:
        raise ValueError("Global server args is not set yet!")

    newer, older = types.ModuleType("sglang.srt.runtime_context"), types.ModuleType("sglang.srt.server_args")
    vars(newer).update(get_server_args=unset)
    vars(older).update(get_global_server_args=lambda: "older")
    monkeypatch.setitem(sys.modules, newer.__name__, newer)
    monkeypatch.setitem(sys.modules, older.__name__, older)
    assert server_args_of_process() == "older"
    vars(newer).update(get_server_args=lambda: "newer")
    assert server_args_of_process() == "newer"


def test_weights_without_an_identity_are_refused_in_one_line_and_counted(
    shared_daemon: Daemon, start_sglang: Start, caplog: pytest.LogCaptureFixture
) -> None:
    keys = page_keys(1, 3)
    with caplog.at_level(logging.WARNING):
        controller = start_sglang(shared_daemon, waits=False, extra={"revision": ""}, model_name="no-such/model")
        for _ in range(2):
            assert controller.backup(keys, range(3)) == 0
            assert controller.backend.batch_exists(keys) == 0
    logged = [record.message for record in caplog.records if "shares nothing" in record.message]
    assert len(logged) == 1
    assert "set revision in --hicache-storage-backend-extra-config" in logged[0]
    assert controller.backend.counters()["refused_weights"] == 12


def _serves(monkeypatch: pytest.MonkeyPatch, **args: Any) -> None:
    """SGLang's arguments, where it keeps them in a scheduler's process."""
    module = types.ModuleType("sglang.srt.server_args")
    vars(module).update(get_global_server_args=lambda: types.SimpleNamespace(**args))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_while_weights_are_read_everything_is_a_miss_and_then_pages_are_shared(
    daemon: Daemon, start_sglang: Start, held_weights: HeldWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serves(monkeypatch, model_path=held_weights.path)
    keys, size = page_keys(3, 4), held_weights.file.stat().st_size + len("{}")
    controller = start_sglang(daemon, waits=False, extra={"revision": ""})
    assert controller.backup(keys, range(4)) == 0
    assert controller.backend.batch_exists(keys) == 0
    assert not controller.backend.clear(), "it has no name yet"
    counters = controller.backend.counters()
    assert counters["refused_reading"] == 8
    assert counters["weights_bytes_read"] < counters["weights_bytes"] == size
    held_weights.release()
    wait_until(lambda: controller.backup(keys, range(4)) == 4, "the weights are read")
    assert controller.backend.counters()["weights_bytes_read"] == size
    other = start_sglang(daemon, waits=False, extra={"revision": ""})
    wait_until(lambda: other.prefetch(keys, range(4)) == 4, "another engine has the same weights")
    assert other.backend.clear()
    assert controller.backend.batch_exists(keys) == 0


def test_weights_that_changed_while_they_were_read_are_refused_for_good(
    daemon: Daemon, start_sglang: Start, held_weights: HeldWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serves(monkeypatch, model_path=held_weights.path)
    controller, keys = start_sglang(daemon, waits=False, extra={"revision": ""}), page_keys(3, 4)
    held_weights.file.write_bytes(b"other weights")
    held_weights.release()
    wait_until(lambda: not controller.backend.batch_exists(keys) and bool(controller.backend._store.refusal), "refused")
    assert "model.safetensors' has changed" in controller.backend._store.refusal
    assert "set revision" in controller.backend._store.refusal
    assert controller.backup(keys, range(4)) == 0
    assert controller.backend.counters()["refused_weights"] >= 4


def test_pages_that_are_split_over_ranks_are_refused(shared_daemon: Daemon, start_sglang: Start) -> None:
    for rank in range(2):
        ranks = start_sglang(
            shared_daemon,
            HostPool(layout="mla"),
            waits=False,
            is_mla_model=True,
            tp_rank=rank,
            tp_size=2,
            dcp_size=2,
            dcp_rank=rank,
        )
        assert ranks.backend.batch_exists(page_keys(1, 2)) == 0
        assert ranks.backend.counters()["refused_dcp"] == 2


def test_every_refusal_has_a_remedy_and_is_in_the_registry(
    daemon: Daemon, start_sglang: Start, caplog: pytest.LogCaptureFixture
) -> None:
    registry = pytest.importorskip("prometheus_client").REGISTRY

    def shown(reason: str) -> float:
        labels = {"engine": "sglang", "reason": reason}
        return float(registry.get_sample_value("kvpool_engine_refused_total", labels) or 0)

    before = {reason: shown(reason) for reason in ("interface", "sidecars", "layout")}
    controller, keys = start_sglang(daemon), page_keys(2, 3)
    with caplog.at_level(logging.WARNING):
        controller.backend.batch_get(keys)
        controller.backend.batch_set_v2([PoolTransfer("mamba", controller.pool.slots(range(3)), keys=keys)])
        pool = HostPool()
        pool.get_page_buffer_meta = lambda indices: ([], [])  # type: ignore[method-assign]
        nothing = start_sglang(daemon, pool, waits=False)
        assert nothing.backend.batch_exists(keys) == 0
    assert {reason: shown(reason) - before[reason] for reason in before} == {"interface": 3, "sidecars": 3, "layout": 3}
    lines = "\n".join(record.message for record in caplog.records)
    for remedy in ("set interface_v1 to 1", "without --hicache-storage-backend", "set --hicache-mem-layout"):
        assert remedy in lines
