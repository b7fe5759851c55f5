"""Holders: engine connections that may write slots of the arena, and the processes behind them.

A holder's number is its connection's. It is never given twice while one arena lives, through however many lives of the daemon:
a slot that a life leaves in a writer's hands names that writer to the next one.

What cannot be proven counts as running: another user's process may be hidden in /proc, and its number used again; a process of
another PID namespace has no number here (0), and ends unseen. Any thread.
"""

import os
import select
from dataclasses import dataclass
from pathlib import Path

from kvpool.ids import PROOF_BYTES

PROC = Path("/proc")
_START = 19  # field of /proc/PID/stat behind the command's name


@dataclass(frozen=True, slots=True)
class Process:
    """A process by the kernel. `pid` 0: one that cannot be seen from here. `start`: when it began, in ticks since the boot; 0:
    unknown."""

    pid: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of slots: connection `number`, of a process of `user`, whose welcome had this `proof`. `first` not 0: it is no
    connection, and stands for those from that number on to its own, which wrote together."""

    number: int
    process: Process
    proof: bytes
    user: int
    first: int = 0

    @property
    def is_connection(self) -> bool:
        """Whether it stands for itself."""
        return self.proof != bytes(PROOF_BYTES)

    @property
    def is_unknown(self) -> bool:
        """Whether it stands for writers that nobody can name any more."""
        return not self.is_connection and not self.first


def unknown_holder(number: int) -> Holder:
    """What stands for writers whose names are lost. Its number is nobody's."""
    return Holder(number, Process(0), bytes(PROOF_BYTES), 0)


def joint_holder(number: int, *, first: int) -> Holder:
    """What stands for connections of one life that wrote together. Its number is nobody's."""
    return Holder(number, Process(0), bytes(PROOF_BYTES), 0, first)


def process_of(pid: int, proc: Path = PROC) -> Process:
    """The process that has this number now, whose start is unknown where the kernel does not show it."""
    try:
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return Process(pid)
    return Process(pid, int(fields[_START])) if len(fields) > _START else Process(pid)


def has_ended(process: Process, timeout_s: float = 0.0) -> bool:
    """Whether it is certain that a process of this PID namespace runs no more, with all its threads. Waits for so long."""
    if not process.pid:
        return False
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except OSError:  # no descriptors left, or a kernel without this call
        return False
    try:
        now = process_of(process.pid)
        if process.start and now.start and now.start != process.start:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)
