"""The system calls of a daemon with everything on, against those that its unit allows."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.config.curve_keys import make_key_pair, write_key_file
from kvpool.protocol import verify_walk
from tests.rigs.daemon import PROGRAM, SMALL, Daemon, wait_connected, wait_until
from tests.rigs.device.device_daemon import DeviceDaemon
from tests.rigs.events.router import Router
from tests.rigs.notify_socket import NotifySocket
from tests.rigs.payload import load_all, store, tokens_of
from tests.rigs.runs.ports import free_port
from tests.rigs.store.scripted_store import SharedDirectory

UNIT = Path(__file__).parents[3] / "configs" / "kvpoold.service"
CHUNKS = 40
DRAM_CHUNKS = 192


class TracedDaemon(DeviceDaemon):
    """A daemon with a device tier and a shared store, under strace. `trace`: its file."""

    def __init__(self, directory: Path, trace: Path, **options: str) -> None:
        super().__init__(directory, **options)
        self._shared = SharedDirectory(directory)
        self._trace = trace

    def command(self) -> list[str]:
        """The command line."""
        tracer = ["strace", "-f", "-qq", "-o", str(self._trace), sys.executable]
        return [
            *tracer,
            "-m",
            "tests.rigs.store.store_daemon",
            str(self._shared.path),
            *super().command()[len(PROGRAM) :],
        ]


def _allowed_calls() -> set[str]:
    """The system calls that the unit's filter allows, groups expanded by systemd."""
    sets: dict[str, set[str]] = {}
    shown = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True).stdout
    name = ""
    for line in shown.splitlines():
        if line.startswith("@"):
            name = line.strip()
            sets[name] = set()
        elif name and line.strip() and not line.strip().startswith("#"):
            sets[name].add(line.strip())

    def expand(word: str) -> set[str]:
        return set().union(*(expand(entry) for entry in sets[word])) if word.startswith("@") else {word}

    allowed: set[str] = set()
    for words in re.findall(r"(?m)^SystemCallFilter=(.*)$", UNIT.read_text()):
        named = set().union(*(expand(word) for word in words.lstrip("~").split()))
        allowed = allowed - named if words.startswith("~") else allowed | named
    return allowed


def _peer_options(directory: Path, name: str, ports: tuple[int, int]) -> dict[str, str]:
    return {
        "peer.listen": f"tcp://127.0.0.1:{ports[0]}",
        "peer.stream": "tcp://127.0.0.1:0",
        "peer.name": name,
        "peer.shm": "false",
        "peer.members": ", ".join(f"127.0.0.1:{port}" for port in ports),
        "peer.keys": str(directory / "key"),
        "peer.allow": str(directory / "allow"),
        "peer.encrypt": "true",
    }


def _everything(directory: Path, ports: tuple[int, int]) -> dict[str, str]:
    return {
        **_peer_options(directory, "traced", ports),
        "dram.capacity": f"{DRAM_CHUNKS * SMALL.chunk_bytes}B",
        "ssd.path": str(directory / "ssd"),
        "ssd.capacity": "64MiB",
        "ssd.write_through": "true",
        "server.metrics": "127.0.0.1:0",
        "events.publish": f"tcp://127.0.0.1:{free_port()}",
        "events.replay": f"tcp://127.0.0.1:{free_port()}",
        "events.keys": str(directory / "key"),
        "events.allow": str(directory / "clients"),
        "store.master": "localhost:1",
        "store.buffer": "4MiB",
        "store.publish": "all",
        "store.answer_timeout": "5s",
    }


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_allows_every_system_call_of_a_daemon_with_everything_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = subprocess.run(["strace", "-qq", "true"], capture_output=True, check=False)
    if attached.returncode:
        pytest.skip("strace may not trace here")
    pair, client = make_key_pair(), make_key_pair()
    write_key_file(str(tmp_path / "key"), pair)
    (tmp_path / "allow").write_text(pair.public.decode() + "\n")
    (tmp_path / "clients").write_text(client.public.decode() + "\n")
    for name in ("traced", "other"):
        (tmp_path / name).mkdir()
    ports = free_port(), free_port()
    trace = tmp_path / "trace"
    traced = TracedDaemon(tmp_path / "traced", trace, **_everything(tmp_path, ports))
    with (
        NotifySocket(str(tmp_path / "notify")) as manager,
        Daemon(tmp_path / "other", **_peer_options(tmp_path, "other", (ports[1], ports[0]))) as other,
    ):
        with monkeypatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", manager.address)
            patch.setenv("WATCHDOG_USEC", "300000")
            traced.start()
        try:
            _use_everything(traced, other, (pair.public, client.public, client.secret))
            manager.wait_for("WATCHDOG=1", times=3)
            os.kill(traced.info()["pid"], signal.SIGTERM)
            assert traced.process is not None
            assert traced.process.wait(60) == 0
        finally:
            traced.__exit__()
    used = set(re.findall(r"(?m)^\d+ +(?:<\.\.\. )?([a-z_0-9]+)[( ]", trace.read_text()))
    assert {"memfd_create", "accept4", "sendto", "sched_setscheduler", "getrandom"} <= used
    assert "io_uring_enter" in used or "pwritev" in used or "pwrite64" in used
    assert used - _allowed_calls() == set()


def _use_everything(traced: DeviceDaemon, other: Daemon, keys: tuple[bytes, bytes, bytes]) -> None:
    """Save, load, evict, promote, publish, pull in both directions, and check every chunk."""
    options = traced._options
    with (
        traced.connect() as pool,
        other.connect() as there,
        Router(options["events.publish"], options["events.replay"], keys=keys) as router,
    ):
        wait_connected(pool)
        wait_until(lambda: traced.stats()["ssd.state"] == "ok", "the disk is open")
        wait_until(lambda: traced.stats()["store.state"] == "ok", "the store is joined")
        traced.wait_for_state("ok")
        number = 0
        while not router.receive(0.05):
            number += 1
            store(pool, pool.keys(tokens_of(number, CHUNKS * SMALL.chunk_tokens)))
            assert number < 1000, "no router hears anything"
        assert router.replay(0)
        own, foreign = (pool.keys(tokens_of(2000 + at, CHUNKS * SMALL.chunk_tokens)) for at in range(2))
        store(pool, own)
        store(there, foreign)
        wait_until(lambda: there.lookup(own).chunks == CHUNKS, "the other node has heard of a chain")
        wait_until(lambda: pool.lookup(foreign).chunks == CHUNKS, "and this one of another")
        for asking, keys_ in ((there, own), (pool, foreign)):
            assert load_all(asking, keys_)[0].reason == "complete"
        wait_until(lambda: traced.stats()["store.published_chunks"] > 0, "a chunk is in the store")
    with traced.admin() as admin:
        verify_walk.read_all(admin.verify_bytes, verify_walk.every(admin.check()["tiers"]), sys.maxsize)
