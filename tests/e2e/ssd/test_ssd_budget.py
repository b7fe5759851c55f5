"""Writes of a daemon to its SSD tier: within its budget, stricter step by step, no chunk twice without a use in between."""

import time
from pathlib import Path

import kvpool_client as kv
from kvpool.tiering.admission import Admitted
from kvpool_native import SSD_HEADER_BYTES
from tests.rigs.daemon import SMALL, Daemon, Start, wait_connected, wait_until
from tests.rigs.payload import store, tokens_of

CHAIN = 4
DRAM_CHUNKS = 64
SLOT_BYTES = SMALL.chunk_bytes + SSD_HEADER_BYTES
HOURLY_CHUNKS = 48
DAY_S = 86_400
# Requests that the eviction policy needs to adapt.
LESSONS = 120


def keys_of(pool: kv.Pool, number: int) -> kv.KeyChain:
    return pool.keys(tokens_of(9000 + number, CHAIN * SMALL.chunk_tokens))


def use(pool: kv.Pool, keys: kv.KeyChain) -> int:
    with pool.acquire(pool.lookup(keys)) as lease:
        return lease.chunks


def settle(daemon: Daemon) -> dict[str, int | float | str]:
    wait_until(lambda: daemon.stats()["ssd.demotions_under_way"] == 0, "writing has ended")
    return daemon.stats()


def test_a_tiny_budget_passes_every_step_and_is_never_exceeded(start_daemon: Start, tmp_path: Path) -> None:
    per_day = 24 * HOURLY_CHUNKS * SLOT_BYTES
    daemon = start_daemon(
        dram__capacity=f"{DRAM_CHUNKS * SMALL.chunk_bytes}B",
        ssd__path=str(tmp_path / "ssd"),
        ssd__capacity="64MiB",
        ssd__watermark="0",
        ssd__write_budget=f"{per_day}B",
    )
    started_s = time.monotonic() - 60  # the daemon's budget grew before this point already
    daemon.wait_open()
    seen: list[str] = []

    def look() -> dict[str, int | float | str]:
        stats = settle(daemon)
        allowed = HOURLY_CHUNKS * SLOT_BYTES + per_day * (time.monotonic() - started_s) / DAY_S
        assert int(stats["ssd.written_bytes"]) <= allowed
        seen.append(str(stats["ssd.admission"]))
        return stats

    with daemon.connect() as pool:
        assert store(pool, keys_of(pool, 0)).stored == CHAIN
        for _ in range(LESSONS):
            assert use(pool, keys_of(pool, 0)) == CHAIN
        number = 0
        while number < 40 and look()["ssd.admission"] in ("all", "likely"):
            number += 1
            assert store(pool, keys_of(pool, number)).stored == CHAIN
        while number < 80 and look()["ssd.admission"] != "nothing":
            number += 1
            assert store(pool, keys_of(pool, number)).stored == CHAIN
            assert use(pool, keys_of(pool, number)) == CHAIN, "used again, so worth a write at this step"
        before = look()
        for _ in range(DRAM_CHUNKS // CHAIN):
            number += 1
            assert store(pool, keys_of(pool, number)).stored == CHAIN, "DRAM serves on"
        after = look()
    assert [word for at, word in enumerate(seen) if word not in seen[:at]] == [step.word for step in Admitted]
    assert seen == sorted(seen, key=[step.word for step in Admitted].index)
    assert after["ssd.written_bytes"] == before["ssd.written_bytes"]
    assert int(after["ssd.declined_no_budget"]) > 0
    declined = sum(int(count) for name, count in after.items() if name.startswith("ssd.declined_"))
    assert declined == after["evicted_chunks"]
    assert int(after["ssd.written_bytes"]) > (HOURLY_CHUNKS - CHAIN) * SLOT_BYTES
    assert daemon.stop() == 0
    daemon.start()
    daemon.wait_open()
    with daemon.connect() as pool:
        assert use(pool, keys_of(pool, number)) == CHAIN, "a planned stop keeps what DRAM had"
    assert daemon.problems() == []


def test_a_budget_in_drive_writes_is_that_of_the_tier(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", ssd__write_budget="1.5 DWPD")
    with daemon.admin() as admin:
        assert admin.info()["ssd_write_budget_bytes"] == 96 << 20
        assert "ssd_warning" not in admin.info()
    assert int(daemon.stats()["ssd.write_budget_left_bytes"]) == 4 << 20


def test_a_tier_smaller_than_dram_is_written_once_and_reported_to_be_small(start_tiered: Start) -> None:
    chains = 28  # of 192 KiB: more than the disk has slots for, fewer than a search for an unwritten chunk examines
    daemon = start_tiered(dram__capacity="64MiB", ssd__capacity="16MiB", ssd__watermark="0")
    named = "ssd.capacity is 16.0 MiB, less than dram.capacity 64.0 MiB"
    assert named in daemon.log()
    with daemon.admin() as admin:
        assert named in admin.info()["ssd_warning"]
    layout = kv.Layout(layers=3, kv_heads=2, head_dim=256, dtype="float16", chunk_tokens=SMALL.chunk_tokens)
    with daemon.connect(layout) as pool:
        for number in range(chains):
            assert store(pool, keys_of(pool, number)).stored == CHAIN
        stats = settle(daemon)
        assert stats["dram.chunks"] == chains * CHAIN
        assert int(stats["ssd.evicted_chunks"]) > 0, "it is smaller than what was written"
        assert stats["ssd.demoted_chunks"] == chains * CHAIN, "each chunk is written once"
        assert use(pool, keys_of(pool, 0)) == CHAIN
        assert store(pool, keys_of(pool, chains)).stored == CHAIN
        stats = settle(daemon)
        assert stats["ssd.demoted_chunks"] == (chains + 2) * CHAIN, "and once more when it was used again"
        assert daemon.problems() == []
        assert daemon.stop() == 0
        daemon.start()
        daemon.wait_open()
        wait_connected(pool)
        assert int(daemon.stats()["ssd.chunks"]) > 0
    assert daemon.problems() == []
