"""`bench footprint`: the cost of an idle daemon: memory beside its arena, CPU time, and the time until it serves.

Ready counts from the start of a launcher that becomes the daemon to the first answered handshake, the interpreter's own
start included, while the arena is still being faulted in; the floor is an interpreter that does nothing, started just before.
Memory and CPU are read when that work is over. Memory is what the kernel counts as resident, less the arena's pages. The index
is part of it as far as it was touched: a daemon that has been filled once has all of it, which `index_full_mib` shows.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.errors import KVPoolError
from kvpool.units import format_size
from kvpool_tools.bench.daemon import memory_available_bytes, start_daemon, wait_until_ready, wait_until_settled
from kvpool_tools.bench.measure import cpu_seconds, median, spread, timed_s
from kvpool_tools.sim.children import stop

CAPACITY_WANTED = 16 << 30
QUICK_CAPACITY = 1 << 30
# Of the available memory, so that a machine without 16 GiB to spare is measured with what it has.
MEMORY_SHARE = 0.75
STARTS = 5
QUICK_STARTS = 2
IDLE_WINDOW_S = 5.0
QUICK_WINDOW_S = 1.0
RSS_BAR_MIB = 45
READY_BAR_S = 0.25
# The clock that is read counts nanoseconds; one wake-up of a process costs some ten thousand of them.
CPU_BAR_S = 0.001
INTERPRETER = [sys.executable, "-c", ""]
ARENA_NAME = "memfd:kvpool-arena"
INDEX_NAME = "memfd:kvpool-index"


def default_capacity(is_quick: bool) -> int:
    """16 GiB, or what this machine can spare, in whole GiB where possible."""
    wanted = QUICK_CAPACITY if is_quick else CAPACITY_WANTED
    spare = int(memory_available_bytes() * MEMORY_SHARE)
    unit = 1 << 30 if spare >= 1 << 30 else 1 << 20
    return min(wanted, spare // unit * unit)


def bench_footprint(capacity: int, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """One row: a daemon with an arena of `capacity` bytes. It is started several times and left alone the last time."""
    starts = QUICK_STARTS if is_quick else STARTS
    window_s = QUICK_WINDOW_S if is_quick else IDLE_WINDOW_S
    steps = starts + 2
    ready_s: list[float] = []
    floor_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
        socket = f"{directory}/kvpool.sock"
        for number in range(starts):
            floor_s.append(timed_s(lambda: subprocess.run(INTERPRETER, check=True)))  # noqa: S603 - nothing
            begin = time.perf_counter()
            process = start_daemon(socket, capacity)
            try:
                wait_until_ready(socket, process)
                ready_s.append(time.perf_counter() - begin)
                advance(steps)
                if number < starts - 1:
                    continue
                info = wait_until_settled(socket, process, capacity)
                advance(steps)
                before_s, start = cpu_seconds(process.pid), time.perf_counter()
                time.sleep(window_s)
                idle_cpu_s, idle_s = cpu_seconds(process.pid) - before_s, time.perf_counter() - start
                settled_cpu_s = before_s
                resident = resident_bytes(process.pid)
            finally:
                stop(process)
        advance(steps)
    times = [own / least for own, least in zip(ready_s, floor_s, strict=True)]
    arena, index = resident[ARENA_NAME], resident[INDEX_NAME]
    return [
        {
            "name": f"idle daemon, {format_size(capacity)}",
            "capacity_bytes": capacity,
            "starts": starts,
            "ready_s": round(median(ready_s), 3),
            "ready_spread_s": spread(ready_s, 3),
            "ready_bar_s": READY_BAR_S,
            "interpreter_s": round(median(floor_s), 3),
            "ready_times_floor": round(median(times), 1),
            "ready_times_floor_spread": spread(times, 1),
            "rss_mib": _mib(resident["all"] - arena),
            "rss_index_mib": _mib(index),
            "index_full_mib": _mib(info["index_bytes"]),
            "rss_bar_mib": RSS_BAR_MIB,
            "arena_mib": _mib(arena),
            "idle_s": round(idle_s, 2),
            "idle_cpu_seconds": round(idle_cpu_s, 6),
            "idle_cpu_bar_seconds": CPU_BAR_S,
            "cpu_seconds": round(settled_cpu_s, 2),
        }
    ]


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident bytes of a process: of `all` its mappings, and of the arena's and the index's. Raises KVPoolError."""
    sums = {"all": 0, ARENA_NAME: 0, INDEX_NAME: 0}
    name = ""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError as error:
        raise KVPoolError(f"the memory of process {pid} cannot be read: {error.strerror}") from error
    for line in lines:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = next((known for known in (ARENA_NAME, INDEX_NAME) if known in line), "")
        elif line.startswith("Rss:"):
            size = int(line.split()[1]) * 1024
            sums["all"] += size
            if name:
                sums[name] += size
    return sums


def _mib(size: int) -> float:
    return round(size / (1 << 20), 1)
