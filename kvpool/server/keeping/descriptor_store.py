"""Descriptor store: systemd as the keeper of memory, by sd_notify.

    FDSTORE=1 FDNAME=NAME FDPOLL=0, with a descriptor      it is kept, where the unit has room for it, and else closed
    FDSTOREREMOVE=1 FDNAME=NAME                            it is kept no more
    BARRIER=1, with a descriptor                           what was sent before is done: the descriptor is closed
    LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES                 what a start finds: descriptors from 3 on, and their names

The unit has to allow it (FileDescriptorStoreMax=). systemd says so from version 254 on by the variable FDSTORE; the unit of
this package sets it for older ones, whatever a drop-in allows. So the store is tried: it is given pipes, whose own ends show
which of them it has. It reads what a dead process has sent before it notices the death: what was sent is kept. It gives
everything back at a restart, by whomever, and lets it go at a stop, unless FileDescriptorStorePreserve=yes (254 and later) is
set. Whether it stops or restarts it says by the signal (RestartKillSignal=).

Control thread only. A call waits READ_S at most for the manager to read what it was sent.
"""

import itertools
import os
import select
from collections.abc import Collection, Mapping, MutableMapping

from kvpool.server.health.systemd import ServiceManager
from kvpool.tiers.dram.kept.keeper import FILES_MAX, KeeperFault

FIRST = 3
LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
STORE_VARIABLE = "FDSTORE"
PREFIX = "kvpool-"
PROBE = "kvpool-probe"
READ_S = 5.0
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

    def has_room(self) -> bool:
        """Whether it really has room for FILES_MAX. One that does not say so in time is believed if it has given something
        back."""
        count = FILES_MAX - len(self._passed.keys() - {PROBE})
        pipes: list[tuple[int, int]] = []
        try:
            while len(pipes) < count:
                pipes.append(os.pipe())
        except OSError:  # no descriptors are left, and it would need as many
            for end in itertools.chain.from_iterable(pipes):
                os.close(end)
            return False
        self._manager.remove_stored(PROBE)  # of a life that ended in here
        is_sent = self._manager.store(PROBE, *(its_end for _, its_end in pipes))
        poll = select.poll()
        for own_end, its_end in pipes:
            os.close(its_end)
            poll.register(own_end, select.POLLIN)
        is_read = is_sent and self._manager.wait_read(READ_S)
        is_whole = not poll.poll(0)
        self._manager.remove_stored(PROBE)
        for own_end, _ in pipes:
            os.close(own_end)
        return is_whole if is_read else bool(self._passed)

    def why_it_may_end(self, *, is_restart: bool) -> str:
        """See `Keeper`."""
        return "" if is_restart else "it is no restart"

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
        if names:
            self._manager.wait_read(READ_S)  # the memory is free then; one that is slower does it later

    def forsake(self) -> bool:
        """See `Keeper`: there is one service manager."""
        return False


def has_store(environment: Mapping[str, str]) -> bool:
    """Whether the service manager keeps as many descriptors as there may be."""
    room = environment.get(STORE_VARIABLE, "")
    return room.isdecimal() and int(room) >= FILES_MAX


def take_passed(environment: MutableMapping[str, str], pid: int) -> dict[str, int]:
    """The descriptors of kept memory that a service manager has started this process with, by name, no longer inheritable. It
    closes the others, and removes the variables: they are not for a child. Called once, before any other descriptor is opened
    or child started."""
    listen_pid, count, names = (environment.pop(name, "") for name in LISTEN_VARIABLES)
    if listen_pid != str(pid) or not count.isdecimal():
        return {}
    passed: dict[str, int] = {}
    named = names.split(":")
    for place in range(min(int(count), _PASSED_MAX)):
        descriptor, name = FIRST + place, named[place] if place < len(named) else ""
        try:
            os.set_inheritable(descriptor, False)
        except OSError:
            continue  # not there
        if name.startswith(PREFIX) and name not in passed:
            passed[name] = descriptor
        else:
            os.close(descriptor)
    return passed
