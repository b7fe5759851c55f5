"""Commits of groups in the background: the result comes later, once, and what ends in between leaves nothing half stored."""

import os
import signal
import threading
import warnings
from typing import Any

import pytest

from kvpool import failpoint
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, spawn, wait_until
from tests.rigs.groups.hybrid import CHUNK, HYBRID, WINDOW_CHUNKS, assert_served, begin_store
from tests.rigs.payload import payload_of, tokens_of

CHUNKS = 4
STORED = CHUNKS + WINDOW_CHUNKS + 1

ENDING = """
import sys
import kvpool_client as kv
from tests.rigs.groups.hybrid import CHUNK, HYBRID, begin_store
from tests.rigs.payload import tokens_of

pool = kv.connect(sys.argv[1], model="m", layout=HYBRID)
begin_store(pool, pool.keys(tokens_of(int(sys.argv[2]), 64 * CHUNK + 1))).commit(wait=False)
print("ended")
"""


def test_a_process_without_room_for_a_thread_commits_at_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon.connect(HYBRID) as pool, daemon.connect() as plain:
        keys, plain_keys = pool.keys(tokens_of(8, CHUNKS * CHUNK + 1)), plain.keys(tokens_of(8, 64))
        saves = begin_store(pool, keys, [CHUNKS]), plain.save(plain_keys, from_=payload_of(plain_keys, SMALL))

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", refuse)
            results = [save.commit(wait=False) for save in saves]
        assert [result.stored for result in results if result is not None] == [STORED, 2]
        for save in saves:
            save.abort()
        assert_served(pool, keys, CHUNKS)


@in_both_write_modes
def test_a_commit_in_the_background_gives_its_result_later(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * CHUNK + 1))
        save = begin_store(pool, keys, [CHUNKS])
        with save:
            save.layer(0, 0)
            assert save.commit(wait=False) is None
            save.commit(wait=False)
        result = save.wait()
        assert (result.stored, result.declined) == (STORED, 0)
        assert save.done()
        assert save.commit() is save.commit(wait=False) is result
        save.abort()
        assert save.wait() is result
        assert_served(pool, keys, CHUNKS)
        again = begin_store(pool, keys, [CHUNKS])
        assert again.commit(wait=False) is None
        assert again.wait().present == STORED
        assert daemon.stats()["dram.chunks"] == STORED
    assert daemon.problems() == []


def test_a_save_that_was_given_up_is_not_committed(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * CHUNK + 1))
        save = begin_store(pool, keys, [CHUNKS])
        save.abort()
        result = save.commit(wait=False)
        assert result is not None
        assert (result.stored, result.reasons) == (0, {"aborted": STORED})
        assert pool.lookup(keys).chunks == 0
    assert daemon.problems() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_commit_whose_daemon_does_not_answer_is_declined(daemon: Daemon, number: int) -> None:
    with daemon.connect(HYBRID, timeout_s=30.0 if number == signal.SIGKILL else 3.0) as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * CHUNK + 1))
        save = begin_store(pool, keys, [CHUNKS])
        daemon.signal(number)
        save.commit(wait=False)
        result = save.wait()
        assert (result.stored, result.reasons) == (0, {"disconnected": STORED})
        assert pool.lookup(keys).chunks == 0


def test_a_pool_that_is_closed_ends_its_commits(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        saves = [begin_store(pool, pool.keys(tokens_of(seed, CHUNKS * CHUNK + 1))) for seed in range(8)]
        for save in saves:
            save.commit(wait=False)
    results = [save.wait() for save in saves]
    assert all(result.stored + result.declined == sum(len(one.states) for one in result.groups) for result in results)
    wait_until(lambda: daemon.stats()["reservations"] == 0, "nothing is reserved")
    assert daemon.problems() == []


def test_a_fork_ends_a_commit_in_the_child_alone(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the commit is under way: it waits before its request until the child has ended."""
    reach, may_go_on = failpoint.reach, threading.Event()

    def wait_before_the_request(name: str, *rest: Any) -> None:
        if name == "client.save.before_commit":
            may_go_on.wait()
        reach(name, *rest)

    monkeypatch.setattr(failpoint, "reach", wait_before_the_request)
    with daemon.connect(HYBRID, timeout_s=30.0) as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * CHUNK + 1))
        save = begin_store(pool, keys, [CHUNKS])
        assert save.commit(wait=False) is None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                signal.alarm(60)
                result = save.wait()
                save.abort()
                os._exit(0 if (result.stored, set(result.reasons)) == (0, {"disconnected"}) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not save.done()
        finally:
            may_go_on.set()
        assert save.wait().stored == STORED
        assert_served(pool, keys, CHUNKS)
    assert daemon.problems() == []


@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_that_ends_while_a_commit_goes_on_is_not_aborted(daemon: Daemon, processes: int) -> None:
    for seed in range(processes):
        with spawn(ENDING, daemon.socket, str(seed)) as engine:
            assert engine.stdout is not None
            printed = engine.stdout.read()
        assert (printed, engine.returncode) == ("ended\n", 0)
    wait_until(lambda: daemon.stats()["reservations"] == 0, "nothing is reserved")
    assert daemon.problems() == []
