"""Adapter for custom torch engines: a prefix cache over paged KV tensors.

    prefix = PagedPrefixCache(pool, layers, block_tokens=16)
    with prefix.restore(tokens, block_ids) as restored, gated(restored, attention_modules):
        logits = restored.prefill(lambda start: model.prefill(tokens, start, block_ids))
    prefix.store(tokens, block_ids).commit()

Imports torch, so nothing in `kvpool_client` imports this package.
"""

from kvpool_client.torch.hooks import announced, gated
from kvpool_client.torch.prefix_cache import PagedPrefixCache, layout_of
from kvpool_client.torch.restored import PrefixShortened, Restored

__all__ = ["PagedPrefixCache", "PrefixShortened", "Restored", "announced", "gated", "layout_of"]
