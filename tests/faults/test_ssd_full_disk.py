"""Disks without room: a tier that does not fit stays off, one that has its room keeps it, whatever others fill."""

import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import lmdb
import pytest

from tests.faults.rigs.damage import PAGE_BYTES
from tests.faults.rigs.disks import Disk, loop_disk, small_disk
from tests.faults.rigs.tiered import (
    CAPACITY,
    assert_sound,
    directory_bytes,
    restart,
    tier_options,
)
from tests.faults.rigs.traffic import DramClient, Traffic, fill, load_chains
from tests.rigs.daemon import Daemon, Start, wait_until

CHAINS = 480
FITTING_CHAINS = 75
FLUSHED_CHAINS = 40
BACK_WITHIN_S = 60.0
FILLING_BYTES = 1 << 20


def _fill_up(file: Path) -> None:
    """Fill the file system."""
    with file.open("wb", buffering=0) as filler:
        for size in (FILLING_BYTES, 512):
            with pytest.raises(OSError, match="No space left"):
                filler.writelines(itertools.repeat(bytes(size)))


def _take_room_of(data: Path) -> None:
    """Leave a catalogue the pages that it uses, as a version has left it that did not allocate it."""
    with lmdb.open(str(data.parent), readonly=True, lock=False) as environment:
        used = (environment.info()["last_pgno"] + 1) * PAGE_BYTES
    os.truncate(data, used)


@contextmanager
def on_disk(start_daemon: Start, mounting: AbstractContextManager[Disk]) -> Iterator[tuple[Daemon, Disk]]:
    """A daemon with a tier on a disk; it is killed before that is unmounted."""
    with mounting as disk:
        daemon = start_daemon(**tier_options(disk.path / "ssd", policy="lru"))
        try:
            yield daemon, disk
        finally:
            daemon.kill()


@contextmanager
def served_without_room(start_daemon: Start, chains: int) -> Iterator[tuple[Daemon, Path]]:
    """A daemon with so many chains on a full disk, whose catalogue has not all its room; and the file that fills the disk."""
    with on_disk(start_daemon, small_disk(2 * CAPACITY)) as (daemon, disk):
        daemon.wait_open()
        fill(daemon, chains)
        assert daemon.stop() == 0
        _take_room_of(disk.path / "ssd" / "catalogue" / "data.mdb")
        _fill_up(disk.path / "filler")
        daemon.start()
        wait_until(lambda: daemon.stats()["ssd.state"] == "readonly", "it says that it has no room")
        yield daemon, disk.path / "filler"


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
def test_a_tier_that_does_not_fit_its_disk_stays_off_until_there_is_room(start_daemon: Start) -> None:
    with small_disk(CAPACITY + CAPACITY // 32) as disk:
        other = disk.path / "other"
        other.write_bytes(bytes(CAPACITY // 2))
        daemon = start_daemon(**tier_options(disk.path / "ssd", policy="lru"))
        try:
            _expect_offline_for_lack_of_room(daemon, disk.path / "ssd")
            assert daemon.stop() == 0
            other.unlink()
            daemon.start()
            daemon.wait_open()
        finally:
            daemon.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_others_fill_takes_nothing_from_a_tier(start_daemon: Start, tmp_path: Path, kind: str) -> None:
    mounting = small_disk(2 * CAPACITY) if kind == "tmpfs" else loop_disk(kind, tmp_path / "image")
    with on_disk(start_daemon, mounting) as (daemon, disk):
        daemon.wait_open()
        _fill_up(disk.path / "filler")
        fill(daemon, FITTING_CHAINS)
        assert (daemon.stats()["ssd.state"], daemon.stats()["ssd.dropped_rows"]) == ("ok", 0)
        for _ in range(2):
            daemon.kill()
            restart(daemon)
            daemon.wait_open()
            assert load_chains(daemon, FITTING_CHAINS).missed == 0
        assert_sound(daemon)
        assert daemon.stop() == 0
        assert "durable: yes" in daemon.log()


@pytest.mark.slow
def test_a_damaged_catalogue_is_rebuilt_on_a_full_disk(start_daemon: Start) -> None:
    with on_disk(start_daemon, small_disk(2 * CAPACITY)) as (daemon, disk):
        ssd = disk.path / "ssd"
        daemon.wait_open()
        fill(daemon, FITTING_CHAINS)
        daemon.kill()
        _fill_up(disk.path / "filler")
        with (ssd / "catalogue" / "data.mdb").open("r+b") as file:
            file.write(bytes(2 * PAGE_BYTES))
        restart(daemon)
        daemon.wait_open()
        assert load_chains(daemon, FITTING_CHAINS).missed == 0
        assert not (ssd / "catalogue.bad").exists(), "it has given its room to the new one"
        assert_sound(daemon)


@pytest.mark.slow
def test_a_catalogue_without_all_its_room_on_a_full_disk_is_served_and_gets_it_later(start_daemon: Start) -> None:
    """As a version has left it that did not allocate its catalogue."""
    with served_without_room(start_daemon, FITTING_CHAINS) as (daemon, filler):
        with daemon.admin() as admin:
            assert "the catalogue cannot be given its" in admin.info()["ssd_reason"]
        assert load_chains(daemon, FITTING_CHAINS).missed == 0
        with DramClient(daemon, first_chain=5000) as client, daemon.admin() as admin:
            for _ in range(4):
                client.turn()
            assert admin.demote_all(1.0)["left"] > 0, "nothing is admitted"
            filler.unlink()
            wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is tried again", BACK_WITHIN_S)
            wait_until(lambda: admin.demote_all(10.0)["left"] == 0, "chunks are admitted", BACK_WITHIN_S)
        daemon.kill()
        restart(daemon)
        daemon.wait_open()
        assert load_chains(daemon, FITTING_CHAINS).missed == 0
        assert_sound(daemon)


@pytest.mark.slow
def test_a_smaller_capacity_takes_less_of_the_disk(start_daemon: Start, tmp_path: Path) -> None:
    """With segments of one size, what is configured decides how many there are."""
    path = tmp_path / "ssd"
    options = {"ssd__segment": "256KiB", "ssd__max_chunks": "1024"}
    large = start_daemon(**tier_options(path, capacity=2 * CAPACITY, policy="lru"), **options)
    large.wait_open()
    with Traffic(large, 1, chains=CHAINS), DramClient(large, first_chain=5000) as client:

        def has_written() -> bool:
            client.turn()
            return int(large.stats()["ssd.chunks"]) > 200

        wait_until(has_written, "chunks are written")
    assert large.stop() == 0
    assert directory_bytes(path) <= 2 * CAPACITY
    small = start_daemon(**tier_options(path, capacity=CAPACITY), **options)
    small.wait_open()
    assert directory_bytes(path) <= CAPACITY
    load_chains(small, CHAINS)
    assert small.problems() == []


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_flushed_chunks_do_not_come_back_after_a_flush_on_a_full_disk(start_daemon: Start, *, is_rebuilt: bool) -> None:
    """The catalogue waits for room, and the removals of its rows with it."""
    with served_without_room(start_daemon, FLUSHED_CHAINS) as (daemon, _):
        assert load_chains(daemon, FLUSHED_CHAINS).served > 0
        with daemon.admin() as admin:
            assert admin.flush(None, None)["durable"]
        daemon.kill()
        daemon.start(*(["--rebuild"] if is_rebuilt else []))
        wait_until(lambda: daemon.stats()["ssd.state"] != "starting", "the tier is open")
        assert load_chains(daemon, FLUSHED_CHAINS).served == 0
        assert_sound(daemon)
