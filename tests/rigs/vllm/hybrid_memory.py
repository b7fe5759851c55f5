"""Memory of the scripted hybrid engine (see `hybrid_engine`): each rank's KV by layer and block, and what it must be.

A rank has its heads of every layer; ranks beyond the heads have the same ones. A layer's tensor is shared with the layers of
the other groups.
"""

from collections.abc import Iterable, Sequence

import torch

from tests.rigs.vllm.divided_states import DividedStates
from tests.rigs.vllm.engine import kv_of
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

    def states(self, rank: int, layer: int) -> torch.Tensor:
        """A layer's blocks as states, without their padding."""
        blocks = self.kv[rank][layer].flatten(1)
        size = self._divided.size(len(self.ranks)) if self._divided else blocks.shape[1] - STATE_PADDING
        states: torch.Tensor = blocks[:, :size].unflatten(1, (1, 1, -1))
        return states

    def overwrite(self, blocks: Iterable[int]) -> None:
        """Fill blocks with bytes that belong to no token."""
        for layers in self.kv:
            for tensor in layers:
                tensor[list(blocks)] = 254

    def is_right(
        self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int], first: int
    ) -> bool:
        """Whether the KV of `tokens` is in place from the first one on that is read."""
        return all(
            torch.equal(self._slot(rank, layer, table, place), self._kv_of(rank, group, layer, tokens[: place + 1]))
            for place in range(first, len(tokens))
        )

    def write(self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int], first: int) -> None:
        """Compute the KV of `tokens` from the first one on."""
        for place in range(first, len(tokens)):
            self._slot(rank, layer, table, place).copy_(self._kv_of(rank, group, layer, tokens[: place + 1]))

    def is_right_state(self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int]) -> bool:
        """Whether the state behind `tokens` is in place; behind none nothing must be."""
        right = not tokens or torch.equal(
            self._state(rank, layer, table, len(tokens)), self._state_of(rank, group, layer, tokens)
        )
        return bool(right)

    def write_state(self, rank: int, group: int, layer: int, *, table: Sequence[int], tokens: list[int]) -> None:
        """Compute the state behind `tokens`."""
        self._state(rank, layer, table, len(tokens)).copy_(self._state_of(rank, group, layer, tokens))

    def _slot(self, rank: int, layer: int, table: Sequence[int], place: int) -> torch.Tensor:
        return self.kv[rank][layer][table[place // BLOCK], :, place % BLOCK]

    def _kv_of(self, rank: int, group: int, layer: int, tokens: list[int]) -> torch.Tensor:
        number, first = self._numbers[group][layer], self._first_heads[rank]
        return torch.stack([kv_of(number, first + head, tokens, "")[0] for head in range(self._heads_of[layer])])

    def _state(self, rank: int, layer: int, table: Sequence[int], count: int) -> torch.Tensor:
        return self.states(rank, layer)[table[(count - 1) // BLOCK]].flatten()

    def _state_of(self, rank: int, group: int, layer: int, tokens: list[int]) -> torch.Tensor:
        if self._divided is not None:
            return self._divided.of_rank(self._numbers[group][layer], tokens, rank, len(self.ranks))
        value = self._kv_of(rank, group, layer, tokens).flatten()
        return value.repeat(BLOCK)[: self.states(rank, layer).shape[-1]]
