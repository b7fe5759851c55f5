"""Rows that are many for DRAM, or slow to come from the SSD: what one lease leaves out, the next ones bring."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool_client.engines.lease_size import LeaseSize
from kvpool_client.named_keys import Names
from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease
from tests.engines.vllm_tier.region import ROW_BYTES, Region, Start, keys_of
from tests.rigs.daemon import Daemon, wait_until

# Twice as many as DRAM has room for.
CHUNKS, AT_ONCE = 64, 8
OPTIONS = {"dram.capacity": "2MiB", "ssd.capacity": "64MiB", "ssd.admission": "all"}


def _store(region: Region, daemon: Daemon) -> list[bytes]:
    """A prompt's rows, of which the end is in DRAM and the beginning on the SSD."""
    keys = keys_of(1, CHUNKS)
    for first in range(0, CHUNKS, AT_ONCE):
        part = keys[first : first + AT_ONCE]
        wait_until(lambda part=part: region.store(part).is_whole, "the rows are stored")  # type: ignore[misc]
    assert all(region.found(region.begin(keys), keys))
    stats = daemon.stats()
    assert stats["dram.chunks"] < CHUNKS
    assert stats["ssd.chunks"] > 0
    region.counts()
    return keys


@pytest.mark.parametrize("largest", [64, 3])
def test_more_rows_than_dram_has_room_for_are_loaded_from_the_first_on(
    start_daemon: Callable[..., Daemon],
    start_region: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    largest: int,
) -> None:
    monkeypatch.setattr("kvpool_client.engines.lease_size.CHUNKS_AT_ONCE", largest)
    daemon = start_daemon(**OPTIONS, **{"ssd.path": str(tmp_path / "ssd")})
    daemon.wait_open()
    region = start_region(daemon)
    keys = _store(region, daemon)
    for _ in range(2):
        ended = region.load(keys)
        assert ended.good == tuple(keys)
        assert region.counts() == {"loaded_chunks": CHUNKS}
    wait_until(lambda: daemon.stats()["leases"] == 0, "the leases have ended")


def test_a_lease_that_is_late_makes_the_next_ones_smaller_and_its_rows_are_loaded(
    daemon: Daemon, start_region: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, keys = start_region(daemon, timeout_s=1.0, batch_timeout_s=60.0), keys_of(1, 20)
    wait_until(lambda: region.store(keys).is_whole, "the rows are stored")
    region.counts()
    sizes, acquire = list[int](), LeaseSize.acquire_set

    def late_once(size: LeaseSize, names: Names) -> Lease:
        sizes.append(len(names))
        if len(sizes) > 1:
            return acquire(size, names)
        daemon.signal(signal.SIGSTOP)
        try:
            return acquire(size, names)
        finally:
            daemon.signal(signal.SIGCONT)

    monkeypatch.setattr(LeaseSize, "acquire_set", late_once)
    assert region.load(keys).good == tuple(keys)
    assert sizes[:2] == [20, 5]


def test_rows_that_no_lease_brings_end_as_absent_after_a_bounded_number_of_leases(
    daemon: Daemon, start_region: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, keys = start_region(daemon, batch_timeout_s=600.0), keys_of(1, 20)
    assert region.store(keys).is_whole
    region.counts()
    asked, acquire = list[Any](), LeaseSize.acquire_set

    def leave_out(size: LeaseSize, names: Names) -> Lease:
        asked.append(names)
        return acquire(size, names[:, ::-1].copy())  # names of nothing

    monkeypatch.setattr(LeaseSize, "acquire_set", leave_out)
    assert region.load(keys).good == ()
    assert region.counts() == {"failed_chunks_absent": 20}
    assert sum(map(len, asked)) == 20 * 8


def test_a_save_has_as_many_rows_as_find_room_by_their_bytes(
    daemon: Daemon, start_region: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.engines.lease_size.BYTES_AT_ONCE", 8 * ROW_BYTES + 1)
    region, keys, sizes, save = start_region(daemon), keys_of(1, 20), list[int](), Pool.save_set

    def noted(pool: Pool, names: Names, *rest: Any, **named: Any) -> Any:
        sizes.append(len(names))
        return save(pool, names, *rest, **named)

    monkeypatch.setattr(Pool, "save_set", noted)
    assert region.store(keys).is_whole
    assert sizes == [4, 8, 8], "a prompt's end first"


def test_without_a_thread_for_the_next_lease_all_rows_are_loaded(
    daemon: Daemon, start_region: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.engines.lease_size.CHUNKS_AT_ONCE", 8)
    region, keys = start_region(daemon), keys_of(1, 20)
    assert region.store(keys).is_whole
    assert region.jobs._rows is not None
    region.jobs._rows._set_loads.close()
    assert region.load(keys).good == tuple(keys)


def test_a_load_that_breaks_leaves_no_lease(
    daemon: Daemon, start_region: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.engines.lease_size.CHUNKS_AT_ONCE", 8)
    region, keys, acquired = start_region(daemon), keys_of(1, 20), threading.Semaphore(0)
    assert region.store(keys).is_whole
    acquire = LeaseSize.acquire_set

    def counted(size: LeaseSize, names: Names) -> Lease:
        lease = acquire(size, names)
        acquired.release()
        return lease

    def lacking(*_: Any, **__: Any) -> Any:
        assert all(acquired.acquire(timeout=60) for _ in range(2)), "the next rows are leased, too"
        raise MemoryError

    monkeypatch.setattr(LeaseSize, "acquire_set", counted)
    monkeypatch.setattr(Pool, "load_set", lacking)
    assert region.load(keys).good == ()
    wait_until(lambda: daemon.stats()["leases"] == 0, "both leases have ended")
