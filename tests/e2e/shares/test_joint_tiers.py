"""Chunks that ranks have stored together, in lower tiers, on other nodes, in events, and for those that wait for them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.types import Level
from tests.e2e.remote.test_two_daemons import two_daemons
from tests.e2e.shares.test_joint_saves import CHUNKS, LAYOUT, assert_loads, part_rows, save_part, shares_of
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of


def test_only_complete_chunks_go_to_the_disk_and_come_back_for_every_size(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    left, right = shares_of(2)
    assert save_part(daemon, LAYOUT, left, 1).part == CHUNKS
    assert save_part(daemon, LAYOUT, right, 1).stored == CHUNKS
    assert save_part(daemon, LAYOUT, left, 2).part == CHUNKS
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
    daemon.kill()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with daemon.connect(layout=LAYOUT) as pool:
        for seed, chunks in ((1, CHUNKS), (2, 0)):
            assert pool.lookup(pool.keys(tokens_of(seed, CHUNKS * LAYOUT.chunk_tokens))).chunks == chunks
    for size in (1, 4, 0):
        for share in shares_of(size):
            assert_loads(daemon, LAYOUT, share, 1)
    assert save_part(daemon, LAYOUT, right, 2).part == CHUNKS
    assert daemon.problems() == []


def test_another_node_fetches_only_complete_chunks(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here):
        left, right = shares_of(2)
        assert save_part(owner, LAYOUT, left, 3).part == CHUNKS
        with here.connect(layout=LAYOUT, timeout_s=60.0) as pool:
            keys = pool.keys(tokens_of(3, CHUNKS * LAYOUT.chunk_tokens))
            assert save_part(owner, LAYOUT, right, 3).stored == CHUNKS
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the chunks are known")
            assert set(pool.lookup(keys).tiers.tolist()) == {Level.PEER}
        for share in shares_of(4):
            assert_loads(here, LAYOUT, share, 3)


def test_one_event_has_the_chunks_and_their_token_ids_when_they_are_complete(daemon: Daemon) -> None:
    left, right = shares_of(2)
    with daemon.connect(layout=LAYOUT) as pool:
        tokens = tokens_of(4, CHUNKS * LAYOUT.chunk_tokens)
        keys = pool.keys(tokens)
        before = pool.events()
        save_part(daemon, LAYOUT, left, 4)
        assert pool.events(before.mark).events == ()
        save_part(daemon, LAYOUT, right, 4)
        (stored,) = pool.events(before.mark).events
        assert (stored.kind, stored.parent) == (kv.EventKind.STORED, b"")
        assert stored.chunks == tuple(keys[number] for number in range(CHUNKS))
        assert stored.tokens == tokens.astype("<i4").tobytes()


def test_who_finds_a_chunk_incomplete_can_wait_for_its_parts(daemon: Daemon) -> None:
    left, right = shares_of(2)
    save_part(daemon, LAYOUT, left, 5)
    with daemon.connect(layout=LAYOUT) as whole:
        keys = whole.keys(tokens_of(5, CHUNKS * LAYOUT.chunk_tokens))
        assert whole.is_being_saved(keys, 0)
        save = whole.save(keys, from_=part_rows(keys, LAYOUT, kv.Share.whole(LAYOUT)))
        assert save.commit().reasons == {"pending": CHUNKS}
        other = threading.Thread(target=save_part, args=(daemon, LAYOUT, right, 5))
        other.start()
        assert save.wait_pending(60.0)
        other.join()
        assert store(whole, keys).present == CHUNKS


@pytest.mark.slow
def test_ranks_that_save_more_than_memory_has_store_right_bytes_or_none(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Saves wait for room that the disk makes, in parts, while others join them."""
    daemon = start_daemon(
        dram__capacity="4MiB",
        ssd__path=str(tmp_path / "ssd"),
        ssd__capacity="64MiB",
        ssd__admission="all",
        server__reservation_ttl="2s",
    )
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    prompts = range(10, 40)

    def save_all(share: kv.Share) -> None:
        with daemon.connect(layout=LAYOUT, share=share, timeout_s=10.0) as pool:
            for seed in prompts:
                keys = pool.keys(tokens_of(seed, CHUNKS * LAYOUT.chunk_tokens))
                result = pool.save(keys, from_=part_rows(keys, LAYOUT, share)).commit()
                assert result.stored + result.present + result.part + result.declined == CHUNKS

    ranks = [threading.Thread(target=save_all, args=(share,)) for share in shares_of(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    found = 0
    with daemon.connect(layout=LAYOUT, timeout_s=10.0) as pool:
        for seed in prompts:
            keys = pool.keys(tokens_of(seed, CHUNKS * LAYOUT.chunk_tokens))
            loaded, into = load_all(pool, keys)
            assert_right_bytes(keys, LAYOUT, loaded, into)
            found += loaded.chunks
    assert found > CHUNKS
    wait_until(lambda: daemon.stats()["joint_chunks"] == 0, "incomplete chunks expire")
    stats = daemon.stats()
    assert (stats["reservations"], stats["dram.writing_chunks"], stats["dram.zombie_slots"]) == (0, 0, 0)
    assert daemon.problems() == []
