"""SSD tiers of unusual size: the largest that the core takes, without a disk of that size, and one smaller than a chain."""

from collections.abc import Callable
from pathlib import Path

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import store, tokens_of


def test_a_daemon_with_64_tib_starts_and_serves(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(dram__capacity="16MiB")
    assert daemon.stop() == 0
    daemon.environment["KVPOOL_FAILPOINT"] = "daemon.ssd.open_files:*:error"  # before 64 TiB are asked of the disk
    daemon.start(f"--set=ssd.path={tmp_path / 'ssd'}", "--set=ssd.capacity=64TiB", "--set=ssd.max_chunks=200000")
    wait_until(lambda: daemon.stats()["ssd.state"] == "offline", "the disk was tried")
    assert int(daemon.stats()["ssd.capacity_bytes"]) > 63 << 40
    with daemon.connect() as pool:
        assert store(pool, pool.keys(tokens_of(1, 4 * 32))).stored == 4
    assert all(problem.startswith("ssd: it could not be opened") for problem in daemon.problems())
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()


def test_of_chains_longer_than_the_tier_only_what_fits_is_written(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", ssd__max_chunks="20")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with daemon.connect() as pool:
        for seed in range(4):
            assert store(pool, pool.keys(tokens_of(seed, 100 * 32))).stored == 100
    with daemon.admin() as admin:
        report = admin.demote_all(60.0)
    assert not report["durable"]
    assert int(daemon.stats()["demoted_chunks"]) <= 4 * 2 * 20  # each chain twice: by watermark, and by order
    assert daemon.problems() == []
