"""A daemon with little DRAM over an SSD tier, as the campaigns need it, and the checks of its directory."""

import re
import time
from pathlib import Path

from tests.rigs.daemon import SMALL, Daemon, wait_until

DRAM_CHUNKS = 48
CAPACITY = 16 << 20
# A daemon that was killed or that died serves again within this time: the median, of two times the shorter, because others may
# use the machine.
DEAD_S_MAX = 2.0


def tier_options(
    path: Path, *, dram_chunks: int = DRAM_CHUNKS, capacity: int = CAPACITY, policy: str = "class-queues"
) -> dict[str, str]:
    """Options of a daemon that writes much down and checkpoints often."""
    return {
        "dram__policy": policy,
        "dram__capacity": f"{dram_chunks * SMALL.chunk_bytes}B",
        "ssd__path": str(path),
        "ssd__capacity": f"{capacity}B",
        "ssd__watermark": "0.3",
        "ssd__checkpoint_interval": "100ms",
        "server__lease_ttl": "2s",
    }


def restart(daemon: Daemon) -> float:
    """Start a daemon that is dead; the seconds until it answered and its tier was open or given up."""
    started = time.monotonic()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] != "starting", "the tier is open or given up")
    return time.monotonic() - started


def is_dead(daemon: Daemon) -> bool:
    """True if the process has ended by itself."""
    assert daemon.process is not None
    return daemon.process.poll() is not None


def let_pass(seconds: float) -> None:
    """Let other work go on for so long: the seed decides when a fault comes."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, "time passes", seconds + 5.0)


def directory_bytes(path: Path) -> int:
    """Sizes of all files in the directory."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def assert_sound(daemon: Daemon) -> None:
    """No invariant is broken. A deep check may find chunks that a fault has spoilt, and has dropped them then. A tier that
    could not be opened, is not written, or whose disk changes bytes, stays named.
    """
    shown = (
        r"it could not be opened: ",
        r"chunks are read, and none is written: ",
        r"\d+ chunks within \d+ s were not what ",
    )
    lasting = f"ssd: ({'|'.join(shown)})"
    known = rf"{lasting}|ssd: chunk [0-9a-f]{{64}}: "
    assert [line for line in daemon.problems() if not re.match(known, line)] == []
    assert [line for line in daemon.problems() if not re.match(lasting, line)] == []
