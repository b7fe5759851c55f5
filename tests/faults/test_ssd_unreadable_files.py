"""Files of the SSD tier that the disk does not give, or that others have cut: unreadable now is not the same as absent."""

import errno
import os

import pytest

from tests.faults.rigs.fault_filesystem import FaultFilesystem
from tests.faults.rigs.tiered import is_dead, restart, tier_options
from tests.faults.rigs.traffic import CHAIN, Tally, chain_of
from tests.rigs.daemon import Daemon, Start, wait_connected, wait_until
from tests.rigs.payload import store

CHAINS = 8
CATALOGUE = "data.mdb"
BACK_WITHIN_S = 60.0


@pytest.fixture
def start_tiered(fault_filesystem: FaultFilesystem, start_daemon: Start) -> Daemon:
    """A daemon whose tier on the mount has some chains, all durable."""
    daemon = start_daemon(**tier_options(fault_filesystem.path / "ssd", dram_chunks=96, capacity=64 << 20))
    daemon.wait_open()
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        for number in range(CHAINS):
            store(pool, chain_of(pool, number))
        assert admin.demote_all(60.0)["durable"]
    return daemon


def _kept(daemon: Daemon) -> Tally:
    """What the tier has of the chains; DRAM is empty after a restart."""
    found = Tally()
    with daemon.connect(timeout_s=10.0) as pool:
        wait_connected(pool)
        for number in range(CHAINS):
            found.load(pool, number)
    assert found.wrong == []
    return found


def _wait_state(daemon: Daemon, state: str, text: str = "") -> None:
    wait_until(
        lambda: daemon.stats()["ssd.state"] == state and text in str(daemon.info()["ssd_reason"]),
        f"the tier is {state} {text}",
        BACK_WITHIN_S,
    )


@pytest.mark.parametrize("match", ["", CATALOGUE, f"catalogue/{CATALOGUE}", "identity", "flushed"])
def test_a_disk_that_gives_nothing_at_a_start_costs_no_chunk(
    fault_filesystem: FaultFilesystem, start_tiered: Daemon, match: str
) -> None:
    start_tiered.stop()
    fault_filesystem.set(match=match or "/", read_error=errno.EIO)
    restart(start_tiered)
    if match != "identity":  # a second copy of what the catalogue has
        _wait_state(start_tiered, "offline", "Input/output error")
        assert "another daemon" not in start_tiered.log()
    fault_filesystem.clear()
    _wait_state(start_tiered, "ok")
    assert not is_dead(start_tiered)
    assert _kept(start_tiered).missed == 0


def test_a_first_start_on_a_disk_that_cannot_be_read_waits_for_it(
    fault_filesystem: FaultFilesystem, start_daemon: Start
) -> None:
    fault_filesystem.set(match=CATALOGUE, read_error=errno.EIO)
    daemon = start_daemon(**tier_options(fault_filesystem.path / "ssd", capacity=64 << 20))
    _wait_state(daemon, "offline", "Input/output error")
    fault_filesystem.clear()
    _wait_state(daemon, "ok")
    assert not is_dead(daemon)


def test_what_was_flushed_does_not_come_back_where_the_file_of_flushes_cannot_be_read(
    fault_filesystem: FaultFilesystem, start_tiered: Daemon
) -> None:
    fault_filesystem.set(match=CATALOGUE, write_error=errno.EIO)  # the removals of rows do not get there
    with start_tiered.admin() as admin:
        assert admin.flush(None, None)["durable"]
    start_tiered.kill()
    fault_filesystem.clear()
    fault_filesystem.set(match="flushed", read_error=errno.EIO)
    restart(start_tiered)
    _wait_state(start_tiered, "offline", "flushed failed: Input/output error")
    fault_filesystem.clear()
    _wait_state(start_tiered, "ok")
    assert _kept(start_tiered).served == 0


def test_a_page_that_cannot_be_read_costs_the_chunks_behind_it_alone(
    fault_filesystem: FaultFilesystem, start_tiered: Daemon
) -> None:
    """The catalogue is lost, so that chunks are looked for by their headers."""
    start_tiered.stop()
    (fault_filesystem.path / "ssd" / "catalogue" / CATALOGUE).unlink()
    fault_filesystem.set(match="segment-000000", read_error=errno.EIO, below=4096)
    restart(start_tiered)
    _wait_state(start_tiered, "ok")
    assert "1 pages of segment-000000.kvs cannot be read: chunks there are misses" in start_tiered.log()
    fault_filesystem.clear()
    found = _kept(start_tiered)
    assert 0 < found.missed <= CHAIN
    assert found.served + found.missed == CHAINS * CHAIN


@pytest.mark.parametrize("size", [0, 8192, 40960])
def test_a_catalogue_that_is_cut_while_it_is_in_use_is_made_again(
    fault_filesystem: FaultFilesystem, start_tiered: Daemon, size: int
) -> None:
    os.truncate(fault_filesystem.path / "ssd" / "catalogue" / CATALOGUE, size)
    with start_tiered.connect(timeout_s=10.0) as pool, start_tiered.admin() as admin:
        assert not admin.demote_all(60.0)["durable"], "nothing is new, and nothing is certain"
        _wait_state(start_tiered, "ok")
        store(pool, chain_of(pool, CHAINS))
        wait_until(lambda: bool(admin.demote_all(60.0)["durable"]), "all is durable", BACK_WITHIN_S)
    start_tiered.kill()
    restart(start_tiered)
    _wait_state(start_tiered, "ok")
    assert _kept(start_tiered).missed == 0
