"""Inputs of the vLLM connector: keys of the configuration, the shape of KV, the model's identity."""

from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.errors import ConfigError
from kvpool_client.vllm.identity.geometry import geometry_of
from kvpool_client.vllm.plan import LoadOutcome, StepReport
from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.support import code_of
from kvpool_client.vllm.worker.tensor_views import block_views

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

from tests.rigs.vllm.config import caches_of, config_of
from tests.rigs.vllm.request import BLOCK
from tests.rigs.vllm.specs import HEADS, NAMES, TOKEN_BYTES, WIDTH, FullAttentionSpec

pytestmark = pytest.mark.torch


class CrossAttentionSpec(FullAttentionSpec):
    """Tokens attend to those since the last multiple of a number."""


class MLAAttentionSpec(FullAttentionSpec):
    """One plane, the same on every rank."""


def test_defaults_need_no_key() -> None:
    assert Settings.of({"other.key": 1}) == Settings()
    assert Settings().is_async


@pytest.mark.parametrize(("block", "chunk"), [(16, 64), (32, 64), (48, 48), (128, 128), (512, 512)])
def test_chunks_are_whole_blocks_by_default(block: int, chunk: int) -> None:
    assert Settings().chunk_tokens_for(block) == chunk


def test_chunks_that_are_no_whole_blocks_refuse_the_start() -> None:
    assert Settings(chunk_tokens=96).chunk_tokens_for(32) == 96
    with pytest.raises(ConfigError, match="chunk_tokens is 100"):
        Settings(chunk_tokens=100).chunk_tokens_for(32)


def shape(caches: Any = None, **config: Any) -> Any:
    made = config_of("/x", ranks=config.pop("ranks", 1))
    for name, value in config.items():
        setattr(made.parallel_config if "parallel" in name else made.cache_config, name, value)
    return geometry_of(made, caches or caches_of(), 2 * BLOCK, lambda _spec, _heads: "form")


def test_scheduler_and_workers_see_one_layout() -> None:
    geometry = shape(ranks=4)
    assert geometry.layout.rank is None
    assert geometry.layout.world == 4
    assert [geometry.shard(rank) for rank in range(4)] == [geometry.layout.for_rank(rank) for rank in range(4)]
    assert geometry.layout.chunk_bytes == len(NAMES) * 2 * BLOCK * TOKEN_BYTES
    assert geometry.blocks_of(geometry.parts[0]) == 2


def test_replicated_kv_has_one_shard() -> None:
    latent = caches_of(replicas=0, spec=MLAAttentionSpec())
    geometry = shape(latent, ranks=4)
    assert (geometry.ranks.replicas, geometry.layout.world) == (4, 1)
    assert {geometry.shard(rank).rank for rank in range(4)} == {0}
    grouped = shape(caches_of(replicas=2), ranks=4)
    assert [grouped.shard(rank).rank for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(("device", "chunked"), [("cpu", True), ("cuda", False), ("cuda", True)])
def test_latents_are_refused_where_the_engine_would_not_attend_to_them_alone(device: str, chunked: bool) -> None:
    config, latent = config_of("/x"), caches_of(replicas=0, spec=MLAAttentionSpec())
    config.device_config = SimpleNamespace(device_type=device)
    config.scheduler_config = SimpleNamespace(enable_chunked_prefill=chunked)
    assert geometry_of(config, latent, 2 * BLOCK, lambda _spec, _heads: "form").ranks.replicas == 1
    config.device_config.device_type, config.scheduler_config.enable_chunked_prefill = "cpu", False
    assert geometry_of(config, caches_of(), 2 * BLOCK, lambda _spec, _heads: "form").ranks.replicas == 1
    with pytest.raises(kv.LayoutMismatch, match="without prefix caching on this processor"):
        geometry_of(config, latent, 2 * BLOCK, lambda _spec, _heads: "form")


def test_everything_that_changes_bytes_is_in_the_format() -> None:
    geometry = shape()
    other = shape(cache_dtype="fp8")
    assert geometry.layout.format != other.layout.format
    assert geometry.layout.fingerprint is not None
    assert (
        geometry_of(config_of("/x"), caches_of(), 2 * BLOCK, lambda _spec, _heads: "amx").layout.format
        != geometry.layout.format
    )


@pytest.mark.parametrize(
    ("caches", "config", "message"),
    [
        (caches_of(spec=CrossAttentionSpec()), {}, "CrossAttentionSpec"),
        (SimpleNamespace(num_blocks=8, kv_cache_groups=[]), {}, "no KV cache"),
        (None, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        (None, {"calculate_kv_scales": True}, "KV scales"),
    ],
)
def test_kv_that_cannot_be_stored_is_refused_by_name(caches: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(kv.LayoutMismatch, match=message):
        shape(caches, **config)


def test_blocks_are_seen_in_the_order_of_memory() -> None:
    geometry = shape()
    heads_inside: Any = torch.arange(8 * BLOCK * TOKEN_BYTES, dtype=torch.int64).to(torch.uint8)
    permuted = heads_inside.view(8, BLOCK, HEADS, WIDTH).transpose(
        1, 2
    )  # logical [B, H, N, C], tokens outermost in memory
    views: Any = block_views(geometry, geometry.parts[0], dict.fromkeys(NAMES, permuted))
    assert torch.equal(views[0].reshape(-1), heads_inside)
    halves = heads_inside.view(16, HEADS, BLOCK // 2, WIDTH)  # the backend's blocks are half as large
    halved: Any = block_views(geometry, geometry.parts[0], dict.fromkeys(NAMES, halves))
    assert torch.equal(halved[0].reshape(-1), heads_inside)
    layers_inside: Any = torch.zeros((8, 3, HEADS, BLOCK, WIDTH), dtype=torch.uint8)
    inner = block_views(geometry, geometry.parts[0], dict.fromkeys(NAMES, layers_inside[:, 1]))[0]
    assert inner.stride()[0] == 3 * BLOCK * TOKEN_BYTES


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros((8, HEADS, BLOCK, WIDTH + 1), dtype=torch.uint8),
        torch.zeros((9, HEADS, BLOCK, WIDTH), dtype=torch.uint8),
        torch.zeros((8, HEADS, BLOCK, 2 * WIDTH), dtype=torch.uint8)[..., ::2],
        torch.zeros((16, 2, HEADS, BLOCK // 2, WIDTH), dtype=torch.uint8)[:, 0],
    ],
)
def test_tensors_of_another_shape_are_refused(tensor: Any) -> None:
    geometry = shape()
    with pytest.raises(kv.LayoutMismatch, match=r"layer .model\.layers\.0"):
        block_views(geometry, geometry.parts[0], dict.fromkeys(NAMES, tensor))


def test_heads_that_are_together_in_a_token_are_refused_where_sizes_share() -> None:
    geometry = geometry_of(config_of("/x"), caches_of(), 2 * BLOCK, lambda _spec, _heads: "form", head_groups=2)
    apart: Any = torch.zeros((8, HEADS, BLOCK, WIDTH), dtype=torch.uint8)
    views: Any = block_views(geometry, geometry.parts[0], dict.fromkeys(NAMES, apart))
    assert views[0].shape == (8, HEADS, BLOCK * WIDTH)
    together: Any = torch.zeros((8, BLOCK, HEADS, WIDTH), dtype=torch.uint8).transpose(1, 2)
    with pytest.raises(kv.LayoutMismatch, match="each head's bytes in a row") as caught:
        block_views(geometry, geometry.parts[0], dict.fromkeys(NAMES, together))
    assert code_of(caught.value) == "token_major"


def test_the_report_of_two_ranks_is_the_shorter_load_and_the_slower_one() -> None:
    def outcome(chunks: int, seconds: float) -> LoadOutcome:
        return LoadOutcome(4, chunks, "complete", 1.0, b"\1" * 4, seconds)

    first = StepReport(7, 0, {"a": outcome(4, 1.0), "b": outcome(4, 1.0)})
    second = StepReport(7, 7, {"a": outcome(4, 2.0), "b": outcome(2, 0.5), "c": outcome(4, 1.0)}, "off")
    both = first.aggregate(second)
    assert (both.step, both.failed_step, both.off) == (7, 7, "off")
    assert both.loads == {"a": outcome(4, 2.0), "b": outcome(2, 0.5), "c": outcome(4, 1.0)}
    assert not both.loads["b"].is_complete
