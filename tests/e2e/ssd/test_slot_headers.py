"""Headers of slots on disk that have several pages: of chunks with many extents."""

import shutil
from pathlib import Path

import lmdb
import numpy as np

import kvpool_client as kv
import kvpool_native
from tests.rigs.daemon import Daemon, Start
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of
from tests.rigs.rank_memory import RankMemory, expected_part

PAGE = kvpool_native.SSD_HEADER_BYTES
# 600 extents: a header of two pages.
MANY = kv.Layout(layers=75, kv_heads=8, head_dim=2, dtype="float16", chunk_tokens=16, head_groups=8)
CHUNKS = 3


def _served(daemon: Daemon) -> None:
    daemon.wait_open()
    with daemon.connect(layout=MANY) as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * MANY.chunk_tokens))
        assert set(pool.lookup(keys).tiers.tolist()) == {kv.Level.SSD}
        loaded, into = load_all(pool, keys)
        assert loaded.chunks == CHUNKS
        assert_right_bytes(keys, MANY, loaded, into)
    share = kv.Share.of_rank(MANY, 3, 4)
    with daemon.connect(layout=MANY, share=share) as pool:
        mine = RankMemory(MANY, share, blocks=CHUNKS, block_tokens=16, memory="head_major")
        cache = pool.register(mine.arrays, block_tokens=16)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert pool.load(lease, cache, list(range(CHUNKS))).wait().chunks == CHUNKS
        for chunk in range(CHUNKS):
            assert np.array_equal(mine.chunk([chunk]), expected_part(keys[chunk], MANY, share))
    assert daemon.problems() == []


def test_chunks_with_more_extents_than_a_page_describes_survive_restarts(start_tiered: Start, tmp_path: Path) -> None:
    assert kvpool_native.ssd_header_bytes(MANY.extents) == 2 * PAGE
    ssd = tmp_path / "ssd"
    daemon = start_tiered(dram__capacity="32MiB")
    with daemon.connect(layout=MANY) as pool, daemon.admin() as admin:
        assert store(pool, pool.keys(tokens_of(1, CHUNKS * MANY.chunk_tokens))).stored == CHUNKS
        assert admin.demote_all(60.0)["left"] == 0
    daemon.kill()
    daemon.start()
    _served(daemon)
    daemon.kill()
    shutil.rmtree(ssd / "catalogue")
    daemon.start()
    _served(daemon)
    assert "rebuilt from the headers" in daemon.log()


def _move_rows(ssd: Path) -> None:
    """Change the catalogue's rows to name slots that begin a page later."""
    with lmdb.open(str(ssd / "catalogue"), max_dbs=4) as environment:
        table = environment.open_db(b"chunks")
        with environment.begin(write=True, db=table) as transaction:
            for key, value in list(transaction.cursor(table)):
                row = bytearray(value)
                row[64:72] = (int.from_bytes(row[64:72], "little") + PAGE).to_bytes(8, "little")
                row[112:116] = kvpool_native.crc32c(bytes(row[:112])).to_bytes(4, "little")
                transaction.put(key, bytes(row))


def test_slots_that_fit_no_layout_now_are_set_aside_with_one_message(start_tiered: Start, tmp_path: Path) -> None:
    """As those are whose header has had another length: their catalogue rows name places between the slots of now."""
    ssd = tmp_path / "ssd"
    daemon = start_tiered(dram__capacity="32MiB")
    with daemon.connect(layout=MANY) as pool, daemon.admin() as admin:
        assert store(pool, pool.keys(tokens_of(1, CHUNKS * MANY.chunk_tokens))).stored == CHUNKS
        assert admin.demote_all(60.0)["left"] == 0
    assert daemon.stop() == 0
    _move_rows(ssd)
    daemon.start()
    daemon.wait_open()
    with daemon.connect(layout=MANY) as pool:
        assert pool.lookup(pool.keys(tokens_of(1, CHUNKS * MANY.chunk_tokens))).chunks == 0
    stats = daemon.stats()
    assert (stats["ssd.unrestored_chunks"], stats["ssd.restored_chunks"]) == (CHUNKS, 0)
    assert daemon.log().count("3 chunks on disk are set aside") == 1
    assert daemon.problems() == []
