"""A stranger: whoever reaches TransferEngine's port, without any key. It writes what it likes into what is registered there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.rigs.transfer.engine_daemons import DEVICES, HOST, PROTOCOL

# Lines on standard input: SERVER OFFSET SIZE TIMES, relative to the first thing that the server has registered.
_PROGRAM = """
import os, sys
os.environ["MC_FORCE_TCP" if sys.argv[1] == "tcp" else "MC_FORCE_HCA"] = "1"
os.environ["MC_LOG_LEVEL"] = "ERROR"
import ctypes
import mooncake.engine
engine = mooncake.engine.TransferEngine()
code = engine.initialize(sys.argv[3], "P2PHANDSHAKE", sys.argv[1], sys.argv[2])
memory = ctypes.create_string_buffer(b"\\x5a" * (1 << 20), 1 << 20)
own = ctypes.addressof(memory)
code = code or engine.register_memory(own, 1 << 20)
print("ready" if code == 0 else f"code {code}", flush=True)
for line in sys.stdin:
    server, offset, size, times = line.split()
    base = engine.get_first_buffer_address(server)
    for _ in range(int(times)):
        for at in range(int(offset), int(offset) + int(size), 1 << 20):
            part = min(1 << 20, int(offset) + int(size) - at)
            code = engine.transfer_sync_write(server, own, base + at, part)
    print(code, flush=True)
"""


class Stranger:
    """One such process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, PROTOCOL, DEVICES, HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ},
        )
        assert self._line() == "ready"

    def write(self, server: str, offset: int, size: int, times: int = 1) -> None:
        """Overwrite what a server has registered, from this offset on."""
        self.begin(server, offset, size, times)
        assert self.end() == 0

    def begin(self, server: str, offset: int, size: int, times: int) -> None:
        """Begin to overwrite, so many times."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{server} {offset} {size} {times}\n")
        self._process.stdin.flush()

    def end(self) -> int:
        """The library's code for what was begun."""
        return int(self._line())

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def stranger() -> Iterator[Stranger]:
    """A stranger, until the end of the test."""
    made = Stranger()
    try:
        yield made
    finally:
        made.kill()
