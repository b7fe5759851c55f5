"""Loads of a set in parts: what ends one while its next lease is asked for, and that no lease stays."""

import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.clock import Deadline
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.set_loads import AHEAD_THREADS, SetLoads

CHUNKS = 64
NAMES = np.zeros((CHUNKS, 32), np.uint8)


class Lease:
    """Of all that it was asked for."""

    def __init__(self, pool: "LargeChunks", chunks: int) -> None:
        self.chunks, self.held, self._pool = chunks, np.ones(chunks, bool), pool
        pool.opened.append(self)

    def release(self) -> None:
        if self not in self._pool.released:
            self._pool.released.append(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LargeChunks:
    """A Pool of chunks of which few are leased at once. `before_ahead`: runs before a lease ahead is answered."""

    layout = SimpleNamespace(chunk_bytes=32 << 20)
    connected = True

    def __init__(self) -> None:
        self.opened: list[Lease] = []
        self.released: list[Lease] = []
        self.before_ahead: Any = lambda: None

    def probe(self, names: Any, **_: object) -> Any:
        return np.ones(len(names), np.uint8)

    def acquire_set(self, names: Any) -> Lease:
        if threading.current_thread() is not threading.main_thread():
            self.before_ahead()
        return Lease(self, len(names))


@pytest.fixture
def pool() -> LargeChunks:
    return LargeChunks()


def _set_loads(pool: Any) -> SetLoads:
    return SetLoads(pool, FailureGuard(logging.getLogger(__name__)), timeout_s=10.0)


def test_what_a_stop_finds_unleased_is_late_and_no_further_lease_is_asked_for(pool: LargeChunks) -> None:
    loads, stop = _set_loads(pool), threading.Event()
    pool.before_ahead = stop.set  # while the lease ahead is waited for
    states = loads.load(NAMES, lambda _lease, places: ["complete"] * len(places), deadline=Deadline(60), stop=stop)
    loads.close()
    first = pool.opened[0].chunks
    assert states == ["complete"] * first + ["late"] * (CHUNKS - first)
    assert 0 < first < CHUNKS
    assert len(pool.opened) == 2
    assert {id(one) for one in pool.opened} == {id(one) for one in pool.released}


def test_loads_do_not_wait_for_each_others_leases_ahead(pool: LargeChunks) -> None:
    """As many as there are threads: the leases ahead of all of them are under way at the same time, or none is answered."""
    loads, meeting, done = _set_loads(pool), threading.Barrier(AHEAD_THREADS), []
    # The size of a part comes from a load of its own; each load below has two parts, and so one lease ahead.
    loads.load(NAMES, lambda _lease, _places: None, deadline=Deadline(60), stop=threading.Event())
    part = pool.opened[0].chunks

    def wait_ahead() -> None:
        if threading.current_thread().name.startswith("kvpool-ahead"):
            meeting.wait(60)

    def load() -> None:
        names, stop = NAMES[: 2 * part], threading.Event()
        done.append(loads.load(names, lambda _, places: ["complete"] * len(places), deadline=Deadline(60), stop=stop))

    pool.before_ahead = wait_ahead
    threads = [threading.Thread(target=load) for _ in range(AHEAD_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    loads.close()
    assert done == [["complete"] * 2 * part] * AHEAD_THREADS
    assert len(pool.released) == len(pool.opened)
