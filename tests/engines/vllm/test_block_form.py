"""The form of blocks as vLLM's own operation for the CPU writes them: measured; it follows the bytes, not the release."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.identity.engine_form import engine_form

# Warnings of vLLM and torch about their own code when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@dataclass
class FullAttentionSpec:
    """As an engine has it."""

    dtype: Any
    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 64


class MLAAttentionSpec(FullAttentionSpec):
    """Latent attention, of which no block can be filled alone."""


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """A configuration and a spec such as an engine has. Imports vLLM into this process."""
    import torch
    from vllm.platforms import current_platform

    assert current_platform.is_cpu()
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    return config, FullAttentionSpec(torch.bfloat16)


def test_a_release_with_the_same_operation_has_the_same_form(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    form = engine_form(*parts)
    assert "/bytes-" in form
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    assert engine_form(*parts) == form


def test_a_block_with_another_packing_has_another_form(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as operations

    form = engine_form(*parts)
    write = operations.cpu_attn_reshape_and_cache
    monkeypatch.setattr(
        operations, "cpu_attn_reshape_and_cache", lambda key, value, *more, **named: write(value, key, *more, **named)
    )
    other = engine_form(*parts)
    assert "/bytes-" in other
    assert other != form


def test_the_form_of_latent_attention_follows_its_backends_code(parts: tuple[Any, Any]) -> None:
    config, spec = parts
    latent: Any = MLAAttentionSpec(spec.dtype)
    assert "/code-" in engine_form(config, latent)


@pytest.mark.parametrize("head_size", [64, 128])
def test_a_heads_bytes_are_the_same_beside_others_and_alone(parts: tuple[Any, Any], head_size: int) -> None:
    """What engines of other tensor-parallel sizes rely on: a block is its heads' bytes, one behind the other."""
    import torch
    from vllm import _custom_ops as operations
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, heads, dtype = 32, 4, torch.bfloat16
    numbers = torch.randn((2, tokens, heads, head_size), generator=torch.Generator().manual_seed(5)).to(dtype)

    def block_of(chosen: list[int]) -> Any:
        block = torch.zeros((1, len(chosen), 2 * tokens, head_size), dtype=dtype)
        keys, values = (plane[:, chosen].contiguous() for plane in numbers)
        operations.cpu_attn_reshape_and_cache(
            keys,
            values,
            *block.chunk(2, dim=2),
            torch.arange(tokens),
            _get_attn_isa(dtype, tokens, head_size, "auto"),
            kv_cache_dtype="auto",
        )
        return block.view(torch.uint8)

    whole = block_of(list(range(heads)))
    for head in range(heads):
        assert torch.equal(whole[0, head], block_of([head])[0, 0])
    assert torch.equal(whole[0, 2:], block_of([2, 3])[0])
