"""Listeners of other processes, and this host's addresses, as the kernel lists them: why an address could not be bound now.

Nothing is bound. Where the kernel's lists cannot be read, nothing is known and nothing is wrong. Any thread.
"""

import errno
import ipaddress
import os
import re
from pathlib import Path

_LISTS = Path("/proc/self/net")
_LISTENS, _LISTENS_LOCALLY = "0A", "00010000"
_LOCAL_V4 = re.compile(r"\|-- (\S+)\n\s+/32 (?:host LOCAL|link BROADCAST)")
_FIRST_FREE_PORT = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
_BINDS_ANY_PORT = 1 << 10  # CAP_NET_BIND_SERVICE
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def fault_of_address(endpoint: str) -> str:
    """Why `HOST:PORT` (an IP address; `[HOST]:PORT` of version 6) could not be bound, in the kernel's words; empty where it
    could. Port 0: any free one."""
    host, _, port = endpoint.rpartition(":")
    address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    if not _is_local(address):
        return os.strerror(errno.EADDRNOTAVAIL)
    if 0 < int(port) < _first_free_port():
        return f"{os.strerror(errno.EACCES)} (ports below {_first_free_port()} are root's)"
    is_taken = any(found == int(port) and _meet(address, taken) for taken, found in _listeners())
    return os.strerror(errno.EADDRINUSE) if is_taken else ""


def listens_at(path: str) -> bool:
    """Whether a process accepts connections at the path to which a unix socket was bound. Nothing is connected."""
    rows = (line.split(maxsplit=7) for line in _lines_of("unix")[1:])
    return any(len(row) == 8 and row[7] == path and row[3] == _LISTENS_LOCALLY for row in rows)


def _first_free_port() -> int:
    """The first port that this process may bind; 0 where that is not known."""
    try:
        status = Path("/proc/self/status").read_text()
        first = int(_FIRST_FREE_PORT.read_text())
    except (OSError, ValueError):
        return 0
    rights = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return 0 if rights & _BINDS_ANY_PORT else first


def _meet(address: _Address, taken: _Address) -> bool:
    """Whether a listener at `taken` keeps others from an address: at the same, or at all of this host. One at all of version 6
    may leave version 4 free, which the lists do not show."""
    mapped = taken.ipv4_mapped if taken.version == 6 else None
    return address in (taken, mapped) or (taken.is_unspecified and taken.version == address.version)


def _is_local(address: _Address) -> bool:
    if address.is_loopback:
        return True
    mapped = address.ipv4_mapped if address.version == 6 else None
    if address.version == 6 and mapped is None:
        rows = _lines_of("if_inet6")
        return not rows or any(int(row.split()[0], 16) == int(address) for row in rows)
    routes = "\n".join(_lines_of("fib_trie"))
    return not routes or str(mapped or address) in _LOCAL_V4.findall(routes)


def _listeners() -> list[tuple[_Address, int]]:
    """Address and port of every listener."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in _lines_of(name)[1:]]
    places = [row[1].split(":") for row in rows if row[3] == _LISTENS]
    return [(_parse_address(address), int(port, 16)) for address, port in places]


def _parse_address(text: str) -> _Address:
    """An address in the kernel's lists: words of 32 bits in this machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def _lines_of(name: str) -> list[str]:
    try:
        return (_LISTS / name).read_text().splitlines()
    except OSError:
        return []
