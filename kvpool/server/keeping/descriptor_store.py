"""Descriptor store: systemd as the keeper of memory, by sd_notify.

    FDSTORE=1 FDNAME=NAME FDPOLL=0, with a descriptor      it is kept
    FDSTOREREMOVE=1 FDNAME=NAME                            it is kept no more
    LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES                 what a start finds: descriptors from 3 on, and their names

The unit has to allow it (FileDescriptorStoreMax=). systemd says so from version 254 on by the variable FDSTORE; the unit of
this package sets it for older ones. It answers nothing, and reads what a dead process has sent before it notices the death:
what was sent is kept. It gives everything back at a restart, by whomever, and lets it go at a stop, unless
FileDescriptorStorePreserve=yes (254 and later) is set. Whether it stops or restarts it says by the signal (RestartKillSignal=).

Control thread only.
"""

import os
from collections.abc import Collection, Mapping, MutableMapping

from kvpool.server.health.systemd import ServiceManager
from kvpool.tiers.dram.kept.keeper import FILES_MAX, KeeperFault

FIRST = 3
LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
STORE_VARIABLE = "FDSTORE"
PREFIX = "kvpool-"
_PASSED_MAX = 1024


class DescriptorStore:
    """The store of the unit that this process is the main process of."""

    name = "systemd"

    def __init__(self, manager: ServiceManager, passed: dict[str, int]) -> None:
        """`passed`: what this process was started with, see `take_passed`."""
        self._manager = manager
        self._passed = passed

    def __repr__(self) -> str:
        return f"<DescriptorStore {len(self._passed)} passed>"

    def keeps_through(self, *, is_restart: bool) -> bool:
        """See `Keeper`."""
        return is_restart

    def take_memory(self) -> dict[str, int]:
        """See `Keeper`."""
        passed, self._passed = self._passed, {}
        return passed

    def give_memory(self, name: str, descriptor: int) -> None:
        """See `Keeper`."""
        if not self._manager.store(name, descriptor):
            raise KeeperFault("systemd did not take a message")

    def drop_memory(self, names: Collection[str]) -> None:
        """See `Keeper`."""
        unsent = [name for name in names if not self._manager.remove_stored(name)]
        if unsent:
            raise KeeperFault("systemd did not take a message")

    def forsake(self) -> bool:
        """See `Keeper`: there is one service manager."""
        return False


def has_store(environment: Mapping[str, str]) -> bool:
    """Whether the service manager keeps as many descriptors as there may be."""
    room = environment.get(STORE_VARIABLE, "")
    return room.isdecimal() and int(room) >= FILES_MAX


def take_passed(environment: MutableMapping[str, str], pid: int) -> dict[str, int]:
    """The descriptors of kept memory that a service manager has started this process with, by name, no longer inheritable. The
    variables are removed: they are not for a child. Called once, before any other descriptor is opened or child started."""
    listen_pid, count, names = (environment.pop(name, "") for name in LISTEN_VARIABLES)
    if listen_pid != str(pid) or not count.isdecimal():
        return {}
    passed: dict[str, int] = {}
    for descriptor, name in zip(range(FIRST, FIRST + min(int(count), _PASSED_MAX)), names.split(":"), strict=False):
        try:
            os.set_inheritable(descriptor, False)
        except OSError:
            continue  # not there
        if name.startswith(PREFIX) and name not in passed:
            passed[name] = descriptor
        else:
            os.close(descriptor)
    return passed
