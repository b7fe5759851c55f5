"""Resources of a daemon's process, read from /proc, and a check that clients have left nothing behind in it.

Not a profiler: it looks from outside and never asks the daemon to do anything that costs.
"""

import os
import select
from pathlib import Path

from tests.rigs.daemon import Daemon, wait_until

HELD = ("leases", "tickets", "reservations", "pins", "dram.zombie_slots")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pid_of(daemon: Daemon) -> int:
    """The daemon's process."""
    assert daemon.process is not None
    return daemon.process.pid


def open_fds(daemon: Daemon) -> int:
    """Descriptors that it has open."""
    return len(os.listdir(f"/proc/{pid_of(daemon)}/fd"))


def fds_at_rest(daemon: Daemon) -> int:
    """Descriptors that it has open without any connection."""
    with daemon.admin() as admin:
        wait_until(lambda: admin.stats()["server"]["connections"] == 1, "the asking connection alone is open")
        return open_fds(daemon) - 1


def private_bytes(daemon: Daemon) -> int:
    """Resident memory of its own: the arena, which is shared, does not count."""
    for line in Path(f"/proc/{pid_of(daemon)}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say RssAnon")


def cpu_seconds(daemon: Daemon) -> float:
    """CPU time it has used."""
    fields = Path(f"/proc/{pid_of(daemon)}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def spent_s(daemon: Daemon) -> float:
    """CPU seconds of 0.3 s."""
    begun_s = cpu_seconds(daemon)
    select.select([], [], [], 0.3)
    return cpu_seconds(daemon) - begun_s


def assert_nothing_is_left(daemon: Daemon, *, fds: int) -> None:
    """Every connection is gone and so is all that it held; what is stored is sound, bytes included."""
    wait_until(lambda: daemon.stats()["connections"] == 1, "every connection but the asking one has ended")
    stats = daemon.stats()
    assert {name: stats[name] for name in HELD if stats[name]} == {}
    assert daemon.problems(deep=True) == []
    wait_until(lambda: open_fds(daemon) <= fds, f"the daemon has no more than {fds} descriptors")


def assert_never_internal(daemon: Daemon) -> None:
    """No request has had an unexpected error."""
    log = daemon.log()
    assert "Traceback" not in log, log[-4000:]
    assert "never retrieved" not in log, log[-4000:]
    assert "never awaited" not in log, log[-4000:]
