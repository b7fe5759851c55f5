"""The daemon's configuration: a TOML file, overridden by `--set section.key=value`, over built-in defaults.

Validated whole before anything is constructed: a bad configuration is refused with every fault at once, each naming the
option, its value and what was expected. The result is frozen; whoever has a Config has a valid one.

Each option is described once, in `OPTIONS`; `configs/kvpool.toml` explains them to operators, and a test holds the two
together.
"""

import difflib
import ipaddress
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, InvalidArgument
from kvpool.units import format_duration, format_size, parse_duration, parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SSD_CAPACITY_MIN = 16 << 20
SOCKET_PATH_BYTES_MAX = 107 - len(".lock")
PORT_MAX = 65535
LOOPBACK_NETWORK = ipaddress.ip_network("127.0.0.0/8")


@dataclass(frozen=True, slots=True)
class LoopbackAddress:
    """Where a listener that only this machine can reach is bound. Port 0: any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Section `server`; durations in seconds."""

    socket: str
    socket_mode: int
    metrics: LoopbackAddress | None
    lease_ttl: float
    reservation_ttl: float
    max_connections: int
    max_leases: int
    max_reservations: int
    handshake_timeout: float
    stop_timeout: float
    probe_interval: float
    domain_secret_file: str
    keep_token_ids: bool


@dataclass(frozen=True, slots=True)
class DramConfig:
    """Section `dram`; sizes in bytes, durations in seconds."""

    capacity: int
    segment: int
    max_chunks: int
    huge_pages: str
    prefault: bool
    prefault_threads: int
    verify: str
    policy: str
    retained_share: float
    announced_share: float
    announced_ttl: float


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """Section `ssd`; sizes in bytes, durations in seconds. Capacity 0: no such tier."""

    path: str
    capacity: int
    segment: int
    max_chunks: int
    direct: bool
    io: str
    threads: int
    watermark: float
    write_through: bool
    admission: str
    write_budget: int
    checkpoint_interval: float
    rebuild: bool


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Section `log`."""

    level: str


@dataclass(frozen=True, slots=True)
class Config:
    """Every option of a daemon."""

    server: ServerConfig
    dram: DramConfig
    ssd: SsdConfig
    log: LogConfig


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how its value is read, what its default is as a file would write it, and what is expected."""

    parse: Callable[[Any], Any]
    default: str
    expected: str


def default_socket() -> str:
    """Where daemon and commands meet without a configuration: the service's directory if this user can use it."""
    service = Path("/run/kvpool")
    if service.is_dir() and os.access(service, os.W_OK):
        return str(service / "kvpool.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return str(Path(runtime) / "kvpool" / "kvpool.sock")
    return f"/tmp/kvpool-{os.getuid()}/kvpool.sock"  # noqa: S108 - the directory is this user's own


def load_config(path: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file (None: built-in defaults alone) and overrides; the last one of an option wins.

    Raises ConfigError with every fault.
    """
    faults: list[str] = []
    values = {name: option.default for name, option in OPTIONS.items()}
    written: dict[str, Any] = {**values, **_read_file(path, faults), **_read_overrides(overrides, faults)}
    parsed: dict[str, Any] = {}
    for name, value in written.items():
        option = OPTIONS[name]
        try:
            parsed[name] = option.parse(value)
        except (InvalidArgument, ValueError, TypeError):
            faults.append(f"{name} is {value!r}, expected {option.expected}")
    if not faults:
        _check_together(parsed, faults)
    if faults:
        raise ConfigError(faults)
    sections = {"server": ServerConfig, "dram": DramConfig, "ssd": SsdConfig, "log": LogConfig}
    built = {
        section: kind(**{name.split(".")[1]: value for name, value in parsed.items() if name.startswith(f"{section}.")})
        for section, kind in sections.items()
    }
    return Config(**built)


def _read_file(path: str | None, faults: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        faults.append(f"config file {path} cannot be read: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(f"config file {path} is no TOML: {error}")
        return {}
    return _known(_flatten(tables), faults)


def _read_overrides(overrides: Sequence[str], faults: list[str]) -> dict[str, Any]:
    values = {}
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator:
            faults.append(f"--set {override}: expected section.key=value")
            continue
        values.update(_known({name.strip(): value.strip()}, faults))
    return values


def _flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    flat = {}
    for section, table in tables.items():
        if isinstance(table, Mapping):
            flat.update({f"{section}.{key}": value for key, value in table.items()})
        else:
            flat[section] = table
    return flat


def _known(values: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    for name in values:
        if name not in OPTIONS:
            nearest = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f", did you mean {nearest[0]}?" if nearest else ""
            faults.append(f"{name} is no option{hint}")
    return {name: value for name, value in values.items() if name in OPTIONS}


def _check_together(parsed: Mapping[str, Any], faults: list[str]) -> None:
    if parsed["dram.segment"] > parsed["dram.capacity"] and parsed["dram.segment"] != parse_size(
        OPTIONS["dram.segment"].default
    ):
        faults.append(
            f"dram.segment is {format_size(parsed['dram.segment'])}, "
            f"expected at most dram.capacity {format_size(parsed['dram.capacity'])}"
        )

    if parsed["ssd.capacity"] and not parsed["ssd.path"]:
        faults.append(f"ssd.path is '', expected a directory because ssd.capacity is {parsed['ssd.capacity']}")
    if 0 < parsed["ssd.capacity"] < SSD_CAPACITY_MIN:
        faults.append(f"ssd.capacity is {parsed['ssd.capacity']}, expected 0 or at least {SSD_CAPACITY_MIN}")


def _size(low: str, high: str, default: str) -> Option:
    least, most = parse_size(low), parse_size(high)

    def parse(value: Any) -> int:
        size = parse_size(value) if isinstance(value, str) else int(_plain_int(value))
        if not least <= size <= most:
            raise InvalidArgument(f"size {size}")
        return size

    return Option(parse, default, f"a size from {low} to {high}")


def _duration(low: str, high: str, default: str) -> Option:
    least_s, most_s = parse_duration(low), parse_duration(high)

    def parse(value: Any) -> float:
        if not isinstance(value, str):
            raise InvalidArgument("a duration without unit")
        seconds = parse_duration(value)
        if not least_s <= seconds <= most_s:
            raise InvalidArgument(format_duration(seconds))
        return seconds

    return Option(parse, default, f"a duration with its unit, from {low} to {high}")


def _count(least: int, most: int, default: int) -> Option:
    def parse(value: Any) -> int:
        count = int(value, 10) if isinstance(value, str) else _plain_int(value)
        if not least <= count <= most:
            raise InvalidArgument(f"count {count}")
        return count

    return Option(parse, str(default), f"an integer from {least} to {most}")


def _choice(default: str, *others: str) -> Option:
    words = (default, *others)

    def parse(value: Any) -> str:
        if value not in words:
            raise InvalidArgument(str(value))
        return str(value)

    return Option(parse, default, f"one of {', '.join(words)}")


def _flag(default: str) -> Option:
    def parse(value: Any) -> bool:
        if value not in (True, False, "true", "false") or type(value) is int:
            raise InvalidArgument(repr(value))
        return value in (True, "true")

    return Option(parse, default, "true or false")


def _share(default: str) -> Option:
    def parse(value: Any) -> float:
        share = float(value) if isinstance(value, str) else value
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
            raise InvalidArgument(repr(value))
        return float(share)

    return Option(parse, default, "a number from 0 to 1")


def _directory(value: Any) -> str:
    if not isinstance(value, str) or (value and not value.startswith("/")) or "\0" in value:
        raise InvalidArgument(repr(value))
    return value


def _plain_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(repr(value))
    return value


def _socket_path(value: Any) -> str:
    path = value or default_socket() if isinstance(value, str) else ""
    if not path.startswith("/") or len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX or "\0" in path:
        raise InvalidArgument(path)
    return path


def _mode(value: Any) -> int:
    mode = int(value, 8) if isinstance(value, str) else -1
    if mode & ~0o770 or not mode & 0o600:
        raise InvalidArgument(str(value))
    return mode


def _loopback_address(value: Any) -> LoopbackAddress | None:
    if value == "off":
        return None
    host, separator, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not separator or not port.isascii() or not port.isdigit() or int(port, 10) > PORT_MAX:
        raise InvalidArgument(repr(value))
    is_bracketed = host.startswith("[") and host.endswith("]")
    address = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    is_loopback = address in LOOPBACK_NETWORK if address.version == 4 else str(address) == "::1"
    if not is_loopback or is_bracketed != (address.version == 6):
        raise InvalidArgument(repr(value))
    return LoopbackAddress(str(address), int(port, 10))


def _secret_file(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(repr(value))
    if not value:
        return ""
    found = os.lstat(value) if os.path.lexists(value) else None
    if found is None or found.st_mode & 0o177077 != 0o100000 or found.st_uid not in (os.getuid(), 0):
        raise InvalidArgument(value)
    return value


OPTIONS: dict[str, Option] = {
    "server.socket": Option(
        _socket_path, "", f"an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes (empty: the default place)"
    ),
    "server.socket_mode": Option(_mode, "0660", "octal rights for owner and group, such as 0660"),
    "server.metrics": Option(
        _loopback_address, "off", 'a loopback address and port such as "127.0.0.1:9469" or "[::1]:9469", or "off"'
    ),
    "server.lease_ttl": _duration("10ms", "1d", "30s"),
    "server.reservation_ttl": _duration("10ms", "1d", "60s"),
    "server.max_connections": _count(1, 100_000, 1024),
    "server.max_leases": _count(1, 1_000_000, 4096),
    "server.max_reservations": _count(1, 4096, 64),
    "server.handshake_timeout": _duration("10ms", "1m", "5s"),
    "server.stop_timeout": _duration("0s", "1h", "10s"),
    "server.probe_interval": _duration("0s", "1h", "10s"),
    "server.domain_secret_file": Option(
        _secret_file, "", "a regular file of the daemon's user with rights 0600 or less (empty: the default domain)"
    ),
    "server.keep_token_ids": _flag("true"),
    "dram.capacity": _size("64KiB", "4TiB", "1GiB"),
    "dram.segment": _size("4KiB", "16GiB", "64MiB"),
    "dram.max_chunks": _count(0, 1 << 28, 0),
    "dram.huge_pages": _choice("auto", "hugetlb", "collapse", "off"),
    "dram.prefault": _flag("true"),
    "dram.prefault_threads": _count(1, 64, 2),
    "dram.verify": _choice("always", "cold"),
    "dram.policy": _choice("class-queues", "lru"),
    "dram.retained_share": _share("0.3"),
    "dram.announced_share": _share("0.25"),
    "dram.announced_ttl": _duration("10ms", "1h", "30s"),
    "ssd.path": Option(_directory, "", "an absolute path of a directory (needed where ssd.capacity is not 0)"),
    "ssd.capacity": _size("0B", "8TiB", "0B"),
    "ssd.segment": _size("64KiB", "64GiB", "1GiB"),
    "ssd.max_chunks": _count(0, 1 << 27, 0),
    "ssd.direct": _flag("true"),
    "ssd.io": _choice("auto", "io_uring", "threads"),
    "ssd.threads": _count(1, 64, 4),
    "ssd.watermark": _share("0.5"),
    "ssd.write_through": _flag("false"),
    "ssd.admission": _choice("all", "second-touch"),
    "ssd.write_budget": _size("0B", "8192TiB", "0B"),
    "ssd.checkpoint_interval": _duration("100ms", "1h", "5s"),
    "ssd.rebuild": _flag("false"),
    "log.level": _choice("info", "debug", "warning", "error"),
}
