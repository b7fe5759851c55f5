"""The SSD tier through a daemon: chunks beyond DRAM are promoted again, also after a restart, always with the right bytes."""

import resource
import stat
import time
from pathlib import Path

import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import Refused
from kvpool.pool.chains import ROOM_WAIT_S
from kvpool.states import Level
from tests.rigs.daemon import SMALL, Daemon, Start, in_both_write_modes, wait_connected, wait_until
from tests.rigs.kvpoolctl import ctl, ctl_json
from tests.rigs.payload import store, tokens_of
from tests.rigs.tiered_chains import CHAIN, CHUNK_TOKENS, DRAM_CHUNKS, chains, fill, load_right, store_whole

# Of 96 KiB: about 140 of them are 16 MiB on disk, which is the smallest tier.
WIDE = kv.Layout(layers=3, kv_heads=2, head_dim=128, dtype="float16", chunk_tokens=CHUNK_TOKENS)
# Chains, twice what DRAM has room for.
STORED = 6


@pytest.fixture
def tiered(start_tiered: Start) -> Daemon:
    """A daemon with little DRAM over an SSD tier of 64 MiB."""
    return start_tiered(dram__capacity=f"{DRAM_CHUNKS * SMALL.chunk_bytes}B", ssd__checkpoint_interval="100ms")


@in_both_write_modes
def test_chunks_beyond_dram_are_found_and_loaded(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        stored = fill(pool, STORED)
        assert [pool.lookup(keys).chunks for keys in stored] == [CHAIN] * STORED
        assert pool.lookup(stored[0]).tiers.tolist() == [Level.SSD] * CHAIN
        for keys in stored:
            result = load_right(pool, keys)
            assert (result.chunks, result.reason) == (CHAIN, "complete")
        stats = tiered.stats()
        assert stats["evicted_chunks"] == 0
        assert stats["ssd.promoted_chunks"] >= STORED * CHAIN - DRAM_CHUNKS
    assert tiered.problems() == []


def test_the_ssd_section_of_the_statistics_is_complete_and_readable(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        fill(pool, 2)
        with tiered.admin() as admin:
            assert admin.demote_all(60.0)["left"] == 0
        raw = ctl_json(tiered, "stats", "ssd")["ssd"]
        plain = ctl(tiered, "stats", "ssd").stdout
    assert plain.startswith("# Ssd\nssd.")
    used = 2 * CHAIN * (SMALL.chunk_bytes + kvpool_native.SSD_HEADER_BYTES)
    assert raw["ssd.used_bytes"] == used
    assert f"\nssd.used_bytes:{used}\nssd.used_human:{used / 1024:.1f} KiB\n" in plain
    assert not any(name.endswith("_human") for name in raw)
    geometry = f"{SMALL.chunk_bytes}x{SMALL.extents}"
    assert raw[f"ssd.slots_used.{geometry}"] == raw["ssd.chunks"] == raw["ssd.demoted_chunks"] == 2 * CHAIN
    assert raw[f"ssd.slots.{geometry}"] >= 2 * CHAIN
    assert raw["ssd.state"] == "ok"
    names = ["reason", "capacity_bytes", "read_bytes", "written_bytes", "io_errors", "corrupt_chunks", "evicted_chunks"]
    names += ["waiting_reads", "waiting_writes", "waiting_checks", "waiting_rows"]
    names += ["promoted_chunks", "promotion_failed_chunks", "demotion_failed_chunks"]
    assert {f"ssd.{name}" for name in names} <= set(raw)


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_restart_finds_a_warm_tier(tiered: Daemon, *, is_planned: bool) -> None:
    with tiered.connect() as pool:
        stored = fill(pool, STORED)
        on_disk = int(tiered.stats()["ssd.chunks"])
        assert on_disk >= STORED * CHAIN - DRAM_CHUNKS
        if is_planned:
            assert tiered.stop() == 0
            assert "written down, 0 dropped" in tiered.log()
        else:
            wait_until(lambda: tiered.stats()["ssd.waiting_rows"] == 0, "the catalogue is written")
            tiered.kill()
        least = STORED * CHAIN if is_planned else on_disk - CHAIN
        tiered.start()
        tiered.wait_open()
        assert tiered.stats()["ssd.chunks"] >= least
        wait_connected(pool)
        found = 0
        for keys in stored:
            hit = pool.lookup(keys)
            assert load_right(pool, keys).chunks == hit.chunks
            found += hit.chunks
        assert found >= least
    assert tiered.problems() == []


def test_the_tier_takes_no_more_than_its_capacity(start_tiered: Start, tmp_path: Path) -> None:
    capacity, count = 16 << 20, 30
    daemon = start_tiered(dram__capacity=f"{DRAM_CHUNKS * WIDE.chunk_bytes}B", ssd__capacity=f"{capacity}B")
    with daemon.connect(WIDE) as pool:
        stored = fill(pool, count)
        stats = daemon.stats()
        assert stats["ssd.evicted_chunks"] > 0
        wait_until(lambda: daemon.stats()["ssd.demotions_under_way"] == 0, "writing has ended")
        found = sum(pool.lookup(keys).chunks for keys in stored)
        assert daemon.stats()["evicted_chunks"] == count * CHAIN - found, (
            "what neither tier has any more has left the pool"
        )
        loaded = [load_right(pool, keys).chunks for keys in stored]
        assert sum(loaded) < count * CHAIN
        assert loaded[-1] == CHAIN
    files = [file for file in (tmp_path / "ssd").rglob("*") if file.is_file()]
    assert sum(file.stat().st_blocks * 512 for file in files) <= capacity
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in files)
    assert daemon.problems() == []


@pytest.mark.parametrize(("chunks", "durable"), [(CHAIN, "no"), (0, "yes")])
def test_a_tier_that_cannot_be_opened_does_not_stop_the_daemon_and_its_stop_reports_what_is_lost(
    start_daemon: Start, tmp_path: Path, chunks: int, durable: str
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    daemon = start_daemon(ssd__path=str(blocked / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "offline", "the tier gives up")
    if chunks:
        with daemon.connect() as pool:
            keys = pool.keys(tokens_of(1, chunks * CHUNK_TOKENS))
            assert store(pool, keys).stored == load_right(pool, keys).chunks == chunks
    assert daemon.stop() == 0
    assert f"{chunks} dropped with the DRAM tier, durable: {durable}" in daemon.log()


def test_flush_takes_one_tier_or_all(tiered: Daemon) -> None:
    with tiered.connect() as pool, tiered.admin() as admin:
        stored = fill(pool, 2)
        assert admin.demote_all(60.0)["left"] == 0
        assert tiered.stats()["ssd.chunks"] == 2 * CHAIN
        assert admin.flush(None, None, "dram")["chunks"] == 2 * CHAIN
        assert [pool.lookup(keys).tiers.tolist() for keys in stored] == [[Level.SSD] * CHAIN] * 2
        assert load_right(pool, stored[0]).chunks == CHAIN
        wait_until(lambda: tiered.stats()["ssd.promotions_under_way"] == 0, "promotions have ended")
        assert admin.flush(None, None, "ssd")["chunks"] == 2 * CHAIN
        assert [pool.lookup(keys).chunks for keys in stored] == [CHAIN, 0]
        assert admin.demote_all(60.0)["left"] == 0
        assert admin.flush(None, None)["chunks"] == CHAIN
        assert [pool.lookup(keys).chunks for keys in stored] == [0, 0]
        assert tiered.stats()["ssd.chunks"] == 0
    assert tiered.problems() == []


@pytest.mark.parametrize(
    "point",
    [
        # As a stop meets it below.
        pytest.param("daemon.checkpoint.before_data", marks=pytest.mark.slow),
        "daemon.checkpoint.before_catalogue",
    ],
)
def test_durability_is_not_claimed_where_a_sync_has_failed(tiered: Daemon, point: str) -> None:
    assert tiered.stop() == 0
    assert "durable: yes" in tiered.log()
    tiered.environment = {"KVPOOL_FAILPOINT": f"{point}:2:error"}  # the first one is the opening's
    tiered.start("--set=ssd.checkpoint_interval=1h")
    wait_until(lambda: tiered.stats()["ssd.checkpoints"] == 1, "the opening's checkpoint is complete")
    tiered.wait_open()
    with tiered.connect() as pool, tiered.admin() as admin:
        keys = pool.keys(tokens_of(1, CHAIN * CHUNK_TOKENS))
        assert store(pool, keys).stored == CHAIN
        report = admin.demote_all(60.0)
        assert (report["chunks"], report["left"], report["durable"]) == (CHAIN, 0, False)
        wait_until(
            lambda: tiered.stats()["ssd.lost_chunks"] == CHAIN, "the tier is tried again without what is in doubt"
        )
        report = admin.demote_all(60.0)
        assert (report["chunks"], report["left"], report["durable"]) == (CHAIN, 0, True)


def test_a_stop_reports_that_durability_is_not_certain(tiered: Daemon) -> None:
    assert tiered.stop() == 0
    tiered.environment = {"KVPOOL_FAILPOINT": "daemon.checkpoint.before_data:2:error"}
    tiered.start("--set=ssd.checkpoint_interval=1h")
    wait_until(lambda: tiered.stats()["ssd.checkpoints"] == 1, "the tier is open")
    with tiered.connect() as pool:
        assert store(pool, pool.keys(tokens_of(1, CHAIN * CHUNK_TOKENS))).stored == CHAIN
    assert tiered.stop() == 0
    assert "durable: no" in tiered.log()


def test_a_daemon_without_a_disk_claims_no_durability_for_its_chunks(daemon: Daemon) -> None:
    with daemon.admin() as admin, daemon.connect() as pool:
        assert admin.demote_all(1.0) == {"chunks": 0, "left": 0, "durable": True}, "a power cut has nothing to take"
        assert store(pool, pool.keys(tokens_of(1, CHAIN * CHUNK_TOKENS))).stored == CHAIN
        assert admin.demote_all(1.0) == {"chunks": 0, "left": CHAIN, "durable": False}


def test_chunks_that_a_small_tier_could_not_store_are_neither_counted_nor_durable(start_tiered: Start) -> None:
    count = 30
    daemon = start_tiered(dram__capacity="32MiB", ssd__capacity="16MiB", ssd__watermark="1")
    with daemon.connect(WIDE) as pool, daemon.admin() as admin:
        stored = fill(pool, count)
        report = admin.demote_all(60.0)
        assert 0 < report["chunks"] == daemon.stats()["ssd.chunks"] < daemon.stats()["ssd.demoted_chunks"]
        assert (report["chunks"] + report["left"], report["durable"]) == (count * CHAIN, False)
        assert admin.flush(None, None, "dram")["chunks"] == count * CHAIN
        assert sum(pool.lookup(keys).chunks for keys in stored) == report["chunks"]
    assert daemon.problems() == []
    assert daemon.stop() == 0
    assert "durable: yes" in daemon.log(), "what is left is on disk"


def test_a_missing_tier_cannot_be_flushed(shared_daemon: Daemon) -> None:
    with shared_daemon.admin() as admin, pytest.raises(Refused, match="expected one of dram"):
        admin.flush(None, None, "ssd")


def test_a_disk_that_refuses_writes_is_not_written_and_probed_again(tiered: Daemon) -> None:
    """No file may grow or be written: what a full or failing disk does, done to this process alone."""
    assert tiered.process is not None
    unlimited = resource.prlimit(tiered.process.pid, resource.RLIMIT_FSIZE)
    with tiered.connect() as pool:
        stored = fill(pool, 4)
        resource.prlimit(tiered.process.pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))
        stored += [pool.keys(tokens_of(900 + number, CHAIN * CHUNK_TOKENS)) for number in range(6)]
        for keys in stored[4:]:
            assert store(pool, keys).stored == CHAIN, "DRAM serves on"
            assert load_right(pool, keys).chunks == CHAIN
        wait_until(lambda: tiered.stats()["ssd.state"] != "ok", "the tier rests")
        demoted = int(tiered.stats()["ssd.demoted_chunks"])
        resource.prlimit(tiered.process.pid, resource.RLIMIT_FSIZE, unlimited)
        tiered.wait_open()
        with tiered.admin() as admin:
            assert admin.demote_all(60.0)["left"] == 0
        assert int(tiered.stats()["ssd.demoted_chunks"]) > demoted

        for keys in stored:
            load_right(pool, keys)
    assert tiered.problems() == []


def test_second_touch_writes_only_chunks_that_were_used_again(start_tiered: Start) -> None:
    daemon = start_tiered(
        dram__capacity=f"{DRAM_CHUNKS * SMALL.chunk_bytes}B", ssd__watermark="0", ssd__admission="second-touch"
    )
    with daemon.connect() as pool:
        stored = fill(pool, 3)
        assert daemon.stats()["ssd.demoted_chunks"] == 0
        assert load_right(pool, stored[0]).chunks == CHAIN
        more = chains(pool, 6)[3:]
        for keys in more:
            store_whole(pool, keys)
        wait_until(lambda: daemon.stats()["ssd.demotions_under_way"] == 0, "writing has ended")
        assert pool.lookup(stored[0]).chunks == CHAIN, "what was used is on disk"
        assert pool.lookup(stored[1]).chunks == 0, "what was not has gone"
        assert pool.lookup(more[-1]).chunks == CHAIN
        assert daemon.stats()["ssd.chunks"] == CHAIN
        for keys in (stored[1], *chains(pool, 9)[6:]):
            store_whole(pool, keys)
        wait_until(lambda: daemon.stats()["ssd.demotions_under_way"] == 0, "writing has ended")
        assert load_right(pool, stored[1]).chunks == CHAIN, "what came again has been used before"
    assert daemon.problems() == []


# Larger than a segment.
UNFIT = kv.Layout(layers=4, kv_heads=1, head_dim=1024, dtype="uint8", chunk_tokens=300, planes=1)


def test_chunks_without_room_on_disk_do_not_keep_others_from_it(start_tiered: Start) -> None:
    daemon = start_tiered(dram__capacity="16MiB", dram__segment="2MiB", ssd__segment="1MiB", ssd__watermark="1")
    with daemon.connect(UNFIT, model="unfit") as unfit, daemon.connect() as pool:
        chunks = (12 << 20) // UNFIT.chunk_bytes
        assert store(unfit, unfit.keys(tokens_of(1, chunks * UNFIT.chunk_tokens))).stored == chunks
        stored = fill(pool, 4)
        with daemon.admin() as connection:
            report = connection.demote_all(60.0)
        assert (report["chunks"], report["left"]) == (4 * CHAIN, chunks)
        assert store(unfit, unfit.keys(tokens_of(2, chunks * UNFIT.chunk_tokens))).stored == chunks
        assert "not kept in the ssd tier" in daemon.log()
        daemon.kill()
        daemon.start()
        daemon.wait_open()
        wait_connected(pool)
        for keys in stored:
            assert load_right(pool, keys).chunks == CHAIN
    assert daemon.problems() == []


@pytest.mark.timed
def test_no_save_waits_for_chunks_that_are_never_written(start_tiered: Start) -> None:
    daemon = start_tiered(dram__capacity="16MiB", dram__segment="2MiB", ssd__segment="1MiB", ssd__watermark="1")
    with daemon.connect(UNFIT, model="unfit") as unfit, daemon.admin() as admin:
        chunks = (12 << 20) // UNFIT.chunk_bytes
        assert store(unfit, unfit.keys(tokens_of(1, chunks * UNFIT.chunk_tokens))).stored == chunks
        assert admin.demote_all(60.0)["left"] == chunks
        started = time.monotonic()
        assert store(unfit, unfit.keys(tokens_of(2, chunks * UNFIT.chunk_tokens))).stored == chunks
        assert time.monotonic() - started < ROOM_WAIT_S
