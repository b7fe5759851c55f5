"""Flushed chunks and a rebuild: they do not come back when the catalogue is rebuilt from the slots on disk."""

from pathlib import Path

import pytest

from kvpool.protocol.records import messages as m
from tests.hostile.rigs.raw_clients import engine, keys_of, store
from tests.rigs.daemon import SMALL, Start, wait_until
from tests.rigs.dropping import drop_leases
from tests.rigs.kvpoolctl import ctl


def test_flushed_chunks_stay_flushed_over_rebuilds(start_tiered: Start) -> None:
    daemon = start_tiered()
    dropped, kept, later = keys_of(0, 6), keys_of(100, 6), keys_of(200, 6)
    with engine(daemon, SMALL, "goes") as goes, engine(daemon, SMALL, "stays") as stays, daemon.admin() as admin:
        store(goes, dropped)
        store(stays, kept)
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush("goes", None)
        store(goes, later)
        assert admin.demote_all(60.0)["left"] == 0
    for _ in range(2):  # the second one finds the chunks of the first one's life
        assert daemon.stop() == 0
        daemon.start("--rebuild")
        daemon.wait_open()
        with engine(daemon, SMALL, "goes") as goes, engine(daemon, SMALL, "stays") as stays:
            assert goes.call(m.Acquire(dropped), m.Leased).chunks == 0
            assert stays.call(m.Acquire(kept), m.Leased).chunks == 6
            assert goes.call(m.Acquire(later), m.Leased).chunks == 6
    assert daemon.problems() == []


def test_a_flush_of_all_outlives_rebuilds_as_do_chunks_stored_after_it(start_tiered: Start) -> None:
    daemon = start_tiered()
    dropped, later = keys_of(0, 6), keys_of(200, 6)
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        store(goes, dropped)
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None)
        store(goes, later)
        assert admin.demote_all(60.0)["left"] == 0
    assert daemon.stop() == 0
    daemon.start("--rebuild")
    daemon.wait_open()
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        assert goes.call(m.Acquire(dropped), m.Leased).chunks == 0
        leased = goes.call(m.Acquire(later), m.Leased)
        assert leased.chunks == 6
        drop_leases(goes, leased.lease)  # held chunks stay
        wait_until(lambda: daemon.stats()["ssd.promoted_chunks"] == 6, "all have landed")
        admin.flush(None, None)
        assert daemon.stop() == 0
        daemon.start("--rebuild")
        daemon.wait_open()
        assert daemon.stats()["ssd.chunks"] == 0
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        store(goes, later)  # above every floor, though nothing was found
        assert admin.demote_all(60.0)["left"] == 0
    assert daemon.stop() == 0
    daemon.start("--rebuild")
    daemon.wait_open()
    with engine(daemon, SMALL, "goes") as goes:
        assert goes.call(m.Acquire(later), m.Leased).chunks == 6
    assert daemon.problems() == []


@pytest.mark.parametrize("older_than_s", [None, 0.0])
def test_a_flush_that_is_answered_as_durable_outlives_a_kill(start_tiered: Start, older_than_s: float | None) -> None:
    daemon = start_tiered(ssd__checkpoint_interval="1h")
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        store(goes, keys_of(0, 6))
        assert admin.demote_all(60.0)["left"] == 0
        assert admin.flush(None, older_than_s) | {"bytes": 0} == {
            "chunks": 6,
            "bytes": 0,
            "skipped": 0,
            "durable": True,
        }
    daemon.kill()
    daemon.start()
    daemon.wait_open()
    with engine(daemon, SMALL, "goes") as goes:
        assert goes.call(m.Acquire(keys_of(0, 6)), m.Leased).chunks == 0
    assert daemon.problems() == []


def test_a_flush_of_a_tier_that_is_not_open_is_not_answered_as_durable(start_daemon: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    daemon = start_daemon(ssd__path=str(tmp_path / "file"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "offline", "the tier cannot be opened")
    with daemon.admin() as admin:
        assert not admin.flush(None, None)["durable"]
        assert admin.flush(None, None, "dram")["durable"], "nothing of the tier was to be dropped"
    done = ctl(daemon, "flush", "--all", "--yes")
    assert done.exit_code == 1
    assert "a restart may bring back some of what the SSD tier had" in done.output


def test_chunks_held_during_a_flush_outlive_a_restart(start_tiered: Start) -> None:
    daemon = start_tiered()
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        store(goes, keys_of(0, 6))
        assert admin.demote_all(60.0)["left"] == 0
        leased = goes.call(m.Acquire(keys_of(0, 6)), m.Leased)
        assert admin.flush(None, None)["durable"]
        drop_leases(goes, leased.lease)
        assert admin.demote_all(60.0)["left"] == 0
    assert daemon.stop() == 0
    daemon.start()
    daemon.wait_open()
    with engine(daemon, SMALL, "goes") as goes:
        assert goes.call(m.Acquire(keys_of(0, 6)), m.Leased).chunks == 6
