"""Place of a keeper process: whether it may end with the daemon, by what else they have in common.

    where the keeper is                                                     a stop of the daemon
    in a namespace of processes or control groups that is not the first     a container: its end is that of everything in it
    in a control group that has a group above it in common with the         a service, a job, a login session, a container: who
    daemon's, or the same, other than the root                              ends it ends both
    elsewhere, the root included                                            the keeper goes on
    unknown                                                                 as in a container

It looks at the keeper alone for the namespaces: a process that a daemon in a container can see is in it or in one within,
unless the container has those of the machine. Any thread.
"""

import os
from pathlib import Path

from kvpool.index.holders import PROC

# Numbers that the kernel gives the namespaces of its boot.
_FIRST = {"pid": 0xEFFFFFFC, "cgroup": 0xEFFFFFFB}


def why_it_may_end(pid: int, proc: Path = PROC) -> str:
    """Why a keeper process may end with this process, as a clause; empty where that is certain not to be so."""
    keeper = proc / str(pid)
    try:
        for kind, first in _FIRST.items():
            if os.readlink(keeper / "ns" / kind) != f"{kind}:[{first}]":
                return f"it is in a container, by its {kind} namespace"
        groups, own = _groups_of(keeper), _groups_of(proc / "self")
        for hierarchy, group in groups.items():
            is_above = set(group.strip("/").split("/")) == {".."}  # all that the daemon is shown is in it
            common = group if is_above else os.path.commonpath((group, own[hierarchy]))
            if common != "/":
                return f"it is in the control group {common}, as the daemon is"
    except (OSError, KeyError, ValueError):
        return f"{proc} does not show where it is"
    return "" if groups else f"{proc} does not show where it is"


def _groups_of(process: Path) -> dict[str, str]:
    """The control group of a process in each hierarchy. Raises OSError, ValueError."""
    fields = [line.split(":", 2) for line in (process / "cgroup").read_text(errors="replace").splitlines()]
    return {controllers: group for _, controllers, group in fields}
