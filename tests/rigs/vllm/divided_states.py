"""Recurrent states as vLLM divides them among ranks: a model's whole state, and what each rank of a size has of it.

A convolution's last inputs, by step or by channel, of three projections, then a recurrent tensor by heads; bytes are items.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

STEPS, HEADS, WIDTH, DEPTH = 2, 8, 2, 3
# The projections' channels in their order, of the whole model: two are as wide as each other, one as the heads of the state.
PROJECTIONS = {"gdn_attention": (8, 8, HEADS * WIDTH), "mamba2": (HEADS * WIDTH, 8, 8)}


@dataclass(frozen=True)
class DividedStates:
    """`kind`: vLLM's mamba_type; `is_by_channel`: a convolution's inputs are [channels, steps] in memory; `has_one_group`: the
    two narrow projections are DEPTH channels, the same on every rank. `item`: the data type that is shown."""

    kind: str = "gdn_attention"
    is_by_channel: bool = False
    has_one_group: bool = False
    item: str = "torch.uint8"

    def described(self) -> dict[str, Any]:
        """What the model's configuration says."""
        return {"mamba_n_groups": 1} if self.has_one_group else {}

    def spec(self, ranks: int) -> dict[str, Any]:
        """Fields of vLLM's spec on a rank."""
        channels = sum(width for width, _ in self._projections(ranks))
        inputs = (channels, STEPS) if self.is_by_channel else (STEPS, channels)
        shapes = (inputs, (HEADS // ranks, WIDTH, DEPTH))
        return {"mamba_type": self.kind, "shapes": shapes, "dtypes": (self.item, "torch.int8")}

    def size(self, ranks: int) -> int:
        """Bytes of a rank's state."""
        return sum(width for width, _ in self._projections(ranks)) * STEPS + HEADS * WIDTH * DEPTH // ranks

    def of_rank(self, layer: int, tokens: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
        """A rank's state behind these tokens."""
        known = tuple(tokens)
        inputs = [
            _bytes_of(layer, known, name, STEPS * width * parts).view(STEPS, -1).chunk(parts, dim=1)[rank % parts]
            for name, (width, parts) in enumerate(self._projections(ranks))
        ]
        convolved = torch.cat(inputs, dim=1)
        recurrent = _bytes_of(layer, known, "recurrent", HEADS * WIDTH * DEPTH).chunk(ranks)[rank]
        return torch.cat([(convolved.T if self.is_by_channel else convolved).flatten(), recurrent])

    def _projections(self, ranks: int) -> list[tuple[int, int]]:
        """The channels of each projection on a rank, and how many ranks have other ones."""
        if self.has_one_group:
            return [(HEADS * WIDTH // ranks, ranks), (DEPTH, 1), (DEPTH, 1)]
        return [(width // ranks, ranks) for width in PROJECTIONS[self.kind]]


@lru_cache(maxsize=1024)
def _bytes_of(layer: int, tokens: tuple[int, ...], name: object, count: int) -> torch.Tensor:
    digest = hashlib.shake_128(repr((layer, tokens, name)).encode()).digest(count)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
