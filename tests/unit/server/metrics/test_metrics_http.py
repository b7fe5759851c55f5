"""The HTTP listener: what it answers, and that garbage, slow peers and crowds cost nothing but their own connections."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvpool.clock import MonotonicClock
from kvpool.config.addresses import LoopbackAddress
from kvpool.server.health.health import HealthReport
from kvpool.server.metrics.answers import PAGE_S, make_app
from kvpool.server.metrics.http import CONNECTIONS_MAX, REQUEST_TIMEOUT_S, MetricsServer
from kvpool.server.metrics.measurements import LoopStalled
from tests.rigs.clock import HandClock
from tests.rigs.daemon import wait_until

GOOD = HealthReport(True, True, (), None, None)


@pytest.fixture
def serve() -> Iterator[Callable[..., MetricsServer]]:
    with ExitStack() as stack:

        def start(app: Any = None, clock: Any = None, host: str = "127.0.0.1") -> MetricsServer:
            chosen = app or make_app(CollectorRegistry(), lambda: GOOD, MonotonicClock())
            server = MetricsServer(LoopbackAddress(host, 0), chosen, clock or MonotonicClock())
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="module")
def shared() -> Iterator[MetricsServer]:
    """One listener for the tests that leave nothing behind."""
    server = MetricsServer(
        LoopbackAddress("127.0.0.1", 0), make_app(CollectorRegistry(), lambda: GOOD, MonotonicClock()), MonotonicClock()
    )
    yield server
    server.stop()


def _connect(server: MetricsServer) -> socket.socket:
    assert isinstance(server.address, LoopbackAddress)
    return socket.create_connection((server.address.host, server.address.port), timeout=10.0)


def _ask(server: MetricsServer, request: bytes) -> bytes:
    with _connect(server) as peer:
        peer.sendall(request)
        return _rest(peer)


def _rest(peer: socket.socket) -> bytes:
    """Everything until the end; a reset is an end too."""
    data = b""
    try:
        while part := peer.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def _get(server: MetricsServer, path: str, *headers: str) -> tuple[int, str]:
    answer = _ask(server, "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()).decode()
    return int(answer.split(" ")[1]), answer


def _served_threads() -> int:
    return sum(thread.name == "kvpool-metrics-request" for thread in threading.enumerate())


def _answered(server: MetricsServer) -> int:
    return sum(not one.is_idle for one in list(server._server._served.values()))


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/nothing"])
def test_head_is_answered_as_get_without_the_body(shared: MetricsServer, path: str) -> None:
    got = _ask(shared, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    asked = _ask(shared, f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    (head, _, body), (headers, end, nothing) = got.partition(b"\r\n\r\n"), asked.partition(b"\r\n\r\n")
    assert (end, nothing) == (b"\r\n\r\n", b"")
    assert headers.split(b"\r\n")[0] == head.split(b"\r\n")[0]
    assert f"Content-Length: {len(body)}".encode() in headers.split(b"\r\n")
    assert b"Allow: GET, HEAD" in _ask(shared, b"PUT /metrics HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_control_thread_that_does_not_answer_is_503_everywhere(serve: Callable[..., MetricsServer]) -> None:
    def late() -> HealthReport:
        raise LoopStalled("the control thread did not answer within 2 s")

    class Late(CollectorRegistry):
        def collect(self) -> Any:
            late()

    server = serve(make_app(Late(), late, MonotonicClock()))
    for path in ("/metrics", "/healthz", "/readyz"):
        status, answer = _get(server, path)
        assert status == 503
        assert "the control thread did not answer" in answer


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/../etc/passwd HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("OPTIONS /healthz HTTP/1.1", 405),
        ("DELETE /readyz HTTP/1.1", 405),
        ("GET /metrics?name[]=nothing HTTP/1.1", 200),
    ],
)
def test_only_three_paths_are_answered_and_only_to_get(shared: MetricsServer, request_line: str, status: int) -> None:
    assert int(_ask(shared, f"{request_line}\r\n\r\n".encode()).split(b" ")[1]) == status


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 1000,
        b"\xff\xfe\r\n\r\n",
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_garbage_ends_its_own_connection(
    shared: MetricsServer, garbage: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with _connect(shared) as peer:
        try:
            peer.sendall(garbage)
            peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has hung up already
        assert not _rest(peer).startswith(b"HTTP/1.0 200")
    assert _get(shared, "/healthz")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_peer_that_leaves_before_its_answer_is_not_logged(
    serve: Callable[..., MetricsServer], capfd: pytest.CaptureFixture[str]
) -> None:
    gone, asked = threading.Event(), threading.Event()

    def slow(environ: Any, start_response: Any) -> Any:
        asked.set()
        assert gone.wait(10.0)
        start_response("200 OK", [])
        return [b"x" * (8 << 20)]

    server = serve(slow)
    with _connect(server) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert asked.wait(10.0)
    gone.set()
    wait_until(lambda: _served_threads() == 0, "its thread ends")
    assert capfd.readouterr() == ("", "")


def test_an_application_that_fails_answers_500_and_is_logged(
    serve: Callable[..., MetricsServer], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(environ: Any, start_response: Any) -> Any:
        raise ZeroDivisionError("oops")

    assert _ask(serve(failing), b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 500")
    wait_until(lambda: "ZeroDivisionError: oops" in caplog.text, "it is logged")
    assert capfd.readouterr() == ("", "")


def test_a_client_without_a_request_is_replaced_first_and_closed_after_a_second(
    serve: Callable[..., MetricsServer],
) -> None:
    clock = HandClock()
    server = serve(clock=clock)
    with ExitStack() as stack:
        idle = [stack.enter_context(_connect(server)) for _ in range(CONNECTIONS_MAX)]
        for peer in idle[1:]:
            peer.sendall(b"GET /metrics HTTP/1.1\r\nslow: ")
        wait_until(lambda: _served_threads() == CONNECTIONS_MAX, "each has its thread")
        assert _get(server, "/healthz")[0] == 200
        assert idle[0].recv(1) == b"", "the oldest one was closed"
        idle[1].sendall(b"ly dripping")
        wait_until(lambda: _served_threads() == CONNECTIONS_MAX - 1, "the others are still there")
        clock.advance(REQUEST_TIMEOUT_S)
        for peer in idle[1:]:
            assert not _rest(peer).startswith(b"HTTP/1.0 200")
        wait_until(lambda: _served_threads() == 0, "their threads have ended")
    assert _get(server, "/healthz")[0] == 200


def test_connections_beyond_the_bound_are_closed_while_others_are_answered(serve: Callable[..., MetricsServer]) -> None:
    go_on = threading.Event()

    def slow(environ: Any, start_response: Any) -> Any:
        assert go_on.wait(20.0)
        start_response("200 OK", [])
        return [b"done"]

    clock = HandClock()
    server = serve(slow, clock=clock)
    with ExitStack() as stack:
        busy = [stack.enter_context(_connect(server)) for _ in range(CONNECTIONS_MAX)]
        for peer in busy:
            peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        wait_until(lambda: _answered(server) == CONNECTIONS_MAX, "each is being answered")
        wait_until(lambda: _served_threads() == CONNECTIONS_MAX, "no thread of an earlier test is left")
        for _ in range(4):
            with _connect(server) as peer:
                assert _rest(peer) == b""
        assert _served_threads() == CONNECTIONS_MAX
        clock.advance(REQUEST_TIMEOUT_S)
        go_on.set()
        assert _rest(busy[0]).endswith(b"done"), "an answer may take longer than asking"


def test_a_page_is_rendered_once_a_second_however_many_ask(serve: Callable[..., MetricsServer]) -> None:
    rendered: list[int] = []

    class Counted(CollectorRegistry):
        def collect(self) -> Any:
            rendered.append(1)
            if len(rendered) == 2:
                raise LoopStalled("the control thread did not answer within 2 s")
            return iter(())

    clock = HandClock()
    server = serve(make_app(Counted(), lambda: GOOD, clock), clock=clock)
    for number in range(5):
        assert _get(server, "/metrics", f"Accept: text/{number}")[0] == 200
        assert _get(server, f"/metrics?name[]={number}")[0] == 200
    assert len(rendered) == 1
    clock.advance(PAGE_S)
    assert [_get(server, "/metrics")[0] for _ in range(3)] == [503, 503, 503], (
        "a failure is not tried again at once either"
    )
    clock.advance(PAGE_S)
    assert _get(server, "/metrics")[0] == 200
    assert len(rendered) == 3
    assert "openmetrics" in _get(server, "/metrics", "Accept: application/openmetrics-text")[1]
    assert len(rendered) == 4


def test_the_same_is_answered_at_a_unix_socket_with_its_rights(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics.sock")
    app = make_app(CollectorRegistry(), lambda: GOOD, MonotonicClock())
    Path(path).touch()
    with pytest.raises(OSError, match=f"server.metrics_socket {path} cannot be bound"):
        MetricsServer(path, app, MonotonicClock(), 0o660)
    Path(path).unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(path)
    server = MetricsServer(path, app, MonotonicClock(), 0o660)
    try:
        assert Path(path).stat().st_mode & 0o777 == 0o660
        with pytest.raises(OSError, match=f"server.metrics_socket {path} cannot be bound"):
            MetricsServer(path, app, MonotonicClock(), 0o660)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(10.0)
            peer.connect(path)
            peer.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert _rest(peer).startswith(b"HTTP/1.0 200")
    finally:
        server.stop()
    assert not Path(path).exists()


def test_stopping_closes_open_connections_and_frees_the_port(serve: Callable[..., MetricsServer]) -> None:
    server = serve()
    with _connect(server) as peer:
        peer.sendall(b"GET")
        wait_until(lambda: _served_threads() == 1, "it is being served")
        server.stop()
        assert _rest(peer) == b""
    assert _served_threads() == 0
    again = MetricsServer(
        server.address, make_app(CollectorRegistry(), lambda: GOOD, MonotonicClock()), MonotonicClock()
    )
    try:
        assert again.address == server.address
        with pytest.raises(OSError, match=f"server.metrics {server.address} cannot be bound"):
            MetricsServer(
                server.address, make_app(CollectorRegistry(), lambda: GOOD, MonotonicClock()), MonotonicClock()
            )
    finally:
        again.stop()
