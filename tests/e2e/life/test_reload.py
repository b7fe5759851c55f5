"""Reload of the configuration: by SIGHUP and by an operator, with faults, and with options that need a restart."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner
from zmq.auth import create_certificates, load_certificate

from kvpool.errors import Refused
from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.notify_socket import NotifySocket
from tests.rigs.payload import store, tokens_of


class Filed(Daemon):
    """A daemon with a configuration file."""

    def __init__(self, directory: Path, text: str, **options: str) -> None:
        super().__init__(directory, **options)
        self._options.pop("log.level")
        self.file = directory / "kvpool.toml"
        self.file.write_text(text)

    def __enter__(self) -> "Filed":
        super().__enter__()
        return self

    def launch(self, *arguments: str) -> None:
        super().launch(*arguments, f"--config={self.file}")

    def hang_up(self, awaited: str, times: int = 1) -> str:
        """SIGHUP; what has been logged since, which contains `awaited`."""
        before = len(self.log())
        self.signal(signal.SIGHUP)
        wait_until(lambda: self.log()[before:].count(awaited) >= times, f"{awaited!r} is logged")
        assert self.process is not None
        assert self.process.poll() is None
        return self.log()[before:]


def _run(daemon: Daemon, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["--socket", daemon.socket, *arguments])
    return done.exit_code, done.output


def test_sighup_does_not_kill_and_changes_what_can_be_changed(tmp_path: Path) -> None:
    text = '[log]\nlevel = "info"\n[server]\nlease_ttl = "30s"\n'
    with Filed(tmp_path, text) as daemon:
        assert "reloaded: no option has changed" in daemon.hang_up("reloaded")
        daemon.file.write_text('[log]\nlevel = "debug"\n[server]\nlease_ttl = "7s"\nstop_timeout = "3s"\n')
        logged = daemon.hang_up("reloaded", 3)
        assert "reloaded log.level: info -> debug" in logged
        assert "reloaded server.lease_ttl: 30 s -> 7 s (for leases" in logged
        assert "reloaded server.stop_timeout: 10 s -> 3 s" in logged
        with daemon.connect() as pool:
            assert store(pool, pool.keys(tokens_of(1, 64))).stored == 2
        assert daemon.problems() == []
        wait_until(lambda: "DEBUG kvpool.server.daemon connection" in daemon.log(), "debug lines are logged")
        assert daemon.stop() == 0


def test_a_faulty_file_changes_nothing_and_names_every_fault(tmp_path: Path) -> None:
    with Filed(tmp_path, '[log]\nlevel = "info"\n') as daemon:
        daemon.file.write_text('[log]\nlevel = "debug"\n[server]\nlease_ttl = "1y"\nsockett = "x"\n')
        logged = daemon.hang_up("is not reloaded")
        line = next(line for line in logged.splitlines() if "is not reloaded" in line)
        assert "nothing is changed" in line
        assert "server.lease_ttl is '1y', expected a duration" in line
        assert "server.sockett is no option, did you mean server.socket?" in line
        with daemon.admin() as admin:
            assert admin.log_level() == {"level": "info", "before": "info"}
            with pytest.raises(Refused, match=r"config: nothing is changed: .*server\.sockett"):
                admin.reload()
        daemon.file.unlink()
        assert f"{daemon.file} cannot be read" in daemon.hang_up("is not reloaded")
        assert daemon.problems() == []


def test_faults_of_peers_are_named_as_at_the_start(tmp_path: Path) -> None:
    peer = '[peer]\nlisten = "tcp://127.0.0.1:9470"\nstream = "tcp://127.0.0.1:9471"\n'
    with Filed(tmp_path, "") as daemon:
        daemon.file.write_text(f'{peer}members = "node-1:9470,"\n')
        code, output = _run(daemon, "reload")
        assert code == 1
        assert "peer.members, entry 1: 'node-1:9470' is no address of a node, expected IP:PORT" in output
        assert "peer.members, entry 1: 'node-1:9470'" in daemon.hang_up("is not reloaded")
        daemon.file.write_text(f'{peer}members = "127.0.0.1:9999"\n')
        code, output = _run(daemon, "reload")
        assert (code, sorted(output.splitlines())) == (
            0,
            [f"peer.{name}: needs a restart" for name in ("listen", "members", "stream")],
        )


def test_what_needs_a_restart_is_named_each_time_and_overrides_still_win(tmp_path: Path) -> None:
    with Filed(tmp_path, "") as daemon:
        daemon.file.write_text('[dram]\ncapacity = "32MiB"\nmax_chunks = 5\n[server]\nmax_leases = 7\n')
        for _ in range(2):
            code, output = _run(daemon, "reload")
            assert code == 0
            assert sorted(output.splitlines()) == [
                "dram.max_chunks: needs a restart",
                "server.max_leases: needs a restart",
            ], "dram.capacity is overridden on the command line, as at the start"
        assert "server.max_leases has changed, which needs a restart" in daemon.log()
        daemon.file.write_text("")
        assert _run(daemon, "reload") == (0, "no option has changed\n")
        daemon.file.write_text("[")
        code, output = _run(daemon, "reload")
        assert (code, "is no TOML" in output) == (1, True)


def test_the_budget_and_the_admission_of_the_disk_change(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir(mode=0o700)
    options = {"ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "64MiB"}
    with Filed(tmp_path, "", **options) as daemon:
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is there")
        assert daemon.stats()["ssd.admission"] == "all"
        daemon.file.write_text('[ssd]\nadmission = "second-touch"\nwrite_budget = "240MiB"\n')
        code, output = _run(daemon, "reload")
        assert (code, output) == (0, "ssd.admission: all -> second-touch\nssd.write_budget: 0 B -> 240.0 MiB\n")
        stats = daemon.stats()
        assert stats["ssd.admission"] == "used-again"
        assert stats["ssd.write_budget_left_bytes"] == 10 << 20, "an hour's worth"
        with daemon.admin() as admin:
            assert admin.info()["ssd_write_budget_bytes"] == 240 << 20
        daemon.file.write_text('[ssd]\nwrite_budget = "2 DWPD"\n')
        assert "reloaded ssd.write_budget: 240.0 MiB -> 2 DWPD" in daemon.hang_up("ssd.write_budget")
        daemon.file.write_text("")
        daemon.hang_up("ssd.write_budget")
        assert daemon.stats()["ssd.admission"] == "all"
        assert daemon.problems() == []


def test_a_level_set_by_an_operator_lasts_until_the_file_is_read_again(tmp_path: Path) -> None:
    with Filed(tmp_path, '[log]\nlevel = "warning"\n') as daemon:
        assert _run(daemon, "log-level") == (0, "warning\n")
        assert _run(daemon, "log-level", "debug") == (0, "log level warning -> debug\n")
        assert _run(daemon, "log-level") == (0, "debug\n")
        assert _run(daemon, "log-level", "loud")[0] == 2
        with daemon.admin() as admin, pytest.raises(Refused, match="the log level is 'loud', expected one of info"):
            admin.log_level("loud")
        assert _run(daemon, "reload") == (0, "log.level: debug -> warning\n")
        assert "log-level by pid" in daemon.log(), "audit lines are logged at every level"


def test_routers_with_keys_that_were_added_may_connect_after_a_reload(tmp_path: Path) -> None:
    create_certificates(tmp_path, "daemon")
    create_certificates(tmp_path, "first")
    create_certificates(tmp_path, "second")
    public = {name: load_certificate(tmp_path / f"{name}.key_secret")[0] for name in ("daemon", "first", "second")}
    secret = load_certificate(tmp_path / "daemon.key_secret")[1]
    assert secret is not None
    (tmp_path / "secret").write_bytes(secret)
    (tmp_path / "secret").chmod(0o600)
    clients = tmp_path / "clients"
    clients.write_bytes(public["first"])
    options = {
        "events.publish": f"ipc://{tmp_path}/events",
        "events.replay": f"ipc://{tmp_path}/replay",
        "events.keys": str(tmp_path / "secret"),
    }
    with Filed(tmp_path, f'[events]\nallow = "{clients}"\n', **options) as daemon:
        assert not _may_ask(tmp_path, public["daemon"], "second")
        clients.write_bytes(public["first"] + b"\n" + public["second"])
        assert "events.allow: 2 keys" in daemon.hang_up("events.allow")
        assert _may_ask(tmp_path, public["daemon"], "second")
        (tmp_path / "others").write_bytes(public["first"])
        daemon.file.write_text(f'[events]\nallow = "{tmp_path}/others"\n')
        assert _run(daemon, "reload")[1].startswith("events.allow: 1 keys (for routers")
        assert not _may_ask(tmp_path, public["daemon"], "second")
        daemon.file.write_text(f'[events]\nallow = "{clients}"\n')
        daemon.hang_up("events.allow")
        clients.write_bytes(b"no key")
        assert "no key of 40 characters" in daemon.hang_up("is not reloaded")
        assert _may_ask(tmp_path, public["daemon"], "first")


def _may_ask(folder: Path, server: bytes, name: str) -> bool:
    """True if a router with this key is answered; the socket's monitor reports a refusal."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as router:
        router.linger = 0
        router.curve_serverkey = server
        router.curve_publickey, router.curve_secretkey = load_certificate(folder / f"{name}.key_secret")
        with router.get_monitor_socket() as monitor:
            router.connect(f"ipc://{folder}/replay")
            router.send_multipart([b"", bytes(8)])
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            while ready := dict(poller.poll(60_000)):
                if router in ready:
                    return True
                event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    return False
    raise AssertionError("neither an answer nor a refusal")


def test_the_service_manager_is_notified_of_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_daemon: Callable[..., Daemon]
) -> None:
    with NotifySocket(str(tmp_path / "notify")) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        daemon = start_daemon()
        manager.take()
        daemon.signal(signal.SIGHUP)
        wait_until(
            lambda: manager.count("RELOADING=1") == 1 and manager.count("READY=1") == 2, "begin and end are notified"
        )
        received = [lines for lines in manager.received if "RELOADING=1" in lines or lines == ["READY=1"]]
        assert received[0][0] == "RELOADING=1"
        assert received[0][1].removeprefix("MONOTONIC_USEC=").isdecimal()
        assert received[1] == ["READY=1"]
