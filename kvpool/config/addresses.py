"""Addresses of listeners: HTTP on a loopback address, events on a loopback address, a socket of the file system, or,
with keys, any address that is one.

Names, wildcards and addresses without a port are refused: a listener's address is always explicit. Pure functions and values.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Any

from kvpool.errors import InvalidArgument

PORT_MAX = 65535
LOOPBACK_NETWORK = ipaddress.ip_network("127.0.0.0/8")
IPC_PATH_BYTES_MAX = 107
# The interface of a link-local address; `ipaddress` takes any text.
_SCOPE = re.compile(r"[A-Za-z0-9_.:@-]{0,15}")


@dataclass(frozen=True, slots=True)
class LoopbackAddress:
    """Address of a listener that only this machine can reach. Port 0: any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ZmqAddress:
    """Address of a ZMQ socket. `is_local`: only this machine can reach it."""

    endpoint: str
    is_local: bool

    def __str__(self) -> str:
        return self.endpoint

    def fault_without_keys(self, is_insecure: bool) -> str:
        """Why nothing may be published there without CURVE keys; empty where it may. `is_insecure`: every user of this machine
        may read it."""
        if self.endpoint.startswith("ipc://") or (self.is_local and is_insecure):
            return ""
        curve = "events.keys and events.allow"
        if not self.is_local:
            return f"expected ipc or a loopback address because there are no CURVE keys: set {curve}, or use ipc"
        return (
            "where every user of this machine could read prompts and there are no CURVE keys: use ipc:// in the directory of "
            f"server.socket, set {curve}, or set events.insecure = true"
        )


def parse_loopback(value: Any) -> LoopbackAddress | None:
    """`HOST:PORT` of this machine, or None for "off". Raises InvalidArgument or ValueError."""
    if value == "off":
        return None
    host, port = _host_and_port(value)
    if not _is_loopback(host):
        raise InvalidArgument(repr(value))
    return LoopbackAddress(host, port)


def parse_zmq(value: Any) -> ZmqAddress | None:
    """`tcp://IP:PORT` or `ipc:///PATH`, or None for "off". Raises InvalidArgument or ValueError."""
    if value == "off":
        return None
    scheme, separator, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    if not separator:
        raise InvalidArgument(repr(value))
    if scheme == "ipc":
        if not rest.startswith("/") or "\0" in rest or len(rest.encode()) > IPC_PATH_BYTES_MAX:
            raise InvalidArgument(repr(value))
        return ZmqAddress(value, is_local=True)
    if scheme != "tcp":
        raise InvalidArgument(repr(value))
    host, port = _host_and_port(rest)
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if address.version == 6 else None
    if (mapped or address).is_unspecified or (mapped or address).is_multicast:
        raise InvalidArgument(repr(value))
    if address.version == 6 and address.is_link_local:  # the messaging library binds none
        raise InvalidArgument(repr(value))
    return ZmqAddress(f"tcp://{LoopbackAddress(host, port)}", is_local=_is_loopback(host))


def _host_and_port(value: Any) -> tuple[str, int]:
    host, separator, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not separator or not port.isascii() or not port.isdigit() or int(port, 10) > PORT_MAX:
        raise InvalidArgument(repr(value))
    is_bracketed = host.startswith("[") and host.endswith("]")
    address = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    if address.version == 6 and not _SCOPE.fullmatch(address.scope_id or ""):
        raise InvalidArgument(repr(value))
    if is_bracketed != (address.version == 6):
        raise InvalidArgument(repr(value))
    return str(address), int(port, 10)


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return address in LOOPBACK_NETWORK if address.version == 4 else str(address) == "::1"
