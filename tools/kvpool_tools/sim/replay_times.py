"""Start times of a replay's requests: one number a line, seconds of the machine's monotonic clock, in the trace's order.

`bench replay --times` writes such a file and `simulate --times` reads it, so that a policy that learns from ages sees the same
ages in both. Main thread of a command only.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from kvpool.errors import InvalidArgument


def write_times(path: Path, began_s: Sequence[float]) -> None:
    """Write the file. Raises InvalidArgument where that fails."""
    try:
        path.write_text("".join(f"{at_s:.9f}\n" for at_s in began_s))
    except OSError as error:
        raise InvalidArgument(f"--times {path} cannot be written: {error.strerror}") from error


def read_times(path: Path) -> list[float]:
    """The times of a file. Raises InvalidArgument."""
    try:
        times = [float(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--times {path}: {error}, expected seconds, one number a line") from error
    if not times or not all(math.isfinite(at_s) and at_s >= 0 for at_s in times):
        raise InvalidArgument(f"--times {path}: {len(times)} times, expected at least one, none below 0")
    return times
