"""Stubs of what LMCache imports and this contract does not use, where it is not installed: compiled kernels.

`numba` compiles kernels that run beside a GPU and has two hundred megabytes; LMCache 0.5.7 imports it wherever torch is.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

# LMCache sends none of this from a test.
QUIET = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


def install() -> None:
    """Before LMCache is imported."""
    os.environ.update(QUIET)
    if importlib.util.find_spec("numba") is None:
        module = types.ModuleType("numba")
        vars(module).update(njit=_unchanged, prange=range)
        sys.modules["numba"] = module


def _unchanged(*given: Any, **_: object) -> Callable[..., Any]:
    """A decorator, with arguments or without."""
    if given and callable(given[0]):
        function: Callable[..., Any] = given[0]
        return function
    return lambda function: function
