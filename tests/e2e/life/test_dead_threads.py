"""Death of a thread that the daemon needs: health over HTTP, the service manager, `info` and `check` all report it."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon, spawn, wait_until
from tests.rigs.events.publishing import CHUNK
from tests.rigs.notify_socket import NotifySocket
from tests.rigs.payload import store, tokens_of

# A daemon one of whose threads dies at its next action after a line on standard input.
DYING_DAEMON = """
import asyncio, sys, threading
from kvpool.config.config import load_config
from kvpool.server.app import App
from kvpool.server.events.publisher import EventPublisher
from kvpool.tiers.ssd.catalogue.catalogue import Catalogue
from kvpool.tiers.ssd.headers import SsdHeaders

threading.excepthook = lambda ended: None
kind, method = {"catalogue": (Catalogue, "_write"), "publisher": (EventPublisher, "_turn"),
                "headers": (SsdHeaders, "_read")}[sys.argv[1]]

def die(*arguments):
    raise SystemExit

def let_die():
    sys.stdin.readline()
    setattr(kind, method, die)
    print("dies", flush=True)

async def main():
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, let_die)
    config = load_config(None, sys.argv[2:])
    app = App(config, lambda: config)
    serving = asyncio.ensure_future(app.run())
    await serving

asyncio.run(main())
"""


def _health(path: Path) -> tuple[int, list[str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(10.0)
        peer.connect(str(path))
        peer.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        answer = b""
        while part := peer.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["problems"]


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["catalogue", "publisher", "headers"])
def test_a_dead_thread_is_unhealthy_everywhere(tmp_path: Path, thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "dram.capacity": "16MiB", "ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "32MiB", "ssd.create": "true",
        "server.metrics_socket": str(tmp_path / "metrics.sock"), "server.probe_interval": "50ms",
        "events.publish": f"ipc://{tmp_path}/events",
    }  # fmt: skip
    daemon = Daemon(tmp_path, **options)
    arguments = [one for one in daemon.command() if one.startswith("--set=")]
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "150000")
    with (
        NotifySocket(str(tmp_path / "notify")) as manager,
        spawn(DYING_DAEMON, thread, *(one.removeprefix("--set=") for one in arguments)) as process,
    ):
        manager.wait_for("READY=1")
        manager.wait_for("WATCHDOG=1", 2)
        monkeypatch.delenv("NOTIFY_SOCKET")
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        assert _health(tmp_path / "metrics.sock") == (200, [])
        with daemon.connect() as pool:
            store(pool, pool.keys(tokens_of(1, CHUNK * 3)))
            _demote_all(daemon)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("die\n")
            process.stdin.flush()
            assert process.stdout.readline() == "dies\n"
            store(pool, pool.keys(tokens_of(2, CHUNK * 3)))
            _give_work(daemon, thread)
        owner = "events" if thread == "publisher" else "ssd"
        problem = f"{owner}: the thread of the {thread} has died"
        wait_until(lambda: _health(tmp_path / "metrics.sock") == (503, [problem]), "health says so")
        with daemon.admin() as admin:
            info = admin.info()
            assert (info["health"], info["problems"]) == ("unhealthy", [problem])
            assert admin.check()["problems"] == [problem]
        command = [sys.executable, "-m", "kvpool_tools.cli.kvpoolctl", "check", "--socket", daemon.socket]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert (ended.returncode, problem in ended.stdout) == (1, True)
        wait_until(lambda: manager.count(f"STATUS=unhealthy: {problem}") > 0, "the service manager is notified")
        fed = manager.count("WATCHDOG=1")
        before = int(daemon.stats()["saved_chunks"])
        wait_until(lambda: int(daemon.stats()["saved_chunks"]) > before + 3, "the probe goes on")
        assert manager.count("WATCHDOG=1") == fed
        process.kill()


def _demote_all(daemon: Daemon) -> None:
    with daemon.admin() as admin:
        admin.demote_all(10.0)
        admin.flush(None, None, "dram")


def _give_work(daemon: Daemon, thread: str) -> None:
    """Causes work for the thread."""
    with daemon.admin() as admin:
        if thread == "headers":
            admin.snapshot(1 << 32)
        elif thread == "catalogue":
            admin.demote_all(0.2)
