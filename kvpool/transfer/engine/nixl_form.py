"""Form of agents' descriptions: what another node's may say of itself, measured on NIXL 1.5.1 with UCX over TCP.

UCX connects to where a description says, and writes there at any address of that process. Who asks for a write chooses the
description; so over TCP it counts only where it is this node's own but for its name, its identity, its host, its port and its
memory, and where these are the asking node's. What is not parsed cannot differ. Pure; any thread.

Over RDMA an address leads to a device, which writes only what was registered there: the name alone is looked at.
"""

import ipaddress
from dataclasses import dataclass

# Each life's description begins with this, eight bytes of a length, and its name.
HEAD = b"nixlSerDes|Agent"
# Behind it: UCX's address of the process, with the length before it; its first byte is flags, its identity follows.
_UCX = b"|t\3\0\0\0\0\0\0\0UCX|c"
_LENGTH_BYTES = 8
_IDENTITY_BYTES = 8
_PORT_BYTES = 2
# Behind the port, at the end of UCX's address.
_FLAG_BYTES = 2
PAGE_BYTES = 4096
FIRST_PORT = 1024
# Of addresses in a process.
_ADDRESS_BITS = 47


@dataclass(frozen=True, slots=True)
class Place:
    """What a description says: UCX's identity, where it listens, and which memory is written. `host`: numeric; empty for the
    loopback device of this machine."""

    identity: bytes
    host: str
    port: int
    base: int
    size: int

    def has(self, address: int, size: int) -> bool:
        """Whether bytes at an address are in the memory."""
        return self.base <= address and address + size <= self.base + self.size


class Form:
    """See the module. `described`: this node's own, of this host and port, with the memory of this base and size. Raises
    ValueError where it has another form than was measured."""

    def __init__(self, described: bytes, *, host: str, port: int, base: int, size: int) -> None:
        own = rest_of(described)
        begin = own.find(_UCX) + len(_UCX)
        if begin < len(_UCX):
            raise ValueError("there is no address of UCX")
        ucx_end = begin + _LENGTH_BYTES + int.from_bytes(own[begin : begin + _LENGTH_BYTES], "little")
        self._identity = begin + _LENGTH_BYTES + 1
        self._own = own
        address = ipaddress.ip_address(host)
        packed = address.packed
        self._host_bytes = 0 if address.is_loopback else len(packed)
        behind = self._identity + _IDENTITY_BYTES
        self._host = own.find(packed, behind, ucx_end) if self._host_bytes else behind
        self._port = ucx_end - _PORT_BYTES - _FLAG_BYTES
        memory = base.to_bytes(8, "little") + size.to_bytes(8, "little")
        self._memory = own.find(memory, ucx_end)
        says_port = own[self._port : self._port + _PORT_BYTES] == port.to_bytes(_PORT_BYTES, "big")
        if min(self._host, self._memory) < 0 or self._host + self._host_bytes > self._port or not says_port:
            raise ValueError(f"it does not say {host}, port {port} and {size} bytes")
        self._fixed = self._fixed_of(own)
        self.own = self.place_in(described)

    def place_in(self, described: bytes) -> Place:
        """The place that a description names. Raises ValueError where it has another form than this node's own."""
        rest = rest_of(described)
        if len(rest) != len(self._own) or self._fixed_of(rest) != self._fixed:
            raise ValueError("an agent is described otherwise than this node's own")
        packed = rest[self._host : self._host + self._host_bytes]
        place = Place(
            rest[self._identity : self._identity + _IDENTITY_BYTES],
            str(ipaddress.ip_address(packed)) if packed else "",
            int.from_bytes(rest[self._port : self._port + _PORT_BYTES], "big"),
            int.from_bytes(rest[self._memory : self._memory + 8], "little"),
            int.from_bytes(rest[self._memory + 8 : self._memory + 16], "little"),
        )
        if place.port < FIRST_PORT:
            raise ValueError(f"an agent's port is {place.port}, expected one above {FIRST_PORT - 1}")
        if not place.base or place.base % PAGE_BYTES or not place.size or (place.base + place.size) >> _ADDRESS_BITS:
            raise ValueError("an agent's memory is none that there can be")
        return place

    def _fixed_of(self, rest: bytes) -> bytes:
        """What is the same in all of this form."""
        parts, begin = [], 0
        for at, size in (
            (self._identity, _IDENTITY_BYTES),
            (self._host, self._host_bytes),
            (self._port, _PORT_BYTES),
            (self._memory, 16),
        ):
            parts.append(rest[begin:at])
            begin = at + size
        return b"|".join([*parts, rest[begin:]])


def name_in(described: bytes) -> str:
    """The name in an agent's description. Raises ValueError where there is none."""
    return described[len(HEAD) + _LENGTH_BYTES : _name_end(described)].decode()


def rest_of(described: bytes) -> bytes:
    """What is behind the name. Raises ValueError where there is none."""
    return described[_name_end(described) :]


def _name_end(described: bytes) -> int:
    begin = len(HEAD) + _LENGTH_BYTES
    end = begin + int.from_bytes(described[len(HEAD) : begin], "little")
    if not described.startswith(HEAD) or not begin < end <= len(described):
        raise ValueError("this describes no agent of NIXL")
    return end


def is_host(place: Place, host: str) -> bool:
    """Whether a place is at the address that a node's connection comes from."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    return address.is_loopback if not place.host else str(address) == place.host
