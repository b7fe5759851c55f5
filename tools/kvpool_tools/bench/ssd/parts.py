"""`bench ssd`: the SSD tier against the disk it is on, part by part, each with its own table.

The measurements are in modules of their own: queue, tail and wait (the native queue without a daemon), end_to_end and reopen.
All work in one fresh folder, which is removed afterwards. Main thread of a command only.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgument
from kvpool.units import format_size, parse_size
from kvpool_tools.bench.disk import disk_folder
from kvpool_tools.bench.ssd.end_to_end import bench_daemon, daemon_disk_bytes
from kvpool_tools.bench.ssd.queue import bench_queue
from kvpool_tools.bench.ssd.reopen import bench_reopen, reopen_disk_bytes
from kvpool_tools.bench.ssd.rig import TOTAL_BYTES_MIN, queue_disk_bytes
from kvpool_tools.bench.ssd.tail import bench_tail
from kvpool_tools.bench.ssd.wait import bench_wait, wait_disk_bytes

DEFAULT_SIZE = "128MiB"
QUICK_SIZE = "16MiB"

Row = dict[str, Any]
Advance = Callable[[int], None]
# One part: its name, the text above its table, and the function that measures it.
Measure = Callable[[str, str, Callable[[Advance], Sequence[Row]]], None]


def parse_total(text: str | None, *, is_quick: bool) -> int:
    """Bytes that one pass moves. Raises InvalidArgument where that is too little."""
    total = parse_size(text or (QUICK_SIZE if is_quick else DEFAULT_SIZE))
    if total < TOTAL_BYTES_MIN:
        raise InvalidArgument(f"--size is {format_size(total)}, expected {format_size(TOTAL_BYTES_MIN)} or more")
    return total


def bench_ssd(parent: str | None, total: int, is_quick: bool, measure: Measure) -> None:
    """All parts on the disk of a folder (None: the user's own). Raises InvalidArgument where that is no disk."""
    needed = max(queue_disk_bytes(total), wait_disk_bytes(), daemon_disk_bytes(total), reopen_disk_bytes(is_quick))
    with disk_folder(parent, needed) as folder:
        parts: dict[str, tuple[str, Callable[[Path, Advance], Sequence[Row]]]] = {
            "queue": (
                "the tier's queue alone, against raw preadv and pwritev of as many bytes",
                lambda at, advance: bench_queue(at, total, is_quick, advance),
            ),
            "tail": (
                "one chunk of demand, idle and while the tier writes at full speed",
                lambda at, advance: bench_tail(at, total, is_quick, advance),
            ),
            "wait": (
                "one chunk of 1 MiB of demand while chunks of 32 MiB are written, in pieces of a write",
                lambda at, advance: bench_wait(at, is_quick, advance),
            ),
            "daemon": (
                "through a daemon: flush --demote, and acquire with load, against raw I/O",
                lambda at, advance: bench_daemon(at, total, is_quick, advance),
            ),
            "reopen": (
                "a killed daemon starts over what it left on disk",
                lambda at, advance: bench_reopen(at, is_quick, advance),
            ),
        }
        for name, (title, run) in parts.items():
            at = folder / name
            at.mkdir(mode=0o700)
            measure(
                f"ssd {name}",
                title,
                lambda advance, name=name, at=at, run=run: [  # type: ignore[misc]
                    {"part": name, **row} for row in run(at, advance)
                ],
            )
