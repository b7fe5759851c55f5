"""A daemon that answers nothing: every call of every thread of a Pool ends within its own deadline."""

import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol import frames
from kvpool.protocol.records import messages as m
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, wait_until
from tests.rigs.greeter import Greeter
from tests.rigs.payload import assert_right_bytes, chunks_leased, load_all, payload_of, store, tokens_of

pytestmark = pytest.mark.timed

TIMEOUT_S = 0.4
# The bound of a call, and the time that a loaded machine of two cores needs to run 64 threads once each.
LATEST_S = 1.2 * TIMEOUT_S + 0.05
CHAIN = 6
# A request of so many keys does not fit a socket's buffer.
MANY_CHUNKS = 20_000
PREFETCH = {
    "version": 1,
    "actions": [{"type": "prefetch", "ranges": [{"start": 0}]}, {"type": "demote", "ranges": [{"start": 0}]}],
}


def _verbs(pool: kv.Pool, hit: kv.Hit) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every call that asks the daemon, by name; the tests check the answers."""
    keys = hit.keys
    many = pool.keys(tokens_of(9, MANY_CHUNKS * SMALL.chunk_tokens))
    new = pool.keys(tokens_of(9, CHAIN * SMALL.chunk_tokens))
    everything = [kv.TokenRange(0, None, 80)]
    yield "acquire", lambda: chunks_leased(pool, hit)
    yield (
        "acquire many",
        lambda: chunks_leased(pool, kv.Hit(len(many), many.tokens, bytes([1]) * len(many), many)),
    )
    yield "save", lambda: pool.save(new, from_=payload_of(new, SMALL)).commit()
    yield "retain", lambda: pool.retain(keys, everything).accepted
    yield "retain many", lambda: pool.retain(many, everything).accepted
    yield "announce", lambda: pool.announce(many).announced
    yield "demote", lambda: pool.demote(many).accepted
    yield "hint", lambda: pool.hint(PREFETCH, many)
    yield "claim", lambda: pool.claim(bytes(32)).chunks
    yield "lookup", lambda: pool.lookup(keys)
    yield "events", lambda: pool.events().events


def _answer_with_half_a_frame(client: socket.socket) -> None:
    while client.recv(65536):
        client.sendall(frames.LENGTH.pack(100) + b"\x97" + bytes([m.Leased.KIND]))


def _timed(call: Callable[[], object]) -> float:
    begun_s = time.monotonic()
    call()
    return time.monotonic() - begun_s


def _in_threads(calls: list[tuple[str, Callable[[], object]]]) -> list[tuple[float, str]]:
    """The time of each call, all begun at once, the longest first."""
    taken: list[tuple[float, str]] = []
    barrier = threading.Barrier(len(calls))

    def run(name: str, call: Callable[[], object]) -> None:
        barrier.wait()
        taken.append((_timed(call), name))

    threads = [threading.Thread(target=run, args=entry) for entry in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(calls)
    return sorted(taken, reverse=True)


@in_both_write_modes
@pytest.mark.parametrize("threads", [1, 16, 64])
def test_a_hung_daemon_delays_no_thread_beyond_its_own_deadline(daemon: Daemon, threads: int) -> None:
    with daemon.connect(timeout_s=TIMEOUT_S) as pool:
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        store(pool, keys)
        hit = pool.lookup(keys)
        leases = [pool.acquire(hit) for _ in range(threads)]
        half_way = [
            pool.save(pool.keys(tokens_of(70 + seed, 64)), from_=np.zeros((2, SMALL.chunk_bytes), np.uint8))
            for seed in range(2)
        ]
        verbs = list(itertools.islice(itertools.cycle(_verbs(pool, hit)), threads))
        daemon.signal(signal.SIGSTOP)
        taken = _in_threads(verbs)
        print(taken[:4])
        assert taken[0][0] < LATEST_S
        wait_until(lambda: not pool.connected, "somebody has noticed")
        calls: list[tuple[str, Callable[[], object]]] = [
            ("release", leases[0].release),
            ("commit", half_way[0].commit),
            ("abort", half_way[1].abort),
        ]
        for name, call in calls:
            assert _timed(call) < LATEST_S, name
        daemon.signal(signal.SIGCONT)
        wait_until(lambda: pool.connected, "the client is back")
        wait_until(lambda: chunks_leased(pool, pool.lookup(keys)) == CHAIN, "leases are given again")
        result, into = load_all(pool, keys)
        assert result.chunks == CHAIN
        assert_right_bytes(keys, SMALL, result, into)
    assert daemon.problems() == []


@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("serve", [lambda _: None, _answer_with_half_a_frame], ids=["reads nothing", "half a frame"])
def test_a_peer_that_never_answers_delays_no_thread_beyond_its_own_deadline(
    daemon: Daemon, tmp_path: Path, threads: int, serve: Callable[[socket.socket], None]
) -> None:
    with Greeter(tmp_path, daemon, serve=serve) as impostor:
        with kv.connect(impostor.path, model="test-model", layout=SMALL, timeout_s=TIMEOUT_S) as pool:
            keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
            with daemon.connect() as good:
                store(good, keys)
            hit = pool.lookup(keys)
            assert hit.chunks == CHAIN
            verbs = list(_verbs(pool, hit))
            for name, call in verbs if threads == 1 else ():
                wait_until(lambda: pool.connected, "the client is back")
                assert _timed(call) < LATEST_S, name
            if threads > 1:
                taken = _in_threads(list(itertools.islice(itertools.cycle(verbs), threads)))
                print(taken[:4])
                assert taken[0][0] < LATEST_S
            wait_until(lambda: pool.connected, "the client is back")
        begun_s = time.monotonic()
        pool.close()
        assert time.monotonic() - begun_s < LATEST_S


@pytest.mark.parametrize("is_stopped", [False, True], ids=["living", "standing still"])
def test_a_pool_is_made_and_closed_within_its_deadline(daemon: Daemon, is_stopped: bool) -> None:
    pool = daemon.connect(timeout_s=TIMEOUT_S)
    keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
    store(pool, keys)
    lease = pool.acquire(pool.lookup(keys))
    into = np.zeros((CHAIN, SMALL.chunk_bytes), np.uint8)
    load = pool.load(lease, into=into)
    if is_stopped:
        daemon.signal(signal.SIGSTOP)
    asking = threading.Thread(target=lambda: pool.announce(keys))
    asking.start()
    assert load.wait().chunks == CHAIN
    assert _timed(pool.close) < LATEST_S
    asking.join()
    if is_stopped:
        assert _timed(lambda: daemon.connect(timeout_s=TIMEOUT_S).close()) < 2 * LATEST_S
    daemon.signal(signal.SIGCONT)


def test_a_thread_whose_turn_never_comes_has_a_miss_and_the_others_go_on(daemon: Daemon) -> None:
    """A thread that only waits behind others' requests has a miss; the connection, which answers, lives on."""
    with daemon.connect(timeout_s=TIMEOUT_S) as pool:
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        store(pool, keys)
        hit = pool.lookup(keys)
        epoch, session = pool.epoch, pool._link.session
        assert session is not None
        with session._turn:
            session._under_way, session._thread = "Acquire", threading.get_ident()  # of another thread's request
            begun_s = time.monotonic()
            assert chunks_leased(pool, hit) == 0
            assert pool.retain(keys, [kv.TokenRange(0)]).absent == CHAIN
            assert time.monotonic() - begun_s < 2 * LATEST_S
            session._under_way = None
        assert pool.connected
        assert chunks_leased(pool, hit) == CHAIN
        assert (pool.epoch, pool.stats()["reconnects"]) == (epoch, 0)


def test_well_behaved_threads_share_one_connection(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=TIMEOUT_S) as pool:
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        store(pool, keys)
        hit = pool.lookup(keys)
        chunks: list[int] = []

        def run() -> None:
            for _ in range(20):
                with pool.acquire(hit) as lease:
                    chunks.append(lease.chunks)

        threads = [threading.Thread(target=run) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert chunks == [CHAIN] * 320
        assert pool.stats()["reconnects"] == 0
        wait_until(lambda: daemon.stats()["leases"] == 0, "every release has arrived")
