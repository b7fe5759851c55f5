"""Checks of bytes over both tiers: exactly the bad chunks are found and dropped, clients are not disturbed, no hold is left."""

import json
import os
import threading
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.protocol import verify_walk
from kvpool.protocol.records import messages as m
from kvpool.states import Level
from tests.rigs.daemon import SMALL, Daemon, Start, wait_until
from tests.rigs.kvpoolctl import ctl, ctl_json
from tests.rigs.payload import assert_right_bytes, flip_bit, load_all, store, tokens_of

CHAIN = 6
MAGIC = b"KVPSLOT1"
KEY_AT, EXTENTS_AT = 32, 152
PAGE = 4096
# Bytes of a slot, counted from its header, and what a check says where one of them has changed.
FAULTS = {
    PAGE + SMALL.chunk_bytes - 1: "bad checksum",
    PAGE: "bad checksum",
    EXTENTS_AT: "bad header",
    0: "bad magic",
}
# At least so many rounds of loads and saves beside checks.
ROUNDS = 8


@pytest.fixture
def tiered(start_tiered: Start) -> Daemon:
    return start_tiered(ssd__checkpoint_interval="100ms")


def fill(daemon: Daemon, pool: kv.Pool, chains: int) -> list[kv.KeyChain]:
    """Chains that both tiers have."""
    stored = [pool.keys(tokens_of(300 + number, CHAIN * SMALL.chunk_tokens)) for number in range(chains)]
    for keys in stored:
        assert store(pool, keys).stored == CHAIN
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
    return stored


def flip_on_disk(directory: Path, key: bytes, at: int) -> None:
    """Change one bit of a chunk's slot, counted from its header, without the daemon's knowledge."""
    for segment in sorted(directory.glob("segment-*.kvs")):
        data = segment.read_bytes()
        for slot in range(0, len(data), PAGE):
            if data[slot : slot + 8] == MAGIC and data[slot + KEY_AT : slot + KEY_AT + 32] == key:
                with segment.open("r+b") as file:
                    file.seek(slot + at)
                    file.write(bytes([data[slot + at] ^ 1]))
                    file.flush()
                    os.fsync(file.fileno())
                return
    pytest.fail(f"no slot has key {key.hex()}")


def test_bytes_changed_on_disk_are_found_named_and_dropped_once(tiered: Daemon, ssd: Path) -> None:
    with tiered.connect() as pool:
        stored = fill(tiered, pool, len(FAULTS) + 1)
        for keys, at in zip(stored, FAULTS, strict=False):
            flip_on_disk(ssd, keys[CHAIN - 1], at)
        bad = ctl(tiered, "check", "--deep")
        assert bad.exit_code == 1
        chunks, faults = len(stored) * CHAIN, len(FAULTS)
        *named, total = bad.stdout.splitlines()
        assert sorted(named) == sorted(
            f"ssd: chunk {keys[CHAIN - 1].hex()[:16]}: {fault}, dropped"
            for keys, fault in zip(stored, FAULTS.values(), strict=False)
        )
        counts = f"{chunks} chunks (dram: {chunks}, ssd: {chunks}), {2 * chunks} verified by their bytes"
        assert total == f"{faults} problems, {counts}"
        assert bad.stderr == ""
        clean, left = ctl(tiered, "check", "--deep"), 2 * chunks - faults
        counts = f"{chunks} chunks (dram: {chunks}, ssd: {chunks - faults}), {left} verified by their bytes"
        assert (clean.exit_code, clean.stdout) == (0, f"0 problems, {counts}\n")
        stats = tiered.stats()
        assert (stats["ssd.corrupt_chunks"], stats["checksum_failures"]) == (faults, 0)
        assert (stats["ssd.chunks"], stats["verified_chunks"]) == (chunks - faults, 2 * chunks + left)
        assert [pool.lookup(keys).tiers.tolist() for keys in stored] == [[Level.DRAM] * CHAIN] * len(stored)


def test_what_follows_a_bad_chunk_goes_with_it(tiered: Daemon, ssd: Path) -> None:
    with tiered.connect() as pool:
        stored = fill(tiered, pool, 2)
        flip_on_disk(ssd, stored[0][2], PAGE + 50)
        document = json.loads(ctl(tiered, "--json", "check", "--deep").stdout)
        expected = {"tier": "ssd", "key": stored[0][2].hex(), "fault": "bad_checksum", "dropped": CHAIN - 2}
        assert document["corrupt"] == [expected]
        (problem,) = document["problems"]
        assert problem == f"ssd: chunk {stored[0][2].hex()}: bad checksum, dropped with {CHAIN - 3} that follow it"
        with tiered.admin() as admin:
            admin.flush(None, None, "dram")
        assert [pool.lookup(keys).chunks for keys in stored] == [2, CHAIN]
    assert tiered.problems() == []


def test_a_bad_chunk_stays_dropped_after_a_kill(tiered: Daemon, ssd: Path) -> None:
    with tiered.connect() as pool:
        stored = fill(tiered, pool, 2)
        flip_on_disk(ssd, stored[1][CHAIN - 1], PAGE)
        assert len(tiered.problems()) == 1
        wait_until(lambda: tiered.stats()["ssd.waiting_rows"] == 0, "the catalogue is written")
    tiered.kill()
    tiered.start()
    tiered.wait_open()
    assert tiered.stats()["ssd.chunks"] == 2 * CHAIN - 1
    assert tiered.problems() == []


def test_a_chunk_with_a_flipped_bit_in_dram_is_dropped_there_and_still_found_on_disk(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        (keys,) = fill(tiered, pool, 1)
        with pool.acquire(pool.lookup(keys)) as lease:
            flip_bit(lease, CHAIN - 1, 5)
        found = ctl(tiered, "check", "--deep")
        assert found.exit_code == 1
        assert found.stdout.startswith(f"dram: chunk {keys[CHAIN - 1].hex()[:16]}: bad checksum, dropped\n")
        assert pool.lookup(keys).tiers.tolist() == [Level.DRAM] * (CHAIN - 1) + [Level.SSD]
        assert tiered.stats()["checksum_failures"] == 1
        result, into = load_all(pool, keys)
        assert result.chunks == CHAIN
        assert_right_bytes(keys, SMALL, result, into)
        wait_until(lambda: tiered.stats()["ssd.promotions_under_way"] == 0, "the chunk is back")
    assert tiered.problems() == []


def test_a_sample_reads_as_many_chunks_as_asked_and_finds_bad_ones(tiered: Daemon, ssd: Path) -> None:
    with tiered.connect() as pool:
        stored = fill(tiered, pool, 5)
        total = 2 * 5 * CHAIN
        good = ctl(tiered, "verify", "--sample", "7")
        assert good.exit_code == 0, good.stderr
        assert good.stdout.startswith(f"0 problems, 7 of {total} chunks verified by their bytes, ")
        seed = good.stdout.rsplit("seed ", 1)[1].strip()
        assert ctl_json(tiered, "verify", "--sample", "7", "--seed", seed)["seed"] == int(seed)
        flip_on_disk(ssd, stored[3][CHAIN - 1], PAGE + 9)
        in_memory = ctl(tiered, "verify", "--sample", "1000", "--tier", "dram")
        assert in_memory.stdout.startswith(f"0 problems, {total // 2} of {total // 2} chunks")
        everything = json.loads(ctl(tiered, "--json", "verify", "--sample", "1000", "--tier", "ssd").stdout)
        assert everything["verified"] == everything["chunks"] == total // 2
        assert [entry["key"] for entry in everything["corrupt"]] == [stored[3][CHAIN - 1].hex()]
        again = ctl(tiered, "verify", "--sample", "1000")
        assert (again.exit_code, again.stdout.split(" chunks")[0]) == (0, f"0 problems, {total - 1} of {total - 1}")
        flip_on_disk(ssd, stored[2][CHAIN - 1], PAGE + 9)
        found = ctl(tiered, "verify", "--sample", str(total))
        assert found.exit_code == 1
        assert f"ssd: chunk {stored[2][CHAIN - 1].hex()[:16]}: bad checksum, dropped\n1 problems, " in found.stdout


def test_a_missing_tier_cannot_be_sampled(shared_daemon: Daemon) -> None:
    refused = ctl(shared_daemon, "verify", "--sample", "5", "--tier", "ssd")
    assert refused.exit_code == 2
    assert "there is no tier ssd, only dram" in refused.stderr
    assert ctl(shared_daemon, "verify").exit_code == 2


def test_a_check_does_not_change_the_order_of_eviction(start_tiered: Start) -> None:
    chains = 8
    capacity = (chains + 2) * CHAIN * SMALL.chunk_bytes
    tiered = start_tiered(dram__policy="lru", dram__capacity=f"{capacity}B")
    with tiered.connect() as pool:
        stored = fill(tiered, pool, chains)
        for keys in (stored[5], stored[1]):
            load_all(pool, keys)
        assert tiered.problems() == []
        assert tiered.stats()["pins"] == 0
        for number in range(2 * chains):
            assert store(pool, pool.keys(tokens_of(9000 + number, CHAIN * SMALL.chunk_tokens))).declined == 0
            tiers = [pool.lookup(keys).tiers.tolist() for keys in stored]
            if Level.SSD in tiers[7]:
                break
        assert Level.SSD in tiers[7]
        assert Level.SSD in tiers[0], "the oldest has gone"
        assert tiers[5] == [Level.DRAM] * CHAIN, "used last but one"
        assert tiers[1] == [Level.DRAM] * CHAIN, "used last"


def test_loads_and_saves_go_on_during_checks(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        stored = fill(tiered, pool, 6)
        checked: list[list[str]] = []
        ended = threading.Event()

        def check() -> None:
            while not ended.is_set():
                checked.append(tiered.problems())

        checking = threading.Thread(target=check)
        checking.start()
        try:
            rounds = 0
            while rounds < ROUNDS or not checked:
                with tiered.admin() as admin:
                    admin.flush(None, None, "dram")
                for keys in stored:
                    result, into = load_all(pool, keys)
                    assert (result.chunks, result.reason) == (CHAIN, "complete")
                    assert_right_bytes(keys, SMALL, result, into)
                fresh = pool.keys(tokens_of(5000 + rounds, CHAIN * SMALL.chunk_tokens))
                assert store(pool, fresh).stored == CHAIN
                rounds += 1
        finally:
            ended.set()
            checking.join()
        assert checked == [[]] * len(checked)
    wait_until(lambda: tiered.stats()["ssd.demotions_under_way"] == 0, "what was demoted has been written")
    assert tiered.problems() == []


def test_connections_that_end_during_a_check_leave_no_holds(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        fill(tiered, pool, 6)
        for level in (Level.DRAM, Level.SSD):
            column = verify_walk.pack([int(level) << 32 | number for number in range(6 * CHAIN)])
            for _ in range(10):
                with tiered.admin() as admin:
                    assert admin.notify(m.encode(m.VerifyBytes(column, 16), 0))
            wait_until(lambda: tiered.stats()["pins"] == 0, "DRAM chunks are free again")
            wait_until(lambda: tiered.stats()["ssd.checks_under_way"] == 0, "SSD chunks are free again")
            wait_until(lambda: tiered.stats()["connections"] == 2, "the connections have ended")
        with tiered.admin() as admin:
            assert admin.check()["problems"] == []
            dropped = admin.flush(None, None)
            assert (dropped["chunks"], dropped["skipped"]) == (6 * CHAIN, 0)


def test_a_part_of_a_check_is_bounded_for_any_request(tiered: Daemon) -> None:
    with tiered.connect() as pool, tiered.admin() as admin:
        fill(tiered, pool, 6)
        tiers = admin.check()["tiers"]
        assert {name: counts["chunks"] for name, counts in tiers.items()} == {"dram": 6 * CHAIN, "ssd": 6 * CHAIN}
        column = verify_walk.pack(list(verify_walk.every(tiers))[: m.RECORDS_MAX])
        answer = admin.verify_bytes(column, m.RECORDS_MAX)
        assert answer["chunks"] == 16 <= answer["looked_at"] < 2 * 6 * CHAIN
        assert answer["bytes"] == 16 * SMALL.chunk_bytes
        far_away = verify_walk.pack([Level.SSD << 32 | (1 << 31) - 1, Level.DRAM << 32 | 10**6])
        assert admin.verify_bytes(far_away, 1) == {"looked_at": 2, "chunks": 0, "bytes": 0, "bad": []}
