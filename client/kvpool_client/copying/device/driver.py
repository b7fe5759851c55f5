"""CUDA driver of this process: opens each device once, for all caches on it.

Nothing is loaded before the first cache on a device is registered; the library is the one that KVPOOL_CUDA_DRIVER names. A
driver that cannot be used is the caller's to know, at `register`; what a device refuses later ends a load or a save. A forked
child has none of its parent's devices, and CUDA lets it open none: an engine starts processes by spawning. Any thread. Lock:
`_lock` guards `_opened`, and is held while a device is opened, so that nobody opens it twice.
"""

import os
import threading
import weakref

import kvpool_native
from kvpool.errors import InvalidArgument

VARIABLE = "KVPOOL_CUDA_DRIVER"
DEFAULT_DRIVER = "libcuda.so.1"

_lock = threading.Lock()
# By process, library and ordinal: each device once.
_opened: "weakref.WeakValueDictionary[tuple[int, str, int], kvpool_native.Device]" = weakref.WeakValueDictionary()


def open_device(name: str) -> kvpool_native.Device:
    """The device that torch calls `cuda:N`. Raises InvalidArgument for another kind, and where the driver cannot be used."""
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise InvalidArgument(f"the arrays are on {name}, expected host memory or a CUDA device")
    ordinal, library = int(number or "0"), _library()
    key = (os.getpid(), library, ordinal)
    with _lock:
        device = _opened.get(key)
        if device is None:
            try:
                device = _opened[key] = kvpool_native.Device(library, ordinal)
            except (OSError, RuntimeError, ValueError) as error:
                raise InvalidArgument(refusal(f"the arrays are on {name}", error)) from error
        return device


def ordinal_of(address: int) -> int | None:
    """The number of the device that has this address; None for host memory. Raises InvalidArgument where the driver cannot be
    used."""
    try:
        return kvpool_native.Device.ordinal_of(address, _library())
    except (OSError, RuntimeError) as error:
        raise InvalidArgument(refusal("the arrays have a __cuda_array_interface__", error)) from error


def refusal(what: str, error: Exception) -> str:
    """What to know where the driver cannot be used, and what to do."""
    return (
        f"{what}, and the CUDA driver {_library()} cannot be used: {error}; "
        f"install the NVIDIA driver, or set {VARIABLE} to the path of its libcuda.so.1"
    )


def _library() -> str:
    return os.environ.get(VARIABLE) or DEFAULT_DRIVER
