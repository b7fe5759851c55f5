"""Paged block pool for home-made torch engines: prefix reuse on the device, with the node's pool behind it.

    blocks = BlockPool(num_blocks=4096, tokens_per_block=16, device="cuda", pool=pool)

`KVCacheManager` is the same for an executor that is written against TensorRT-LLM's resource manager. Imports torch, so
nothing in `kvpool_client` imports this package.
"""

from kvpool_blocks.allocation import Allocation
from kvpool_blocks.block_pool import BlockPool
from kvpool_blocks.executor import CacheType, KVCacheManager

__all__ = ["Allocation", "BlockPool", "CacheType", "KVCacheManager"]
