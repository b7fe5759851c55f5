"""Mooncake client: the library of Mooncake Store behind the calls that the store process makes.

Imported by the store process alone, and the library only when it connects: it is an optional package. Measured on 0.3.13: the
argument `protocol` does not choose the protocol, the environment does; without a master `setup` tries for a minute and a half;
calls answer codes and raise nothing.
"""

import ctypes
import mmap
import socket
from collections.abc import Mapping
from typing import Any

from kvpool.transfer.child.mooncake import choose_protocol, import_library

MASTER_TIMEOUT_S = 2.0
# The library's own buffer, which calls with registered memory do not use.
LOCAL_BUFFER_BYTES = 1 << 20


class MooncakeClient:
    """See `child.StoreClient`."""

    def __init__(self, store: Any, config: Any, memory: mmap.mmap) -> None:
        self.facts: Mapping[str, Any] = {}
        self._store = store
        self._config = config
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def exist(self, names: list[str]) -> list[int]:
        """See `StoreClient`."""
        codes: list[int] = self._store.batch_is_exist(names)
        return codes

    def get(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """See `StoreClient`."""
        codes: list[int] = self._store.batch_get_into(names, [self._base + offset for offset in offsets], sizes)
        return codes

    def put(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """See `StoreClient`."""
        pointers = [self._base + offset for offset in offsets]
        codes: list[int] = self._store.batch_put_from(names, pointers, sizes, self._config)
        return codes

    def close(self) -> None:
        """See `StoreClient`."""
        self._store.close()


def connect_mooncake(settings: Mapping[str, Any], memory: mmap.mmap) -> MooncakeClient:
    """Join the store. Raises ConnectionError, ImportError or OSError with the reason."""
    choose_protocol(settings["protocol"], "store.protocol")
    library = import_library("mooncake.store", "store")
    host, _, port = settings["master"].rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), MASTER_TIMEOUT_S).close()
    store = library.MooncakeDistributedStore()
    code = store.setup(
        settings["host"],
        settings["metadata"],
        settings["segment"],
        LOCAL_BUFFER_BYTES,
        settings["protocol"],
        "",
        settings["master"],
    )
    if code:
        raise ConnectionError(f"the store at {settings['master']} cannot be joined: code {code}")
    client = MooncakeClient(store, _replicate_config(library, settings), memory)
    code = store.register_buffer(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
    if code:
        raise ConnectionError(f"{len(memory)} bytes cannot be registered with the store's library: code {code}")
    return client


def _replicate_config(library: Any, settings: Mapping[str, Any]) -> Any:
    config = library.ReplicateConfig()
    config.replica_num = settings["replicas"]
    config.with_hard_pin = settings["pin"] == "hard"
    if settings["pin"] == "soft":
        config.soft_pin_action = library.SoftPinAction.ENABLE
    return config
