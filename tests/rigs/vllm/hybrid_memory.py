"""Memory of the scripted hybrid engine (see `hybrid_engine`): each rank's KV by layer and block, and what it must be.

A rank has its heads of every layer; ranks beyond the heads have the same ones. A layer's tensor is shared with the layers of
the other groups.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

from tests.rigs.vllm import token_kv
from tests.rigs.vllm.divided_states import DividedStates
from tests.rigs.vllm.request import BLOCK
from tests.rigs.vllm.specs import STATE_PADDING, WIDTH


class HybridMemory:
    """See the module. `numbers`: of the model's layers in each group; `heads_of`: heads of each layer of a group on a rank;
    `divided`: how states are divided, each rank's its own without."""

    def __init__(
        self,
        numbers: Sequence[Sequence[int]],
        heads_of: Sequence[int],
        *,
        ranks: int,
        heads: int,
        blocks: int,
        divided: DividedStates | None = None,
    ) -> None:
        self.ranks, self.replicas, self._divided = range(ranks), max(1, ranks // heads), divided
        self._numbers, self._heads_of = numbers, heads_of
        self._first_heads = [rank * heads // ranks for rank in self.ranks]
        self.kv = [
            [torch.full((blocks, count, BLOCK, WIDTH), 255, dtype=torch.uint8) for count in heads_of]
            for _ in self.ranks
        ]
        self._arrays = [[tensor.numpy() for tensor in layers] for layers in self.kv]  # the same memory

    def states(self, rank: int, layer: int) -> torch.Tensor:
        """A layer's blocks as states, without their padding."""
        blocks = self.kv[rank][layer].flatten(1)
        size = self._divided.size(len(self.ranks)) if self._divided else blocks.shape[1] - STATE_PADDING
        states: torch.Tensor = blocks[:, :size].unflatten(1, (1, 1, -1))
        return states

    def overwrite(self, blocks: Iterable[int]) -> None:
        """Fill blocks with bytes that belong to no token."""
        places = list(blocks)
        for layers in self._arrays:
            for array in layers:
                array[places] = 254

    def is_right(
        self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int], first: int
    ) -> bool:
        """Whether the KV of `tokens` is in place from the first one on that is read."""
        end = len(tokens)
        found = token_kv.read(self._arrays[rank][layer], table, first, end)
        return np.array_equal(found, self._kv_of(rank, group, layer, tokens, first))

    def write(self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int], first: int) -> None:
        """Compute the KV of `tokens` from the first one on."""
        token_kv.write(self._arrays[rank][layer], table, first, self._kv_of(rank, group, layer, tokens, first))

    def is_right_state(self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int]) -> bool:
        """Whether the state behind `tokens` is in place; behind none nothing must be."""
        right = not tokens or torch.equal(
            self._state(rank, layer, table, len(tokens)), self._state_of(rank, group, layer, tokens)
        )
        return bool(right)

    def write_state(self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int]) -> None:
        """Compute the state behind `tokens`."""
        self._state(rank, layer, table, len(tokens)).copy_(self._state_of(rank, group, layer, tokens))

    def _kv_of(self, rank: int, group: int, layer: int, tokens: list[int], first: int) -> token_kv.Bytes:
        """The right KV of `tokens` from the first one on, in the heads that a rank has."""
        number, lowest = self._numbers[group][layer], self._first_heads[rank]
        return token_kv.kv_of(number, range(lowest, lowest + self._heads_of[layer]), tokens, first=first)

    def _state(self, rank: int, layer: int, table: Sequence[int], count: int) -> torch.Tensor:
        return self.states(rank, layer)[table[(count - 1) // BLOCK]].flatten()

    def _state_of(self, rank: int, group: int, layer: int, tokens: list[int]) -> torch.Tensor:
        if self._divided is not None:
            return self._divided.of_rank(self._numbers[group][layer], tokens, rank, len(self.ranks))
        value = torch.from_numpy(self._kv_of(rank, group, layer, tokens, len(tokens) - 1)).flatten()
        return value.repeat(BLOCK)[: self.states(rank, layer).shape[-1]]
