"""SSD tiers of unusual size: the largest that the core takes, without a disk of that size, and one smaller than a chain; and
those whose capacity was lowered.
"""

from pathlib import Path

import lmdb
import pytest

from tests.rigs.daemon import Start, wait_until
from tests.rigs.payload import store, tokens_of
from tests.rigs.tiered_chains import load_right


def test_a_daemon_with_64_tib_starts_and_serves(start_daemon: Start, tmp_path: Path) -> None:
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


def test_of_chains_longer_than_the_tier_only_what_fits_is_written(start_tiered: Start) -> None:
    daemon = start_tiered(ssd__max_chunks="20")
    with daemon.connect() as pool:
        for seed in range(4):
            assert store(pool, pool.keys(tokens_of(seed, 100 * 32))).stored == 100
    with daemon.admin() as admin:
        report = admin.demote_all(60.0)
    assert not report["durable"]
    assert int(daemon.stats()["ssd.demoted_chunks"]) <= 4 * 2 * 20  # each chain twice: by watermark, and by order
    assert daemon.problems() == []


@pytest.mark.parametrize("is_outgrown", [False, True], ids=["cut", "made anew"])
def test_a_lowered_capacity_is_kept_and_loses_no_chunk_that_fits(
    start_tiered: Start, tmp_path: Path, *, is_outgrown: bool
) -> None:
    ssd, lowered = tmp_path / "ssd", 16 << 20
    daemon = start_tiered(ssd__capacity="256MiB", ssd__segment="1MiB")
    with daemon.connect() as pool, daemon.admin() as admin:
        assert store(pool, pool.keys(tokens_of(1, 8 * 32))).stored == 8
        assert admin.demote_all(60.0)["durable"]
    assert daemon.stop() == 0
    (ssd / "catalogue.bad").mkdir()
    (ssd / "catalogue.bad" / "data.mdb").write_bytes(bytes(lowered))  # set aside when there was room for it
    if is_outgrown:
        with (
            lmdb.open(str(ssd / "catalogue"), map_size=lowered, max_dbs=3, lock=False) as environment,
            environment.begin(write=True) as transaction,
        ):
            ignored = environment.open_db(b"namespaces", transaction)
            for number in range(1000):
                transaction.put(b"ignored %d" % number, bytes(2000), db=ignored)
    for _ in range(2):
        daemon.start(f"--set=ssd.capacity={lowered}B")
        daemon.wait_open()
        assert sum(file.stat().st_size for file in ssd.rglob("*") if file.is_file()) <= lowered
        with daemon.connect() as pool:
            assert load_right(pool, pool.keys(tokens_of(1, 8 * 32))).chunks == 8
        assert daemon.problems() == []
        assert daemon.stop() == 0
