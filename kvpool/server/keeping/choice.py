"""Choice of a keeper: who keeps this daemon's memory, or why nobody does.

    server.keep_memory   off        nobody
                         systemd    the descriptor store of the unit
                         keeper     a process of its own, which ends with its container or control group
                         auto       systemd where its unit has a store; nobody under a service manager without one, and in
                                    a container whose first process the daemon is; else a process of its own

What another choice has left with the others is dropped: it would else take the memory that this life needs.
Control thread only.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.config.config import ServerConfig
from kvpool.server.health.systemd import ServiceManager
from kvpool.server.keeping.descriptor_store import DescriptorStore, has_store
from kvpool.server.keeping.own_keeper import OwnKeeper
from kvpool.tiers.dram.kept.keeper import FILES_MAX, KeeperFault

log = logging.getLogger(__name__)

FIRST_PROCESS = 1
MAIN_PROCESS_VARIABLE = "SYSTEMD_EXEC_PID"


@dataclass(frozen=True, slots=True)
class Choice:
    """A keeper, or why there is none."""

    keeper: DescriptorStore | OwnKeeper | None
    why_nobody: str = ""


def choose_keeper(
    server: ServerConfig, manager: ServiceManager, passed: dict[str, int], *, environment: Mapping[str, str], pid: int
) -> Choice:
    """The keeper of a process. `passed`: what its service manager has started it with."""
    store, own = DescriptorStore(manager, passed), OwnKeeper(server.socket, server.keep_for)
    is_managed = manager.is_there or environment.get(MAIN_PROCESS_VARIABLE) == str(pid)
    reason = _reason_against(server)
    chosen: DescriptorStore | OwnKeeper | None = None
    if not reason:
        if server.keep_memory != "keeper" and manager.is_there and has_store(environment) and store.has_room():
            chosen = store
        elif server.keep_memory == "systemd":
            reason = f"the service manager has no store for it (FileDescriptorStoreMax={FILES_MAX} of the unit)"
        elif server.keep_memory == "auto" and is_managed:
            reason = f"the unit has no store for it (FileDescriptorStoreMax={FILES_MAX}), and a process would end with the unit"
        elif server.keep_memory == "auto" and pid == FIRST_PROCESS:
            reason = "this is the first process of a container, with which everything in it ends"
        else:
            chosen = own
    for one in (store, own):
        if one is not chosen:
            _drop_left(one)
    return Choice(chosen, reason)


def _reason_against(server: ServerConfig) -> str:
    if server.keep_memory == "off":
        return "server.keep_memory is off"
    if server.staging_bytes:
        return "server.write_mode is copy, whose arena no later process could write"
    return "" if hasattr(os, "pidfd_open") else "this system cannot say whether a process has ended"


def _drop_left(keeper: DescriptorStore | OwnKeeper) -> None:
    """Have a keeper that is not used drop what it has."""
    name = keeper.name
    try:
        found = keeper.take_memory()
        for descriptor in found.values():
            os.close(descriptor)
        keeper.drop_memory(found)
    except KeeperFault as error:
        log.warning(
            "%s is not used, and may still have memory of an earlier daemon, which its end frees: %s", name, error
        )
    else:
        if isinstance(keeper, OwnKeeper) and not keeper.pid:
            keeper.remove_place()
    if isinstance(keeper, OwnKeeper):
        keeper.close()
