"""Memory of the scripted engine (see `engine.py`): each rank's KV by layer and block, and what it must be.

A rank has its heads of every layer; several may have the same ones. A layer's tensor is shared with the layers of the other
groups.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

from tests.rigs.vllm import token_kv
from tests.rigs.vllm.divided_states import DividedStates
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.specs import STATE_PADDING, WIDTH

GONE = 253


class ScriptedMemory:
    """See the module. `numbers`: of the model's layers in each group; `heads_of`: heads of each layer of a group on a rank;
    `first_heads`: the number of the first one, of each rank; `divided`: how states are divided, each rank's its own without."""

    def __init__(
        self,
        numbers: Sequence[Sequence[int]],
        heads_of: Sequence[int],
        first_heads: Sequence[int],
        *,
        blocks: int,
        divided: DividedStates | None = None,
    ) -> None:
        self._numbers, self._heads_of, self._first_heads, self._divided = numbers, heads_of, first_heads, divided
        self.kv = [
            [torch.full((blocks, count, BLOCK, WIDTH), 255, dtype=torch.uint8) for count in heads_of]
            for _ in first_heads
        ]
        self._arrays = [[tensor.numpy() for tensor in layers] for layers in self.kv]  # the same memory

    def states(self, rank: int, layer: int) -> torch.Tensor:
        """A layer's blocks as states, without their padding."""
        blocks = self.kv[rank][layer].flatten(1)
        size = self._divided.size(len(self.kv)) if self._divided else blocks.shape[1] - STATE_PADDING
        states: torch.Tensor = blocks[:, :size].unflatten(1, (1, 1, -1))
        return states

    def overwrite(self, blocks: Iterable[int]) -> None:
        """Fill blocks with bytes that belong to no token."""
        places = list(blocks)
        for layers in self._arrays:
            for array in layers:
                array[places] = 254

    def take_away(self) -> None:
        """The memory is gone: no byte of it is changed by anybody before `bring_back`."""
        self._fill(GONE)

    def bring_back(self) -> None:
        """It is there again, and belongs to no token."""
        for layers in self._arrays:
            for array in layers:
                assert (array == GONE).all(), "written while it was gone"
        self._fill(0)

    def _fill(self, value: int) -> None:
        for layers in self._arrays:
            for array in layers:
                array[:] = value

    def is_right(self, rank: int, group: int, layer: int, request: Request, span: range) -> bool:
        """Whether the KV of a span of a request's tokens is in place."""
        found = token_kv.read(self._arrays[rank][layer], request.tables[group], span.start, span.stop)
        return np.array_equal(found, self._kv_of(rank, group, layer, request, span))

    def write(
        self, rank: int, group: int, layer: int, request: Request, span: range, *, is_spoiled: bool = False
    ) -> None:
        """Compute the KV of a span of a request's tokens, wrong ones with `is_spoiled`."""
        values = self._kv_of(rank, group, layer, request, span)
        table = request.tables[group]
        token_kv.write(self._arrays[rank][layer], table, span.start, 255 - values if is_spoiled else values)

    def is_right_state(self, rank: int, group: int, layer: int, request: Request, end: int) -> bool:
        """Whether the state behind so many of a request's tokens is in place; behind none nothing must be."""
        right = not end or torch.equal(
            self._state(rank, group, layer, request, end), self._state_of(rank, group, layer, request, end)
        )
        return bool(right)

    def write_state(
        self, rank: int, group: int, layer: int, request: Request, end: int, *, is_spoiled: bool = False
    ) -> None:
        """Compute the state behind so many of a request's tokens, a wrong one with `is_spoiled`."""
        value = self._state_of(rank, group, layer, request, end)
        self._state(rank, group, layer, request, end).copy_(255 - value if is_spoiled else value)

    def _kv_of(self, rank: int, group: int, layer: int, request: Request, span: range) -> token_kv.Bytes:
        """The right KV of a span of a request's tokens, in the heads that a rank has."""
        lowest = self._first_heads[rank]
        heads = range(lowest, lowest + self._heads_of[layer])
        tokens = request.tokens[: span.stop]
        return token_kv.kv_of(self._numbers[group][layer], heads, tokens, request.adapter, first=span.start)

    def _state(self, rank: int, group: int, layer: int, request: Request, end: int) -> torch.Tensor:
        return self.states(rank, layer)[request.tables[group][(end - 1) // BLOCK]].flatten()

    def _state_of(self, rank: int, group: int, layer: int, request: Request, end: int) -> torch.Tensor:
        if self._divided is not None:
            return self._divided.of_rank(self._numbers[group][layer], request.tokens[:end], rank, len(self.kv))
        value = torch.from_numpy(self._kv_of(rank, group, layer, request, range(end - 1, end))).flatten()
        return value.repeat(BLOCK)[: self.states(rank, layer).shape[-1]]
