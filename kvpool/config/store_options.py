"""Section `store` of the configuration: its options, their record, and the checks between them. See `config`."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.config.options import (
    Option,
    choice_option,
    count_option,
    duration_option,
    lack_of_mooncake,
    size_option,
)
from kvpool.errors import InvalidArgument
from kvpool.units import write_size

P2P_HANDSHAKE = "P2PHANDSHAKE"
ADDRESS_BYTES_MAX = 256
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_HOST = re.compile(r"[A-Za-z0-9._:-]*")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Section `store`; sizes in bytes, durations in seconds. `master` empty: there is no shared store."""

    master: str
    host: str
    protocol: str
    metadata: str
    segment: int
    buffer: int
    publish: str
    replicas: int
    pin: str
    answer_timeout: float
    transfer_timeout: float
    miss_ttl: float

    @property
    def is_used(self) -> bool:
        """Whether chunks are fetched from a shared store."""
        return bool(self.master)

    @property
    def lack(self) -> str:
        """What this machine lacks for it; empty for nothing."""
        missing = lack_of_mooncake("store") if self.is_used else ""
        return f"store.master is set, and {missing}" if missing else ""

    @property
    def own_host(self) -> str:
        """The name or address by which the other clients of the store reach this node."""
        return self.host or socket.gethostname()


def check_store(parsed: Mapping[str, Any], faults: list[str]) -> None:
    """Add the faults of these options' values together."""
    if parsed["store.segment"] and not parsed["store.master"]:
        faults.append(f"store.segment is {write_size(parsed['store.segment'])}, expected store.master beside it")


def _master(value: Any) -> str:
    if value == "":
        return ""
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) and len(value) <= ADDRESS_BYTES_MAX else None
    if found is None or not 0 < int(found.group(1)) < 1 << 16:
        raise InvalidArgument(repr(value))
    return str(value)


def _host(value: Any) -> str:
    if not isinstance(value, str) or len(value) > ADDRESS_BYTES_MAX or _HOST.fullmatch(value) is None:
        raise InvalidArgument(repr(value))
    return value


def _metadata(value: Any) -> str:
    is_server = isinstance(value, str) and value.startswith("http://") and value.endswith("/metadata")
    if value != P2P_HANDSHAKE and not (is_server and len(value) <= ADDRESS_BYTES_MAX and value.isprintable()):
        raise InvalidArgument(repr(value))
    return str(value)


STORE_OPTIONS: dict[str, Option] = {
    "store.master": Option(_master, "", '"HOST:PORT" of a mooncake_master (empty: no shared store)'),
    "store.host": Option(_host, "", "a host name or address of this node (empty: the host's name)"),
    "store.protocol": choice_option("tcp", "rdma"),
    "store.metadata": Option(_metadata, P2P_HANDSHAKE, f'"{P2P_HANDSHAKE}" or "http://HOST:PORT/metadata"'),
    "store.segment": size_option("0B", "16TiB", "0B"),
    "store.buffer": size_option("1MiB", "64GiB", "128MiB"),
    "store.publish": choice_option("reused", "retained", "all", "off"),
    "store.replicas": count_option(1, 16, 1),
    "store.pin": choice_option("off", "soft", "hard"),
    "store.answer_timeout": duration_option("1ms", "10s", "20ms"),
    "store.transfer_timeout": duration_option("100ms", "10m", "5s"),
    "store.miss_ttl": duration_option("10ms", "1m", "1s"),
}
