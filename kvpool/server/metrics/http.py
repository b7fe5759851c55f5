"""HTTP listener: on a loopback address for collectors, on a unix socket for users who may open the pool, or on both.

Threads: one named thread accepts; each connection is served on a named thread of its own, CONNECTIONS_MAX at a time. A
connection without a complete request within REQUEST_TIMEOUT_S is cut; where there are too many, the oldest of these is cut
earlier, and without any of these, further connections are closed at once. One that lasts longer than CONNECTION_TIMEOUT_S is
cut in any case. At most PACE_REQUESTS are accepted in PACE_S, so that a loop of requests cannot keep the control thread from
the interpreter. Lock: `_lock` guards the connections being served; never held across a call.
"""

import errno
import io
import logging
import os
import socket
import socketserver
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvpool.clock import Clock, Deadline
from kvpool.config.addresses import LoopbackAddress
from kvpool.errors import ConfigError
from kvpool.ownership import is_served, make_socket_directory
from kvpool.server.metrics.answers import WsgiApp

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8
REQUEST_TIMEOUT_S = 1.0
CONNECTION_TIMEOUT_S = 10.0
PACE_REQUESTS = 25
PACE_S = 0.5
POLL_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 0.1


class MetricsServer:
    """One HTTP listener of a daemon, at an address or at the path of a unix socket. The constructor starts it."""

    def __init__(self, address: LoopbackAddress | str, app: WsgiApp, clock: Clock, socket_mode: int = 0o600) -> None:
        """Raises OSError, naming the option, when the address cannot be bound, ConfigError for another user's directory."""
        option = "server.metrics_socket" if isinstance(address, str) else "server.metrics"
        try:
            self._server = _BoundedServer(address, app, clock, socket_mode)
        except OSError as error:
            raise OSError(error.errno, f"{option} {address} cannot be bound: {error.strerror}") from error
        self.address = address if isinstance(address, str) else LoopbackAddress(address.host, self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_INTERVAL_S,), name="kvpool-metrics", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<MetricsServer {self.address}, {self._server.open_connections} open>"

    def stop(self) -> None:
        """Close the listener and cut what is being served. Blocks for at most twice STOP_TIMEOUT_S; not on the loop."""
        self._server.shutdown()
        self._thread.join(STOP_TIMEOUT_S)
        self._server.server_close()


@dataclass(slots=True)
class _Served:
    """A connection that a thread serves. It is idle until its request has arrived."""

    until: Deadline
    thread: threading.Thread
    is_idle: bool = True
    is_cut: bool = False


class _BoundedServer(WSGIServer):
    """A WSGI server with a thread for each connection, a bound on them, and a time limit for each.

    Invariant: `_served` holds exactly the connections that a living thread serves, the oldest first; at most CONNECTIONS_MAX of
    them are not cut, and at most twice as many there are.
    """

    request_queue_size = 256
    # wsgiref's own would let a restarted daemon fail on addresses in TIME_WAIT.
    allow_reuse_address = True

    def __init__(self, address: LoopbackAddress | str, app: WsgiApp, clock: Clock, socket_mode: int) -> None:
        self._path = address if isinstance(address, str) else ""
        self._socket_mode = socket_mode
        self._is_bound = False
        self._clock = clock
        self._pause = threading.Event()  # never set
        self._paces: deque[Deadline] = deque(maxlen=PACE_REQUESTS)
        self._lock = threading.Lock()
        self._served: dict[socket.socket, _Served] = {}  # guarded by _lock
        self.set_app(app)
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
            super().__init__(address, _Handler)  # type: ignore[arg-type]  # the family decides what an address is
        else:
            self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            super().__init__((address.host, address.port), _Handler)

    @property
    def open_connections(self) -> int:
        """Connections that are being served."""
        with self._lock:
            return len(self._served)

    def server_bind(self) -> None:
        """Bind without the inherited look-up of this host's name."""
        if self._path:
            _clear_place(self._path)
            umask = os.umask(0o777 & ~self._socket_mode)
            try:
                socketserver.TCPServer.server_bind(self)
            finally:
                os.umask(umask)
            self._is_bound = True
            os.chmod(self._path, self._socket_mode)
            self.server_name, self.server_port = "localhost", 0
        else:
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own, or close it where too many are being answered."""
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="kvpool-metrics-request", daemon=True
        )
        with self._lock:
            replaced = self._make_room()
            has_room = self._has_room()
            if has_room:
                self._served[request] = _Served(Deadline(REQUEST_TIMEOUT_S, self._clock), thread)
        if replaced is not None:
            _cut(replaced)
        try:
            if has_room:
                return thread.start()
            log.debug("a connection to server.metrics is refused: %d are open", CONNECTIONS_MAX)
        except RuntimeError as error:
            log.warning("a connection to server.metrics is refused: %s", error)
            with self._lock:
                del self._served[request]
        return self.shutdown_request(request)

    def note_request(self, request: socket.socket) -> None:
        """Note that a connection's request has arrived."""
        with self._lock:
            served = self._served[request]
            served.is_idle = False
            served.until = Deadline(CONNECTION_TIMEOUT_S, self._clock)

    def get_request(self) -> Any:
        """Accept, at a bounded pace. Out of descriptors the listener stays readable: then it pauses instead of spinning."""
        if len(self._paces) == PACE_REQUESTS:
            self._pause.wait(self._paces[0].remaining_s())
        self._paces.append(Deadline(PACE_S, self._clock))
        try:
            request, client_address = super().get_request()
        except OSError:
            self._pause.wait(ACCEPT_PAUSE_S)
            raise
        return request, client_address or ("unix", 0)

    def service_actions(self) -> None:
        """Called between connections: cut those beyond their time limit."""
        with self._lock:
            overdue = [request for request, served in self._served.items() if served.until.has_passed()]
            for request in overdue:
                self._served[request].is_cut = True
        for request in overdue:
            _cut(request)

    def server_close(self) -> None:
        """Close the listener and every connection, and wait for their threads."""
        super().server_close()
        with self._lock:
            served = list(self._served.items())
        deadline = Deadline(STOP_TIMEOUT_S, self._clock)
        for request, _ in served:
            _cut(request)
        for _, one in served:
            one.thread.join(deadline.remaining_s())
        if self._is_bound:
            Path(self._path).unlink(missing_ok=True)

    def _has_room(self) -> bool:
        is_bounded = len(self._served) < 2 * CONNECTIONS_MAX
        return is_bounded and sum(not served.is_cut for served in self._served.values()) < CONNECTIONS_MAX

    def _make_room(self) -> socket.socket | None:
        """The connection that is cut for a new one; None where none has to be, or none can be."""
        if self._has_room():
            return None
        for request, served in self._served.items():
            if served.is_idle and not served.is_cut:
                served.is_cut = True
                return request
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended in an error: the peer's, or because it was cut."""
        del request
        log.debug("a connection of %s to server.metrics failed", client_address, exc_info=True)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except (OSError, ValueError):
            self.handle_error(request, client_address)
        finally:
            with self._lock:
                del self._served[request]
            self.shutdown_request(request)


class _Handler(WSGIRequestHandler):
    """One request. A bad one costs the peer its connection and logs nothing above level debug."""

    timeout = CONNECTION_TIMEOUT_S

    def parse_request(self) -> bool:
        """Parse the request's line and headers; whether they are valid."""
        is_good = super().parse_request()
        if is_good:
            assert isinstance(self.server, _BoundedServer)
            self.server.note_request(self.connection)
        return is_good

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log requests and bad requests, in the inherited class's words."""
        log.debug("server.metrics: " + format, *arguments)

    def get_stderr(self) -> io.StringIO:
        """The stream for tracebacks of a failed answer, which wsgiref would print."""
        return _LogLines()


class _LogLines(io.StringIO):
    """A file whose text is logged when it is flushed."""

    def flush(self) -> None:
        """Log what has been written."""
        text = self.getvalue().strip()
        if text:
            log.warning("server.metrics failed to answer: %s", text.splitlines()[-1])
            log.debug("%s", text)
        self.seek(0)
        self.truncate()


def _cut(request: socket.socket) -> None:
    """Shut both directions down; the thread that serves it sees the end and closes it."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection to server.metrics had ended: %s", error)


def _clear_place(path: str) -> None:
    """Make the socket's directory, and remove a stale socket. Raises OSError or ConfigError."""
    if fault := make_socket_directory(path):
        raise ConfigError([f"server.metrics_socket cannot be there: {fault}"])
    if Path(path).is_socket():
        if is_served(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        Path(path).unlink()
