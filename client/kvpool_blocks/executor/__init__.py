"""TensorRT-LLM's resource manager interface over a block pool, for executors written against it.

Imports torch, and nothing of TensorRT-LLM: requests, batches and settings are duck-typed after it.
"""

from kvpool_blocks.executor.cache_settings import CacheType
from kvpool_blocks.executor.dummy_request import DummyRequest, RequestState
from kvpool_blocks.executor.kv_cache_manager import KVCacheManager
from kvpool_blocks.executor.resource_manager import BaseResourceManager

__all__ = ["BaseResourceManager", "CacheType", "DummyRequest", "KVCacheManager", "RequestState"]
