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
# Answers are frames. Of one connection it waits by reading, as what asks does; of several by a poll.
ECHO = """
import select, socket, sys
size, answer_size, *fds = map(int, sys.argv[1:])
peers = {fd: socket.socket(fileno=fd) for fd in fds}
answer = (answer_size - 4).to_bytes(4, "little") + bytes(answer_size - 4)
poll = select.epoll()
for fd in fds:
    poll.register(fd, select.EPOLLIN)
try:
    while True:
        for fd, _ in poll.poll() if len(fds) > 1 else [(fds[0], 0)]:
            left = size
            while left:
                data = peers[fd].recv(left)
                if not data:
                    sys.exit(0)
                left -= len(data)
            peers[fd].sendall(answer)
except OSError:
    pass
"""


class RawEcho:
    """A child that answers requests of one length with answers of another, on one connection or more. Used as a context
    manager. `sockets`: this side of the connections."""

    def __init__(self, request_bytes: int, answer_bytes: int, connections: int = 1) -> None:
        self._request, self._answer_bytes = bytes(request_bytes), answer_bytes
        self._cores = os.sched_getaffinity(0)
        pairs = [sockets.socketpair() for _ in range(connections)]
        self.sockets, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self._ours = self.sockets[0]
        self._ours.settimeout(TIMEOUT_S)
        fds = [peer.fileno() for peer in theirs]
        command = [sys.executable, "-I", "-S", "-c", ECHO, *map(str, (request_bytes, answer_bytes, *fds))]
        self._child = subprocess.Popen(command, pass_fds=fds)  # noqa: S603 - the program above; it ends with its peers
        for peer in theirs:
            peer.close()
        if len(self._cores) > 1:
            os.sched_setaffinity(self._child.pid, {max(self._cores)})

    def __repr__(self) -> str:
        return f"<RawEcho of {len(self._request)} and {self._answer_bytes} bytes, process {self._child.pid}>"

    def __enter__(self) -> "RawEcho":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ours in self.sockets:
            ours.close()
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
