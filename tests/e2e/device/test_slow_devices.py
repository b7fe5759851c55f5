"""A device that is late: what its copies still read or write belongs to nobody else, whatever expires or ends meanwhile.

The engine's device hangs with copies under way while the daemon's deadlines pass, and another engine, in host memory, takes all
the room that there is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGCONT, SIGSTOP
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool_client.connection.link import Link
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.blocks import DeviceBlocks
from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.device import emulated
from tests.rigs.device.device_daemon import DeviceDaemon, DeviceEngine
from tests.rigs.device.engine import DeviceKv
from tests.rigs.payload import assert_right_bytes, chunk_bytes_of, load_all, payload_of, store, tokens_of

pytestmark = emulated.NEEDS_ORDERS
CHUNKS, BLOCKS = 8, 32
# Chunks of 2 MiB and some: a device tier has that at least.
ROOM, CHAIN = 180, 20
TIMEOUT_S = 1.0
TTL = "1s"
OPTIONS = {"dram.capacity": f"{ROOM * SMALL.chunk_bytes}B", "server.reservation_ttl": TTL, "server.lease_ttl": TTL}
LATE_S, ENDED_S = 0.05, 60.0


class LateEngine:
    """An engine on a device; blocks 0, 1 … have its chain."""

    def __init__(self, daemon: DeviceDaemon) -> None:
        self.pool = daemon.connect(timeout_s=TIMEOUT_S)
        self.kv = DeviceKv(SMALL, "kv_first", BLOCKS)
        self.cache: Cache = self.pool.register(self.kv.arrays, 16, "kv_first")
        self.ids = list(range(2 * CHUNKS))
        self.keys = self.pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))

    def save(self) -> kv.Save:
        """A save of its chain, of which nothing is announced."""
        arrays = [np.zeros(self.kv.shape, np.uint16) for _ in self.kv.arrays]
        for number, row in enumerate(payload_of(self.keys, SMALL)):
            parts = row.view(np.uint16).reshape(SMALL.layers, 2, 2, 16, -1)
            for array, planes in zip(arrays, parts, strict=True):
                array[:, 2 * number : 2 * number + 2] = planes
        self.kv.write(arrays)
        return self.pool.save(self.keys, cache=self.cache, block_ids=self.ids)

    def lease(self) -> kv.Lease:
        """A lease of its chain."""
        lease = self.pool.acquire(self.pool.lookup(self.keys))
        assert lease.chunks == CHUNKS
        return lease

    def load(self, lease: kv.Lease) -> kv.Load:
        """A load of a lease of its chain."""
        return self.pool.load(lease, self.cache, self.ids)

    def clear(self) -> None:
        """Blocks with no chunk's bytes."""
        self.kv.write([np.full(self.kv.shape, 0xDEAD, np.uint16) for _ in self.kv.arrays])

    def compare(self, chunks: int) -> None:
        """The blocks have so many chunks."""
        expected = [chunk_bytes_of(self.keys[at], SMALL.chunk_bytes).tobytes() for at in range(chunks)]
        assert self.kv.chunks(self.ids, CHUNKS)[:chunks] == expected


class Others:
    """An engine in host memory."""

    def __init__(self, daemon: DeviceDaemon) -> None:
        self.pool = daemon.connect()
        self.chains: list[kv.KeyChain] = []

    def take_room(self) -> None:
        """Store more chunks than there is room for."""
        for _ in range(ROOM // CHAIN + 1):
            keys = self.pool.keys(tokens_of(500 + len(self.chains), CHAIN * SMALL.chunk_tokens))
            store(self.pool, keys)
            self.chains.append(keys)

    def compare(self) -> None:
        """What is still there of it is right, and that is most of the last chains."""
        loaded = 0
        for keys in self.chains:
            result, into = load_all(self.pool, keys)
            assert_right_bytes(keys, SMALL, result, into)
            loaded += result.chunks
        assert loaded > ROOM // 2


@pytest.fixture
def engine(daemon: DeviceDaemon) -> Iterator[LateEngine]:
    """An engine on the daemon's device."""
    engine = LateEngine(daemon)
    yield engine
    emulated.order("clear 1")
    engine.pool.close()


@pytest.fixture
def others(daemon: DeviceDaemon) -> Iterator[Others]:
    """An engine elsewhere."""
    others = Others(daemon)
    yield others
    others.pool.close()


@contextmanager
def _hanging_from(name: str) -> Iterator[threading.Event]:
    """The device hangs from the first call of this method of its blocks on: what that queues is not done before the block is
    left. The event says that it is queued."""
    queue, is_queued = getattr(DeviceBlocks, name), threading.Event()

    def queue_and_hang(self: DeviceBlocks, *arguments: Any, **named: Any) -> kvpool_native.DeviceEvent:
        emulated.order("hang 1")
        event: kvpool_native.DeviceEvent = queue(self, *arguments, **named)
        is_queued.set()
        return event

    setattr(DeviceBlocks, name, queue_and_hang)
    try:
        yield is_queued
    finally:
        setattr(DeviceBlocks, name, queue)
        emulated.order("hang 0")


class _Waiting:
    """A call on a thread of its own that waits for the device."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=act)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it returns soon."""
        self._thread.join(LATE_S)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Until it has returned."""
        self._thread.join(ENDED_S)
        assert not self._thread.is_alive()


def _zombies(daemon: DeviceDaemon) -> int:
    return int(daemon.stats()["dram.zombie_slots"])


@pytest.mark.parametrize(
    ("end", "is_overdue"), [("abort", False), pytest.param("commit", True, marks=pytest.mark.slow)]
)
def test_slots_that_a_late_device_still_writes_are_nobody_elses(
    daemon: DeviceDaemon, engine: LateEngine, others: Others, end: str, is_overdue: bool
) -> None:
    """Neither when the reservation has expired, nor when the daemon ends the connection for that."""
    save = engine.save()
    with _hanging_from("queue_gather") as is_queued:
        save.layer(0)
        assert is_queued.wait(ENDED_S)
        ending = _Waiting(save.abort if end == "abort" else save.commit)
        wait_until(lambda: _zombies(daemon) == CHUNKS, "the reservation has expired")
        others.take_room()
        if is_overdue:
            wait_until(lambda: "it has written slots for twice" in daemon.log(), "the daemon ends the connection")
            others.take_room()
        assert not ending.has_ended
        assert _zombies(daemon) == CHUNKS
    ending.join()
    assert save.wait().stored == 0
    wait_until(lambda: _zombies(daemon) == 0, "the slots are free")
    others.compare()
    assert daemon.problems() == []


def test_a_session_that_ends_by_a_late_answer_ends_behind_the_device(
    daemon: DeviceDaemon, engine: LateEngine, others: Others
) -> None:
    """The connection, and with it the reservation, lasts as long as the device may write."""
    save = engine.save()
    with _hanging_from("queue_gather") as is_queued:
        save.layer(0)
        assert is_queued.wait(ENDED_S)
        daemon.signal(SIGSTOP)
        asking = _Waiting(lambda: store(engine.pool, engine.pool.keys(tokens_of(2, SMALL.chunk_tokens))))
        wait_until(lambda: not engine.pool.connected, "the answer is late")
        assert not asking.has_ended
        daemon.signal(SIGCONT)
        # One more is that of the request whose answer nobody has waited for.
        wait_until(lambda: _zombies(daemon) == CHUNKS + 1, "the reservations have expired")
        others.take_room()
        assert _zombies(daemon) == CHUNKS + 1
    asking.join()
    assert save.commit().stored == 0
    wait_until(lambda: _zombies(daemon) == 0, "the slots are free")
    others.compare()


def test_a_session_ends_behind_the_device_of_a_save_that_nobody_has_any_more(daemon: DeviceDaemon) -> None:
    """Also of one with summaries, which is made of two runs: its KV is still copied by a thread of its own."""
    layout = kv.Layout(layers=3, kv_heads=2, head_dim=32, dtype="bfloat16", chunk_tokens=64, summaries="clusters7")
    pool = daemon.connect(layout=layout)
    arrays = DeviceKv(layout, "kv_first", 4)
    cache = pool.register(arrays.arrays, 16, "kv_first")
    save = pool.save(pool.keys(tokens_of(1, layout.chunk_tokens)), cache=cache, block_ids=[0, 1, 2, 3])
    with _hanging_from("queue_gather") as is_queued:
        save.layer(0)
        assert is_queued.wait(ENDED_S)
        held = [save]
        del save
        with pytest.warns(ResourceWarning, match="neither committed nor aborted"):
            held.clear()
        closing = _Waiting(pool.close)
        assert not closing.has_ended
        assert daemon.stats()["reservations"] == 1
    closing.join()
    wait_until(lambda: daemon.stats()["reservations"] == 0, "the connection has ended")


def _loaded(engine: LateEngine) -> int:
    with engine.lease() as lease:
        return engine.load(lease).wait().chunks


def _with_copies(daemon: DeviceDaemon, engine: LateEngine) -> None:
    """Each chunk of the engine's chain has a copy: the first load opens the device, and the next lease has copies made."""
    # A machine with other work may be slower than the deadlines are long.
    wait_until(lambda: CHUNKS in ((result := engine.save().commit()).stored, result.present), "its chain is stored")
    for _ in range(2):
        wait_until(lambda: _loaded(engine) == CHUNKS, "it is loaded")
    daemon.wait_for_copies(CHUNKS)
    engine.clear()


def test_a_load_that_is_cancelled_ends_behind_the_device(
    daemon: DeviceDaemon, engine: LateEngine, others: Others
) -> None:
    """Its blocks are the engine's again when the call returns, though the copies that it reads are others' meanwhile."""
    others.take_room()
    _with_copies(daemon, engine)
    lease = engine.lease()
    with _hanging_from("queue_spread") as is_queued, DeviceEngine(daemon) as other:
        load = engine.load(lease)
        assert is_queued.wait(ENDED_S)
        cancelling = _Waiting(load.cancel)
        with daemon.admin() as admin:
            admin.flush(None, None, "hbm")
        for keys in others.chains[-3:]:
            other.lease([keys[at] for at in range(CHAIN)])
        wait_until(lambda: daemon.stats()["hbm.chunks"] >= 2 * CHAIN, "other copies are in their place")
        assert not cancelling.has_ended
    cancelling.join()
    engine.clear()
    before = engine.kv.read()
    assert (load.wait().chunks, load.wait().reason) == (0, "cancelled")
    lease.release()
    assert all(np.array_equal(*layers) for layers in zip(before, engine.kv.read(), strict=True))


def test_a_lease_that_expires_while_the_device_reads_gives_nothing(
    daemon: DeviceDaemon, engine: LateEngine, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody renews it, and what it was of leaves both tiers."""
    _with_copies(daemon, engine)
    monkeypatch.setattr(Link, "_renew", lambda *_: None)
    lease = engine.lease()
    with _hanging_from("queue_spread") as is_queued:
        load = engine.load(lease)
        assert is_queued.wait(ENDED_S)
        wait_until(lambda: daemon.stats()["leases"] == 0, "the lease has expired")
        others.take_room()
        assert engine.pool.lookup(engine.keys).chunks == 0
    result = load.wait()
    assert (result.chunks, result.reason) == (0, "gone")
    lease.release()
    others.compare()
