"""Paged KV for a transformers model: block pool, block tables, and the Cache that its attention writes and reads.

One tensor [2, blocks, block_tokens, kv_heads, head_dim] for each layer; a sequence's blocks lie anywhere in it. It knows
nothing of kvpool. Blocks that nobody owns hold NaN, so an answer that used KV which was neither computed nor loaded for
it would show. One thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class PagedKV:
    """The blocks of all layers. Invariant: a block is either in `_free` and all NaN, or owned by one borrower."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        seed: int,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        shape, kind = (2, blocks, block_tokens, kv_heads, head_dim), getattr(torch, dtype)
        self.layers = [torch.full(shape, torch.nan, dtype=kind, device=device) for _ in range(layers)]
        self.block_tokens = block_tokens
        self._free: list[int] = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()

    @contextmanager
    def borrow(self, tokens: int) -> Iterator[list[int]]:
        """A block table for `tokens` tokens; its blocks are wiped and free again after the context."""
        count = -(-tokens // self.block_tokens)
        if count > len(self._free):
            raise MemoryError(f"{count} blocks are asked, {len(self._free)} are free")
        table = [self._free.pop() for _ in range(count)]
        try:
            yield table
        finally:
            for layer in self.layers:
                layer[:, table] = torch.nan
            self._free[:0] = table


class PagedSequence:
    """One sequence: its block table and how many of its tokens have KV in every layer."""

    def __init__(self, kv: PagedKV, block_table: list[int], length: int) -> None:
        starts = torch.tensor(block_table, dtype=torch.int64) * kv.block_tokens
        self.rows = (starts[:, None] + torch.arange(kv.block_tokens)).flatten().to(kv.layers[0].device)
        self.length = length
        self.cache = Cache(layers=[_PagedLayer(self, layer) for layer in kv.layers])


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is not typed
    """One layer of one sequence, in the form that the model's attention calls."""

    is_sliding = False

    def __init__(self, sequence: PagedSequence, layer: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._sequence = sequence
        self._planes = layer.flatten(1, 2)  # a view: [2, rows, kv_heads, head_dim]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the blocks exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens' KV, each [1, kv_heads, tokens, head_dim], and return that of the whole sequence."""
        end = self._sequence.length + key_states.shape[2]
        written = self._sequence.rows[self._sequence.length : end]
        for plane, states in zip(self._planes, (key_states, value_states), strict=True):
            plane.index_copy_(0, written, states[0].transpose(0, 1))
        keys, values = self._planes.index_select(1, self._sequence.rows[:end]).transpose(1, 2)
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        """Tokens before those of the running forward pass."""
        return self._sequence.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the KV that `update` will return."""
        return self._sequence.length + query_length, 0

    def get_max_length(self) -> int:
        """No maximum but the block table's."""
        return -1
