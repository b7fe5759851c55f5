"""SIGHUP at every moment of a daemon's life: from its first imports, while it serves, and until the process has ended."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import store, tokens_of

LIVES = pytest.mark.parametrize("lives", [1, pytest.param(3, marks=pytest.mark.slow)])
RELOADED = "reloaded: no option has changed"
HANG_UPS_AT_ONCE = 100

HEAVY_MODULES = """
import sys
from kvpool.cli.kvpoold import run
assert run(["--help"]) == 0
print(sorted({"uvloop", "asyncio", "kvpool_native", "kvpool.config.config", "kvpool.server.app"} & set(sys.modules)))
"""


class HungUp(Daemon):
    """A daemon that gets many SIGHUPs."""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def ignores_hang_ups(self) -> bool:
        """True if the kernel reports that SIGHUP is ignored, or the process has ended."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        ignored = next((line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), "0")
        return bool(int(ignored, 16) & 1 << signal.SIGHUP - 1) or self.has_ended()

    def has_logged_more_than(self, before: int) -> bool:
        """True if another reload was logged."""
        return self.log().count(RELOADED) > before

    def has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def hang_up_until(self, condition: Callable[[], bool], what: str) -> None:
        """SIGHUP again and again, until the condition holds or the process has ended."""

        def has_come() -> bool:
            for _ in range(HANG_UPS_AT_ONCE):
                if self.has_ended():
                    return True
                os.kill(self.pid, signal.SIGHUP)
            return condition()

        wait_until(has_come, what)


@LIVES
def test_no_sighup_ends_a_daemon_that_starts_serves_or_stops(tmp_path: Path, lives: int) -> None:
    daemon = HungUp(tmp_path)
    with contextlib.ExitStack() as stack:
        for life in range(lives):
            daemon.launch()
            stack.push(daemon)
            wait_until(daemon.ignores_hang_ups, "SIGHUP is ignored")
            daemon.hang_up_until(daemon.answers, "the daemon answers")
            assert not daemon.has_ended(), daemon.log()
            before = daemon.log().count(RELOADED)
            daemon.signal(signal.SIGHUP)
            wait_until(partial(daemon.has_logged_more_than, before), "the configuration is read again")
            with daemon.connect() as pool:
                assert store(pool, pool.keys(tokens_of(life, 64))).stored == 2
            assert daemon.problems() == []
            daemon.signal(signal.SIGTERM)
            daemon.hang_up_until(daemon.has_ended, "the daemon has ended")
            assert daemon.stop() == 0, daemon.log()


@LIVES
def test_further_signals_do_not_interrupt_a_stop(tmp_path: Path, lives: int) -> None:
    daemon = HungUp(tmp_path)
    with contextlib.ExitStack() as stack:
        for _ in range(lives):
            daemon.start()
            stack.push(daemon)

            def has_ended() -> bool:
                for number in (signal.SIGTERM, signal.SIGINT) * 50:
                    if daemon.has_ended():
                        return True
                    os.kill(daemon.pid, number)
                return False

            wait_until(has_ended, "the daemon has ended")
            assert daemon.stop() == 0, daemon.log()


def test_the_command_line_is_read_without_the_daemons_modules() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY_MODULES], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
