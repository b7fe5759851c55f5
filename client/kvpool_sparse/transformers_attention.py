"""Compute by lookup for transformers: an attention function, and a cache that keeps each row's KV in a SparseSequence.

    register()
    model.set_attn_implementation(ATTENTION)
    with SparseCache(pool, rows=1) as cache:
        model.generate(ids, cache=cache)  # past_key_values= in older releases

For grouped-query models with RoPE and full attention in every layer: Qwen2, Llama and what is built like them.
Prompts are computed with full causal attention; a single new token attends by `SparseSequence.attend`. Rows of a
batch may have different lengths, padded on the left as `generate` wants it, and each is dense or sparse by its own
length. What models do beyond a scaled product (windows, sinks, soft caps) raises. A model whose rotary scaling depends on
the length (LongRoPE, dynamic NTK) has other KV for equal tokens in longer prompts: its sequences are not shared.

Rows whose model is on a device attend there, each in a DeviceSequence; on the processor KV is read where it lies.

`torch.compile` of a whole model compiles what is around each layer's cache and attention, which run as they are.

Imports torch and transformers, so nothing else in `kvpool_client` imports this module. One thread at a time.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_client.engines.length_facts import configuration_of, length_scalings
from kvpool_client.pool import Pool
from kvpool_sparse.arrays import GROUP_MAX
from kvpool_sparse.config import SparseConfig
from kvpool_sparse.device import DeviceSequence
from kvpool_sparse.sequence import SparseSequence

ATTENTION = "kvpool-sparse"
# Queries of a prompt that are attended to at once: bounds the mask, which has a row for each of them and query head
# of a group.
QUERIES_AT_ONCE = 128
# Arguments of attention functions that change what attention is.
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "dropout")


def register() -> None:
    """Make the attention known to transformers under the name ATTENTION. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, sparse_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _padding_mask)


def layout_of_model(
    config: object,
    *,
    chunk_tokens: int = 256,
    dtype: str = "bfloat16",
    summaries: str = "clusters7",
    is_shared: bool = True,
) -> Layout:
    """The layout of a model's KV, from its transformers configuration.

    `is_shared`: whether prompts find each other's KV by their tokens. Raises InvalidArgument for a model that allows only
    sequences without tokens, unless it is False.
    """
    if is_shared:
        _check_sharing(config, "is_shared=False, and sequences without tokens")
    heads, hidden = config.num_attention_heads, config.hidden_size  # type: ignore[attr-defined]  # any model's configuration
    return Layout(
        layers=config.num_hidden_layers,  # type: ignore[attr-defined]  # likewise
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        dtype=dtype,
        chunk_tokens=chunk_tokens,
        summaries=summaries,
    )


class SparseLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # of the library's own subclass hook
    """One layer of all rows."""

    def __init__(self, cache: "SparseCache", layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the library's has no annotations
        self.is_initialized = True
        self._cache = cache
        self.layer = layer
        self.seen = cache.prefix_tokens  # positions, padding included

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: sequences grow by themselves."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no annotations for it
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens of all rows, [rows, kv_heads, tokens, head_dim]; returns them as they are, for
        `sparse_attention`."""
        rows = self._cache.rows
        if self._cache.device is None:
            self._cache.place(key_states.device)
        if key_states.shape[0] != len(rows):
            raise InvalidArgument(f"keys have {key_states.shape[0]} rows, the cache has {len(rows)}")
        new = key_states.shape[2]
        self._check_step(new)
        for number, row in enumerate(rows):
            skipped = min(new, max(0, self._cache.padding[number] - self.seen))
            row.append(
                self.layer,
                key_states[number, :, skipped:].transpose(0, 1),
                value_states[number, :, skipped:].transpose(0, 1),
            )
        self.seen += new
        for states in (key_states, value_states):  # by this `sparse_attention` knows whose tokens they are
            states.kvpool_layer = self  # type: ignore[attr-defined]  # a mark of ours
        return key_states, value_states

    def _check_step(self, new: int) -> None:
        """Check that the layers before have these tokens as well, and those behind do not: a step that has failed in
        the middle is not repeated. Raises InvalidArgument."""
        layers: list[Any] = list(self._cache.layers)
        expected = [each.seen == self.seen + (new if each.layer < self.layer else 0) for each in layers]
        if not all(expected):
            seen = [each.seen for each in layers]
            raise InvalidArgument(
                f"layers have {seen} positions, expected the same: a step has failed, begin a new cache"
            )

    def attended(self, query: torch.Tensor) -> torch.Tensor:
        """Attention of the newest tokens' queries, [rows, heads, tokens, head_dim], as [rows, tokens, heads,
        head_dim]."""
        out = torch.zeros_like(query).transpose(1, 2).contiguous()
        new = query.shape[2]
        for number, row in enumerate(self._cache.rows):
            skipped = min(new, max(0, self._cache.padding[number] - (self.seen - new)))
            if skipped == new:
                continue
            if new == 1:
                out[number, 0] = torch.as_tensor(row.attend(self.layer, query[number, :, 0])).to(out.dtype)
            else:
                out[number, skipped:] = _attend_causally(row, self.layer, query[number, :, skipped:])
        return out

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Check that a batch's padding, [rows, positions], is the cache's. Raises InvalidArgument."""
        if mask is None or (mask.ndim == 2 and bool(mask.all()) and not any(self._cache.padding)):
            return
        positions = torch.arange(mask.shape[-1])
        expected = positions >= torch.tensor(self._cache.padding)[:, None]
        if mask.ndim != 2 or not torch.equal(mask.bool().cpu(), expected):
            raise InvalidArgument(
                f"attention_mask leaves out other positions than padding={self._cache.padding} on the left, expected the same"
            )

    def check_model(self, module: torch.nn.Module, heads: int) -> None:
        """Check that the model has the layers and heads that the layout can serve, and KV that may be shared where it is.
        Raises InvalidArgument."""
        layout, config = self._cache.rows[0].layout, getattr(module, "config", None)
        self._cache.check_sharing(config)
        layers = getattr(config, "num_hidden_layers", layout.layers)
        if layers != layout.layers:
            raise InvalidArgument(f"the model has {layers} layers, the layout has {layout.layers}: expected the same")
        if heads > GROUP_MAX * layout.kv_heads:
            raise InvalidArgument(
                f"the model has {heads} query heads and {layout.kv_heads} KV heads, expected at most {GROUP_MAX} for each"
            )

    def _refuse(self, *args: object, **kwargs: object) -> None:
        """Raises InvalidArgument: rows are only appended to."""
        raise InvalidArgument(
            "a SparseCache is only appended to: expected greedy search or sampling, without beams and without cutting the cache"
        )

    reorder_cache = crop = reset = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask would cover."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Positions seen, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class SparseCache(Cache):
    """The KV of a batch. `rows`: the sequence of each row, which may be asked for its `stats`; from the first tokens on
    those of a model on a device are DeviceSequences."""

    def __init__(
        self,
        pool: Pool,
        config: SparseConfig | None = None,
        *,
        rows: int = 1,
        padding: Sequence[int] | None = None,
        tokens: object = None,
        threads: int | None = None,
        device: torch.device | str | None = None,
        staging_blocks: int | None = None,
    ) -> None:
        """`padding`: tokens on the left of each row that are none. `tokens`: the prompt's token ids, of a batch of
        one row without padding: what the pool has of it is not computed again (`prefix_tokens`), and what is saved is
        found by others. `device`: where rows attend, that of the model's first tensors by default. `staging_blocks`: of
        each row there, as of a DeviceSequence. Raises InvalidArgument.
        """
        self.padding = [0] * rows if padding is None else [int(each) for each in padding]
        if rows < 1 or len(self.padding) != rows or min(self.padding) < 0:
            raise InvalidArgument(f"padding is {padding!r}, expected {rows} numbers of tokens")
        if tokens is not None and (rows != 1 or self.padding[0]):
            raise InvalidArgument(f"tokens are given for {rows} rows, expected one row without padding")
        self.rows: list[SparseSequence | DeviceSequence] = [
            SparseSequence(pool, config, tokens=tokens, threads=threads) for _ in range(rows)
        ]
        self._staging_blocks = staging_blocks
        self._begin()
        if device is not None:
            self._stage(torch.device(device))

    @classmethod
    def of(cls, rows: "Sequence[SparseSequence | DeviceSequence]") -> "SparseCache":
        """A cache of sequences that are there already, of the same length: forks of a common prompt, for example."""
        cache = cls.__new__(cls)
        cache.rows = list(rows)
        cache._staging_blocks = None
        cache.padding = [0] * len(cache.rows)
        if len({row.tokens for row in cache.rows}) != 1:
            raise InvalidArgument(f"rows have {[row.tokens for row in rows]} tokens, expected the same number")
        cache._begin()
        return cache

    def __enter__(self) -> "SparseCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all rows. Idempotent."""
        for row in self.rows:
            row.close()

    def _begin(self) -> None:
        self._checked_config: object = None  # of the model, once it was found to fit
        self.device: torch.device | None = None
        self.prefix_tokens = self.rows[0].tokens  # at the start, not computed again
        layers: list[Any] = [SparseLayer(self, layer) for layer in range(self.rows[0].layout.layers)]
        super().__init__(layers=layers)

    def check_sharing(self, config: object) -> None:
        """Check that a model's KV may be found by tokens where that of a row is. Raises InvalidArgument."""
        if config is not self._checked_config and any(row.is_shared for row in self.rows):
            _check_sharing(config, "a cache without tokens")
        self._checked_config = config

    def place(self, device: torch.device) -> None:
        """Have the rows attend where the model is: on the processor where KV lies, on a device there. Once."""
        if device.type != "cpu":
            self._stage(device)
        self.device = device

    def _stage(self, device: torch.device) -> None:
        self.device = device
        for number, row in enumerate(self.rows):
            if isinstance(row, SparseSequence):
                self.rows[number] = DeviceSequence(row, device=device, staging_blocks=self._staging_blocks)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no annotations for it
def sparse_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    *value_and_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function: `key` is what `SparseLayer.update` returned. Raises InvalidArgument for what it does not
    compute."""
    layer = getattr(key, "kvpool_layer", None)
    value, mask = (*value_and_mask, None, None)[:2]
    if getattr(value, "kvpool_layer", None) is not layer or not isinstance(layer, SparseLayer):
        raise InvalidArgument(
            f"the {ATTENTION} attention got other keys or values than a SparseCache has just taken, expected a SparseCache"
        )
    for name in REFUSED:
        given = kwargs.get(name)
        if torch.is_tensor(given) or given not in (None, 0.0):
            raise InvalidArgument(f"the model's attention has a {name}, expected plain full attention")
    if torch.is_grad_enabled() and query.requires_grad:
        raise InvalidArgument("gradients are on, expected torch.inference_mode(): sparse attention has none")
    expected = query.shape[-1] ** -0.5
    if scaling is not None and not np.isclose(scaling, expected, rtol=1e-6):
        raise InvalidArgument(f"the model scales its logits by {scaling}, expected 1/sqrt(head_dim), {expected}")
    layer.check_model(module, query.shape[1])
    layer.check_mask(mask)
    return layer.attended(query), None


def _check_sharing(config: object, expected: str) -> None:
    """Check that a model has the same KV for equal tokens, however long the prompt. Raises InvalidArgument."""
    found = length_scalings(configuration_of(config))
    if found:
        raise InvalidArgument(
            f"the model's rotary scaling is {', '.join(found)}, by which equal tokens have other KV in longer prompts, "
            f"expected {expected}"
        )


def _padding_mask(
    *args: object, attention_mask: torch.Tensor | None = None, mask_function: object = None, **kwargs: object
) -> torch.Tensor | None:
    """The mask that reaches `sparse_attention`: the batch's padding as it was given, without what causality adds.
    Raises InvalidArgument for models that mask anything else."""
    if mask_function is not causal_mask_function:
        raise InvalidArgument(
            "the model's attention is masked by more than causality and padding, expected plain full attention"
        )
    return attention_mask


def _attend_causally(row: SparseSequence | DeviceSequence, layer: int, query: torch.Tensor) -> torch.Tensor:
    """Full attention of the row's newest tokens, [heads, tokens, head_dim], as [tokens, heads, head_dim]."""
    keys, values = row.dense(layer)
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    keys, values = keys.to(query.device), values.to(query.device)
    heads, new, head_dim = query.shape
    kv_heads, total = keys.shape[:2]
    grouped = query.reshape(kv_heads, heads // kv_heads, new, head_dim)
    out = torch.empty_like(grouped)
    for first in range(0, new, QUERIES_AT_ONCE):
        part = grouped[:, :, first : first + QUERIES_AT_ONCE]
        count = part.shape[2]
        end = total - new + first + count  # the last of them sees so many tokens
        mask = torch.ones(count, end, dtype=torch.bool, device=query.device).tril_(end - count)
        rows = part.reshape(kv_heads, -1, head_dim)
        found = scaled_dot_product_attention(
            rows[None], keys[None, :, :end], values[None, :, :end], attn_mask=mask.repeat(heads // kv_heads, 1)
        )
        out[:, :, first : first + count] = found[0].reshape(part.shape)
    return out.reshape(heads, new, head_dim).transpose(0, 1)
