"""Tests of a node's own clients while a peer misbehaves: their slow requests are as fast as beside a peer that does not.

Rounds with and without the disturbance take turns, and the median of each kind counts. A flood takes a core wherever it goes:
in the rounds without, the same flood goes to another daemon.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from tests.hostile.rigs.daemon_watch import assert_never_internal, private_bytes
from tests.rigs.nodes.flood import KINDS, Flood, wait_flooded
from tests.rigs.nodes.network import chain_of, network, wait_known
from tests.rigs.payload import store

pytestmark = [pytest.mark.campaign, pytest.mark.timed]

ROUNDS = 7
ROUND_S = 0.5
RATIO_MAX = 1.2
# Of the 99th percentile of half a millisecond: less than this is one turn of another process on a shared core.
NOISE_MS = 0.5
# A flood of pulls takes its share of the loop's time in pieces of up to a millisecond: an answer waits for a few of them.
FLOOD_MS_MAX = 3.0
CHUNKS, FLOOD_CHUNKS = 24, 512
GROWTH_MAX = 64 << 20


def _round_ms(pool: kv.Pool, keys: kv.KeyChain) -> float:
    """The 99th percentile of leases of a chain that is here."""
    times = []
    end_s = time.monotonic() + ROUND_S
    while time.monotonic() < end_s:
        begun_s = time.perf_counter()
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == len(keys)
        times.append(time.perf_counter() - begun_s)
    return float(np.percentile(times, 99) * 1e3)


def _compare(
    name: str,
    pool: kv.Pool,
    keys: kv.KeyChain,
    *,
    without: Callable[[], "contextlib.AbstractContextManager[None]"],
    disturbed: Callable[[], "contextlib.AbstractContextManager[None]"],
    more_ms: float = NOISE_MS,
) -> None:
    quiet: list[float] = []
    loud: list[float] = []
    for _ in range(ROUNDS):
        for times, kind in ((quiet, without), (loud, disturbed)):
            with kind():
                times.append(_round_ms(pool, keys))
    ratio = float(np.median(loud) / np.median(quiet))
    print(f"{name}: p99 {np.median(quiet):.2f} ms without, {np.median(loud):.2f} ms with it, {ratio:.2f} times")
    assert ratio <= RATIO_MAX or np.median(loud) - np.median(quiet) <= more_ms


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_of_the_control_plane_does_not_delay_the_nodes_own_clients(tmp_path: Path, kind: str) -> None:
    with (
        network(tmp_path, ("flood", "here", "other")) as net,
        net["here"].daemon() as here,
        net["other"].daemon() as other,
        here.connect(timeout_s=30.0) as pool,
    ):
        keys, own = chain_of(pool, 1, FLOOD_CHUNKS), chain_of(pool, 2, CHUNKS)
        store(pool, keys)
        store(pool, own)
        packed = b"".join(keys[number] for number in range(len(keys)))
        before = private_bytes(here)
        with (
            Flood(net["flood"], here, net["here"].pair.public, kind=kind, keys=packed) as flood,
            Flood(net["flood"], other, net["other"].pair.public, kind=kind, keys=packed) as elsewhere,
        ):
            for one, daemon in ((flood, here), (elsewhere, other)):
                wait_flooded(daemon, 100)
                one.pause()
            _compare(kind, pool, own, without=elsewhere.running, disturbed=flood.running, more_ms=FLOOD_MS_MAX)
        assert private_bytes(here) - before < GROWTH_MAX
        assert here.problems() == []
        assert_never_internal(here)


def test_a_peer_that_stalls_does_not_delay_the_nodes_own_clients(tmp_path: Path, seed: int) -> None:
    with (
        network(tmp_path, ("owner", "here"), seed=seed) as net,
        net["owner"].daemon() as owner,
        net["here"].daemon(peer__stall_timeout="1m", peer__pull_timeout="2m") as here,
        owner.connect() as there,
        here.connect(timeout_s=30.0) as pool,
        here.connect(timeout_s=60.0) as waiting,
    ):
        own, lost = chain_of(pool, 1, CHUNKS), chain_of(pool, 2, CHUNKS)
        store(pool, own)
        store(there, lost)
        wait_known(pool, lost, CHUNKS)

        @contextlib.contextmanager
        def stalled() -> Iterator[None]:
            """A client waits for chunks of a peer that sends nothing."""
            net.stream["owner"].is_stalled = True
            lease = waiting.acquire(waiting.lookup(lost))
            assert lease.chunks == CHUNKS
            into = np.zeros((CHUNKS, waiting.layout.chunk_bytes), np.uint8)
            load = waiting.load(lease, into=into)
            ended = threading.Thread(target=load.wait)
            ended.start()
            try:
                yield
                assert not load.done(), "it waits"
            finally:
                net.stream["owner"].is_stalled = False
                ended.join()
                lease.release()
                with here.admin() as admin:
                    admin.flush(None, None, "")
                store(pool, own)

        _compare("stalled", pool, own, without=contextlib.nullcontext, disturbed=stalled)
        assert here.problems() == owner.problems() == []
