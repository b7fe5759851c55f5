"""The table of what the vLLM connector serves: every refusal in it happens, names its remedy, is counted."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm import one_child
from kvpool_client.vllm.support import BEGIN, END, REMEDIES, TABLE, Unserved, support_table
from tests.rigs.vllm import fake_vllm

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.config import caches_of, config_of
from tests.rigs.vllm.specs import FullAttentionSpec, MambaSpec, specs_by_layer

pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[4] / "docs" / "engines.md"


class CrossAttentionSpec(FullAttentionSpec):
    """Attention to the tokens of one piece."""


class MLAAttentionSpec(FullAttentionSpec):
    """One plane, the same on every rank."""


def on(part: str, **values: Any) -> Callable[[Any, Any], None]:
    """Set fields of a part of the configuration."""
    return lambda config, _caches: vars(getattr(config, part)).update(values)


def with_spec(spec: Any) -> Callable[[Any, Any], None]:
    """Give all layers a spec."""
    return lambda _config, caches: vars(caches).update(kv_cache_groups=caches_of(spec=spec).kv_cache_groups)


def latent_on_a_plain_processor(config: Any, caches: Any) -> None:
    config.device_config = SimpleNamespace(device_type="cpu")
    config.scheduler_config = SimpleNamespace(enable_chunked_prefill=False)
    with_spec(MLAAttentionSpec())(config, caches)


def with_a_draft_beside_the_last_stage(config: Any, _caches: Any) -> None:
    """Of three layers that are all shown the first stage has one."""
    vars(config.parallel_config).update(pipeline_parallel_size=2)
    config.model_config.get_layers_start_end_indices = lambda parallel: (parallel.rank, 1 + 2 * parallel.rank)


def with_two_groups_in_stages(config: Any, caches: Any) -> None:
    vars(config.parallel_config).update(pipeline_parallel_size=2)
    config.model_config.get_layers_start_end_indices = lambda parallel: (2 * parallel.rank, 2 + 2 * parallel.rank)
    groups = [caches_of(layers=[layer]).kv_cache_groups[0] for layer in (0, 1)]
    vars(caches).update(kv_cache_groups=groups)


class Other:
    """A connector that the engine has already."""


OTHER = Other()


def beside_another(config: Any, _caches: Any) -> None:
    config.kv_transfer_config.engine_id = "engine"
    for role in fake_vllm.KVConnectorRole:
        one_child.claim(OTHER, "engine", role.name, getattr(config.parallel_config, "rank", 0))


REFUSED: dict[str, Callable[[Any, Any], None]] = {
    "pipeline_parallel": with_a_draft_beside_the_last_stage,
    "context_parallel": on("parallel_config", decode_context_parallel_size=2),
    "several_nodes": on("parallel_config", tensor_parallel_size=16, nnodes=2),
    "unknown_weights": on("model_config", revision="main"),
    "other_attention": with_spec(CrossAttentionSpec()),
    "states_not_kept": with_spec(MambaSpec(mamba_cache_mode="none")),
    "speculative_states": with_spec(MambaSpec(num_speculative_blocks=1)),
    "staged_groups": with_two_groups_in_stages,
    "mla_without_prefixes": latent_on_a_plain_processor,
    "calculated_scales": on("cache_config", calculate_kv_scales=True),
    "uneven_heads": lambda config, _caches: vars(config.kv_transfer_config)["kv_connector_extra_config"].update(
        {"kvpool.head_groups": 3}
    ),
    "odd_blocks": with_spec(specs_by_layer(num_kv_heads=1)),
    "second_child": beside_another,
    "coarse_hashes": lambda _config, caches: vars(caches).update(hash_block_size=5),
}


# What only the tensors show: `test_settings` has it.
OF_TENSORS = "token_major"


def test_the_page_has_the_table_of_the_code() -> None:
    """Written by `make docs`."""
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == support_table()


def test_every_row_that_is_not_served_has_a_code_and_a_remedy() -> None:
    refused = [entry for entry in TABLE if entry.text == "no"]
    assert {entry.code for entry in refused} == set(REFUSED) | {OF_TENSORS} == set(REMEDIES)
    assert len(refused) == len(REMEDIES)
    assert all(entry.remedy for entry in refused)
    assert not any(entry.code or entry.remedy for entry in TABLE if entry.text != "no")


@pytest.mark.parametrize("role", list(fake_vllm.KVConnectorRole), ids=lambda role: role.name.lower())
@pytest.mark.parametrize("code", REFUSED)
def test_a_refusal_names_its_remedy_and_is_counted(code: str, role: Any, caplog: pytest.LogCaptureFixture) -> None:
    with fake_vllm.installed():
        from kvpool_client.vllm import connector

        config, caches = config_of("/nowhere"), caches_of()
        REFUSED[code](config, caches)
        make: Any = connector.KVPoolConnector
        made = make(config, role, caches)
        words = "does nothing" if code == one_child.CODE else "runs without a pool"
        logged = "".join(record.getMessage() for record in caplog.records if words in record.getMessage())
        stats = made.get_kv_connector_stats()
        assert stats.data == {f"refusals_{code}": 1}
        assert made.get_kv_connector_stats() is None, "counted once"
        remedy = REMEDIES[code] if code != "several_nodes" else "use --tensor-parallel-size 8"
        # Of a second child the scheduler's half speaks for its workers.
        assert logged.count(remedy) == (code != one_child.CODE or role.name == "SCHEDULER")
        made.shutdown()


def test_a_connector_may_follow_a_closed_one_and_stand_beside_other_roles_and_engines() -> None:
    first, second = Other(), Other()
    one_child.claim(first, "one", "WORKER", 0)
    one_child.claim(first, "one", "WORKER", 0)
    for engine, role, rank in (
        ("one", "SCHEDULER", 0),
        ("one", "WORKER", 1),
        ("two", "WORKER", 0),
        (None, "WORKER", 0),
    ):
        one_child.claim(second, engine, role, rank)
    with pytest.raises(Unserved, match="kvpool's already"):
        one_child.claim(second, "one", "WORKER", 0)
    one_child.release(first)
    one_child.claim(second, "one", "WORKER", 0)
    del second
    one_child.claim(first, "two", "WORKER", 0)
    one_child.release(first)
