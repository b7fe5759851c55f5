"""DRAM that outlives its daemon: killed, stopped, restarted by a service manager, and every way in which it begins empty."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool import failpoint
from kvpool.server.app import EXIT_RESTART
from kvpool.server.keeping.own_keeper import SUFFIX
from kvpool.tiers.dram.kept.keeper import FILES_MAX
from tests.rigs.daemon import SMALL, Daemon, wait_connected, wait_until
from tests.rigs.kept_daemon import ContainedDaemon, KeptDaemon, StoredDaemon
from tests.rigs.payload import payload_of, store, tokens_of
from tests.rigs.tiered_chains import CHAIN, chains, load_right

CHAINS = 6
STEPS = ["daemon.keep.before_give:1", *(f"daemon.keep.given:{nth}" for nth in (1, 2, 3)), "daemon.keep.after_drop:1"]
StartKept = Callable[..., KeptDaemon]


@pytest.fixture
def start_kept(tmp_path: Path) -> Iterator[StartKept]:
    """Starts daemons with keepers, which end with the test."""
    started: list[KeptDaemon] = []

    def start(**options: str) -> KeptDaemon:
        directory = tmp_path / f"kept-{len(started)}"
        directory.mkdir()
        daemon = KeptDaemon(directory, **{name.replace("__", "."): value for name, value in options.items()})
        started.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in started:
        daemon.__exit__(None, None, None)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredDaemon]:
    """A daemon under a service manager with a store, started, on a disk too."""
    daemon = StoredDaemon(tmp_path, FILES_MAX, **_ssd(tmp_path))
    with daemon:
        yield daemon


def _ssd(folder: Path) -> dict[str, str]:
    return {"ssd.path": str(folder / "ssd"), "ssd.create": "true", "ssd.capacity": "64MiB", "ssd.segment": "1MiB"}


def _fill(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        for keys in chains(pool, CHAINS):
            assert store(pool, keys).stored == CHAIN


def _found(daemon: Daemon) -> int:
    """Chunks that are served, each with its own bytes, by a new client."""
    with daemon.connect() as pool:
        return sum(load_right(pool, keys).chunks for keys in chains(pool, CHAINS))


def _assert_all_in_dram(daemon: Daemon) -> None:
    assert _found(daemon) == CHAINS * CHAIN
    assert daemon.stats()["dram.chunks"] == CHAINS * CHAIN
    assert daemon.problems() == []


def test_a_killed_daemon_leaves_every_chunk_to_the_next_one(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    for life in range(1, 4):
        daemon.kill()
        daemon.start()
        assert (
            daemon.began() == f"from life {life}: {CHAINS * CHAIN} chunks, {_kib(CHAINS * CHAIN * SMALL.chunk_bytes)}"
        )
        _assert_all_in_dram(daemon)
    assert daemon.info()["dram_kept_by"].startswith("kvpool-keeper (process ")
    assert daemon.info()["dram_life"] == 4


def _kib(size: int) -> str:
    return f"{size / 1024:.1f} KiB"


def test_what_is_on_disk_too_is_known_in_both_and_needs_the_disk_for_nothing(
    start_kept: StartKept, tmp_path: Path
) -> None:
    daemon = start_kept(**{name.replace(".", "__"): value for name, value in _ssd(tmp_path).items()})
    _fill(daemon)
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
    daemon.kill()
    daemon.start()
    daemon.wait_open()
    assert daemon.stats()["dram.chunks"] == daemon.stats()["ssd.chunks"] == CHAINS * CHAIN
    assert daemon.problems() == []
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["chunks"] == 0
    daemon.kill()
    shutil.rmtree(tmp_path / "ssd")
    daemon.start()
    _assert_all_in_dram(daemon)
    with daemon.admin() as admin:
        demoted = admin.demote_all(60.0)
    assert (demoted["chunks"], demoted["left"]) == (CHAINS * CHAIN, 0)


def test_a_client_goes_on_with_what_it_has_mapped(start_kept: StartKept) -> None:
    daemon = start_kept()
    with daemon.connect() as pool:
        for keys in chains(pool, CHAINS):
            assert store(pool, keys).stored == CHAIN
        arena = _mapped_arenas()
        for _ in range(2):
            daemon.kill()
            daemon.start()
            wait_connected(pool)
            assert [load_right(pool, keys).chunks for keys in chains(pool, CHAINS)] == [CHAIN] * CHAINS
        further = pool.keys(tokens_of(7, 3 * SMALL.chunk_tokens))
        assert store(pool, further).stored == 3
        assert _mapped_arenas() == arena
    daemon.kill()
    daemon.start()
    with daemon.connect() as pool:
        assert load_right(pool, further).chunks == 3


def _mapped_arenas() -> list[str]:
    return sorted(
        line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvpool-arena" in line
    )


def test_a_stop_leaves_the_memory_and_writes_nothing(start_kept: StartKept, tmp_path: Path) -> None:
    options = {"server__stop": "keep", **{name.replace(".", "__"): value for name, value in _ssd(tmp_path).items()}}
    daemon = start_kept(**options)
    _fill(daemon)
    for number in (signal.SIGTERM, signal.SIGINT):
        daemon.signal(number)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        assert f"0 chunks written down, {CHAINS * CHAIN} left in memory alone, with kvpool-keeper" in daemon.log()
        daemon.start()
        daemon.wait_open()
        assert daemon.stats()["ssd.chunks"] == 0
        _assert_all_in_dram(daemon)


@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of processes takes root")
def test_a_stop_in_a_container_writes_down_what_its_end_would_lose(tmp_path: Path) -> None:
    daemon = ContainedDaemon(tmp_path, **{"server.keep_memory": "auto", **_ssd(tmp_path)})
    with daemon:
        assert daemon.info()["dram_kept_by"].startswith("kvpool-keeper (process ")
        daemon.wait_open()
        _fill(daemon)
        daemon.signal_first_process(signal.SIGTERM)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        assert "may not outlive this stop with it: it is in a container, by its pid namespace" in daemon.log()
        assert f"{CHAINS * CHAIN} chunks written down, 0 left in memory alone, with kvpool-keeper" in daemon.log()
        daemon.start()
        daemon.wait_open()
        assert daemon.began() == "empty: nothing was kept"
        assert _found(daemon) == CHAINS * CHAIN


def test_a_keeper_that_ends_while_a_save_is_waited_for_loses_nothing(start_kept: StartKept, tmp_path: Path) -> None:
    options = {"server__stop": "keep", **{name.replace(".", "__"): value for name, value in _ssd(tmp_path).items()}}
    daemon = start_kept(server__stop_timeout="600s", **options)
    daemon.wait_open()
    _fill(daemon)
    keeper = daemon.keeper_of_running
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(9, SMALL.chunk_tokens))
        save = pool.save(keys, from_=payload_of(keys, SMALL))
        daemon.signal(signal.SIGTERM)
        os.kill(keeper.pid, signal.SIGKILL)
        wait_until(lambda: "has ended: dram is kept by nobody" in daemon.log(), "the daemon has noticed")
        save.abort()
    assert daemon.process is not None
    assert daemon.process.wait(60) == 0
    assert f"{CHAINS * CHAIN} chunks written down, 0 dropped with the DRAM tier, durable: yes" in daemon.log()
    daemon.start()
    daemon.wait_open()
    assert _found(daemon) == CHAINS * CHAIN


def test_a_stop_that_demotes_frees_the_memory(start_kept: StartKept, tmp_path: Path) -> None:
    daemon = start_kept(
        server__stop="demote", **{name.replace(".", "__"): value for name, value in _ssd(tmp_path).items()}
    )
    daemon.wait_open()
    _fill(daemon)
    keeper = daemon.keeper_of_running
    assert daemon.stop() == 0
    daemon.wait_keeper_ended(keeper)
    assert f"{CHAINS * CHAIN} chunks written down, 0 dropped with the DRAM tier" in daemon.log()
    assert not os.path.lexists(f"{daemon.socket}{SUFFIX}")
    daemon.start()
    daemon.wait_open()
    assert daemon.began() == "empty: nothing was kept"
    assert daemon.stats()["ssd.chunks"] == CHAINS * CHAIN
    assert _found(daemon) == CHAINS * CHAIN


@pytest.mark.parametrize("stop", ["keep", "auto"])
def test_a_keeper_whose_socket_was_removed_is_left_nothing(start_kept: StartKept, tmp_path: Path, stop: str) -> None:
    daemon = start_kept(**_ssd(tmp_path), **{"server.stop": stop})
    daemon.wait_open()
    _fill(daemon)
    keeper = daemon.keeper_of_running
    os.unlink(daemon.socket + SUFFIX)
    assert daemon.stop() == 0
    daemon.wait_keeper_ended(keeper)
    assert "a lower tier gets what dram alone has: " in daemon.log()
    assert f"{CHAINS * CHAIN} chunks written down" in daemon.log()
    daemon.start()
    daemon.wait_open()
    assert _found(daemon) == CHAINS * CHAIN


def test_both_killed_is_a_clean_cold_start(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    keeper = daemon.keeper_of_running
    daemon.kill()
    os.kill(keeper.pid, signal.SIGKILL)
    daemon.wait_keeper_ended(keeper)
    daemon.start()
    assert daemon.began() == "empty: nothing was kept"
    assert daemon.log().count("dram begins empty: nothing was kept") == 2
    assert _found(daemon) == 0
    _fill(daemon)
    daemon.kill()
    daemon.start()
    _assert_all_in_dram(daemon)


def test_a_keeper_without_a_daemon_gives_the_memory_up_in_time(start_kept: StartKept) -> None:
    daemon = start_kept(server__keep_for="1s")
    _fill(daemon)
    keeper = daemon.keeper_of_running
    daemon.kill()
    daemon.wait_keeper_ended(keeper)
    daemon.start()
    assert daemon.began() == "empty: nothing was kept"


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_while_the_memory_changes_hands_loses_nothing(start_kept: StartKept, step: str) -> None:
    daemon = start_kept()
    _fill(daemon)
    daemon.kill()
    daemon.environment = {failpoint.VARIABLE: f"{step}:crash"}
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(60) == -signal.SIGKILL
    daemon.environment = {}
    daemon.start()
    assert "from life " in daemon.began()
    _assert_all_in_dram(daemon)


def test_other_options_are_a_cold_start_that_has_room(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    daemon.kill()
    daemon.start("--set=dram.capacity=8MiB")
    assert daemon.began() == f"empty: dram.capacity was {16 << 20}, and is {8 << 20}"
    assert _found(daemon) == 0
    daemon.kill()
    daemon.start("--set=server.keep_memory=off")
    assert daemon.began() == "empty: server.keep_memory is off"
    assert daemon.info()["dram_kept_by"] == "nobody: server.keep_memory is off"
    daemon.kill()
    assert daemon.keeper is None


def test_a_flush_does_not_come_back_and_without_a_daemon_the_keeper_ends(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    with daemon.admin() as admin:
        assert admin.flush(None, None, "")["chunks"] == CHAINS * CHAIN
    daemon.kill()
    daemon.start()
    assert _found(daemon) == 0
    _fill(daemon)
    keeper = daemon.keeper_of_running
    daemon.kill()
    command = [sys.executable, "-m", "kvpool_tools.cli.kvpoolctl", "--socket", daemon.socket, "flush", "--all", "--yes"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.stdout.startswith("no daemon runs; dropped 1")
    assert (ended.returncode, "flush again when a daemon runs" in ended.stderr) == (1, True), (
        "nobody has looked at a disk"
    )
    daemon.wait_keeper_ended(keeper)
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 3
    daemon.start()
    assert _found(daemon) == 0


def _check(daemon: KeptDaemon, option: str) -> subprocess.CompletedProcess[str]:
    command = [*daemon.command(), "--check", f"--set={option}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_capacity_that_cannot_fit_is_refused_by_check_and_start_and_costs_nothing(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    daemon.kill()
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    too_large = f"dram.capacity={int(total.split()[1]) * 2}KiB"
    refused = _check(daemon, too_large)
    assert refused.returncode == 2
    assert "dram.capacity" in refused.stderr
    for _ in range(4):
        start = [*daemon.command(), f"--set={too_large}"]
        ended = subprocess.run(start, capture_output=True, text=True, check=False, timeout=120)
        assert ended.returncode == 1
        assert "dram.capacity" in ended.stderr
    daemon.start()
    assert "from life 1: " in daemon.began()
    _assert_all_in_dram(daemon)


def test_a_check_says_that_a_start_with_another_capacity_begins_empty(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    assert "begin empty" not in _check(daemon, "dram.capacity=8MiB").stdout  # it has its memory while it runs
    daemon.kill()
    for option, reason in (("dram.capacity=8MiB", "dram.capacity was "), ("server.keep_memory=off", "is off")):
        checked = _check(daemon, option)
        assert checked.returncode == 0
        (line,) = [one for one in checked.stdout.splitlines() if "dram would begin empty" in one]
        assert reason in line
    assert "begin empty" not in _check(daemon, "dram.capacity=16MiB").stdout
    daemon.start()
    _assert_all_in_dram(daemon)


def test_an_address_in_use_refuses_a_start_before_anything_is_dropped(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    daemon.kill()
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for options in ([], ["--set=dram.capacity=8MiB"], ["--set=server.keep_memory=off"], []):
            start = [*daemon.command(), f"--set=server.metrics={address}", *options]
            ended = subprocess.run(start, capture_output=True, text=True, check=False, timeout=120)
            assert ended.returncode == 1
            assert f"server.metrics {address} cannot be bound" in ended.stderr
    daemon.start()
    _assert_all_in_dram(daemon)


def test_what_a_keeper_has_that_did_not_answer_a_start_never_comes_back(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    left = daemon.keeper_of_running
    daemon.kill()
    os.kill(left.pid, signal.SIGSTOP)
    daemon.start()
    assert daemon.began() == "empty: kvpool-keeper: it does not answer its connection: not in time"
    assert daemon.keeper_of_running != left
    _fill(daemon)
    with daemon.admin() as admin:
        admin.flush(None, None, "")
    os.kill(left.pid, signal.SIGCONT)
    daemon.wait_keeper_ended(left)
    daemon.kill()
    daemon.start()
    assert "from life 1: 0 chunks" in daemon.began()
    assert _found(daemon) == 0


def test_a_keeper_is_no_part_of_the_daemons_process_group(start_kept: StartKept) -> None:
    daemon = start_kept()
    _fill(daemon)
    keeper = daemon.keeper_of_running
    info = daemon.info()
    assert os.getsid(keeper.pid) != os.getsid(info["pid"])
    assert os.getpgid(keeper.pid) != os.getpgid(info["pid"])
    daemon.kill()
    daemon.start()
    assert daemon.keeper_of_running == keeper
    _assert_all_in_dram(daemon)


def test_a_service_manager_with_a_store_keeps_it_over_kills_and_restarts(stored: StoredDaemon) -> None:
    _fill(stored)
    for life, number in ((1, signal.SIGKILL), (2, signal.SIGINT)):
        stored.wait_stored(f"kvpool-book-{life}")
        assert len(stored.manager.stored) == 5
        stored.signal(number)
        assert stored.process is not None
        # A service that ends so begins again, though nobody has asked its manager for it.
        assert stored.process.wait(60) == (-signal.SIGKILL if number == signal.SIGKILL else EXIT_RESTART)
        stored.start()
        assert f"from life {life}: {CHAINS * CHAIN} chunks" in str(stored.info()["dram_began"])
        assert stored.info()["dram_kept_by"] == "systemd"
        _assert_all_in_dram(stored)
        assert stored.stats()["ssd.chunks"] == 0
    assert f"0 chunks written down, {CHAINS * CHAIN} left in memory alone, with systemd" in stored.log()


def test_a_stop_that_its_store_does_not_outlive_writes_everything_down(stored: StoredDaemon) -> None:
    stored.wait_open()
    _fill(stored)
    assert stored.stop() == 0
    assert (
        "a lower tier gets what dram alone has: systemd may not outlive this stop with it: it is no restart"
        in stored.log()
    )
    assert f"{CHAINS * CHAIN} chunks written down, 0 left in memory alone, with systemd, durable: yes" in stored.log()
    stored.manager.forget()
    stored.start()
    stored.wait_open()
    assert _found(stored) == CHAINS * CHAIN
    assert stored.info()["dram_began"] == "empty: nothing was kept"


def test_a_manager_without_a_store_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    daemon = StoredDaemon(tmp_path)
    del daemon.environment["FDSTORE"]
    with daemon:
        assert "the unit has no store for it (FileDescriptorStoreMax=8)" in str(daemon.info()["dram_kept_by"])
        daemon.manager.take()
        assert daemon.manager.stored == {}


@pytest.mark.parametrize("room", [0, FILES_MAX - 1])
def test_a_store_that_has_less_room_than_it_says_loses_nothing(tmp_path: Path, room: int) -> None:
    """As a drop-in with another FileDescriptorStoreMax= beside the unit's own variable."""
    with StoredDaemon(tmp_path, room, **_ssd(tmp_path)) as daemon:
        assert "the unit has no store for it (FileDescriptorStoreMax=8)" in str(daemon.info()["dram_kept_by"])
        assert daemon.manager.stored == {}
        daemon.wait_open()
        _fill(daemon)
        daemon.signal(signal.SIGINT)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        assert f"{CHAINS * CHAIN} chunks written down, 0 dropped with the DRAM tier, durable: yes" in daemon.log()
        daemon.start()
        daemon.wait_open()
        assert _found(daemon) == CHAINS * CHAIN


def test_a_life_under_a_manager_is_distrusted_after_five_early_ends(stored: StoredDaemon) -> None:
    _fill(stored)
    stored.kill()
    Path(f"{stored.socket}.lock").write_text("4")  # that of a life after four early ends
    stored.launch()
    wait_until(lambda: "because the last 5 lives ended early" in stored.log(), "it waits")
    wait_until(stored.answers, "it serves")
    assert stored.info()["dram_began"] == "empty: the last 5 lives ended early"
