"""The first start on a machine: a value that does not fit, a missing path or another user's file is named with its remedy."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.notify_socket import NotifySocket
from tests.rigs.payload import store, tokens_of


def _check(daemon: Daemon) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["--socket", daemon.socket, "check"])
    return done.exit_code, done.output


def _start_with(start_daemon: Callable[..., Daemon], path: Path) -> Daemon:
    daemon = start_daemon(ssd__path=str(path), ssd__capacity="16MiB", ssd__create="false")
    wait_until(lambda: daemon.stats()["ssd.state"] != "starting", "the tier was looked at")
    return daemon


def test_a_directory_that_others_may_read_is_a_problem_with_a_remedy(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    path = tmp_path / "ssd"
    path.mkdir(mode=0o755)
    daemon = _start_with(start_daemon, path)
    cure = f"it has rights 0755, and chunks are prompts that nobody else may read: chmod 700 {path}"
    with daemon.admin() as admin:
        info = admin.info()
    assert info["health"] == "degraded"
    assert info["problems"] == [f"ssd: it could not be opened: {path}: {cure}"]
    assert (info["ssd_state"], info["ssd_reason"]) == ("offline", f"{path}: {cure}")
    code, output = _check(daemon)
    assert (code, cure in output) == (1, True)
    assert cure in daemon.log()
    with daemon.connect() as pool:
        assert store(pool, pool.keys(tokens_of(1, 64))).stored == 2, "DRAM serves"
    path.chmod(0o700)
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is tried again")
    assert _check(daemon)[0] == 0
    with daemon.admin() as admin:
        assert (admin.info()["health"], admin.info()["problems"]) == ("ready", [])


def test_a_missing_directory_is_not_created_unasked(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    path = tmp_path / "unmounted" / "ssd"
    daemon = _start_with(start_daemon, path)
    reason = daemon.stats()["ssd.reason"]
    assert f"there is no such directory: mount its disk, make it (install -d -m 700 -o {os.geteuid()} {path})" in str(
        reason
    )
    assert _check(daemon)[0] == 1
    assert not path.parent.exists()


def test_a_file_is_no_directory(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("")
    daemon = _start_with(start_daemon, tmp_path / "ssd")
    assert "this is no directory: set ssd.path" in str(daemon.stats()["ssd.reason"])


def test_a_symbolic_link_to_a_private_directory_is_used(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "ssd").symlink_to(tmp_path / "disk")
    daemon = _start_with(start_daemon, tmp_path / "ssd")
    with daemon.connect() as pool, daemon.admin() as admin:
        assert store(pool, pool.keys(tokens_of(1, 64))).stored == 2
        assert admin.demote_all(60.0) == {"chunks": 2, "left": 0, "durable": True}
    assert _check(daemon)[0] == 0
    assert list((tmp_path / "disk").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_names_both(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    daemon = _start_with(start_daemon, path)
    reason = str(daemon.stats()["ssd.reason"])
    assert "it belongs to uid 65534, and the daemon is uid 0: run it as that user: runuser -u nobody" in reason


def test_the_service_manager_gets_a_missing_tiers_status_and_further_watchdog_messages(
    start_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NotifySocket(str(tmp_path / "notify")) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        _start_with(start_daemon, tmp_path / "nowhere")
        manager.wait_for("WATCHDOG=1", times=3)
        statuses = [line for lines in manager.received for line in lines]
        assert any(line.startswith("STATUS=degraded: ssd: it could not be opened") for line in statuses)


def test_a_directory_on_the_root_file_system_is_warned_of(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    path.mkdir(mode=0o700)
    daemon = _start_with(start_daemon, path)
    is_root = path.stat().st_dev == os.stat("/").st_dev
    with daemon.admin() as admin:
        assert ("is on the root file system" in admin.info().get("ssd_disk_warning", "")) == is_root
    assert daemon.log().count("is on the root file system") == is_root


def test_more_memory_than_available_is_refused_unless_configured(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, **{"dram.capacity": "2TiB", "dram.max_chunks": "1000", "dram.prefault": "false"})
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(60.0) == 1
    assert "cannot serve: dram.capacity 2.0 TiB takes" in daemon.log()
    assert "can be had by" in daemon.log()
    assert "dram.allow_overcommit = true" in daemon.log()
    with Daemon(tmp_path, **{**daemon._options, "dram.allow_overcommit": "true"}) as willing:
        assert willing.stats()["dram.capacity_bytes"] == 2 << 40


def test_reserved_huge_pages_that_are_not_there_are_named(start_daemon: Callable[..., Daemon]) -> None:
    free = int(Path("/proc/meminfo").read_text().partition("HugePages_Free:")[2].split()[0])
    daemon = start_daemon(dram__huge_pages="hugetlb", dram__capacity=f"{2 * free + 32}MiB")
    with daemon.admin() as admin:
        warning = admin.info()["dram_pages_warning"]
    assert f"of which {free} are reserved and free (set vm.nr_hugepages to" in warning
    assert warning in daemon.log()


class Limited(Daemon):
    """A daemon that may have 300 file descriptors."""

    def command(self) -> list[str]:
        return ["/bin/sh", "-c", 'ulimit -n 300; exec "$@"', "sh", *super().command()]


def test_a_connection_limit_above_the_descriptors_is_cut_and_reported(tmp_path: Path) -> None:
    with Limited(tmp_path, **{"server.max_connections": "500"}) as daemon:
        with daemon.admin() as admin:
            assert admin.info()["max_connections"] == 108
        assert "108 connections are served at a time; raise the limit" in daemon.log()
