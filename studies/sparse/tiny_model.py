"""Causal model of 1.8 million parameters, with what matters of large ones: rotary positions, grouped heads, key biases.

The embedding of a token also carries a learnt map of its predecessor's ("smear"), so that one layer of attention finds what
followed a token. Needs torch: this module is imported only where the model is used. An observer sees the queries, keys and
values of each layer, and may return other outputs. Main thread only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.sparse.tasks import VOCABULARY

# Called for each layer with q [heads, n, D], keys and values [kv_heads, all, D] after RoPE, and the dense output [heads, n, D].
Observer = Callable[[int, Tensor, tuple[Tensor, Tensor], Tensor], Tensor]
Past = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    layers: int = 3
    width: int = 192
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 512
    rope_base: float = 1e6


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions on x [batch, heads, n, D], pairs (d, d + D/2); positions [batch, n]."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.to(torch.float64)[:, None, :, None] * frequencies
    cosine, sine = angles.cos().float(), angles.sin().float()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMS norm."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.query = nn.Linear(shape.width, shape.heads * shape.head_dim)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_dim)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_dim)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        return x.reshape(batch, length, heads, self.shape.head_dim).transpose(1, 2)

    def forward(
        self, x: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None, observer: Observer | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Output, and keys and values of all tokens so far."""
        shape = self.shape
        normed = self.attention_norm(x)
        q = rotated(self._split(self.query(normed), shape.heads), positions, shape.rope_base)
        k = rotated(self._split(self.key(normed), shape.kv_heads), positions, shape.rope_base)
        v = self._split(self.value(normed), shape.kv_heads)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        group = shape.heads // shape.kv_heads
        wide_k, wide_v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        if past is None:
            attended = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)
        else:
            before = k.shape[2] - q.shape[2]
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(before)
            attended = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask)
        if observer is not None:
            attended = observer(self.index, q[0], (k[0], v[0]), attended[0])[None]
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up), (k, v)


class TinyModel(nn.Module):
    """Decoder with tied embeddings."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.smear = nn.Linear(shape.width, shape.width, bias=False)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        start_weights(self, torch.Generator().manual_seed(seed))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        past: Past | None = None,
        observer: Observer | None = None,
        before: int | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [batch, n, vocabulary], and keys and values of each layer. `before` is the token ahead of the first one."""
        embedded = self.embedding(tokens) * self.shape.width**0.5
        first = torch.zeros_like(embedded[:, :1])
        if before is not None:
            first = self.embedding(torch.full_like(tokens[:, :1], before)) * self.shape.width**0.5
        x = embedded + self.smear(torch.cat([first, embedded[:, :-1]], dim=1))
        kept: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self.layers):
            x, kv = layer(x, positions, None if past is None else past[index], observer)
            kept.append(kv)
        return F.linear(self.norm(x), self.embedding.weight), kept


# Sharpness of the copy heads at the start, the size of their values, and the noise that blurs them: guesses that learn.
_COPY_LOGIT = 2.8
_COPY_GAIN = 0.5
_COPY_BLUR = 0.3
# The slowest pairs: over 34,000 positions the fastest of them turns by 1.4 radian at base 1e6.
_COPY_PAIRS = 9


def start_weights(model: TinyModel, generator: torch.Generator) -> None:
    """Weights at the start: random, and a blurred copy head for KV head 0 in all layers but the first.

    Without that start the model has to find a circuit of two heads by chance, which takes far longer than the training lasts.
    """
    shape = model.shape

    def noise(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    with torch.no_grad():
        model.embedding.weight.copy_(noise(VOCABULARY, shape.width) * shape.width**-0.5)
        model.smear.weight.copy_(torch.linalg.qr(noise(shape.width, shape.width))[0])
        for layer in model.layers:
            assert isinstance(layer, Layer)
            for part in (layer.query, layer.key, layer.value):
                part.weight.copy_(noise(*part.weight.shape) * shape.width**-0.5)
                part.bias.zero_()
            layer.gate_up.weight.copy_(noise(*layer.gate_up.weight.shape) * shape.width**-0.5)
            deep = (2 * shape.layers) ** -0.5
            layer.out.weight.copy_(noise(*layer.out.weight.shape) * (shape.heads * shape.head_dim) ** -0.5 * deep)
            layer.down.weight.copy_(noise(*layer.down.weight.shape) * shape.hidden**-0.5 * deep)
            if layer.index > 0:
                _start_copy_head(layer, model.smear.weight, noise)


def _start_copy_head(layer: Layer, smear: Tensor, noise: Callable[[int, int], Tensor]) -> None:
    """Queries ask for their token, keys answer with their predecessor's, and the value is the token itself."""
    shape = layer.shape
    half, dim = shape.head_dim // 2, shape.head_dim
    slow = torch.cat([torch.arange(half - _COPY_PAIRS, half), torch.arange(dim - _COPY_PAIRS, dim)])
    asked = torch.zeros(dim, shape.width)
    asked[slow] = noise(len(slow), shape.width) * shape.width**-0.5 * _COPY_LOGIT
    read = torch.linalg.qr(noise(shape.width, dim))[0].T
    layer.key.weight[:dim] = asked @ smear.T + _COPY_BLUR * layer.key.weight[:dim]
    layer.value.weight[:dim] = read
    for head in range(shape.heads // shape.kv_heads):
        rows = slice(head * dim, (head + 1) * dim)
        layer.query.weight[rows] = asked + _COPY_BLUR * layer.query.weight[rows]
        layer.out.weight[:, rows] = _COPY_GAIN * read.T
