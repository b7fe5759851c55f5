"""Adapter for custom torch engines: a prefix cache over paged KV tensors.

    prefix = PagedPrefixCache(pool, layers, block_tokens=16)
    prompts = [Prompt(tokens, block_ids)]
    logits = prefix.prefill(prompts, attention_modules, lambda starts: model.prefill(prompts, starts))

Imports torch, so nothing in `kvpool_client` imports this package.
"""

from kvpool_client.torch.hooks import announced, gated
from kvpool_client.torch.prefix_cache import PagedPrefixCache, Prompt, layout_of
from kvpool_client.torch.restored import PrefixShortened, Restored, prefill_batch

__all__ = [
    "PagedPrefixCache",
    "PrefixShortened",
    "Prompt",
    "Restored",
    "announced",
    "gated",
    "layout_of",
    "prefill_batch",
]
