"""What the daemon answers over HTTP: /metrics, /healthz, /readyz. On a loopback address, for collectors and supervisors.

    GET /metrics   Prometheus text or OpenMetrics, as the request's Accept says      200, 503
    GET /healthz   JSON {"status", "problems", …}: whether the daemon can work       200, 503
    GET /readyz    the same: whether it takes requests now, not while draining       200, 503

503 also answers when the control thread does not, within SNAPSHOT_TIMEOUT_S. No request changes anything.

Threads: one named thread accepts; each connection is served on a named thread of its own, CONNECTIONS_MAX at most, those
beyond are closed at once. A connection that lasts longer than CONNECTION_TIMEOUT_S is cut, however it spends its time.
Lock: `_lock` guards the connections being served; never held across a call.
"""

import io
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvpool.addresses import LoopbackAddress
from kvpool.clock import Clock, Deadline
from kvpool.server.health import HealthReport
from kvpool.server.snapshot import LoopStalled

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8
CONNECTION_TIMEOUT_S = 10.0
SNAPSHOT_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 0.1

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]


class MetricsServer:
    """The HTTP listener of one daemon. It listens from its making on; `stop` ends it."""

    def __init__(self, address: LoopbackAddress, app: WsgiApp, clock: Clock) -> None:
        """Raises OSError, naming the option, when the address cannot be bound."""
        try:
            self._server = _BoundedServer(address, app, clock)
        except OSError as error:
            raise OSError(error.errno, f"server.metrics {address} cannot be bound: {error.strerror}") from error
        self.address = LoopbackAddress(address.host, self._server.server_port)
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


class _BoundedServer(WSGIServer):
    """A WSGI server with a thread for each connection, a bound on them, and a time limit for each.

    Invariant: `_served` holds exactly the connections that a living thread serves, with their deadlines.
    """

    request_queue_size = 16
    # wsgiref's own would let a restarted daemon fail on addresses in TIME_WAIT.
    allow_reuse_address = True

    def __init__(self, address: LoopbackAddress, app: WsgiApp, clock: Clock) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._clock = clock
        self._pause = threading.Event()  # never set
        self._lock = threading.Lock()
        self._served: dict[socket.socket, tuple[Deadline, threading.Thread]] = {}  # guarded by _lock
        self.set_app(app)
        super().__init__((address.host, address.port), _Handler)

    @property
    def open_connections(self) -> int:
        """Connections that are being served."""
        with self._lock:
            return len(self._served)

    def server_bind(self) -> None:
        """Bind without asking a name service who we are, as the inherited one does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own, or close it where there are too many."""
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="kvpool-metrics-request", daemon=True
        )
        with self._lock:
            has_room = len(self._served) < CONNECTIONS_MAX
            if has_room:
                self._served[request] = (Deadline(CONNECTION_TIMEOUT_S, self._clock), thread)
        try:
            if has_room:
                return thread.start()
            log.debug("a connection to server.metrics is refused: %d are open", CONNECTIONS_MAX)
        except RuntimeError as error:
            log.warning("a connection to server.metrics is refused: %s", error)
            with self._lock:
                del self._served[request]
        return self.shutdown_request(request)

    def get_request(self) -> Any:
        """Accept. Out of descriptors the listener stays readable: then it pauses instead of turning in place."""
        try:
            return super().get_request()
        except OSError:
            self._pause.wait(ACCEPT_PAUSE_S)
            raise

    def service_actions(self) -> None:
        """Called between connections: cut those whose time is over."""
        with self._lock:
            overdue = [request for request, (deadline, _) in self._served.items() if deadline.has_passed()]
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
        for _, (_, thread) in served:
            thread.join(deadline.remaining_s())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended in an error: it is the peer's, or it has been cut."""
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
    """One request. Whatever a peer sends costs it its own connection and no line above level debug."""

    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests and bad requests, as the inherited class words them."""
        log.debug("server.metrics: " + format, *arguments)

    def get_stderr(self) -> io.StringIO:
        """Where tracebacks of a failed answer go: wsgiref would print them."""
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


def make_app(registry: CollectorRegistry, read_health: Callable[[], HealthReport]) -> WsgiApp:
    """The WSGI application. `registry` and `read_health` may raise LoopStalled."""
    metrics_app: WsgiApp = make_wsgi_app(registry)

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path not in ("/metrics", "/healthz", "/readyz"):
            return _plain(start_response, "404 Not Found", "expected /metrics, /healthz or /readyz\n")
        if method != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET"), ("Content-Length", "0")])
            return []
        try:
            if path == "/metrics":
                return metrics_app(environ, start_response)
            report = read_health()
        except LoopStalled as error:
            if path == "/metrics":
                return _plain(start_response, "503 Service Unavailable", f"{error}\n")
            report = HealthReport(False, False, (str(error),), None, None)
        is_good = report.is_healthy if path == "/healthz" else report.is_ready
        return _health(start_response, report, is_good=is_good)

    return app


def _health(start_response: StartResponse, report: HealthReport, *, is_good: bool) -> list[bytes]:
    document = {
        "status": "unavailable" if not is_good else "degraded" if report.problems else "ok",
        "is_ready": report.is_ready,
        "is_healthy": report.is_healthy,
        "problems": list(report.problems),
        "probe_age_s": report.probe_age_s,
        "probe_latency_s": report.probe_latency_s,
    }
    body = (json.dumps(document) + "\n").encode()
    status = "200 OK" if is_good else "503 Service Unavailable"
    start_response(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
    return [body]


def _plain(start_response: StartResponse, status: str, text: str) -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode()]


def _cut(request: socket.socket) -> None:
    """End both directions; the thread that serves it sees the end and closes it."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection to server.metrics had ended: %s", error)
