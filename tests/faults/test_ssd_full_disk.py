"""Disks without room: a tier that does not fit stays off, a full catalogue suspends the tier until it can grow."""

import itertools
from pathlib import Path

import pytest

from tests.faults.rigs.disks import loop_disk, small_disk
from tests.faults.rigs.tiered import (
    CAPACITY,
    StartDaemon,
    assert_sound,
    directory_bytes,
    restart,
    tier_options,
    wait_open,
)
from tests.faults.rigs.traffic import DramClient, Traffic, load_chains
from tests.rigs.daemon import Daemon, wait_until

CHAINS = 480
BACK_WITHIN_S = 20.0
FILLING_BYTES = 1 << 20


def _fill_up(file: Path) -> None:
    """Fill the file system."""
    with file.open("wb", buffering=0) as filler:
        for size in (FILLING_BYTES, 512):
            with pytest.raises(OSError, match="No space left"):
                filler.writelines(itertools.repeat(bytes(size)))


def _expect_offline_for_lack_of_room(daemon: Daemon, ssd: Path) -> None:
    wait_until(lambda: daemon.stats()["ssd.state"] != "starting", "the tier is given up")
    with daemon.admin() as admin:
        info = admin.info()
    assert info["ssd_state"] == "offline"
    assert "set ssd.capacity to " in info["ssd_reason"]
    assert list(ssd.glob("segment-*")) == [], "nothing was made that could not be finished"
    with DramClient(daemon, first_chain=0) as client:
        for _ in range(20):
            client.turn()
    assert_sound(daemon)


@pytest.mark.slow
def test_a_tier_that_does_not_fit_its_disk_stays_off_until_there_is_room(start_daemon: StartDaemon) -> None:
    with small_disk(CAPACITY + CAPACITY // 32) as disk:
        other = disk.path / "other"
        other.write_bytes(bytes(CAPACITY // 2))
        daemon = start_daemon(**tier_options(disk.path / "ssd", policy="lru"))
        try:
            _expect_offline_for_lack_of_room(daemon, disk.path / "ssd")
            assert daemon.stop() == 0
            other.unlink()
            daemon.start()
            wait_open(daemon)
        finally:
            daemon.kill()


@pytest.mark.slow
def test_a_tier_whose_catalogue_meets_a_full_disk_is_suspended_until_there_is_room(
    start_daemon: StartDaemon, tmp_path: Path, seed: int
) -> None:
    with loop_disk("ext4", tmp_path / "image") as disk:
        daemon = start_daemon(**tier_options(disk.path / "ssd", policy="lru"))
        try:
            wait_open(daemon)
            _fill_up(disk.path / "filler")
            with Traffic(daemon, seed, chains=CHAINS), DramClient(daemon, first_chain=5000) as client:

                def has_given_up() -> bool:
                    client.turn()
                    return bool(daemon.stats()["ssd.state"] == "readonly")

                wait_until(has_given_up, "the catalogue cannot grow", BACK_WITHIN_S)
                with daemon.admin() as admin:
                    assert "catalogue" in admin.info()["ssd_reason"]
                (disk.path / "filler").unlink()
                wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is tried again", BACK_WITHIN_S)
            with daemon.admin() as admin:
                assert admin.demote_all(10.0)["left"] == 0
            daemon.kill()
            restart(daemon)
            wait_open(daemon)
            assert load_chains(daemon, CHAINS).served > 0
            assert_sound(daemon)
        finally:
            daemon.kill()


@pytest.mark.slow
def test_a_smaller_capacity_takes_less_of_the_disk(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """With segments of one size, what is configured decides how many there are."""
    path = tmp_path / "ssd"
    options = {"ssd__segment": "256KiB", "ssd__max_chunks": "1024"}
    large = start_daemon(**tier_options(path, capacity=2 * CAPACITY, policy="lru"), **options)
    wait_open(large)
    with Traffic(large, 1, chains=CHAINS), DramClient(large, first_chain=5000) as client:

        def has_written() -> bool:
            client.turn()
            return int(large.stats()["ssd.chunks"]) > 200

        wait_until(has_written, "chunks are written")
    assert large.stop() == 0
    assert directory_bytes(path) <= 2 * CAPACITY
    small = start_daemon(**tier_options(path, capacity=CAPACITY), **options)
    wait_open(small)
    assert directory_bytes(path) <= CAPACITY
    load_chains(small, CHAINS)
    assert small.problems() == []
