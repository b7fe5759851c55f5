"""A real Mooncake Store for a test: a mooncake_master, and clients that contribute memory, each a process of its own.

The package is optional: `needs_mooncake` skips where it is missing, with the reason.
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.daemon import wait_until
from tests.rigs.runs.ports import free_port
from tests.rigs.store.ports import is_listening

MASTER = Path(sysconfig.get_path("scripts")) / "mooncake_master"
HOST = "127.0.0.1"


def _missing() -> str:
    if importlib.util.find_spec("mooncake") is None or not MASTER.exists():
        return "mooncake-transfer-engine-non-cuda is not installed (make test-store installs it)"
    found = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
    return (
        "" if found.returncode == 0 else f"mooncake.store cannot be imported: {found.stderr.strip().splitlines()[-1]}"
    )


REASON = _missing()
needs_mooncake = pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")

# Contributes memory to the store until its standard input ends, and does what its lines say: `put NAME`, a value under a name.
_SEGMENT = """
import os, sys
os.environ["MC_FORCE_TCP"] = "1"
os.environ["MC_LOG_LEVEL"] = "ERROR"
import mooncake.store
store = mooncake.store.MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print("joined" if code == 0 else f"setup: {code}", flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "put":
        print(store.put(words[1], bytes.fromhex(words[2])), flush=True)
    if words[0] == "exist":
        print(store.is_exist(words[1]), flush=True)
store.close()
"""


class Master:
    """One mooncake_master after another at one port."""

    def __init__(self, directory: Path, **flags: str) -> None:
        self.address = f"{HOST}:{free_port()}"
        self._flags = flags
        self._log = directory / "mooncake_master.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        port = self.address.rpartition(":")[2]
        flags = {
            "rpc_address": HOST,
            "rpc_port": port,
            "metrics_port": str(free_port()),
            "enable_http_metadata_server": "false",
            **self._flags,
        }
        command = [str(MASTER), *(f"--{name}={value}" for name, value in flags.items())]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: is_listening(HOST, int(port)), "the master listens")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Segment:
    """A client of the store that contributes memory: another node without kvpool."""

    def __init__(self, master: Master, size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SEGMENT, master.address, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ},
        )
        assert self._line() == "joined"

    def put(self, name: str, value: bytes) -> int:
        """The library's code for a value under a name."""
        return int(self._ask(f"put {name} {value.hex()}"))

    def exist(self, name: str) -> bool:
        """Whether the store has something under a name."""
        return self._ask(f"exist {name}") == "1"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def mooncake(directory: Path, *, segment_bytes: int = 64 << 20, **flags: str) -> Iterator[tuple[Master, Segment]]:
    """A master, and a client that contributes memory."""
    master = Master(directory, **flags)
    master.start()
    try:
        segment = Segment(master, segment_bytes)
        try:
            yield master, segment
        finally:
            segment.kill()
    finally:
        master.kill()
