"""A disk that changes bytes: misses, a tier that is not written any more, and a report to the operator."""

import re
from pathlib import Path

import kvpool_client as kv
from kvpool.tiers.ssd.corruption import CHUNKS
from tests.rigs.daemon import Daemon, Start, wait_until
from tests.rigs.payload import load_all, store, tokens_of


def on_disk_alone(daemon: Daemon, pool: kv.Pool, count: int) -> list[kv.KeyChain]:
    """Prompts of one chunk that DRAM has no more."""
    keys = [pool.keys(tokens_of(number, 32)) for number in range(1, count + 1)]
    for prompt in keys:
        assert store(pool, prompt).stored == 1
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")
    return keys


def test_several_corrupt_reads_in_a_minute_make_the_tier_readonly_and_unhealthy(start_tiered: Start, ssd: Path) -> None:
    daemon = start_tiered()
    with daemon.connect() as pool, daemon.admin() as admin:
        keys = on_disk_alone(daemon, pool, CHUNKS + 2)
        for segment in ssd.glob("segment-*.kvs"):
            content = bytearray(segment.read_bytes())
            content[4096 + 100 :: 8192] = bytes(byte ^ 1 for byte in content[4096 + 100 :: 8192])
            with segment.open("r+b") as file:
                file.write(content)
        for prompt in keys:
            result, _ = load_all(pool, prompt)
            assert result.chunks == 0
            assert result.reason in ("gone", "checksum", "io")
        wait_until(lambda: daemon.stats()["ssd.state"] == "readonly", "nothing more is written there")
        assert "were not what had been written" in str(admin.info()["ssd_reason"])
        assert any("check the disk" in line for line in daemon.problems(deep=False))
        assert str(admin.info()["corrupt_chunks_of"]).startswith("test-model:")
        assert store(pool, pool.keys(tokens_of(99, 32))).stored == 1  # DRAM serves on


def test_a_cut_segment_file_is_two_lines_of_the_log_with_place_and_count(start_tiered: Start, ssd: Path) -> None:
    daemon = start_tiered()
    with daemon.connect() as pool:
        keys = on_disk_alone(daemon, pool, 40)
        for segment in sorted(ssd.glob("segment-*.kvs")):
            with segment.open("r+b") as file:
                file.truncate(0)
        for prompt in keys:
            assert load_all(pool, prompt)[0].chunks == 0
        stats = daemon.stats()
        assert (stats["ssd.promotion_failed_chunks"], stats["ssd.corrupt_chunks"]) == (len(keys), len(keys))
    daemon.stop()
    lines = [line for line in daemon.log().splitlines() if "bad in the ssd tier" in line]
    assert len(lines) == 2, lines
    place = rf"chunk [0-9a-f]{{16}} at offset \d+ of {re.escape(str(ssd))}/segment-\d{{6}}\.kvs: short_read$"
    assert re.search(f"ERROR .*a chunk is bad in the ssd tier, and no engine gets it: {place}", lines[0])
    assert re.search(f"ERROR .*{len(keys) - 1} more chunks were bad in the ssd tier, .*the latest: {place}", lines[1])
