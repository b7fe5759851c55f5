"""An etcd of the tests' own: Debian's `etcd-server`, on free ports, without a disk to wait for; and a server that drips."""

import contextlib
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

from tests.rigs.daemon import wait_until
from tests.rigs.runs.ports import free_port

PROGRAM = shutil.which("etcd")
REASON = "needs etcd: apt-get install etcd-server"


class Etcd:
    """One server. Killed and started again it has the same data and address."""

    def __init__(self, directory: Path, *, is_tls: bool = False) -> None:
        """`is_tls`: with a certificate that etcd makes for itself."""
        self._directory = directory
        self._is_tls = is_tls
        self.certificate = directory / "etcd" / "fixtures" / "client" / "cert.pem"
        self.url = f"http{'s' * is_tls}://127.0.0.1:{free_port()}"
        self._peer_url = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Etcd":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it serves. A test without etcd is skipped."""
        if PROGRAM is None:
            pytest.skip(REASON)
        command = [
            *(PROGRAM, "--data-dir", str(self._directory / "etcd"), "--log-level", "error"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self._peer_url, "--initial-advertise-peer-urls", self._peer_url),
            *(
                "--initial-cluster",
                f"default={self._peer_url}",
                "--heartbeat-interval",
                "20",
                "--election-timeout",
                "100",
            ),
        ]
        if self._is_tls:
            command.append("--auto-tls")
        with (self._directory / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_healthy, "etcd serves")

    def pause(self) -> None:
        """Stop it as a hanging machine would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Lose all data, as a new cluster would have none. REQUIRES: it was killed."""
        shutil.rmtree(self._directory / "etcd")

    def _is_healthy(self) -> bool:
        try:  # the certificate may be absent, or written in part
            trusted = ssl.create_default_context(cafile=str(self.certificate)) if self._is_tls else None
            with urllib.request.urlopen(f"{self.url}/health", timeout=1, context=trusted) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


@contextlib.contextmanager
def dripping(first: bytes) -> Iterator[str]:
    """The URL of a server that sends these bytes, and then one byte after the other."""
    is_over = threading.Event()

    def serve(listening: socket.socket) -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), listening.accept()[0] as asking:
                asking.sendall(first)
                while not is_over.wait(0.02):
                    asking.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()
