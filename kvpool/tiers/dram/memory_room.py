"""Memory room: a check that the memory of a DRAM tier is available, before any of it is used.

    available := the least of  MemAvailable
                                limit - use + page cache  of the process's control group and each one above it, v1 and v2

Without this check the kernel would kill the daemon, or an engine beside it, while the background pre-fault takes memory that is
not there. A number that cannot be read does not count. Reserved huge pages are counted apart. Blocks; called at the start only.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvpool.clock import Deadline
from kvpool.units import format_size

# Beyond any machine: the value of v1 control groups for "no limit".
UNLIMITED = 1 << 60
# The kernel frees tens of GiB in a second (guess): memory that is not free then is in use.
PATIENCE_S = 10.0
LOOK_S = 0.05


class _GroupFiles(NamedTuple):
    """Names of a control group's files, and of the lines in `memory.stat` that count its page cache."""

    limit: str
    use: str
    cache: tuple[str, str]


_FILES_V2 = _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))
_FILES_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes available, and the source of that number. `most`: the bytes that would be available without other processes."""

    size: int
    source: str
    most: int


def check_memory(
    capacity: int,
    needed_by: Callable[[int], int],
    *,
    allow_overcommit: bool,
    root: Path = Path("/"),
    patience_s: float = PATIENCE_S,
    freed_bytes: int = 0,
) -> None:
    """Check that the memory of a DRAM tier of `capacity` is available. `needed_by`: the bytes that a capacity takes, rising;
    `freed_bytes`: those that the daemon gives back before it takes any.

    Raises MemoryError with the numbers and the largest capacity that fits. Waits up to `patience_s` for other processes to give
    memory back: after the daemon was killed, engines still have its arena mapped.
    """
    needed = needed_by(capacity)
    deadline, never = Deadline(patience_s), threading.Event()
    while True:
        room = find_room(root, freed_bytes)
        if allow_overcommit or room is None or needed <= room.size:
            return
        if needed > room.most or deadline.has_passed():
            break
        never.wait(LOOK_S)
    fitting = _largest(capacity >> 20, lambda mib: needed_by(mib << 20) <= room.size)
    is_index = not fitting and capacity <= room.size
    raise MemoryError(
        f"dram.capacity {format_size(capacity)} takes {format_size(needed)} of memory with the index of all tiers, and "
        f"{format_size(room.size)} can be had by {room.source}: "
        + (f"set dram.capacity to {fitting}MiB at most, " if fitting else "")
        + ("lower dram.max_chunks, or the capacity of the tiers below, " if is_index else "")
        + "free memory, or set dram.allow_overcommit = true"
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, by bisection; 0 where not even 1 fits."""
    least, beyond = 0, most + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least


def find_room(root: Path, freed_bytes: int = 0) -> MemoryRoom | None:
    """The smallest room that any source reports, with what is given back; None without a source."""
    found = [
        replace(room, size=min(room.size + freed_bytes, room.most))
        for room in (_of_machine(root), *_of_groups(root))
        if room is not None
    ]
    return min(found, key=lambda room: room.size, default=None)


def free_huge_bytes(root: Path = Path("/")) -> int:
    """Bytes in huge pages that are reserved and free."""
    memory = _numbers(root / "proc/meminfo")
    return memory.get("HugePages_Free", 0) * memory.get("Hugepagesize", 0) << 10


def _of_machine(root: Path) -> MemoryRoom | None:
    numbers = _numbers(root / "proc/meminfo")
    available, most = numbers.get("MemAvailable"), numbers.get("MemTotal", 0) << 10
    return None if available is None else MemoryRoom(available << 10, "MemAvailable in /proc/meminfo", most)


def _of_groups(root: Path) -> list[MemoryRoom | None]:
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            found += [_of_group(folder, root, _FILES_V2) for folder in _upwards(root / "sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            found += [_of_group(folder, root, _FILES_V1) for folder in _upwards(root / "sys/fs/cgroup/memory", path)]
    return found


def _upwards(mount: Path, path: str) -> list[Path]:
    """A group's folder and its parents. In a container the path may be the host's; folders that do not exist are skipped."""
    steps = [step for step in path.split("/") if step and step != ".."]
    return [mount.joinpath(*steps[:count]) for count in range(len(steps), -1, -1)]


def _of_group(folder: Path, root: Path, files: _GroupFiles) -> MemoryRoom | None:
    limit, use = _number(folder / files.limit), _number(folder / files.use)
    if limit is None or use is None or limit >= UNLIMITED:
        return None
    counts = _numbers(folder / "memory.stat")
    unused = max(limit - use + sum(counts.get(name, 0) for name in files.cache), 0)
    return MemoryRoom(min(unused, limit), f"{files.limit} of /{folder.relative_to(root)}", limit)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of `name number` or `name: number kB`, by name."""
    words = [line.replace(":", " ").split() for line in _lines(path)]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
