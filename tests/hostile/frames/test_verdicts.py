"""False reports of bad chunks: they drop nothing."""

from collections.abc import Callable
from pathlib import Path

from kvpool.protocol.records import messages as m
from kvpool.states import Level
from tests.hostile.rigs.raw_clients import engine, keys_of, mapped_arena, next_answer, raw_engine, read_back, store
from tests.rigs.daemon import Daemon, wait_until

CHUNKS = 150


def test_a_report_about_chunks_under_promotion_drops_nothing(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    keys = keys_of(0, CHUNKS)
    with engine(daemon) as good, daemon.admin() as admin, raw_engine(daemon) as hostile:
        store(good, keys)
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")
        assert daemon.stats()["dram.chunks"] == 0
        with mapped_arena(good) as arena:
            arena[:] = b"\xa5" * len(arena)  # chunks that have not landed do not count as right
        # The first lease, and reports about chunks of its last part, which has not landed yet.
        reports = [m.ReportCorrupt(1, chunk) for chunk in (CHUNKS - 3, CHUNKS - 2, CHUNKS - 1)]
        hostile.sendall(b"".join(m.encode(one, 1) for one in (m.Acquire(keys), *reports)))
        _, _, leased = next_answer(hostile)
        assert leased[:2] == [1, CHUNKS]
        assert set(leased[4][-3:]) == {Level.SSD}
        wait_until(lambda: daemon.stats()["ssd.promoted_chunks"] == CHUNKS, "all have landed")
        wait_until(lambda: daemon.stats()["corrupt_reports"] == 3, "all reports were read")
        stats = daemon.stats()
        assert (stats["checksum_failures"], stats["dram.dropped_chunks"], stats["ssd.promotion_failed_chunks"]) == (
            0,
            0,
            0,
        )
        assert read_back(good, keys) == [True] * CHUNKS
    assert daemon.problems() == []
