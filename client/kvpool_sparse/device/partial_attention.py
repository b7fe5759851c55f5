"""Attention of one query over parts of a sequence's tokens on a device, and their merge.

    part      logit [..., r] natural log of the sum of exp(scaled q·k), -inf without tokens; value [..., r, head_dim]
    query     float32 [kv_heads, r, head_dim], scaled: the r heads of each KV head

Logits, weights and sums are float32 whatever the keys' dtype. Pure functions; any thread. Workspace is bounded by what
is passed at once.
"""

import math

import torch

Part = tuple[torch.Tensor, torch.Tensor]
# Resident tokens of all KV heads that are converted to float32 at once (a guess: 16 MiB of keys with 8 heads of 128).
TOKENS_AT_ONCE = 4096


def scaled_query(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """A query [heads, head_dim] as parts want it."""
    head_dim = query.shape[-1]
    return query.reshape(kv_heads, -1, head_dim) / math.sqrt(head_dim)


def no_part(query: torch.Tensor) -> Part:
    """The part over no tokens."""
    return query.new_full(query.shape[:-1], -math.inf), torch.zeros_like(query)


def attend_tokens(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> list[Part]:
    """Parts over tokens, `keys` and `values` [kv_heads, tokens, head_dim]; none of no tokens."""
    spans = zip(keys.split(TOKENS_AT_ONCE, dim=1), values.split(TOKENS_AT_ONCE, dim=1), strict=True)
    return [_part(query, some_keys, some_values) for some_keys, some_values in spans if some_keys.shape[1]]


def attend_blocks(query: torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, ranks: torch.Tensor) -> Part:
    """The part over blocks [n, 2, block_tokens, head_dim], keys before values. `heads` [n]: each one's KV head;
    `ranks` [n]: its number among those of its KV head."""
    logits, values = _part(query[heads], blocks[:, 0], blocks[:, 1])
    shape = (int(ranks.max()) + 1, query.shape[0], query.shape[1])
    all_logits = logits.new_full(shape, -math.inf)
    all_values = values.new_zeros((*shape, query.shape[2]))
    all_logits[ranks, heads] = logits
    all_values[ranks, heads] = values
    return _merged(all_logits, all_values)


def merged(parts: list[Part]) -> Part:
    """Attention over several sets of tokens from that over each.

    Stable in float32: weights are relative to the largest logit; a part without tokens counts nothing, whatever its
    value.
    """
    return _merged(torch.stack([logit for logit, _ in parts]), torch.stack([value for _, value in parts]))


def _part(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Part:
    """Attention of [n, r, head_dim] over [n, tokens, head_dim]."""
    logits = torch.bmm(query, keys.float().transpose(1, 2))
    base = _finite_base(logits.amax(dim=-1))
    weights = torch.exp(logits - base[..., None])
    total = weights.sum(dim=-1)
    value = torch.bmm(weights, values.float())
    return base + torch.log(total), torch.where(total[..., None] == 0, 0.0, value / total[..., None])


def _merged(logits: torch.Tensor, values: torch.Tensor) -> Part:
    base = _finite_base(logits.amax(dim=0))
    weights = torch.exp(logits - base)
    total = weights.sum(dim=0)
    summed = torch.where(weights[..., None] > 0, weights[..., None] * values, 0.0).sum(dim=0)
    mean = torch.where(total[..., None] == 0, 0.0, summed / total[..., None])  # a logit that is no number stays none
    return base + torch.log(total), mean


def _finite_base(most: torch.Tensor) -> torch.Tensor:
    """What logits are relative to: the largest, 0 where there is none."""
    return torch.where(torch.isneginf(most), 0.0, most)
