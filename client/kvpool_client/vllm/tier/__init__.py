"""Secondary tier for vLLM's tiered offloading, loaded by configuration; vLLM's code is not changed.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
       "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184, "blocks_per_chunk": 16,
       "secondary_tiers": [{"type": "KVPoolTier", "module_path": "kvpool_client.vllm.tier"}]}}'

vLLM copies between its devices and a region of host memory; the tier stores and loads rows of that region. `KVPoolTier` is made
when it is asked for, because its base class is vLLM's: importing this package imports no engine.
"""

from kvpool_client.vllm.tier.row_store import RowStore
from kvpool_client.vllm.tier.settings import Settings

__all__ = ["KVPoolTier", "RowStore", "Settings"]


def __getattr__(name: str) -> object:
    """The tier's class, once vLLM asks for it."""
    if name != "KVPoolTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool_client.vllm.tier.tier import KVPoolTier  # optional heavy dependency: vllm

    return KVPoolTier
