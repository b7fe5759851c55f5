"""TransferEngine behind the calls that its child process makes.

Imported by that process alone, and the library only when it begins: it is an optional package. Measured on 0.3.13: the argument
`protocol` does not choose the protocol, the environment does; ports listen on every interface, without authentication; calls
raise nothing; an asynchronous call answers 0 or all ones where it fails; an id that has ended must not be asked for again; over
TCP a buffer that is not registered works, over RDMA it fails.
"""

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool.transfer.child.mooncake import choose_protocol, import_library

# Needs no server for its metadata: nodes ask each other.
METADATA = "P2PHANDSHAKE"
# Of an attempt to reach another node's handshake port: others wait meanwhile.
CONNECT_S = 1
# Ports that former lives had are avoided: others remember what they knew of those.
PORT_ATTEMPTS = 8
VERBS_DEVICES = "/dev/infiniband/uverbs"
_REFUSED_IDS = (0, (1 << 64) - 1, -1)


class TransferEngineClient:
    """See `child.MoveClient`. `library`: its own object, with the memory registered."""

    notices = None
    met = 0

    def __init__(self, engine: Any, memory: mmap.mmap, facts: Mapping[str, Any]) -> None:
        self.library = engine
        self._base: int = facts["base"]
        self._size = len(memory)
        self.facts = facts

    def submit(self, other: str, offset: int, address: int, size: int) -> int:
        """See `MoveClient`."""
        if offset < 0 or size <= 0 or offset + size > self._size:
            return 0
        number: int = self.library.batch_transfer_async_read(other, [self._base + offset], [address], [size])
        return 0 if number in _REFUSED_IDS else number

    def look(self, number: int) -> int:
        """See `MoveClient`."""
        code: int = self.library.transfer_check_status(number)
        return code if code in (1, -1) else 0  # one that has timed out in the library may still write: it has not ended

    def close(self) -> None:
        """See `MoveClient`."""
        self.library.unregister_memory(self._base)


def connect_engine(settings: Mapping[str, Any], memory: mmap.mmap) -> TransferEngineClient:
    """Begin to serve and to read. Raises ConnectionError, ImportError or OSError with the reason."""
    protocol = settings["protocol"]
    choose_protocol(protocol, "peer.rdma_protocol")
    first, last = settings["ports"]
    os.environ["MC_MIN_RPC_PORT"], os.environ["MC_MAX_RPC_PORT"] = str(first), str(last)
    os.environ["MC_HANDSHAKE_CONNECT_TIMEOUT"] = str(CONNECT_S)
    library = import_library("mooncake.engine", "rdma")
    for _ in range(PORT_ATTEMPTS):
        engine = library.TransferEngine()
        code = engine.initialize(settings["host"], METADATA, protocol, settings["devices"])
        if code:
            raise ConnectionError(
                f"TransferEngine cannot begin at {settings['host']}, devices {settings['devices']!r}, ports {first} to "
                f"{last}: code {code}"
            )
        port = engine.get_rpc_port()
        if port not in settings["former_ports"]:
            break
    _verify_protocol(protocol)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = engine.register_memory(base, len(memory))
    if code:
        raise ConnectionError(
            f"{len(memory)} bytes cannot be registered with TransferEngine: code {code} (RDMA pins them: see LimitMEMLOCK)"
        )
    host = f"[{settings['host']}]" if ":" in settings["host"] else settings["host"]
    return TransferEngineClient(engine, memory, {"server": f"{host}:{port}", "base": base, "port": port})


def _verify_protocol(protocol: str) -> None:
    """Raises ConnectionError where the library uses another protocol than it was asked for."""
    uses_verbs = any(name.startswith(VERBS_DEVICES) for name in open_files())
    if uses_verbs != (protocol == "rdma"):
        used = "rdma" if uses_verbs else "tcp"
        raise ConnectionError(f"TransferEngine uses {used}, expected {protocol}: see peer.rdma_devices")


def open_files() -> list[str]:
    """What this process has open, as the system names it."""
    folder = Path("/proc/self/fd")
    # The descriptor of the listing itself is closed by then.
    return [str(one.readlink()) for one in list(folder.iterdir()) if one.is_symlink()]
