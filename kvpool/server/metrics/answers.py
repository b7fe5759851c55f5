"""HTTP answers: /metrics, /healthz, /readyz.

    GET /metrics   Prometheus text or OpenMetrics, by the request's Accept header     200, 503
    GET /healthz   JSON {"status", "problems", …}: whether the daemon can work       200, 503
    GET /readyz    the same: whether it takes requests now, not while draining       200, 503

503 also answers when the control thread does not, within SNAPSHOT_TIMEOUT_S. No request changes anything.

The page of metrics is rendered at most once in PAGE_S for each of its four forms, for any number of requests; `name[]` is
ignored.

Called by the HTTP threads. Lock: each form's own; a request that comes while a page is rendered waits for that page, or for its
failure.
"""

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvpool.clock import Clock, Deadline
from kvpool.server.health.health import HealthReport
from kvpool.server.metrics.measurements import LoopStalled

SNAPSHOT_TIMEOUT_S = 2.0
PAGE_S = 1.0
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]


class _Page:
    """One form of the page of metrics, with the result of its last rendering."""

    def __init__(self, render: WsgiApp, clock: Clock, *, accept: str, encoding: str) -> None:
        self._render = render
        self._clock = clock
        self._environ = {
            "PATH_INFO": "/metrics",
            "REQUEST_METHOD": "GET",
            "QUERY_STRING": "",
            "HTTP_ACCEPT": accept,
            "HTTP_ACCEPT_ENCODING": encoding,
        }
        self._lock = threading.Lock()
        self._fresh: Deadline | None = None  # guarded by _lock
        self._response: tuple[Any, ...] = ()  # guarded by _lock
        self._body: list[bytes] = []  # guarded by _lock
        self._failure: LoopStalled | None = None  # guarded by _lock

    def answer(self, start_response: StartResponse) -> list[bytes]:
        """The page, at most PAGE_S old. Raises LoopStalled."""
        with self._lock:
            if self._fresh is None or self._fresh.has_passed():
                self._failure = None
                try:
                    self._body = list(self._render(self._environ, self._note))
                except LoopStalled as error:
                    self._failure = error
                self._fresh = Deadline(PAGE_S, self._clock)
            if self._failure is not None:
                raise LoopStalled(str(self._failure))
            response, body = self._response, self._body
        start_response(*response)
        return body

    def _note(self, *response: Any) -> None:
        self._response = response


def make_app(registry: CollectorRegistry, read_health: Callable[[], HealthReport], clock: Clock) -> WsgiApp:
    """The WSGI application. `registry` and `read_health` may raise LoopStalled."""
    render: WsgiApp = make_wsgi_app(registry)
    pages = {
        (is_open, is_packed): _Page(
            render, clock, accept=OPENMETRICS if is_open else "text/plain", encoding="gzip" if is_packed else ""
        )
        for is_open in (False, True)
        for is_packed in (False, True)
    }

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if method == "HEAD":
            return _without_body(app, environ, start_response)
        if path not in ("/metrics", "/healthz", "/readyz"):
            return _plain(start_response, "404 Not Found", "expected /metrics, /healthz or /readyz\n")
        if method != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            return []
        try:
            if path == "/metrics":
                is_open = "application/openmetrics-text" in environ.get("HTTP_ACCEPT", "")
                is_packed = "gzip" in environ.get("HTTP_ACCEPT_ENCODING", "")
                return pages[is_open, is_packed].answer(start_response)
            report = read_health()
        except LoopStalled as error:
            if path == "/metrics":
                return _plain(start_response, "503 Service Unavailable", f"{error}\n")
            report = HealthReport(False, False, (str(error),), None, None)
        is_good = report.is_healthy if path == "/healthz" else report.is_ready
        return _health(start_response, report, is_good=is_good)

    return app


def _without_body(app: WsgiApp, environ: Environ, start_response: StartResponse) -> list[bytes]:
    """The answer to GET, with its length and without its body."""
    begun: list[tuple[str, list[tuple[str, str]]]] = []
    body = app({**environ, "REQUEST_METHOD": "GET"}, lambda status, headers: begun.append((status, headers)))
    status, headers = begun[-1]
    kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
    start_response(status, [*kept, ("Content-Length", str(sum(map(len, body))))])
    return []


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
