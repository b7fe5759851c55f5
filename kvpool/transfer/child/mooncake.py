"""Mooncake's libraries in a child process: the protocol they use, and what to do where they are missing.

The libraries are imported in child processes alone. They choose a protocol by what the machine has; their argument `protocol`
does not (measured on 0.3.13). The environment does, if it is set before the first use.
"""

import importlib
import os
from pathlib import Path
from typing import Any

# Seconds after which the libraries give a transfer up: their least, so that nothing is kept by one that nobody waits for.
LIBRARY_TIMEOUT_S = 5
INFINIBAND = Path("/sys/class/infiniband")
# Of what they write to standard error.
LOG_LEVEL = "WARNING"


def choose_protocol(protocol: str, option: str) -> None:
    """Have the libraries use a protocol. Raises ConnectionError where it cannot be had; `option`: by which it was chosen."""
    os.environ.setdefault("MC_LOG_LEVEL", LOG_LEVEL)
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(LIBRARY_TIMEOUT_S))
    if protocol == "tcp":
        os.environ.pop("MC_FORCE_HCA", None)
        os.environ["MC_FORCE_TCP"] = "1"
        return
    if not has_rdma_devices():
        raise ConnectionError(f"{option} is 'rdma' and {INFINIBAND} has no device: the library would use TCP silently")
    os.environ.pop("MC_FORCE_TCP", None)
    os.environ["MC_FORCE_HCA"] = "1"


def has_rdma_devices() -> bool:
    """Whether this machine has any."""
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def import_library(name: str, extra: str) -> Any:
    """A module of the package. Raises ImportError that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} cannot be imported ({error}): install kvpool[{extra}], and libibverbs1, libnuma1 and libcurl4 "
            "of the system"
        ) from error
