"""A recount in a child process: its report, its death, and a daemon that goes on."""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.server.health import forked_check
from kvpool.server.health.forked_check import check_in_child
from tests.hostile.rigs.raw_clients import engine, keys_of, read_back, store
from tests.rigs.daemon import Daemon


def run(verify: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    gc.collect()  # what other tests have left open
    fds = len(os.listdir("/proc/self/fd"))
    report = asyncio.run(check_in_child(verify))
    assert len(os.listdir("/proc/self/fd")) == fds
    with contextlib.suppress(ChildProcessError):
        assert os.waitpid(-1, os.WNOHANG) == (0, 0), "it has been reaped"
    return report


def test_a_report_of_any_length_comes_whole() -> None:
    lines = [f"broken {number}" for number in range(30_000)]
    assert run(lambda: {"problems": lines, "pid": os.getpid()})["problems"] == lines
    assert run(lambda: {"problems": [], "pid": os.getpid()})["pid"] != os.getpid()


def _abort() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _fail() -> dict[str, Any]:
    raise RuntimeError("broken beyond counting")


def _hang() -> dict[str, Any]:
    time.sleep(60)
    return {}


@pytest.mark.parametrize("verify", [_abort, _fail, _hang])
def test_a_child_that_ends_early_or_never_is_a_problem_of_the_report(
    verify: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_check, "TIMEOUT_S", 0.5)
    report = run(verify)
    assert report["chunks"] == 0
    assert len(report["problems"]) == 1
    assert report["problems"][0].startswith("check: its process ended before it was done")


def test_checks_beside_saves_find_nothing(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    is_over = threading.Event()

    def save() -> None:
        with engine(daemon) as busy:
            number = 0
            while not is_over.is_set():
                store(busy, keys_of(100 * number, 40))  # 12 KiB each in 16 MiB: most have to go again
                assert all(read_back(busy, keys_of(100 * number, 40)))
                number += 1

    saving = threading.Thread(target=save)
    saving.start()
    try:
        with daemon.admin() as admin:
            for _ in range(6):
                report = admin.check()
                assert report["problems"] == []
    finally:
        is_over.set()
        saving.join()
    assert daemon.problems() == []


def test_the_child_has_nothing_of_the_daemon_but_its_pipe() -> None:
    report = run(lambda: {"problems": os.listdir("/proc/self/fd")})
    assert len([name for name in report["problems"] if int(name) > 2]) <= 2  # the pipe, and the listing itself
