"""Notifications to a service manager, and the process for which its watchdog counts."""

import logging
import os
import time
from pathlib import Path

import pytest

from kvpool.server.health.systemd import ServiceManager
from tests.rigs.notify_socket import NotifySocket


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_each_call_is_one_datagram(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"@kvpool-test-{os.getpid()}"
    with NotifySocket(address) as socket:
        manager = ServiceManager({"NOTIFY_SOCKET": address})
        manager.ready("serving")
        manager.alive()
        manager.status("two\nlines")
        manager.stopping("draining")
        manager.extend(2.5)
        assert socket.take() == [
            ["READY=1", "STATUS=serving"],
            ["WATCHDOG=1"],
            ["STATUS=two lines"],
            ["STOPPING=1", "STATUS=draining"],
            ["EXTEND_TIMEOUT_USEC=2500000", "WATCHDOG=1"],
        ]


@pytest.mark.parametrize("address", ["", "@", "relative", "vsock:2:1234"])
def test_without_an_address_there_are_no_notifications_and_no_watchdog(address: str) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
    manager.ready("serving")
    assert manager.watchdog_interval_s is None


@pytest.mark.parametrize(
    ("interval", "pid", "expected"),
    [
        ("30000000", "", 30.0),
        ("500000", "17", 0.5),
        ("500000", "18", None),
        ("0", "", None),
        ("-1", "", None),
        ("soon", "", None),
        ("", "17", None),
    ],
)
def test_the_watchdog_counts_only_for_the_process_it_names(interval: str, pid: str, expected: float | None) -> None:
    environment = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": interval, "WATCHDOG_PID": pid}
    assert ServiceManager(environment, pid=17).watchdog_interval_s == expected


def test_a_manager_that_has_gone_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    manager.ready("serving")
    manager.alive()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "READY=1 to the service manager failed" in warnings[0].getMessage()


def test_a_manager_that_does_not_read_costs_a_short_wait_and_no_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NotifySocket(str(tmp_path / "notify")) as socket:
        manager = ServiceManager({"NOTIFY_SOCKET": socket.address})
        sent = 0
        while not caplog.records:
            before_s = time.thread_time()
            manager.alive()
            used_s = time.thread_time() - before_s
            sent += 1
            assert sent < 10_000
        assert used_s < 0.05, "it spins while the queue is full"
        assert "WATCHDOG=1 to the service manager failed" in caplog.text
        assert len(socket.take()) == sent - 1
