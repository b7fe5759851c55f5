"""Start checks: every fault of a configuration that options, files, places and this machine show, found together before
anything of the daemon begins: at a start, a reload and by `kvpoold --check`. Nothing is made, bound, joined or changed.

Any thread.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvpool_native
from kvpool import failpoint
from kvpool.clock import MonotonicClock
from kvpool.config.config import Config, read_config
from kvpool.errors import ConfigError
from kvpool.keys import domain_key, domain_tag
from kvpool.ownership import fault_of_left, fault_of_other, fault_of_root, fault_of_socket_place
from kvpool.pool.lower_tiers import plan_tiers
from kvpool.server.connections.local_socket import bound_name
from kvpool.server.descriptor_room import descriptor_limit, plan_descriptors
from kvpool.server.keeping.choice import reason_against
from kvpool.server.keeping.own_keeper import SUFFIX, OwnKeeper
from kvpool.server.listeners import fault_of_address, listens_at
from kvpool.tiers.dram.kept.kept_memory import KeptMemory
from kvpool.tiers.dram.memory_room import free_huge_bytes
from kvpool.tiers.dram.numa import check_numa
from kvpool.tiers.dram.tier import check_memory_fits, plan_geometry

SECRET_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """A configuration that a start would take. `idle`: a line for each option that does nothing."""

    config: Config
    idle: tuple[str, ...]


def checked_config(path: str | None, overrides: Sequence[str]) -> CheckedConfig:
    """The configuration of a file and overrides. Raises ConfigError with the faults of every stage of a start."""
    reading = read_config(path, overrides)
    faults = [*reading.faults, *failpoint.faults, *reading.of_valid(_faults_of_start(reading.config))]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return CheckedConfig(reading.config, reading.idle)


def read_secret(path: str) -> bytes:
    """The secret of all keys; empty without a file. Raises ConfigError."""
    if not path:
        return b""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            secret = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            [f"server.domain_secret_file is {path!r}: {error.strerror}, expected a readable file"]
        ) from error
    if not 0 < len(secret) <= SECRET_BYTES_MAX:
        size = "empty" if not secret else f"longer than {SECRET_BYTES_MAX} bytes"
        raise ConfigError(
            [f"server.domain_secret_file is {path!r}, which is {size}, expected 1 to {SECRET_BYTES_MAX} bytes"]
        )
    return secret


def lacks_that_refuse(config: Config) -> Iterator[str]:
    """What this machine lacks at this moment, without which no daemon would serve."""
    if is_running(config):
        return
    plans, found = plan_tiers(config), _kept_memory(config)
    try:
        check_memory_fits(
            config.dram,
            plans.further_entries,
            upper=plans.region,
            resident_bytes=found.resident_bytes,
            freed_bytes=found.bytes_to_drop,
        )
    except MemoryError as error:
        yield str(error)
    yield from addresses_in_use(config)


def addresses_in_use(config: Config) -> Iterator[str]:
    """Addresses of the configuration that this machine lacks, or that another process has. REQUIRES: no daemon serves there."""
    named = [*config.events.endpoints, ("server.metrics", str(config.server.metrics or ""))]
    if config.peer.is_used:
        named += [("peer.listen", str(config.peer.listen)), ("peer.stream", str(config.peer.stream))]
    for option, endpoint in named:
        if endpoint and not endpoint.startswith("ipc://"):
            fault = fault_of_address(endpoint.removeprefix("tcp://"))
            yield from [f"{option} {endpoint} cannot be bound: {fault}"] if fault else []
    files = [*config.events.files, ("server.metrics_socket", config.server.metrics_socket)]
    for option, path in files:
        if path and listens_at(path):
            yield f"{option} {path} is served by another process: stop it, or choose another path"


def lacks_that_degrade(config: Config) -> Iterator[str]:
    """What this machine lacks at this moment, without which a daemon would serve less."""
    shortage = plan_descriptors(config, descriptor_limit()).shortage
    if shortage:
        yield shortage
    if config.dram.huge_pages == "hugetlb" and not is_running(config):
        needed = plan_geometry(config.dram, plan_tiers(config).further_entries).arena_bytes
        if free_huge_bytes() < needed:
            yield f"dram.huge_pages is hugetlb, and {free_huge_bytes()} bytes of {needed} are reserved and free"
    if not is_running(config) and (reason := _kept_memory(config).why_dropped):
        yield f"a start would leave or drop the memory that a keeper has, and dram would begin empty: {reason}"
    yield from filter(None, [*(plan.examine() for plan in plan_tiers(config).all), config.store.lack, config.peer.lack])


def is_running(config: Config) -> bool:
    """Whether a daemon serves at the configuration's socket: it has the memory that another start would look for. Nothing is
    connected, which it would log."""
    return listens_at(bound_name(config.server.socket))


@dataclass(frozen=True, slots=True)
class _Found:
    """What the keeper process of a socket has, as a start would find it: bytes of an arena to take over, and bytes to drop, and
    why."""

    resident_bytes: int = 0
    bytes_to_drop: int = 0
    why_dropped: str = ""


def _kept_memory(config: Config) -> _Found:
    server = config.server
    if not listens_at(server.socket + SUFFIX):
        return _Found()
    keeper = OwnKeeper(server.socket, None)
    tag = domain_tag(domain_key(read_secret(server.domain_secret_file)))
    kept = KeptMemory(keeper, tag, MonotonicClock(), why_cold=reason_against(server))
    try:
        geometry = plan_geometry(config.dram, plan_tiers(config).further_entries, plan_tiers(config).region)
        former = kept.find_memory(config, geometry)
        return _Found(0 if former is None else former.resident_bytes, kept.bytes_to_drop, kept.reason)
    except OSError as error:
        return _Found(why_dropped=str(error))
    finally:
        kept.leave_found()
        keeper.close()


def _faults_of_start(config: Config) -> Iterator[str]:
    yield from filter(None, [kvpool_native.copy_variant_fault()])
    yield from _faults_of(lambda: read_secret(config.server.domain_secret_file))
    yield from _faults_of(lambda: check_numa(config.dram.numa))
    yield from _faults_of(lambda: plan_descriptors(config, descriptor_limit()))  # plans the tiers, too
    yield from _faults_of_places(config)
    events = config.events
    if events.publish is not None and (events.keys or events.allow):
        from kvpool.config.curve_keys import read_allow_list, read_key_file  # imports ZMQ

        if events.keys:
            yield from _faults_of(lambda: read_key_file("events.keys", events.keys))
        if events.allow:
            yield from _faults_of(lambda: read_allow_list("events.allow", events.allow))
    if config.peer.is_used:
        from kvpool.server.peers.trust import read_trust  # as above

        yield from _faults_of(lambda: read_trust(config.peer))


def _faults_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return error.faults
    return []


def _fault_beside(socket: str) -> str:
    """What is wrong with the lock of the daemon's socket, or with what has its name while it is made; empty for nothing."""
    lock, fresh = Path(f"{socket}.lock"), Path(bound_name(socket))
    if not listens_at(bound_name(socket)) and (fault := fault_of_left(socket)):
        return fault
    if os.path.lexists(lock):
        if not stat.S_ISREG(lock.lstat().st_mode):
            return f"{lock} exists and is no file: remove it, or choose another path"
        if not os.access(lock, os.R_OK | os.W_OK, effective_ids=True):
            return fault_of_other(str(lock))
    if fresh.is_dir() and not fresh.is_symlink():
        return f"{fresh} exists and is a directory: remove it, or choose another path"
    return ""


def _faults_of_places(config: Config) -> Iterator[str]:
    """Of the sockets in the file system."""
    server = config.server
    if fault := fault_of_socket_place(server.socket) or fault_of_root(server.socket) or _fault_beside(server.socket):
        yield f"server.socket cannot be there: {fault}"
    if server.metrics_socket and (fault := fault_of_socket_place(server.metrics_socket)):
        yield f"server.metrics_socket cannot be there: {fault}"
    has_keys = bool(config.events.keys)
    for option, path in config.events.files:
        if os.path.lexists(path) and not Path(path).is_socket():
            yield f"{option} is ipc://{path}, which exists and is no socket: move it away, or choose another path"
        elif not has_keys and (fault := fault_of_socket_place(path, is_private=True)):
            yield f"{option} is ipc://{path}, where others could put a socket of their own: {fault}"
