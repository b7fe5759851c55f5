"""Mooncake client: the library of Mooncake Store behind the calls that the store process makes.

Imported by the store process alone, and the library only when it connects: it is an optional package. Measured on 0.3.13: the
argument `protocol` does not choose the protocol, the environment does; without a master `setup` tries for a minute and a half;
calls answer codes and raise nothing.
"""

import ctypes
import importlib
import mmap
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MASTER_TIMEOUT_S = 2.0
# The library's own buffer, which calls with registered memory do not use.
LOCAL_BUFFER_BYTES = 1 << 20
# Seconds after which the library gives a transfer up: its least, so that its threads are not kept by one that nobody waits for.
LIBRARY_TIMEOUT_S = 5
INFINIBAND = Path("/sys/class/infiniband")
# Of what the library writes to standard error.
LOG_LEVEL = "WARNING"


class MooncakeClient:
    """See `child.StoreClient`."""

    def __init__(self, store: Any, config: Any, memory: mmap.mmap) -> None:
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
    _set_environment(settings["protocol"])
    try:
        library: Any = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ImportError(
            f"the Mooncake client cannot be imported ({error}): install kvpool[store], and libibverbs1, libnuma1 and libcurl4 "
            "of the system"
        ) from error
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


def _set_environment(protocol: str) -> None:
    """Choose the protocol: the library reads it when it is first used."""
    os.environ.setdefault("MC_LOG_LEVEL", LOG_LEVEL)
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(LIBRARY_TIMEOUT_S))
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
        return
    if not INFINIBAND.is_dir() or not any(INFINIBAND.iterdir()):
        raise ConnectionError(
            f"store.protocol is 'rdma' and {INFINIBAND} has no device: the library would use TCP silently"
        )
    os.environ["MC_FORCE_HCA"] = "1"


def _replicate_config(library: Any, settings: Mapping[str, Any]) -> Any:
    config = library.ReplicateConfig()
    config.replica_num = settings["replicas"]
    config.with_hard_pin = settings["pin"] == "hard"
    if settings["pin"] == "soft":
        config.soft_pin_action = library.SoftPinAction.ENABLE
    return config
