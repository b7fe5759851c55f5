"""Llama-shaped model with random weights from a seed: RMSNorm, rotary positions, grouped-query attention, SwiGLU; float32.

Matrices are multiplied TILE rows at a time, the last tile filled up with zeros: the same kernel on the same shape for a prompt,
a part of one and a batch of single tokens, so that a row has the same bits in each (see `attention`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from examples.engine.attention import TILE, Span, attend, write_pages


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    vocabulary: int = 2048
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    feed: int = 1024


SMALL = Shape(vocabulary=256, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, feed=128)


def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`rows @ weight`, tile by tile. Requires a multiple of TILE rows."""
    tiles = rows.view(-1, TILE, rows.shape[1])
    return torch.bmm(tiles, weight.expand(len(tiles), *weight.shape)).view(len(rows), -1)


def normalize(rows: torch.Tensor) -> torch.Tensor:
    """RMSNorm; random weights need no gain."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)


def rotate(rows: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [tokens, heads, head_dim]; `turns` [2, tokens, 1, head_dim / 2]: cosines and sines."""
    (one, other), (cos, sin) = rows.chunk(2, -1), turns
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Layer(nn.Module):
    """Attention over paged KV and a feed-forward."""

    def __init__(self, shape: Shape, random: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = draw(random, shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        self.out = draw(random, shape.heads * shape.head_dim, shape.width)
        self.gate_up = draw(random, shape.width, 2 * shape.feed)
        self.down = draw(random, shape.feed, shape.width)

    def forward(
        self, rows: torch.Tensor, turns: torch.Tensor, pages: torch.Tensor, spans: Sequence[Span]
    ) -> torch.Tensor:
        """`rows`: the spans' tokens one after another, filled up to whole tiles. Writes their KV, then attends."""
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        projected = multiply(normalize(rows), self.qkv).view(len(rows), -1, head_dim)
        queries = rotate(projected[:, :heads], turns) * head_dim**-0.5
        keys = rotate(projected[:, heads : heads + kv_heads], turns)
        keys_values = torch.stack([keys, projected[:, heads + kv_heads :]], 1)
        attended, at = torch.zeros_like(queries), 0
        for span in spans:
            end = at + len(span.tokens)
            write_pages(pages, keys_values[at:end], span)
            attended[at:end] = attend(queries[at:end], pages, span)
            at = end
        rows = rows + multiply(attended.flatten(1), self.out)
        gate, up = multiply(normalize(rows), self.gate_up).chunk(2, -1)
        return rows + multiply((nn.functional.silu(gate) * up), self.down)


class Model(nn.Module):
    """Token ids of spans in, logits of each span's last token out."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.embedding = torch.randn(shape.vocabulary, shape.width, generator=random)
        self.layers = nn.ModuleList(Layer(shape, random) for _ in range(shape.layers))
        self.head = draw(random, shape.width, shape.vocabulary)
        self.frequencies = 10_000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)

    @torch.no_grad()
    def forward(self, spans: Sequence[Span], pages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits [spans, vocabulary]; writes the KV of all tokens into `pages`, one tensor for each layer."""
        tokens = torch.tensor([token for span in spans for token in span.tokens])
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        angles = filled(positions)[:, None, None] * self.frequencies
        turns, rows = torch.stack([angles.cos(), angles.sin()]), filled(self.embedding[tokens])
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            rows = layer(rows, turns, layer_pages, spans)
        last = torch.tensor([len(span.tokens) for span in spans]).cumsum(0) - 1
        return multiply(filled(normalize(rows)[last]), self.head)[: len(spans)]


def filled(rows: torch.Tensor) -> torch.Tensor:
    """The rows, and zeros up to whole tiles."""
    missing = -len(rows) % TILE
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def draw(random: torch.Generator, inputs: int, outputs: int) -> torch.Tensor:
    """Random weights [inputs, outputs] that keep the size of what they multiply."""
    return torch.randn(inputs, outputs, generator=random).div_(math.sqrt(inputs))
