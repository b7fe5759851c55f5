"""Section `peer` of the configuration: its options, their record, and the checks between them. See `config`."""

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpool.config.addresses import ZmqAddress, parse_zmq
from kvpool.config.options import (
    Option,
    bound_option,
    choice_option,
    count_option,
    duration_option,
    flag_option,
    lack_of_mooncake,
    lack_of_nixl,
    share_option,
    size_option,
)
from kvpool.config.path_options import readable_file, secret_file
from kvpool.errors import InvalidArgument

NAME_BYTES_MAX = 256
MEMBERS_CHARACTERS_MAX = 1 << 17
# Of TransferEngine: each life takes two that the last ones did not have.
PORTS_MIN = 16
_DEVICES = re.compile(r"(?:[A-Za-z0-9_.-]+(?:,[A-Za-z0-9_.-]+)*)?")
_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})")


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Section `peer`; sizes in bytes, durations in seconds. `listen` None: this node has no peers."""

    transport: str
    shm: bool
    listen: ZmqAddress | None
    stream: ZmqAddress | None
    name: str
    members: str
    members_refresh: float
    etcd_ca: str
    etcd_certificate: str
    etcd_key: str
    keys: str
    allow: str
    encrypt: bool
    rdma_protocol: str
    rdma_devices: str
    rdma_ports: tuple[int, int]
    rdma_buffer: int
    index: int
    threads: int
    connections: int
    rate: int
    offered: int
    promoted: int
    leased_quota: float
    answer_timeout: float
    stall_timeout: float
    pull_timeout: float

    @property
    def is_used(self) -> bool:
        """Whether this node serves others, and asks them."""
        return self.transport != "off" and self.listen is not None

    @property
    def uses_rdma(self) -> bool:
        """Whether chunks move by TransferEngine, or NIXL, where both nodes have it."""
        return _uses_rdma(self.transport, self.rdma_devices)

    @property
    def lack(self) -> str:
        """What this machine lacks for it; empty for nothing."""
        lack = lack_of_nixl if self.transport == "nixl" else partial(lack_of_mooncake, "rdma")
        missing = lack() if self.is_used and self.uses_rdma else ""
        return f"chunks of other nodes come by TCP: {missing}" if missing else ""

    @property
    def uses_shared_memory(self) -> bool:
        """Whether chunks of nodes on this host are copied out of their memory, and theirs out of this node's."""
        return self.is_used and self.shm and self.transport in ("auto", "rdma", "nixl")

    @property
    def node_name(self) -> str:
        """The name by which others know this node."""
        return self.name or socket.gethostname()


def check_peers(parsed: Mapping[str, Any], faults: list[str]) -> None:
    """Add the faults of these options' values together."""
    if parsed["peer.transport"] == "off":
        return
    if bool(parsed["peer.keys"]) != bool(parsed["peer.allow"]):
        faults.append("peer.keys and peer.allow: expected both or none")
    for name in ("peer.listen", "peer.stream"):
        address = parsed[name]
        if address and not address.is_local and not parsed["peer.keys"]:
            faults.append(
                f"{name} is {address}, expected a loopback address because peer.keys and peer.allow are empty"
            )
    if parsed["peer.encrypt"] and not parsed["peer.keys"]:
        faults.append(
            "peer.encrypt is true, expected peer.keys and peer.allow: secrets of streams are exchanged under them"
        )
    if _uses_rdma(parsed["peer.transport"], parsed["peer.rdma_devices"]):
        _check_rdma(parsed, faults)
    if bool(parsed["peer.listen"]) != bool(parsed["peer.stream"]):
        faults.append("peer.listen and peer.stream: expected both or none")
    elif parsed["peer.listen"] and _host_of(parsed["peer.listen"]) != _host_of(parsed["peer.stream"]):
        faults.append(
            f"peer.stream is {parsed['peer.stream']}, expected the host of peer.listen, {_host_of(parsed['peer.listen'])}: "
            "other nodes receive chunks from no other"
        )
    elif (
        parsed["peer.listen"]
        and parsed["peer.listen"] == parsed["peer.stream"]
        and not _is_any_port(parsed["peer.stream"])
    ):
        faults.append(f"peer.stream is {parsed['peer.stream']}, expected another port than that of peer.listen")
    if parsed["peer.members"] and not parsed["peer.listen"]:
        faults.append(f"peer.members is {parsed['peer.members']!r}, expected peer.listen and peer.stream beside it")
    if bool(parsed["peer.etcd_certificate"]) != bool(parsed["peer.etcd_key"]):
        faults.append("peer.etcd_certificate and peer.etcd_key: expected both or none")
    is_etcd = parsed["peer.members"].startswith("etcd:")
    faults += [
        f"{name} is {parsed[name]!r}, expected peer.members to name etcd:URL beside it"
        for name in ("peer.etcd_ca", "peer.etcd_certificate", "peer.etcd_key")
        if parsed[name] and not is_etcd
    ]


def _uses_rdma(transport: str, devices: str) -> bool:
    return transport in ("rdma", "nixl") or (transport == "auto" and bool(devices))


def _check_rdma(parsed: Mapping[str, Any], faults: list[str]) -> None:
    library = "NIXL" if parsed["peer.transport"] == "nixl" else "TransferEngine"
    if parsed["peer.transport"] == "auto":
        chosen = f"peer.rdma_devices is {parsed['peer.rdma_devices']!r} and peer.transport is 'auto'"
    else:
        chosen = f"peer.transport is {parsed['peer.transport']!r}"
    if parsed["peer.encrypt"]:
        faults.append(f"{chosen} and peer.encrypt is true, expected one of both: {library} sends bytes in clear")
    if not parsed["peer.keys"] or not parsed["peer.listen"]:
        faults.append(
            f"{chosen}, expected peer.listen, peer.keys and peer.allow beside it: {library} listens on every address "
            "of this host"
        )


def _host_of(address: ZmqAddress) -> str:
    return str(ipaddress.ip_address(address.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")))


def _is_any_port(address: ZmqAddress) -> bool:
    return address.endpoint.endswith(":0")


def _tcp(value: Any) -> ZmqAddress | None:
    address = parse_zmq(value)
    if address is not None and not address.endpoint.startswith("tcp://"):
        raise InvalidArgument(repr(value))
    return address


def _members(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MEMBERS_CHARACTERS_MAX:
        raise InvalidArgument(repr(value)[:100])
    return value.strip()


def _devices(value: Any) -> str:
    if not isinstance(value, str) or len(value) > NAME_BYTES_MAX or _DEVICES.fullmatch(value) is None:
        raise InvalidArgument(repr(value))
    return value


def _ports(value: Any) -> tuple[int, int]:
    found = _PORTS.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise InvalidArgument(repr(value))
    first, last = int(found.group(1)), int(found.group(2))
    if not 1024 <= first <= last - PORTS_MIN + 1 <= (1 << 16) - PORTS_MIN:
        raise InvalidArgument(repr(value))
    return first, last


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > NAME_BYTES_MAX:
        raise InvalidArgument(repr(value))
    if value != value.strip():
        raise InvalidArgument(repr(value))
    return value


_TCP_EXPECTED = (
    'an address of this host such as "tcp://192.0.2.7:9470" or "tcp://[2001:db8::7]:9470" '
    '(a loopback address needs no keys), or "off"'
)
_NAME_EXPECTED = f"printable text of at most {NAME_BYTES_MAX} bytes without spaces at its ends (empty: the host's name)"
_MEMBERS_EXPECTED = '"IP:PORT [KEY], ...", "dns:NAME:PORT", "etcd:URL[,URL...][/PREFIX]", or empty: nobody is asked'

PEER_OPTIONS: dict[str, Option] = {
    "peer.transport": choice_option("auto", "rdma", "nixl", "tcp", "off"),
    "peer.shm": flag_option("true"),
    "peer.listen": Option(_tcp, "off", _TCP_EXPECTED),
    "peer.stream": Option(_tcp, "off", _TCP_EXPECTED),
    "peer.name": Option(_name, "", _NAME_EXPECTED),
    "peer.members": Option(_members, "", _MEMBERS_EXPECTED),
    "peer.members_refresh": duration_option("100ms", "1h", "5s"),
    "peer.etcd_ca": Option(readable_file, "", "a file of certificates in PEM (empty: the system's)"),
    "peer.etcd_certificate": Option(readable_file, "", "a file with this node's certificate in PEM (empty: none)"),
    "peer.etcd_key": Option(
        secret_file,
        "",
        "a file with the certificate's key, of the daemon's user with rights 0600 or less (empty: none)",
    ),
    "peer.keys": Option(secret_file, "", "a key file of the daemon's user with rights 0600 or less (empty: no keys)"),
    "peer.allow": Option(readable_file, "", "a file of public keys, one to a line (empty: no keys)"),
    "peer.encrypt": flag_option("false"),
    "peer.rdma_protocol": choice_option("rdma", "tcp"),
    "peer.rdma_devices": Option(_devices, "", 'names of RDMA devices such as "mlx5_0,mlx5_1" (empty: all)'),
    "peer.rdma_ports": Option(_ports, "15000-15999", f'"FIRST-LAST", at least {PORTS_MIN} ports above 1023'),
    "peer.rdma_buffer": size_option("8MiB", "64GiB", "256MiB"),
    "peer.index": size_option("1MiB", "1TiB", "64MiB"),
    "peer.threads": count_option(1, 64, 4),
    "peer.connections": count_option(1, 16, 2),
    "peer.rate": bound_option("64KiB", "1TiB"),
    "peer.offered": bound_option("1MiB", "16TiB", "for a quarter of dram.capacity"),
    "peer.promoted": size_option("1MiB", "16TiB", "256MiB"),
    "peer.leased_quota": share_option("0.5"),
    "peer.answer_timeout": duration_option("10ms", "1m", "2s"),
    "peer.stall_timeout": duration_option("10ms", "1m", "2s"),
    "peer.pull_timeout": duration_option("100ms", "10m", "5s"),
}
