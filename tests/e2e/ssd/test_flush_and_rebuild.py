"""Flushed chunks and a rebuild: they do not come back when the catalogue is rebuilt from the slots on disk."""

from collections.abc import Callable
from pathlib import Path

from kvpool.protocol.records import messages as m
from tests.hostile.rigs.raw_clients import engine, keys_of, store
from tests.rigs.daemon import SMALL, Daemon, wait_until


def wait_open(daemon: Daemon) -> None:
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")


def test_flushed_chunks_stay_flushed_over_rebuilds(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_open(daemon)
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
        wait_open(daemon)
        with engine(daemon, SMALL, "goes") as goes, engine(daemon, SMALL, "stays") as stays:
            assert goes.call(m.Acquire(dropped), m.Leased).chunks == 0
            assert stays.call(m.Acquire(kept), m.Leased).chunks == 6
            assert goes.call(m.Acquire(later), m.Leased).chunks == 6
    assert daemon.problems() == []


def test_a_flush_of_all_outlives_rebuilds_as_do_chunks_stored_after_it(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_open(daemon)
    dropped, later = keys_of(0, 6), keys_of(200, 6)
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        store(goes, dropped)
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None)
        store(goes, later)
        assert admin.demote_all(60.0)["left"] == 0
    assert daemon.stop() == 0
    daemon.start("--rebuild")
    wait_open(daemon)
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        assert goes.call(m.Acquire(dropped), m.Leased).chunks == 0
        leased = goes.call(m.Acquire(later), m.Leased)
        assert leased.chunks == 6
        goes.call(m.Release(leased.lease), m.Done)  # held chunks stay
        wait_until(lambda: daemon.stats()["promoted_chunks"] == 6, "all have landed")
        admin.flush(None, None)
        assert daemon.stop() == 0
        daemon.start("--rebuild")
        wait_open(daemon)
        assert daemon.stats()["ssd.chunks"] == 0
    with engine(daemon, SMALL, "goes") as goes, daemon.admin() as admin:
        store(goes, later)  # above every floor, though nothing was found
        assert admin.demote_all(60.0)["left"] == 0
    assert daemon.stop() == 0
    daemon.start("--rebuild")
    wait_open(daemon)
    with engine(daemon, SMALL, "goes") as goes:
        assert goes.call(m.Acquire(later), m.Leased).chunks == 6
    assert daemon.problems() == []
