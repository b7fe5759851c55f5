"""etcd's gateway: servers that are no etcd, that answer late or without end, and that cannot be reached."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvpool.peers.members.etcd_address import EtcdTls
from kvpool.peers.members.etcd_gateway import EtcdGateway
from kvpool.peers.members.member import MembersUnavailable
from tests.rigs.runs.etcd import Etcd, dripping


def _gateway(url: str, timeout_s: float = 2.0) -> EtcdGateway:
    return EtcdGateway((url,), EtcdTls(), timeout_s=timeout_s)


class _Answers(BaseHTTPRequestHandler):
    """A server that answers every call with `server.answer`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, pieces = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(piece)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def hostile() -> Iterator[ThreadingHTTPServer]:
    """A server that is no etcd."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _endless() -> Iterator[bytes]:
    while True:
        yield b"1000\r\n" + b"x" * 4096 + b"\r\n"


def _trickle(until: threading.Event) -> Iterator[bytes]:
    yield b"2\r\n{ \r\n"
    while not until.wait(0.05):
        yield b"1\r\n \r\n"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, b""),
        (200, b"nonsense"),
        (200, b"[]"),
        (200, b"[" * 100_000),
        (200, b'{"header": 5}'),
        (200, b'{"kvs": 5}'),
        (200, b'{"kvs": [5]}'),
        (200, b'{"kvs": [{"key": "*"}]}'),
        (200, b'{"kvs": [{"key": 7}]}'),
        (200, b'{"count": "many"}'),
        (200, b'{"count": "%s"}' % (b"9" * 5000)),
        (200, b'{"header": {"revision": "1"}, "count": "--5"}'),
        (500, b"{}"),
        (302, b"{}"),
    ],
)
def test_a_server_that_is_no_etcd_is_unavailable(hostile: ThreadingHTTPServer, status: int, text: bytes) -> None:
    headers = {"Content-Length": str(len(text)), "Location": "http://127.0.0.1:1/"}
    hostile.answer = (status, headers, [text])  # type: ignore[attr-defined]
    gateway = _gateway(f"http://127.0.0.1:{hostile.server_port}")
    with pytest.raises(MembersUnavailable):
        gateway.read(b"x/", limit=10)
    gateway.close()


def test_an_answer_without_end_is_cut_and_one_that_trickles_has_a_deadline(hostile: ThreadingHTTPServer) -> None:
    gateway = _gateway(f"http://127.0.0.1:{hostile.server_port}", timeout_s=0.5)
    hostile.answer = (200, {"Transfer-Encoding": "chunked"}, _endless())  # type: ignore[attr-defined]
    with pytest.raises(MembersUnavailable, match=r"more than|within"):
        gateway.grant(5)
    done = threading.Event()
    hostile.answer = (200, {"Transfer-Encoding": "chunked"}, _trickle(done))  # type: ignore[attr-defined]
    with pytest.raises(MembersUnavailable, match="within"):
        gateway.grant(5)
    done.set()
    gateway.close()


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_a_server_that_sends_a_byte_now_and_then_has_one_deadline(first: bytes) -> None:
    with dripping(first) as url:
        gateway = _gateway(url, timeout_s=0.3)
        with pytest.raises(MembersUnavailable, match=r"no whole answer within 0\.3 s"):
            gateway.grant(5)
        gateway.close()


def test_the_next_server_is_asked_after_one_has_failed(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        gateway = EtcdGateway(("http://127.0.0.1:1", etcd.url), EtcdTls(), timeout_s=60.0)
        with pytest.raises(MembersUnavailable, match=r"127\.0\.0\.1:1"):
            gateway.grant(5)
        assert gateway.grant(5)
        gateway.close()


def test_a_server_that_cannot_be_reached_is_named_with_the_reason(hostile: ThreadingHTTPServer) -> None:
    port = hostile.server_port
    for url, expected in (
        ("http://127.0.0.1:1", "http://127.0.0.1:1: it cannot be connected: Connection refused"),
        (f"https://127.0.0.1:{port}", f"https://127.0.0.1:{port}: TLS fails: "),
    ):
        gateway = _gateway(url)
        with pytest.raises(MembersUnavailable) as raised:
            gateway.grant(5)
        assert str(raised.value).startswith(expected)
        gateway.close()
