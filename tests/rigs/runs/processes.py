"""Processes of this machine that a test has started, or that those have."""

import contextlib
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process lives, and does not only wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants_of(pid: int) -> set[int]:
    """The children of a process, theirs and so on, as long as their parents live."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= {int(child)} | descendants_of(int(child))
    return found
