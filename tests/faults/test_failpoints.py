"""Every failpoint, crashed, failed and delayed under a whole day's work: no wrong byte, nothing left behind, work goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.errors import ConfigError, KVPoolError
from kvpool.failpoint import FAILPOINTS, WITHOUT_ERROR, parse
from tests.faults.rigs.workload import CHAIN, chain_tokens
from tests.rigs.daemon import SMALL, Daemon, Start, importing, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store

ROUNDS = 6
DRAM_CHUNKS = 24
WORK_TIMEOUT_S = 60.0
SLOW_DISK_S = 60.0
ROOT = Path(__file__).parent.parent.parent

# Reached before the first request, or once in a life.
FIRST_TIME = {
    name for name in FAILPOINTS if re.search(r"\.(ssd|drain|flush|catalogue|checkpoint|demote|promote)\.", name)
} | {
    "daemon.verify.job",
    "daemon.transfer.job",
    "client.report_corrupt.before",
    "client.renew.before",
    "client.connect.before",
    "client.connect.after_welcome",
    "daemon.prefault.segment",
}
# Reached only where there is another node: tests/faults/test_pull_failures.py.
OF_PEERS = {"daemon.pull.before_read"}
# Reached only where somebody keeps the memory: tests/e2e/life/test_kept_memory.py.
OF_KEEPERS = {name for name in FAILPOINTS if ".keep." in name}
# Reached where a disk is new, or has a model that it did not have.
OF_A_NEW_DISK = "daemon.ssd.identity"
QUICK = {
    ("daemon.commit.before_publish", "crash"),
    ("daemon.commit.after_publish", "crash"),
    ("daemon.answer.before_send", "error"),
    ("daemon.acquire.after_grant", "error"),
    ("daemon.demote.committed", "crash"),
    ("daemon.promote.landed", "crash"),
    ("daemon.catalogue.before_commit", "error"),
    ("daemon.drain.end", "crash"),
    ("client.save.before_commit", "crash"),
    ("client.load.before_result", "crash"),
    ("client.save.before_commit", "error"),
}


def _cases() -> Iterator[object]:
    for name in FAILPOINTS:
        for action in ("crash", "error", "delay(200ms)"):
            if name in OF_PEERS | OF_KEEPERS:
                continue
            if action == "error" and name in WITHOUT_ERROR:
                continue
            marks = () if (name, action) in QUICK else (pytest.mark.campaign,)
            yield pytest.param(name, action, marks=marks, id=f"{name}-{action.partition('(')[0]}")


def _needs_earlier_life(name: str) -> bool:
    """True if a point is reached for certain only where an earlier life has left chunks on disk."""
    return (".ssd." in name and name != OF_A_NEW_DISK) or ".promote." in name


def _work(daemon: Daemon, failpoint: str) -> "subprocess.CompletedProcess[str]":
    environment = {**importing(), "KVPOOL_FAILPOINT": failpoint}
    command = [sys.executable, "-m", "tests.faults.rigs.workload", daemon.socket, str(ROUNDS)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WORK_TIMEOUT_S, check=False)


def _live_before(daemon: Daemon) -> None:
    """A life that leaves chunks on disk, however slow the disk is to open and to write."""
    daemon.start()
    daemon.wait_open()
    assert _work(daemon, "").returncode == 0
    wait_until(lambda: int(daemon.stats()["ssd.chunks"]) > 0, "chunks are on disk", SLOW_DISK_S)
    assert daemon.stop() == 0


def _launch(daemon: Daemon, failpoint: str) -> None:
    """Start, without insisting that it lives."""
    daemon.environment = {"KVPOOL_FAILPOINT": failpoint}
    with contextlib.suppress(AssertionError):
        daemon.start()


def _is_open_or_dead(daemon: Daemon) -> bool:
    """True if the SSD tier takes chunks, or the failpoint was reached before that."""
    assert daemon.process is not None
    if daemon.process.poll() is not None:
        return True
    with contextlib.suppress(KVPoolError, OSError):
        return bool(daemon.stats()["ssd.state"] == "ok")
    return False


def _operate(daemon: Daemon) -> None:
    """An operator's work: a deep check, a flush of old chunks, a stop."""
    assert daemon.process is not None
    with contextlib.suppress(KVPoolError, OSError):
        daemon.problems()
    with contextlib.suppress(KVPoolError, OSError), daemon.admin() as admin:
        admin.flush(None, 1e6)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.wait(20.0)


def _expect_all_well(daemon: Daemon) -> None:
    """A fresh client of a fresh daemon finds right bytes or none, and can work."""
    daemon.environment = {}
    daemon.start()
    if "ssd.path" in str(daemon.command()):
        daemon.wait_open()
    with daemon.connect() as pool:
        for number in [*range(ROUNDS), 9000]:
            keys = pool.keys(chain_tokens(number))
            result, into = load_all(pool, keys)
            assert_right_bytes(keys, SMALL, result, into)
        keys = pool.keys(chain_tokens(5000))
        assert store(pool, keys).stored == CHAIN
        result, into = load_all(pool, keys)
        assert result.chunks == CHAIN
        assert_right_bytes(keys, SMALL, result, into)
    wait_until(lambda: daemon.stats()["connections"] == 1, "the client is gone")
    stats = daemon.stats()
    assert (stats["leases"], stats["reservations"], stats["dram.writing_chunks"]) == (0, 0, 0)
    assert daemon.problems() == []


@pytest.fixture
def make_daemon(start_daemon: Start, tmp_path: Path) -> Start:
    """A stopped daemon with little DRAM, over an SSD tier or not."""

    def make(*, has_ssd: bool) -> Daemon:
        options = {"dram__capacity": f"{DRAM_CHUNKS * SMALL.chunk_bytes}B", "server__lease_ttl": "300ms"}
        if has_ssd:
            options |= {
                "ssd__path": str(tmp_path / "ssd"),
                "ssd__capacity": "32MiB",
                "ssd__checkpoint_interval": "100ms",
            }
        daemon = start_daemon(**options)
        assert daemon.stop() == 0
        return daemon

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("name", "action"), list(_cases()))
def test_a_failure_here_costs_misses_and_nothing_else(make_daemon: Start, name: str, action: str) -> None:
    daemon = make_daemon(has_ssd=name != "daemon.evict.after")
    failpoint = f"{name}:{1 if name in FIRST_TIME else 2}:{action}"
    of_daemon = name.startswith("daemon.")
    if _needs_earlier_life(name):
        _live_before(daemon)
    _launch(daemon, failpoint if of_daemon else "")
    if re.search(r"\.(demote|promote|catalogue|checkpoint)\.", name):
        wait_until(lambda: _is_open_or_dead(daemon), "the tier is open", SLOW_DISK_S)
    done = _work(daemon, "" if of_daemon else failpoint)
    expected = -signal.SIGKILL if action == "crash" and not of_daemon else 0
    assert done.returncode == expected, done.stderr
    reached = f"failpoint {name} reached"
    if ".ssd." in name:  # The tier is opened beside the work, and a slow disk may take longer than all of it.
        wait_until(lambda: reached in daemon.log(), reached, SLOW_DISK_S)
    _operate(daemon)
    assert reached in (daemon.log() if of_daemon else done.stderr)
    if of_daemon and action == "error":
        daemon.forgive_logged_errors()  # The point's own.
    _expect_all_well(daemon)


def test_the_table_names_every_point_in_the_code_and_no_other() -> None:
    sources = [*(ROOT / "kvpool").rglob("*.py"), *(ROOT / "client").rglob("*.py")]
    reached = [name for path in sources for name in re.findall(r'failpoint\.reach\(\s*"([^"]+)"', path.read_text())]
    assert set(reached) == set(FAILPOINTS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("daemon.commit:1:crash", "expected one of: daemon.handshake"),
        ("daemon.commit.before_publish:0:crash", "expected name:nth:crash"),
        ("daemon.commit.before_publish:1:explode", "expected name:nth:crash"),
        ("daemon.commit.before_publish:1:delay(soon)", "soon"),
        ("daemon.drain.end:1:error", "nothing fails at this point"),
    ],
)
def test_a_wrong_failpoint_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse(text)


def test_a_daemon_with_a_wrong_failpoint_does_not_start(tmp_path: Path) -> None:
    done = subprocess.run(
        Daemon(tmp_path).command(),
        env={**os.environ, "KVPOOL_FAILPOINT": "daemon.commit:1:crash"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "expected one of: daemon.handshake" in done.stderr
