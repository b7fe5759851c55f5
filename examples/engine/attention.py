"""Paged attention in tiles: the result for a token has the same bits however its computation is batched or cut.

A kernel may sum in another order for matrices of another shape, and floating-point sums depend on their order. So a token at
position p is always row p % TILE of a tile of TILE queries, over the keys up to the end of that tile: the shapes that it is
computed with depend on p alone, not on the prompt's length, on what was reused, or on other requests.
"""

from dataclasses import dataclass

import torch

TILE = 16  # also the tokens of a block: a tile of queries ends where a block does
_HIDDEN = torch.full((TILE, TILE), float("-inf")).triu(1)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one request to compute, from position `start` on, and the request's block table."""

    tokens: list[int]
    start: int
    block_ids: torch.Tensor

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.tokens)


def write_pages(pages: torch.Tensor, keys_values: torch.Tensor, span: Span) -> None:
    """Write rows [tokens, 2, kv_heads, head_dim] of a span into a layer's blocks."""
    positions = torch.arange(span.start, span.end)
    pages[span.block_ids[positions // TILE], :, positions % TILE] = keys_values


def attend(queries: torch.Tensor, pages: torch.Tensor, span: Span) -> torch.Tensor:
    """Causal attention of a span's queries [tokens, heads, head_dim] over its blocks; the same shape."""
    (count, heads, head_dim), kv_heads = queries.shape, pages.shape[3]
    first, tiles = span.start // TILE, -(-span.end // TILE)
    # [kv_heads, positions, head_dim]; rows of a block behind the span are finite, and hidden.
    keys, values = (
        pages[:, plane].index_select(0, span.block_ids[:tiles]).view(-1, kv_heads, head_dim).transpose(0, 1)
        for plane in range(2)
    )
    rows = queries.new_zeros((tiles - first) * TILE, heads, head_dim)
    offset = span.start - first * TILE
    rows[offset : offset + count] = queries
    tiled = rows.view(-1, TILE, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    attended = torch.empty_like(tiled, memory_format=torch.contiguous_format)
    for number, query in enumerate(tiled.reshape(tiles - first, kv_heads, -1, head_dim)):
        seen = (first + number + 1) * TILE
        scores = torch.bmm(query, keys[:, :seen].transpose(1, 2)).view(kv_heads, -1, TILE, seen)
        scores[..., -TILE:] += _HIDDEN
        weights = scores.softmax(-1).view(kv_heads, -1, seen)
        attended[number] = torch.bmm(weights, values[:, :seen]).view(attended.shape[1:])
    return attended.permute(0, 3, 1, 2, 4).reshape(rows.shape)[offset : offset + count]
