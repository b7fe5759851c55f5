"""Raw round trips over a unix socket: the floor of every request to the daemon.

The echo is a child process with blocking sockets: the least that a daemon on another core costs. While it is measured the two
ends are pinned to cores of their own, where there are two: without that they run sometimes on one core, sometimes on two, which
halves or doubles the floor from run to run (9 and 19 us, measured). Main thread of a command.
"""

import os
import socket as sockets
import subprocess
import sys
from types import TracebackType

from kvpool.errors import KVPoolError
from kvpool_tools.bench.measure import cpu_seconds, timed_s

TIMEOUT_S = 10.0
ECHO = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
size, answer = int(sys.argv[2]), bytes(int(sys.argv[3]))
while True:
    left = size
    while left:
        data = peer.recv(left)
        if not data:
            sys.exit(0)
        left -= len(data)
    peer.sendall(answer)
"""


class RawEcho:
    """A child that answers requests of one length with answers of another. Used as a context manager."""

    def __init__(self, request_bytes: int, answer_bytes: int) -> None:
        self._request, self._answer_bytes = bytes(request_bytes), answer_bytes
        self._cores = os.sched_getaffinity(0)
        self._ours, theirs = sockets.socketpair()
        self._ours.settimeout(TIMEOUT_S)
        sizes = [str(request_bytes), str(answer_bytes)]
        command = [sys.executable, "-I", "-S", "-c", ECHO, str(theirs.fileno()), *sizes]
        self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()])  # noqa: S603 - the program above; it ends with its peer
        theirs.close()
        if len(self._cores) > 1:
            os.sched_setaffinity(self._child.pid, {max(self._cores)})

    def __repr__(self) -> str:
        return f"<RawEcho of {len(self._request)} and {self._answer_bytes} bytes, process {self._child.pid}>"

    def __enter__(self) -> "RawEcho":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()
        try:
            self._child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def cpu_seconds(self) -> float:
        """CPU time of the child so far."""
        return cpu_seconds(self._child.pid)

    def round_trips_s(self, samples: int) -> list[float]:
        """Seconds of so many round trips, one after the other. Raises KVPoolError when the child has ended."""
        os.sched_setaffinity(0, {min(self._cores)})
        try:
            return [timed_s(self._round_trip) for _ in range(samples)]
        finally:
            os.sched_setaffinity(0, self._cores)

    def _round_trip(self) -> None:
        self._ours.sendall(self._request)
        left = self._answer_bytes
        while left:
            data = self._ours.recv(left)
            if not data:
                raise KVPoolError("the echo process has ended")
            left -= len(data)
