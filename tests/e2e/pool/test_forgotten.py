"""Things that an engine forgets end by themselves: saves that nobody commits, leases that nobody releases, saves out of time.

Others get what was held at once, and nothing else of the engine's connection ends with it.
"""

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool_client.connection.session import Session
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, wait_connected, wait_until
from tests.rigs.layouts import over
from tests.rigs.payload import assert_right_bytes, payload_of
from tests.rigs.prompts import CHUNKS, Ranks, assert_loads, assert_served, begin, begin_load, prompt, store
from tests.rigs.runs.children import assert_in_child

TTL, OVERDUE_S = "1s", 7


@pytest.fixture
def pool(daemon: Daemon) -> Iterator[kv.Pool]:
    with daemon.connect(timeout_s=20.0) as pool:
        wait_connected(pool)
        yield pool


def let_go(held: list[object]) -> None:
    """Forget what an engine has."""
    held.clear()
    gc.collect()


def step(pool: kv.Pool, keys: kv.KeyChain) -> None:
    """An engine's step that saves, and fails before it has computed what it saves; the engine goes on."""

    def fail_before_the_pass() -> None:
        save = begin(pool, keys)
        save.layer(0)
        raise RuntimeError("the pass has failed")

    with contextlib.suppress(RuntimeError):
        fail_before_the_pass()
    gc.collect()


@in_both_write_modes
@over("plain", "hybrid", "divided")
def test_a_save_that_an_exception_left_is_free_for_another_client_at_once(ranks: Ranks, shared: Shared) -> None:
    with shared.connect(ranks.layout) as other:
        pool, keys = ranks.first, ranks.prompt(1)
        wanted = ranks.needed(keys)
        with pytest.warns(ResourceWarning, match=f"Save {wanted} chunks.*neither committed nor aborted"):
            step(pool, keys)
        wait_until(lambda: shared.daemon.stats()["reservations"] == 0, "the save has ended")
        assert store(other, keys).stored == wanted
        ranks.assert_served(keys)
        assert (pool.connected, pool.stats()["declined_aborted"]) == (True, wanted)
    stats = shared.daemon.stats()
    assert (stats["expired_reservations"], stats["dram.zombie_slots"]) == (0, 0)


def test_a_save_that_was_committed_or_aborted_is_collected_without_a_word(daemon: Daemon, pool: kv.Pool) -> None:
    assert store(pool, prompt(pool, 1)).stored == CHUNKS
    keys = prompt(pool, 2)
    rows = payload_of(keys, SMALL)
    pool.save(keys, from_=rows).abort()
    background = pool.save(keys, from_=rows)
    background.commit(wait=False)
    background.wait()
    del background
    with pool.acquire(pool.lookup(keys)):
        pass
    gc.collect()  # a warning is an error here
    assert daemon.stats()["leases"] == 0


@in_both_write_modes
@over("plain", "hybrid", "divided")
def test_a_lease_that_nobody_has_is_released_and_its_load_writes_nothing_more(ranks: Ranks, shared: Shared) -> None:
    pool, keys = ranks.first, ranks.prompt(1, 64)
    ranks.store(keys)
    lease = pool.acquire(pool.lookup(keys))
    load, into = begin_load(pool, lease)
    held: list[object] = [load, lease]
    del lease, load
    with pytest.warns(ResourceWarning, match="Lease .* live, 64 chunks.*never released") as warned:
        let_go(held)
    assert len(warned) == 1, "the rows of each group end with the whole lease"
    wait_until(lambda: shared.daemon.stats()["leases"] == 0, "the lease has ended")
    for rows in into:
        rows[:] = 7
    assert shared.daemon.stats()["pins"] == 0
    assert all((rows == 7).all() for rows in into), "the load had ended before the lease had"
    assert pool._link._leases_in_use == {}
    ranks.assert_served(keys, 64)


def test_a_load_that_nobody_has_goes_on_for_who_has_its_lease(pool: kv.Pool) -> None:
    keys = prompt(pool, 1)
    store(pool, keys)
    with pool.acquire(pool.lookup(keys)) as lease:
        into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
        pool.load(lease, into=into)
        gc.collect()
    assert_right_bytes(keys, SMALL, kv.LoadResult(CHUNKS, 0, "complete"), into)


def test_leased_memory_that_nobody_has_is_renewed_no_longer(daemon: Daemon, pool: kv.Pool) -> None:
    keys = prompt(pool, 1)
    store(pool, keys)
    lease = pool.acquire(pool.lookup(keys))
    held: list[object] = [pool.leased_memory(lease)]
    assert len(pool._link._leases_in_use) == 1
    with pytest.warns(ResourceWarning, match="LeasedMemory 6 chunks, open.*never closed") as warned:
        let_go(held)
    assert len(warned) == 1
    wait_until(lambda: pool._link._leases_in_use == {}, "nothing is renewed")
    assert_served(pool, keys, CHUNKS)
    assert_loads(pool, keys, lease)  # the lease is its caller's
    lease.release()
    wait_until(lambda: daemon.stats()["leases"] == 0, "the lease has ended")


def test_a_save_that_is_collected_in_a_cycle_writes_nothing_after_the_connections_end(
    pool: kv.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector clears weak references to all of a cycle before it finalizes any of it."""
    session = pool._link.session
    assert session is not None
    monkeypatch.setattr(pool._link._endings, "end_waiting", lambda: None)
    keys = prompt(pool, 1)
    save: Any = begin(pool, keys)
    save.itself = save
    held: list[object] = [save]
    del save
    with pytest.warns(ResourceWarning, match="neither committed nor aborted"):
        let_go(held)
    (run,) = session._saves
    session.end_session("a test ends it")
    assert run.is_cancelled()  # type: ignore[attr-defined]  # a native job
    assert not session._saves


def test_saves_that_have_ended_are_held_by_nobody(pool: kv.Pool) -> None:
    session = pool._link.session
    assert session is not None
    for seed in range(2):
        keys = prompt(pool, seed)
        save = begin(pool, keys)
        assert len(session._saves) == 1
        if seed:
            save.abort()
        else:
            save.commit()
        assert not session._saves


def test_a_late_save_ends_alone_while_the_end_of_something_forgotten_takes_long(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon, over = start_daemon(server__reservation_ttl=TTL), threading.Event()
    with daemon.connect(timeout_s=20.0) as pool:
        wait_connected(pool)
        pool._link._endings.add_end(over.wait)  # as a load that a slow device cancels
        pool._link._wake()
        keys = prompt(pool, 1)
        save = begin(pool, keys)
        wait_until(lambda: "expired" in repr(save), "its time is over")
        over.set()
        assert save.commit().reasons == {"expired": CHUNKS}
        assert pool.stats()["reconnects"] == 0


@pytest.mark.parametrize("end", ["expires", "pool closes"])
def test_an_engines_memory_is_held_by_nobody_after_the_end(start_daemon: Callable[..., Daemon], end: str) -> None:
    daemon = start_daemon(server__reservation_ttl=TTL)
    with daemon.connect(timeout_s=20.0) as pool:
        wait_connected(pool)
        keys = prompt(pool, 1)
        memory: Any = payload_of(keys, SMALL).copy()
        kept = weakref.ref(memory)
        if end == "expires":
            save = pool.save(keys, from_=memory)
            wait_until(lambda: "expired" in repr(save), "its time is over")
            assert save.commit().reasons == {"expired": CHUNKS}
            del save
        else:
            store(pool, keys)
            lease = pool.acquire(pool.lookup(keys))
            load = pool.load(lease, into=memory)
            pool.close()
            del load, lease
        del memory

        def is_free() -> bool:
            gc.collect()
            return kept() is None

        wait_until(is_free, "the memory is free")


def test_a_lease_of_a_set_is_released(daemon: Daemon, pool: kv.Pool) -> None:
    names = np.arange(96, dtype=np.uint8).reshape(3, 32)
    assert pool.save_set(names, np.zeros((3, SMALL.chunk_bytes), np.uint8)).commit().stored == 3
    held: list[object] = [pool.acquire_set(names)]
    with pytest.warns(ResourceWarning, match="3 chunks.*never released") as warned:
        let_go(held)
    assert len(warned) == 1
    wait_until(lambda: daemon.stats()["leases"] == 0, "it has ended")


def test_what_a_forked_child_or_a_closed_pool_leaves_ends_nothing_and_warns_of_nothing(
    daemon: Daemon, pool: kv.Pool
) -> None:
    store(pool, prompt(pool, 1))
    keys = prompt(pool, 2)
    lease = pool.acquire(pool.lookup(prompt(pool, 1)))
    save = begin(pool, keys)
    mine: list[object] = [lease, save]
    del lease, save

    def are_forgotten_in_silence() -> bool:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            let_go(mine)
        return not warned

    assert_in_child(are_forgotten_in_silence)
    lease, save = cast(tuple[kv.Lease, kv.Save], mine)
    mine.clear()
    stats = daemon.stats()
    assert (stats["leases"], stats["reservations"]) == (1, 1), "they are the parent's"
    assert save.commit().stored == CHUNKS
    save = begin(pool, prompt(pool, 3))
    pool.close()
    del lease, save
    gc.collect()  # a warning is an error here
    wait_until(lambda: daemon.stats()["leases"] + daemon.stats()["reservations"] == 0, "the connection has ended")


ENDING = """
import sys
import kvpool_client as kv
from tests.rigs.daemon import SMALL
from tests.rigs.prompts import begin, prompt, store

pool = kv.connect(sys.argv[1], model="m", revision="1", layout=SMALL, timeout_s=20.0)
keys, others = (prompt(pool, seed, 4) for seed in (1, 2))
store(pool, keys)
lease, save = pool.acquire(pool.lookup(keys)), begin(pool, others)
print(lease.chunks)
"""


def test_an_interpreter_that_ends_with_saves_and_leases_ends_without_a_word(daemon: Daemon) -> None:
    command = [sys.executable, "-W", "error", "-c", ENDING, daemon.socket]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("4\n", "", 0)
    wait_until(lambda: daemon.stats()["leases"] + daemon.stats()["reservations"] == 0, "the connection has ended")


def test_a_finalizer_waits_for_no_lock_of_the_pool(pool: kv.Pool) -> None:
    """It may run in a thread that has any of them."""
    keys = prompt(pool, 1)
    session = pool._link.session
    assert session is not None
    held: list[object] = [begin(pool, keys)]
    with pool._link._lock, session._turn, session._state, pytest.warns(ResourceWarning, match="aborted"):
        let_go(held)
    assert pool.connected
    wait_until(lambda: store(pool, keys).stored == CHUNKS, "the link finds it by itself")


@pytest.mark.parametrize("write_mode", ["in-place", pytest.param("copy", marks=pytest.mark.slow)], indirect=True)
def test_a_reservation_that_ran_out_ends_alone(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__reservation_ttl=TTL)
    with daemon.connect(timeout_s=20.0) as pool, daemon.connect(timeout_s=20.0) as other:
        wait_connected(pool)
        wait_connected(other)
        kept, late, free = (prompt(pool, seed) for seed in (1, 2, 3))
        store(pool, kept)
        lease = pool.acquire(pool.lookup(kept))
        save = begin(pool, late)
        save.layer(0)
        epoch, since = pool.epoch, daemon.stats()["uptime_s"]
        wait_until(lambda: _stored(other, late), "others may save it when its time is over")
        # The daemon would have ended the connection by now.
        wait_until(lambda: daemon.stats()["uptime_s"] - since > OVERDUE_S, "the daemon's patience is over")
        assert (pool.connected, pool.epoch, pool.stats()["reconnects"]) == (True, epoch, 0)
        assert lease.hold.is_live
        assert_loads(pool, kept, lease)
        lease.release()
        wait_until(lambda: _stored(pool, free), "its other saves are served, within their time")
        for layer in (1, 2):
            save.layer(layer)
        ended = save.commit()
        assert (ended.stored, dict(ended.reasons)) == (0, {"expired": CHUNKS})
        for keys in (late, free):
            assert_served(other, keys, CHUNKS)
    stats = daemon.stats()
    assert (stats["dram.zombie_slots"], stats["reservations"]) == (0, 0)
    assert stats["expired_reservations"] >= 1
    assert "twice server.reservation_ttl" not in daemon.log()
    assert daemon.problems() == []


def _stored(pool: kv.Pool, keys: kv.KeyChain) -> bool:
    result = store(pool, keys)
    return result.stored + result.present == len(keys)


def test_a_request_that_another_one_holds_up_names_that_one(daemon: Daemon) -> None:
    """In an engine of one thread that is the Pool's own, which renews leases and reports."""
    with daemon.connect(timeout_s=2.0) as pool:
        wait_connected(pool)
        session = pool._link.session
        assert session is not None
        daemon.signal(signal.SIGSTOP)
        try:
            renewing = threading.Thread(target=lambda: _renew(session), name="kvpool-link")
            renewing.start()
            wait_until(lambda: session._turn.locked(), "a request is under way")
            with pytest.raises(kv.KVPoolError, match="has not answered another request, Renew of thread kvpool-link"):
                session.call(m.Acquire(b""), m.Leased, 0.1)
            renewing.join()
        finally:
            daemon.signal(signal.SIGCONT)


def test_a_request_that_others_keep_from_its_turn_counts_them(pool: kv.Pool) -> None:
    session = pool._link.session
    assert session is not None
    with session._turn, ThreadPoolExecutor(1) as thread:
        asking = thread.submit(session.call, m.Acquire(b""), m.Leased, 0.2)
        while not asking.done():
            session._turns += 1
        with pytest.raises(kv.KVPoolError, match=r"of this Pool's other threads came first, \d+ of them, for 0\.1 s"):
            asking.result()
    assert pool.connected


def _renew(session: Session) -> None:
    with contextlib.suppress(kv.KVPoolError):
        session.call(m.Renew(bytes(8)), m.Done)
