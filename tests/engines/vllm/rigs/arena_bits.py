"""Bits of stored chunks, flipped in the daemon's arena without its knowledge."""

import mmap
import os
from pathlib import Path

import numpy as np

from tests.rigs.daemon import Daemon

PAGE = 4096


def turn_bits(daemon: Daemon, every: int = 10) -> None:
    """Change a bit of every tenth page that holds something, or of fewer: of chunks of one rank, or another."""
    assert daemon.process is not None
    fds = Path(f"/proc/{daemon.process.pid}/fd")
    arena = next(fd for fd in fds.iterdir() if os.readlink(fd).startswith("/memfd:kvpool-arena"))
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = np.frombuffer(memory, np.uint8).reshape(-1, PAGE)
        used = np.flatnonzero(pages.any(axis=1))[::every]
        assert used.size > 0
        pages[used, 77] ^= 16
        del pages
