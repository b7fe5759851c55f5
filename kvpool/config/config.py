"""Configuration of the daemon: a TOML file, overridden by `--set section.key=value`, over built-in defaults.

Validated whole before anything is constructed: a bad configuration is refused with every fault at once, each naming the
option, its value and what was expected. The result is frozen: every Config is valid.

Each option is described once, in `OPTIONS`; `configs/kvpool.toml` explains them to operators, and a test compares the two.
"""

import codecs
import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import kvpool_native
from kvpool.config.addresses import LoopbackAddress, parse_loopback
from kvpool.config.event_options import EVENT_OPTIONS, EventsConfig, addresses_of, check_events
from kvpool.config.hbm_options import HBM_OPTIONS, HbmConfig, check_hbm
from kvpool.config.idle_options import idle_options
from kvpool.config.options import (
    DailyWrites,
    Option,
    choice_option,
    count_option,
    duration_option,
    flag_option,
    share_option,
    size_option,
    write_budget_option,
)
from kvpool.config.path_options import FileFault, directory, group, mode, secret_file
from kvpool.config.peer_options import PEER_OPTIONS, PeerConfig, check_peers
from kvpool.config.settings import Setting, settings_of
from kvpool.config.store_options import STORE_OPTIONS, StoreConfig, check_store
from kvpool.errors import ConfigError, InvalidArgument, did_you_mean
from kvpool.socket_path import SERVED_PATH_BYTES_MAX, can_be_served, default_socket
from kvpool.units import parse_size, write_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_OTHER_MARKS = {  # UTF-32's begins with UTF-16's
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
SSD_CAPACITY_MIN = 16 << 20
CONFIG_BYTES_MAX = 1 << 20
_OPTION_NAME = re.compile(r"\b[a-z]+\.[a-z_]+\b")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Section `server`; durations in seconds."""

    socket: str
    socket_mode: int
    metrics: LoopbackAddress | None
    metrics_socket: str
    lease_ttl: float
    reservation_ttl: float
    max_connections: int
    user_quota: float
    max_leases: int
    max_reservations: int
    max_chain_chunks: int
    handshake_timeout: float
    stop_timeout: float
    probe_interval: float
    domain_secret_file: str
    admin_group: int | None
    keep_token_ids: bool
    write_mode: str
    staging: int
    keep_memory: str
    keep_for: float
    stop: str

    @property
    def has_metrics(self) -> bool:
        """Whether metrics and health are served over HTTP."""
        return self.metrics is not None or bool(self.metrics_socket)

    @property
    def staging_bytes(self) -> int:
        """Staging memory of each connection; 0: clients write reserved slots in place."""
        return self.staging if self.write_mode == "copy" else 0


@dataclass(frozen=True, slots=True)
class DramConfig:
    """Section `dram`; sizes in bytes, durations in seconds."""

    capacity: int
    segment: int
    max_chunks: int
    huge_pages: str
    numa: str
    prefault: bool
    prefault_threads: int
    verify: str
    policy: str
    token_ids: int
    connection_quota: float
    retained_quota: float
    announced_quota: float
    announced_ttl: float
    allow_overcommit: bool


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """Section `ssd`; sizes in bytes, durations in seconds. Capacity 0: no such tier."""

    path: str
    create: bool
    capacity: int
    segment: int
    max_chunks: int
    direct: bool
    io: str
    threads: int
    watermark: float
    write_through: bool
    admission: str
    write_budget: DailyWrites
    checkpoint_interval: float
    stall_timeout: float
    stop_timeout: float
    rebuild: bool

    @property
    def write_budget_bytes(self) -> int:
        """Bytes that may be written in a day; 0: no bound."""
        return self.write_budget.bytes_per_day(self.capacity)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Section `log`."""

    level: str


@dataclass(frozen=True, slots=True)
class Config:
    """Every option of a daemon. `settings`: each option's value as it was written, and where, by its name."""

    server: ServerConfig
    hbm: HbmConfig
    dram: DramConfig
    ssd: SsdConfig
    peer: PeerConfig
    store: StoreConfig
    events: EventsConfig
    log: LogConfig
    settings: Mapping[str, Setting] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stop_timeout(self) -> float:
        """Seconds that a stop may take to write down what DRAM alone has."""
        return self.ssd.stop_timeout

    @property
    def shortest_ttl(self) -> float:
        """The shortest time to live, in seconds."""
        return min(self.server.lease_ttl, self.server.reservation_ttl, self.dram.announced_ttl)


@dataclass(frozen=True, slots=True)
class ConfigReading:
    """A configuration as it was read. `faults`: a line for each; `config` has the default of each option in `faulty`, and is
    valid where there are none. `idle`: a line for each option that was given a value and does nothing."""

    config: Config
    faults: tuple[str, ...]
    faulty: frozenset[str]
    idle: tuple[str, ...]

    def of_valid(self, faults: Iterable[str]) -> list[str]:
        """Further faults, but those about an option whose value is known to be faulty."""
        return [fault for fault in faults if self.faulty.isdisjoint(_OPTION_NAME.findall(fault))]


def load_config(path: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file (None: built-in defaults alone) and overrides; the last one of an option wins.

    Raises ConfigError with every fault.
    """
    reading = read_config(path, overrides)
    if reading.faults:
        raise ConfigError(list(reading.faults))
    return reading.config


def read_config(path: str | None = None, overrides: Sequence[str] = ()) -> ConfigReading:
    """What `load_config` reads, with its faults."""
    faults: list[str] = []
    faulty = set()
    text = _read_text(path, faults)
    defaults = {name: option.default for name, option in OPTIONS.items()}
    file, overridden = _read_options(path, text, faults), _read_overrides(overrides, faults)
    settings = settings_of(defaults, file, overridden, path=path, text=text)
    parsed: dict[str, Any] = {}
    for name, setting in settings.items():
        value, option = setting.value, OPTIONS[name]
        try:
            parsed[name] = option.parse(value)
            continue
        except FileFault as fault:
            faults.append(f"{name} is {value!r}, {fault}; expected {option.expected}")
        except (InvalidArgument, ValueError, TypeError, LookupError, ArithmeticError, AttributeError):
            faults.append(f"{name} is {value!r}, expected {option.expected}")
        faulty.add(name)
        parsed[name] = option.parse(option.default)
    together: list[str] = []
    _check_together(parsed, together)
    changed = {
        name: setting.value
        for name, setting in settings.items()
        if parsed[name] != OPTIONS[name].parse(OPTIONS[name].default)
    }
    config = _built(parsed, settings)
    reading = ConfigReading(config, tuple(faults), frozenset(faulty), tuple(idle_options(changed, parsed)))
    return replace(reading, faults=(*faults, *reading.of_valid(together)))


def _built(parsed: Mapping[str, Any], settings: Mapping[str, Setting]) -> Config:
    sections = {
        "server": ServerConfig,
        "hbm": HbmConfig,
        "dram": DramConfig,
        "ssd": SsdConfig,
        "peer": PeerConfig,
        "store": StoreConfig,
        "events": EventsConfig,
        "log": LogConfig,
    }
    built = {
        section: kind(**{name.split(".")[1]: value for name, value in parsed.items() if name.startswith(f"{section}.")})
        for section, kind in sections.items()
    }
    return Config(**built, settings=settings)


def _read_text(path: str | None, faults: list[str]) -> str:
    if path is None:
        return ""
    try:
        return _content_of(path)
    except OSError as error:
        faults.append(f"config file {path} cannot be read: {error.strerror}")
    except ValueError as error:
        faults.append(f"config file {path} is no TOML: {error}")
    return ""


def _read_options(path: str | None, text: str, faults: list[str]) -> dict[str, Any]:
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML, a number of thousands of digits, or nested too deep
        faults.append(f"config file {path} is no TOML: {error}")
        return {}
    return _known(_flatten(tables), faults)


def _content_of(path: str) -> str:
    """The content of a file. Raises ValueError where it is no UTF-8, and OSError, also for anything that is no regular file or
    far too large: nothing may delay a reload."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:  # closes a directory too
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content = file.read(CONFIG_BYTES_MAX + 1)
    if len(content) > CONFIG_BYTES_MAX:
        raise OSError(errno.EFBIG, f"it has more than {CONFIG_BYTES_MAX} bytes")
    for name, marks in _OTHER_MARKS.items():
        if content.startswith(marks):
            raise ValueError(f"it begins with the byte order mark of {name}, expected UTF-8: save it as that")
    return content.decode("utf-8-sig")  # editors of other systems begin a file with a byte order mark


def _read_overrides(overrides: Sequence[str], faults: list[str]) -> dict[str, Any]:
    values = {}
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator or not name.strip():
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
    sections = dict.fromkeys(name.partition(".")[0] for name in OPTIONS)
    for name in values:
        section = name.partition(".")[0]
        if name in sections:
            faults.append(f"{name} is {values[name]!r}, expected a section: [{name}], and options below it")
        elif "." in name and section not in sections:
            fault = f"{section} is no section{did_you_mean(section, sections)}; sections are {', '.join(sections)}"
            faults += [] if fault in faults else [fault]
        elif name not in OPTIONS:
            faults.append(f"{name} is no option{did_you_mean(name, OPTIONS)}")
    return {name: value for name, value in values.items() if name in OPTIONS}


def _check_together(parsed: Mapping[str, Any], faults: list[str]) -> None:
    if parsed["dram.segment"] > parsed["dram.capacity"] and parsed["dram.segment"] != parse_size(
        OPTIONS["dram.segment"].default
    ):
        faults.append(
            f"dram.segment is {write_size(parsed['dram.segment'])}, "
            f"expected at most dram.capacity, {write_size(parsed['dram.capacity'])}"
        )

    if parsed["ssd.capacity"] and not parsed["ssd.path"]:
        faults.append(
            f"ssd.path is '', expected a directory because ssd.capacity is {write_size(parsed['ssd.capacity'])}"
        )
    if 0 < parsed["ssd.capacity"] < SSD_CAPACITY_MIN:
        capacity = write_size(parsed["ssd.capacity"])
        faults.append(f"ssd.capacity is {capacity}, expected 0B or at least {write_size(SSD_CAPACITY_MIN)}")
    check_hbm(parsed, faults)
    check_events(parsed, faults)
    check_peers(parsed, faults)
    check_store(parsed, faults)
    _check_socket_paths(parsed, faults)


def _socket_path(value: Any) -> str:
    path = value or default_socket() if isinstance(value, str) else ""
    if not can_be_served(path):
        raise InvalidArgument(path)
    return path


def _check_socket_paths(parsed: Mapping[str, Any], faults: list[str]) -> None:
    """Check that all sockets have different addresses, and those in the file system, with the files beside the first, paths."""
    socket_path = parsed["server.socket"]
    taken = {os.path.normpath(f"{socket_path}{suffix}"): "server.socket" for suffix in ("", ".new", ".lock", ".keep")}
    single = ("server.metrics_socket", "server.metrics", "peer.listen", "peer.stream")
    named = [*((name, parsed[name]) for name in single), *addresses_of(parsed)]
    for name, address in named:
        place = str(address or "").removeprefix("ipc://").removeprefix("tcp://")
        place = os.path.normpath(place) if place.startswith("/") else place
        if place in taken and (name, taken[place]) != ("peer.stream", "peer.listen"):  # compared with the ports there
            kind = "path" if place.startswith("/") else "address"
            faults.append(f"{name} is {place}, expected another {kind} than that of {taken[place]}")
        elif place and not place.endswith(":0"):
            taken[place] = name


def _numa(value: Any) -> str:
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if text not in ("default", "interleave") and not (text.isascii() and text.isdecimal() and int(text) < 1024):
        raise InvalidArgument(repr(value))
    return text


def _metrics_path(value: Any) -> str:
    return "" if value == "" else _socket_path(value)


OPTIONS: dict[str, Option] = {
    "server.socket": Option(
        _socket_path, "", f"an absolute path of at most {SERVED_PATH_BYTES_MAX} bytes (empty: the default place)"
    ),
    "server.socket_mode": Option(mode, "0660", "octal rights for owner and group, such as 0660"),
    "server.metrics": Option(
        parse_loopback, "off", 'a loopback address and port such as "127.0.0.1:9469" or "[::1]:9469", or "off"'
    ),
    "server.metrics_socket": Option(
        _metrics_path, "", f"an absolute path of at most {SERVED_PATH_BYTES_MAX} bytes (empty: no such socket)"
    ),
    "server.lease_ttl": duration_option("10ms", "1d", "30s"),
    "server.reservation_ttl": duration_option("10ms", "1d", "60s"),
    "server.max_connections": count_option(1, 100_000, 1024),
    "server.user_quota": share_option("0.75", is_above_zero=True),
    "server.max_leases": count_option(1, 1_000_000, 4096),
    "server.max_reservations": count_option(1, 4096, 64),
    "server.max_chain_chunks": count_option(1, 1 << 20, 16384),
    "server.handshake_timeout": duration_option("10ms", "1m", "5s"),
    "server.stop_timeout": duration_option("0s", "1h", "10s"),
    "server.probe_interval": duration_option("0s", "1h", "10s"),
    "server.domain_secret_file": Option(
        secret_file, "", "a regular file of the daemon's user with rights 0600 or less (empty: the default domain)"
    ),
    "server.admin_group": Option(group, "", "the name of a group of this machine, or its number (empty: none)"),
    "server.keep_token_ids": flag_option("true"),
    "server.write_mode": choice_option("in-place", "copy"),
    "server.staging": size_option("64KiB", "16GiB", "64MiB"),
    "server.keep_memory": choice_option("auto", "systemd", "keeper", "off"),
    "server.keep_for": duration_option("1s", "7d", "10m"),
    "server.stop": choice_option("auto", "keep", "demote"),
    **HBM_OPTIONS,
    "dram.capacity": size_option("64KiB", f"{kvpool_native.ARENA_BYTES_MAX >> 40}TiB", "1GiB"),
    "dram.segment": size_option("4KiB", "16GiB", "64MiB"),
    "dram.max_chunks": count_option(0, 1 << 28, 0),
    "dram.huge_pages": choice_option("auto", "hugetlb", "collapse", "off"),
    "dram.numa": Option(_numa, "default", "default, interleave or the number of a NUMA node"),
    "dram.prefault": flag_option("true"),
    "dram.prefault_threads": count_option(1, 64, 2),
    "dram.verify": choice_option("always", "cold"),
    "dram.policy": choice_option("class-queues", "lru"),
    "dram.token_ids": size_option("0B", "4TiB", "0B"),
    "dram.connection_quota": share_option("0.5", is_above_zero=True),
    "dram.retained_quota": share_option("0.3"),
    "dram.announced_quota": share_option("0.25"),
    "dram.announced_ttl": duration_option("10ms", "1h", "30s"),
    "dram.allow_overcommit": flag_option("false"),
    "ssd.path": Option(directory, "", "an absolute path of a directory (needed where ssd.capacity is not 0)"),
    "ssd.create": flag_option("false"),
    "ssd.capacity": size_option("0B", f"{kvpool_native.FILES_BYTES_MAX >> 40}TiB", "0B"),
    "ssd.segment": size_option("64KiB", "64GiB", "1GiB"),
    "ssd.max_chunks": count_option(0, 1 << 28, 0),
    "ssd.direct": flag_option("true"),
    "ssd.io": choice_option("auto", "io_uring", "threads"),
    "ssd.threads": count_option(1, 64, 4),
    "ssd.watermark": share_option("0.5"),
    "ssd.write_through": flag_option("false"),
    "ssd.admission": choice_option("all", "second-touch"),
    "ssd.write_budget": write_budget_option("0B", "8192TiB", "0B", least_writes=0.001, most_writes=1000),
    "ssd.checkpoint_interval": duration_option("100ms", "1h", "5s"),
    "ssd.stall_timeout": duration_option("100ms", "1h", "10s"),
    "ssd.stop_timeout": duration_option("0s", "24h", "10m"),
    "ssd.rebuild": flag_option("false"),
    **PEER_OPTIONS,
    **STORE_OPTIONS,
    **EVENT_OPTIONS,
    "log.level": choice_option("info", "debug", "warning", "error"),
}
