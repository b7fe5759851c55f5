"""SGLang HiCache's storage backend, loaded by configuration with nothing patched.

    --hicache-storage-backend dynamic --hicache-mem-layout page_first --hicache-storage-backend-extra-config
      '{"backend_name": "kvpool", "module_path": "kvpool_client.sglang", "class_name": "KVPoolStorage",
        "interface_v1": 1, "socket": "/run/kvpool/kvpool.sock"}'

`linker` is the other door, of SGLang's unified cache without a host tier. `KVPoolStorage` is made when it is asked for, because
its base class is SGLang's: importing this package imports no engine.
"""

from kvpool_client.sglang.host_pages import PoolPages, Shard, describe_host_pool
from kvpool_client.sglang.page_store import PageStore
from kvpool_client.sglang.settings import Settings

__all__ = ["KVPoolStorage", "PageStore", "PoolPages", "Settings", "Shard", "describe_host_pool"]


def __getattr__(name: str) -> object:
    """The backend class, once SGLang asks for it."""
    if name != "KVPoolStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool_client.sglang.storage import KVPoolStorage  # optional heavy dependency: sglang

    return KVPoolStorage
