"""Source of the bytes of an offer: the offering member's own host, and no other.

A peer names the address of its stream. If this node connected to whatever is named, a peer could have it open connections to
third hosts, or to services on its own loopback. Pure functions; any thread.
"""

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """A numeric host, and a port. `is_encrypted`: by TLS."""

    host: str
    port: int
    is_encrypted: bool = False


def stream_of(member: str, offered: str) -> StreamAddress | None:
    """The address to receive from. None where a member offers another host than its own. `tcp://IP:PORT`, or
    offered with `tls`."""
    try:
        own, other = _parse(member), _parse(offered)
        own_host, host = ipaddress.ip_address(own.host), ipaddress.ip_address(other.host)
    except ValueError:
        return None
    if not 0 < other.port < 1 << 16 or host != own_host:
        return None
    return StreamAddress(own.host, other.port, other.is_encrypted)


def _parse(endpoint: str) -> StreamAddress:
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    return StreamAddress(host.removeprefix("[").removesuffix("]"), int(port), scheme == "tls")
