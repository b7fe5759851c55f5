"""Commits in the background: the result comes later, once, and what ends in between leaves nothing half stored."""

import signal
import threading
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool import failpoint
from kvpool_client.verbs.save import publish_each
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import Daemon, in_both_write_modes, spawn, wait_until
from tests.rigs.layouts import Case, over
from tests.rigs.prompts import CHUNKS, Ranks, begin, begin_load, rows_of, whole_result
from tests.rigs.runs.children import assert_in_child

# Ends with a commit under way, or with a load.
ENDING = """
import sys, threading
import kvpool_client as kv
from tests.rigs.layouts import CASES
from tests.rigs.prompts import begin, load, prompt

pool = kv.connect(sys.argv[1], model="m", layout=CASES[sys.argv[2]].layout, timeout_s=20.0)
keys = prompt(pool, int(sys.argv[4]), 64)
save = begin(pool, keys)
if sys.argv[3] == "save":
    save.commit(wait=False)
else:
    assert save.commit().declined == 0
    lease, begun = pool.acquire(pool.lookup(keys)), threading.Event()

    def load_on():
        while load(pool, lease)[0].chunks == 64:
            begun.set()

    threading.Thread(target=load_on, daemon=True).start()
    assert begun.wait(20)
print("ended")
"""
SOME = over("plain", "hybrid", "divided")


@SOME
def test_a_process_without_room_for_a_thread_commits_at_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ranks.prompt(8)
    saves = ranks.begin(keys)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        results = [save.commit(wait=False) for save in saves]
    assert [result.declined for result in results if result is not None] == [0] * len(saves)
    for save in saves:
        save.abort()
    ranks.assert_served(keys)


@in_both_write_modes
@over()
def test_a_commit_in_the_background_gives_its_result_later(ranks: Ranks) -> None:
    keys = ranks.prompt(1)
    for is_new in (True, False):
        *parts, last = ranks.begin(keys)
        for save in (*parts, last):
            with save:
                if is_new:
                    save.layer(0)
                assert save.commit(wait=False) is None
                save.commit(wait=False)
            result = save.wait()
            assert save.done()
            assert save.commit() is save.commit(wait=False) is result
            save.abort()
            assert save.wait() is result
        wanted = ranks.needed(keys)
        assert (result.stored, result.present, result.declined) == (wanted * is_new, wanted * (not is_new), 0)
    ranks.assert_served(keys)


@in_both_write_modes
@SOME
def test_a_wait_before_the_commit_is_refused_and_ends_nothing(ranks: Ranks) -> None:
    keys = ranks.prompt(2)
    saves = ranks.begin(keys)
    for save in saves:
        save.layer(0)
        with pytest.raises(kv.InvalidArgument, match=r"wait comes before the commit of <Save \d+ chunks, under way>"):
            save.wait()
    assert [save.commit().declined for save in saves] == [0] * len(saves)
    ranks.assert_served(keys)


@SOME
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_commit_whose_daemon_does_not_answer_is_declined(case: Case, daemon: Daemon, number: int) -> None:
    timeout_s = 30.0 if number == signal.SIGKILL else 1.0
    with Ranks(case, lambda layout, share: daemon.connect(layout, share=share, timeout_s=timeout_s)) as ranks:
        keys = ranks.prompt(1)
        save = begin(ranks.first, keys)
        daemon.signal(number)
        save.commit(wait=False)
        result = save.wait()
        assert (result.stored, result.reasons) == (0, {"disconnected": ranks.needed(keys)})
        assert ranks.first.lookup(keys).chunks == 0


@SOME
def test_a_pool_that_is_closed_ends_its_commits(case: Case, shared: Shared) -> None:
    with Ranks(case, shared.connect) as ranks:
        keys = [ranks.prompt(seed) for seed in range(8)]
        saves = [save for one in keys for save in ranks.begin(one)]
        for save in saves:
            save.commit(wait=False)
        wanted = ranks.needed(keys[0])
    results = [save.wait() for save in saves]
    assert {result.stored + result.part + result.declined for result in results} == {wanted}
    wait_until(lambda: shared.daemon.stats()["reservations"] == 0, "nothing is reserved")


@in_both_write_modes
@SOME
def test_what_is_under_way_at_a_fork_ends_in_the_child_and_goes_on_in_the_parent(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves, their commits in the background, which wait before their request until the child has ended, and loads."""
    reach, may_go_on = failpoint.reach, threading.Event()

    def wait_before_the_request(name: str, *rest: Any) -> None:
        if name == "client.save.before_commit":
            may_go_on.wait()
        reach(name, *rest)

    keys = ranks.prompt(1)
    *parts, save = ranks.begin(keys)

    def is_disconnected() -> bool:
        save.layer(0)
        result = save.commit()
        assert publish_each([save]) == [result]
        save.abort()
        return (result.stored, set(result.reasons)) == (0, {"disconnected"}) and save.wait_pending(60.0) and save.done()

    assert_in_child(is_disconnected)
    for part in parts:
        part.commit()
    with monkeypatch.context() as patched:
        patched.setattr(failpoint, "reach", wait_before_the_request)
        assert save.commit(wait=False) is None
        try:
            assert_in_child(lambda: set(save.wait().reasons) == {"disconnected"})
            assert not save.done()
        finally:
            may_go_on.set()
        assert save.wait().stored == ranks.needed(keys)
    pool = ranks.first
    with pool.acquire(pool.lookup(keys)) as lease:
        load, into = begin_load(pool, lease)

        def has_ended() -> bool:
            seen = load.wait_layer(0), load.done(), load.chunks_so_far
            result = load.wait()
            load.cancel()
            lease.release()
            return (*seen, result.chunks, result.reason, pool.lookup(keys).chunks) == (
                *(False, True, 0),
                *(0, "disconnected", 0),
            )

        assert_in_child(has_ended)
        assert load.wait() == whole_result(ranks.layout, CHUNKS)
        for right, here in zip(rows_of(pool, keys, lease.ranges), into, strict=True):
            assert np.array_equal(right, here)
    ranks.assert_served(keys)


@pytest.mark.parametrize("processes", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layout", "work"), [("plain", "load"), ("hybrid", "save")])
def test_an_engine_that_ends_while_a_thread_waits_for_copies_is_not_aborted(
    shared: Shared, layout: str, work: str, processes: int
) -> None:
    for number in range(processes):
        with spawn(ENDING, shared.daemon.socket, layout, work, str(number)) as engine:
            assert engine.stdout is not None
            printed = engine.stdout.read()
        assert (printed, engine.returncode) == ("ended\n", 0)
    wait_until(lambda: shared.daemon.stats()["reservations"] == 0, "nothing is reserved")
