"""Ranks that store a chunk together: until its last part is committed it is nobody's, however the others end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import kvpool_client as kv
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.layouts import CASES, FULL, STATE, WINDOW, Case, over, shares_of
from tests.rigs.prompts import CHUNKS, Ranks, assert_loads, begin, prompt, store

KILLED = 7  # the seed of a prompt whose rank is killed while it saves
JOINT = over("stages", "heads", "divided")
Start = Callable[..., Daemon]


def _rank(connection: Connection, socket: str, model: str, name: str) -> None:
    """The last rank of a row in a process of its own: saves what it is asked for."""
    case = CASES[name]
    with kv.connect(socket, model=model, layout=case.layout, share=case.shares[-1], timeout_s=60.0) as pool:
        while (seed := connection.recv()) is not None:
            save = begin(pool, prompt(pool, seed))
            if seed == KILLED:
                connection.send(None)
                connection.recv()  # until it is killed
            result = save.commit()
            connection.send((result.part, result.stored))


@pytest.mark.parametrize("name", ["heads", "divided"])
def test_a_rank_in_a_process_of_its_own_stores_at_the_same_time_and_its_part_is_saved_by_another_when_it_is_killed(
    shared: Shared, name: str
) -> None:
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    arguments = (theirs, shared.daemon.socket, shared.model, name)
    victim = context.Process(target=_rank, args=arguments, daemon=True)
    victim.start()

    def answer() -> tuple[int, int] | None:
        assert connection.poll(60), "the rank has not answered"
        found: tuple[int, int] | None = connection.recv()
        return found

    with Ranks(CASES[name], shared.connect) as ranks:
        left, right = ranks.pools
        wanted = ranks.needed(ranks.prompt(1))
        for seed in range(2, 5):
            connection.send(seed)
            result = store(left, ranks.prompt(seed))
            theirs_ended = answer()
            assert theirs_ended is not None
            totals = result.part + theirs_ended[0], result.stored + theirs_ended[1]
            assert totals == (wanted, wanted), "whoever comes later completes a chunk"
            ranks.assert_served(ranks.prompt(seed))
        connection.send(KILLED)
        assert answer() is None
        keys = ranks.prompt(KILLED)
        assert store(left, keys).part == wanted
        assert store(right, keys).reasons == {"pending": wanted}
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        wait_until(lambda: shared.daemon.stats()["reservations"] == 0, "the killed rank's reservation ends")
        assert store(right, keys).stored == wanted
        ranks.assert_served(keys)


@JOINT
def test_incomplete_chunks_expire_and_are_stored_whole(case: Case, start_daemon: Start) -> None:
    daemon = start_daemon(server__reservation_ttl="1s")
    with Ranks(case, daemon.connect) as ranks, daemon.connect(case.layout) as whole:
        keys = ranks.prompt(11)
        wanted = ranks.needed(keys)
        wait_until(lambda: store(ranks.first, keys).part == wanted, "a part is committed before its time is over")
        assert whole.lookup(keys).chunks == 0
        wait_until(lambda: daemon.stats()["joint_chunks"] == 0, "the incomplete chunks expire")
        assert daemon.stats()["joint_expired_chunks"] >= wanted
        wait_until(lambda: store(whole, keys).declined == 0, "they are stored whole")
        assert whole.lookup(keys).chunks == CHUNKS
        assert store(ranks.pools[-1], keys).present == wanted
        ranks.assert_served(keys)


@JOINT
def test_an_incomplete_chunk_is_pending_for_who_has_all_of_it(ranks: Ranks, shared: Shared) -> None:
    keys = ranks.prompt(18)
    wanted = ranks.needed(keys)
    assert store(ranks.first, keys).part == wanted
    with shared.connect(ranks.layout) as whole:
        assert whole.lookup(keys).chunks == 0
        late = store(whole, keys)
        assert (late.declined, late.reasons) == (wanted, {"pending": wanted})
    assert store(ranks.pools[-1], keys).stored == wanted
    ranks.assert_served(keys)


@JOINT
def test_a_daemon_that_stops_or_is_killed_has_no_incomplete_chunk_afterwards(case: Case, daemon: Daemon) -> None:
    with Ranks(case, daemon.connect) as ranks:
        first, last = ranks.first, ranks.pools[-1]
        keys = ranks.prompt(12)
        wanted = ranks.needed(keys)
        for stop in (daemon.stop, daemon.kill):
            assert store(last, keys).part == wanted
            save = begin(first, keys)
            if stop == daemon.stop:
                assert save.commit().stored == wanted
            stop()
            assert store(first, keys).declined == wanted
            daemon.start()
            wait_until(lambda: all(pool.connected for pool in ranks.pools), "the pools connect again")
            assert first.lookup(keys).chunks == 0
            assert store(first, keys).part == wanted
            assert store(last, keys).stored == wanted
            daemon.stop()
            daemon.start()
            wait_until(lambda: all(pool.connected for pool in ranks.pools), "the pools connect again")


@JOINT
@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_part_that_is_given_up_leaves_the_others_and_is_saved_again(ranks: Ranks, shared: Shared, end: str) -> None:
    keys = ranks.prompt(13)
    wanted = ranks.needed(keys)
    right = shared.connect(ranks.layout, share=ranks.case.shares[-1])
    save = begin(right, keys)
    assert store(ranks.first, keys).part == wanted
    assert store(ranks.pools[-1], keys).reasons == {"pending": wanted}
    if end == "abort":
        save.abort()
        assert save.wait().reasons == {"aborted": wanted}
    right.close()
    wait_until(lambda: shared.daemon.stats()["reservations"] == 0, "its reservations end")
    assert store(ranks.pools[-1], keys).stored == wanted
    for pool in ranks.pools:
        again = store(pool, keys)
        assert (again.stored, again.present, again.part, again.declined) == (0, wanted, 0, 0)
    ranks.assert_served(keys)


@over("divided")
@pytest.mark.parametrize("group", [FULL, WINDOW, STATE])
def test_a_rank_that_gives_one_group_up_leaves_a_miss_until_it_comes_again(ranks: Ranks, group: int) -> None:
    left, right = ranks.pools
    keys = ranks.prompt(20)
    assert store(left, keys).part == ranks.needed(keys)
    named = left.chunks_to_save(keys)
    counts = list(map(len, named))
    stored = store(right, keys, chosen=[() if number == group else chunks for number, chunks in enumerate(named)])
    assert [one.stored for one in stored.groups] == [0 if at == group else count for at, count in enumerate(counts)]
    assert right.lookup(keys).chunks == 0
    again = store(right, keys)
    assert [(one.stored, one.present) for one in again.groups] == [
        (count, 0) if at == group else (0, count) for at, count in enumerate(counts)
    ]
    ranks.assert_served(keys)


@pytest.mark.slow
def test_ranks_that_save_more_than_memory_has_store_right_bytes_or_none(start_daemon: Start, tmp_path: Path) -> None:
    """Saves wait for room that the disk makes, in parts, while others join them."""
    ssd = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB", "ssd__admission": "all"}
    daemon = start_daemon(dram__capacity="4MiB", server__reservation_ttl="2s", **ssd)
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    layout, seeds = CASES["heads"].layout, range(10, 40)

    def save_all(share: kv.Share) -> None:
        with daemon.connect(layout=layout, share=share, timeout_s=10.0) as pool:
            for seed in seeds:
                result = store(pool, prompt(pool, seed))
                assert result.stored + result.present + result.part + result.declined == CHUNKS

    threads = [threading.Thread(target=save_all, args=(share,)) for share in shares_of(layout, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = 0
    with daemon.connect(layout=layout, timeout_s=10.0) as pool:
        for seed in seeds:
            keys = prompt(pool, seed)
            with pool.acquire(pool.lookup(keys)) as lease:
                assert_loads(pool, keys, lease)
                found += lease.chunks
    assert found > CHUNKS
    wait_until(lambda: daemon.stats()["joint_chunks"] == 0, "incomplete chunks expire")
    stats = daemon.stats()
    assert (stats["reservations"], stats["dram.writing_chunks"], stats["dram.zombie_slots"]) == (0, 0, 0)
    assert daemon.problems() == []
