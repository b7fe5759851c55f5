"""Daemons that publish their events."""

from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon, Start
from tests.rigs.events.publishing import local_events


@pytest.fixture
def publish(start_daemon: Start, tmp_path: Path) -> Start:
    """Starts daemons that publish; `ssd`: over a disk that takes whatever DRAM evicts."""

    def start(*, ssd: bool = False, **options: str) -> Daemon:
        disk = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "32MiB", "ssd__watermark": "0"} if ssd else {}
        daemon = start_daemon(**{**local_events(tmp_path), **disk, **options})
        if ssd:
            daemon.wait_open()
        return daemon

    return start
