"""Client processes of `bench replay`, which share the trace's requests in order.

Each client has at most `AHEAD` requests, so that it never waits for this process, and the order of the trace is followed as
well as several clients can. Requests for a client that does not read wait in a buffer of as many.

    STARTED ──ready──► request, answer, … ──stdin closed──► last line ──► ENDED
       └──no answer in time, or ended early──► the replay fails, all are stopped

Every wait has a deadline: a client that has work and prints nothing for `ANSWER_TIMEOUT_S` fails the replay. Main thread of a
command only.
"""

import contextlib
import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict

from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool_tools.bench.replay.client import READY, ProcessUsage, ReplaySettings, RequestResult
from kvpool_tools.sim.children import start_bound, stop

AHEAD = 2
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
READ_BYTES = 1 << 16
WAIT_S = 1.0

HashIds = tuple[int, ...]


class Client:
    """One process. Invariant: `waiting` requests were sent and not answered; `_unsent` holds bytes of those alone."""

    def __init__(self, settings: ReplaySettings, selector: selectors.BaseSelector) -> None:
        arguments = [json.dumps(asdict(settings))]
        pipe = subprocess.PIPE
        self._process = start_bound("kvpool_tools.bench.replay.client", arguments, stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self._input, self._output = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._selector = selector
        self._unsent = bytearray()
        self._unread = bytearray()
        self._is_writing = False
        self.is_closing = False
        self.is_ready = False
        self.waiting = 0
        self.used: ProcessUsage | None = None
        self.deadline = Deadline(ANSWER_TIMEOUT_S)
        selector.register(self._output, selectors.EVENT_READ, self.read)

    def queue_request(self, hash_ids: HashIds) -> None:
        """Queue a request."""
        assert self.waiting < AHEAD
        assert not self.is_closing
        if not self.waiting:
            self.deadline = Deadline(ANSWER_TIMEOUT_S)
        self.waiting += 1
        self._unsent += json.dumps(hash_ids).encode() + b"\n"
        self._write()

    def finish(self) -> None:
        """Close the client's input: no request follows, and the client ends when it has answered. Idempotent."""
        if not self.is_closing:
            self.is_closing = True
            self.deadline = Deadline(ANSWER_TIMEOUT_S)
            self._write()

    def read(self) -> list[RequestResult]:
        """The client's new results. Raises KVPoolError when it has ended too early or prints anything else."""
        data = os.read(self._output, READ_BYTES)
        if not data:
            raise KVPoolError(f"a client process ended early with exit code {self._exit_code()}")
        self._unread += data
        *lines, rest = bytes(self._unread).split(b"\n")
        self._unread = bytearray(rest)
        served = []
        for line in lines:
            fields = json.loads(line)
            if fields == READY:
                self.is_ready = True
            elif "cpu_seconds" in fields:
                self.used = ProcessUsage(**fields)
                self._selector.unregister(self._output)
            else:
                served.append(RequestResult(**fields))
        self.waiting -= len(served)
        self.deadline = Deadline(ANSWER_TIMEOUT_S)
        return served

    def _write(self) -> list[RequestResult]:
        """Send what the pipe takes now; come back when it takes more."""
        while self._unsent:
            try:
                sent = os.write(self._input, self._unsent)
            except BlockingIOError:
                break
            except BrokenPipeError as error:
                raise KVPoolError(f"a client process ended early with exit code {self._exit_code()}") from error
            del self._unsent[:sent]
        wants_to_write = bool(self._unsent)
        if wants_to_write and not self._is_writing:
            self._selector.register(self._input, selectors.EVENT_WRITE, self._write)
        if self._is_writing and not wants_to_write:
            self._selector.unregister(self._input)
        self._is_writing = wants_to_write
        if self.is_closing and not wants_to_write:
            self._pipes[0].close()
        return []

    def stop(self) -> None:
        """End the process. A client that has printed its last line ends by itself; the others are not needed. Idempotent."""
        if self.used is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is stopped
                self._process.wait(STOP_TIMEOUT_S)
        stop(self._process, STOP_TIMEOUT_S)
        for pipe in self._pipes:
            pipe.close()

    def _exit_code(self) -> int | None:
        stop(self._process, STOP_TIMEOUT_S)
        return self._process.returncode


class Clients:
    """The processes of one replay. Use as a context: entering waits until all can serve, leaving ends those that are left."""

    def __init__(self, settings: ReplaySettings, count: int) -> None:
        self._settings = settings
        self._count = count
        self._selector = selectors.DefaultSelector()
        self._clients: list[Client] = []

    def __enter__(self) -> "Clients":
        try:
            for _ in range(self._count):
                self._clients.append(Client(self._settings, self._selector))
            while not all(client.is_ready for client in self._clients):
                self._hear(_ignore)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def serve(self, requests: Iterator[HashIds], on_served: Callable[[RequestResult], None]) -> list[ProcessUsage]:
        """Have the requests served, distributed in order. Returns the usage of each process. Raises KVPoolError when one
        fails."""
        while any(client.used is None for client in self._clients):
            self._give_out(requests)
            self._hear(on_served)
        return [client.used for client in self._clients if client.used is not None]

    def _give_out(self, requests: Iterator[HashIds]) -> None:
        """Give requests to the clients that have the fewest, in the trace's order, until all have `AHEAD`."""
        for depth in range(AHEAD):
            for client in self._clients:
                if client.waiting != depth or client.is_closing:
                    continue
                following = next(requests, None)
                if following is None:
                    for each in self._clients:
                        each.finish()
                    return
                client.queue_request(following)

    def _hear(self, on_served: Callable[[RequestResult], None]) -> None:
        for key, _ in self._selector.select(WAIT_S):
            act: Callable[[], list[RequestResult]] = key.data
            for served in act():
                on_served(served)
        late = [client for client in self._clients if client.used is None and client.deadline.has_passed()]
        if late:
            raise KVPoolError(f"{len(late)} client processes gave no answer for {ANSWER_TIMEOUT_S:.0f} s")

    def _stop(self) -> None:
        self._selector.close()
        for client in self._clients:
            client.stop()


def _ignore(_: RequestResult) -> None:
    """Ignore results: nothing was requested yet."""
