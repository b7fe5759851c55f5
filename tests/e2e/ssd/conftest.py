"""An SSD directory that a daemon has filled and left, made once: each test has a daemon on a copy of its own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.daemon import SMALL, Daemon, Start
from tests.rigs.tiered_chains import DRAM_CHUNKS, fill

# Chains of CHAIN chunks: more than DRAM has room for.
STORED = 5


def _options(ssd: Path) -> dict[str, str]:
    """Little DRAM over a tier whose files have room for 15 chunks each."""
    return {
        "dram.capacity": f"{DRAM_CHUNKS * SMALL.chunk_bytes}B",
        "ssd.path": str(ssd),
        "ssd.capacity": "16MiB",
        "ssd.segment": "256KiB",
    }


@pytest.fixture(scope="session")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a daemon that has stopped has left."""
    directory = tmp_path_factory.mktemp("left-behind")
    with Daemon(directory, **_options(directory / "ssd")) as daemon:
        daemon.wait_open()
        with daemon.connect(timeout_s=20.0) as pool:
            fill(pool, STORED)
        assert daemon.stop() == 0
    return directory / "ssd"


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def start_tiered(start_daemon: Start, ssd: Path) -> Start:
    """Starts daemons whose SSD tier is open, of 64 MiB where no other size is named."""

    def start(**options: str) -> Daemon:
        daemon = start_daemon(**{"ssd__path": str(ssd), "ssd__capacity": "64MiB", **options})
        daemon.wait_open()
        return daemon

    return start


@pytest.fixture
def stopped(left_behind: Path, tmp_path: Path, ssd: Path) -> Iterator[Daemon]:
    """A daemon that does not run yet, on an SSD tier that has STORED chains of CHAIN chunks."""
    shutil.copytree(left_behind, ssd)
    directory = tmp_path / "stopped"
    directory.mkdir()
    daemon = Daemon(directory, **_options(ssd))
    yield daemon
    daemon.__exit__()
