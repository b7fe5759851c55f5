"""LMCache's L2 storage, as a plug-in of its storage manager: loaded by configuration with nothing patched.

    --l2-adapter '{"type": "plugin", "module_path": "kvpool_client.lmcache", "class_name": "KVPoolAdapter",
                   "adapter_params": {"socket": "/run/kvpool/kvpool.sock"}}'

`KVPoolAdapter` is made when it is asked for, because its base class is LMCache's: importing this package imports no LMCache.
"""

from kvpool_client.lmcache.settings import Settings

__all__ = ["KVPoolAdapter", "Settings"]


def __getattr__(name: str) -> object:
    """The adapter class, once LMCache asks for it."""
    if name != "KVPoolAdapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool_client.lmcache.adapter import KVPoolAdapter  # optional heavy dependency: lmcache

    return KVPoolAdapter
