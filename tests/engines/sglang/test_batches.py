"""Frames that SGLang's batches cost, and batches that are refused in part or meet a daemon without their state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.states import Level
from kvpool_client.engines import lease_size
from kvpool_client.named_keys import Names
from kvpool_client.sglang import part_store
from kvpool_client.verbs.results import LoadResult
from kvpool_client.verbs.set_load import SetLoad
from tests.engines.conftest import TIMEOUT_S
from tests.engines.sglang.standin import Controller, HostPool, page_keys
from tests.rigs.daemon import Daemon, wait_until

Start = Callable[..., Controller]
PAGES = 48


class Frames:
    """The frames that clients of this process have sent since the last call."""

    def __init__(self) -> None:
        self.calls: list[type[Any]] = []
        self.notes = 0

    def take(self) -> tuple[list[type[Any]], int]:
        calls, notes = self.calls, self.notes
        self.calls, self.notes = [], 0
        return calls, notes


class Steps:
    """What a backend does with pages, in order, and with how many; ids of the leases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[str, int]] = []
        self.leased: list[int] = []
        self.released: list[int] = []
        acquire, load, release = kv.Pool.acquire_set, kv.Pool.load_set, kv.Lease.release
        wait = SetLoad.wait

        def acquired(pool: kv.Pool, keys: Names, group: int = 0) -> kv.Lease:
            lease = acquire(pool, keys, group)
            self._note("acquire", len(keys))
            self.leased.append(lease.hold.id)
            return lease

        def loaded(pool: kv.Pool, lease: kv.Lease, *rest: Any, **named: Any) -> SetLoad:
            self._note("load", lease.chunks)
            return load(pool, lease, *rest, **named)

        def waited(load: SetLoad, timeout_s: float | None = None) -> LoadResult:
            if load._result is None:
                self._note("wait", load.chunks)
            return wait(load, timeout_s)

        def released(lease: kv.Lease) -> None:
            self._note("release", lease.chunks)
            self.released.append(lease.hold.id)
            release(lease)

        monkeypatch.setattr(kv.Pool, "acquire_set", acquired)
        monkeypatch.setattr(kv.Pool, "load_set", loaded)
        monkeypatch.setattr(kv.Lease, "release", released)
        monkeypatch.setattr(SetLoad, "wait", waited)

    def _note(self, step: str, pages: int) -> None:
        if pages:
            self.taken.append((step, pages))


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    seen, call, notify = Frames(), BlockingConnection.call, BlockingConnection.notify

    def counted(self: BlockingConnection, request: object, *others: Any) -> Any:
        if not isinstance(request, m.Renew):  # sent by the clock, not by a batch
            seen.calls.append(type(request))
        return call(self, request, *others)

    def noted(self: BlockingConnection, frame: bytes) -> bool:
        seen.notes += 1
        return notify(self, frame)

    monkeypatch.setattr(BlockingConnection, "call", counted)
    monkeypatch.setattr(BlockingConnection, "notify", noted)
    return seen


@pytest.fixture
def large(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon(dram__capacity="64MiB")


def _filled(controller: Controller, keys: list[str]) -> None:
    for number, key in enumerate(keys):
        controller.pool.fill(number, key)


def test_a_batch_takes_two_round_trips_to_save_and_one_to_load(
    large: Daemon, start_sglang: Start, frames: Frames
) -> None:
    controller, keys = start_sglang(large, HostPool(pages=PAGES)), page_keys(1, PAGES)
    _filled(controller, keys)
    frames.take()
    assert controller.backup(keys, range(PAGES)) == PAGES
    calls, notes = frames.take()
    assert calls == [m.Reserve, m.Commit]
    assert notes <= 2, "the other frames are usage reports"
    assert controller.prefetch(keys, range(PAGES)) == PAGES
    calls, notes = frames.take()
    assert calls == [m.Acquire]
    assert notes <= 3
    wait_until(lambda: large.stats()["leases"] == 0, "the leases have ended")
    assert all(controller.pool.holds(number, key) for number, key in enumerate(keys))


def test_a_host_page_may_be_saved_twice_in_one_batch(large: Daemon, start_sglang: Start) -> None:
    controller, keys = start_sglang(large, HostPool(pages=PAGES)), page_keys(3, 3)
    _filled(controller, keys)
    backend, pool = controller.backend, controller.pool
    assert backend.batch_set_v1([keys[0], keys[0], keys[1]], pool.slots([0, 0, 1])) == [True] * 3
    assert (backend.counters()["saved_pages"], backend.counters()["present_pages"]) == (2, 1)
    assert backend.batch_get_v1(keys[:2], pool.slots([4, 5])) == [True] * 2
    assert pool.holds(4, keys[0])
    assert pool.holds(5, keys[1])
    assert backend.batch_set_v1([keys[2]], pool.slots([PAGES])) == [False], "a page that is not there"


def test_the_next_pages_are_leased_while_some_are_copied_and_all_are_released_from_the_last_to_the_first(
    large: Daemon, start_sglang: Start, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, keys = start_sglang(large, HostPool(pages=220)), page_keys(2, 220)
    _filled(controller, keys)
    assert controller.backup(keys, range(220)) == 220
    controller.pool.clear()
    loads = controller.backend.counters().get("loads", 0)
    steps = Steps(monkeypatch)
    frames.take()
    results = controller.backend.batch_get_v1(keys, controller.pool.slots(range(220)))
    assert results == [True] * 220
    assert all(controller.pool.holds(number, key) for number, key in enumerate(keys))
    assert steps.taken == [
        *[("acquire", 64), ("load", 64), ("acquire", 64), ("wait", 64)],
        *[("load", 64), ("acquire", 64), ("wait", 64), ("release", 64), ("release", 64)],
        *[("load", 64), ("acquire", 28), ("wait", 64)],
        *[("load", 28), ("wait", 28), ("release", 28), ("release", 64)],
    ]
    assert steps.released == [steps.leased[number] for number in (1, 0, 3, 2)]
    assert frames.take()[0] == [m.Acquire] * 4
    assert controller.backend.counters()["loads"] == loads + 4
    wait_until(lambda: large.stats()["leases"] == 0, "the leases have ended")


def test_pages_of_other_nodes_are_leased_12_at_once_and_none_while_some_are_on_their_way(
    large: Daemon, start_sglang: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, keys = start_sglang(large, HostPool(pages=40)), page_keys(5, 40)
    _filled(controller, keys)
    assert controller.backup(keys, range(40)) == 40
    probe = kv.Pool.probe

    def probed(pool: kv.Pool, keys: Names, *rest: Any, **named: Any) -> Names:
        levels = probe(pool, keys, *rest, **named)
        return np.where(levels > 0, np.uint8(Level.PEER), levels)

    monkeypatch.setattr(kv.Pool, "probe", probed)
    steps = Steps(monkeypatch)
    assert controller.backend.batch_get_v1(keys[:30], controller.pool.slots(range(30))) == [True] * 30
    assert steps.taken == [
        *[("acquire", 12), ("load", 12), ("wait", 12)] * 2,
        *[("acquire", 6), ("load", 6), ("wait", 6), ("release", 6), ("release", 12), ("release", 12)],
    ]


def test_a_save_has_as_many_pages_as_find_room_by_their_bytes(
    large: Daemon, start_sglang: Start, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HostPool(pages=PAGES)
    monkeypatch.setattr(lease_size, "BYTES_AT_ONCE", 20 * pool.kv_buffer.nbytes // PAGES)
    controller, keys = start_sglang(large, pool), page_keys(9, PAGES)
    _filled(controller, keys)
    frames.take()
    assert controller.backend.batch_set_v1(keys, pool.slots(range(PAGES))) == [True] * PAGES
    assert frames.take()[0] == [m.Reserve, m.Commit] * 3


def test_pages_for_which_a_lease_has_no_room_are_leased_once_others_are_released(
    start_daemon: Callable[..., Daemon], start_sglang: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of twice as many bytes as DRAM has, from the SSD."""
    daemon = start_daemon(
        dram__capacity="2MiB", ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", ssd__admission="all"
    )
    daemon.wait_open()
    controller, keys = start_sglang(daemon, HostPool(pages=80, page_size=64, heads=8)), page_keys(8, 80)
    _filled(controller, keys)
    slots = controller.pool.slots
    for first in range(0, 80, 2):
        part = keys[first : first + 2]
        wait_until(
            lambda part=part, first=first: all(controller.backend.batch_set_v1(part, slots([first, first + 1]))),  # type: ignore[misc]
            "the pages are stored",
        )
    assert daemon.stats()["dram.chunks"] < 80
    controller.pool.clear()
    steps = Steps(monkeypatch)
    assert controller.backend.batch_get_v1(keys, slots(range(80))) == [True] * 80
    assert all(controller.pool.holds(number, key) for number, key in enumerate(keys))
    sizes = [pages for step, pages in steps.taken if step == "acquire"]
    assert sizes[0] == 64
    assert len(sizes) > 2, "more than one lease"
    wait_until(lambda: daemon.stats()["leases"] == 0, "the leases have ended")


def test_pages_count_as_looked_up_once_though_they_are_loaded_later(daemon: Daemon, start_sglang: Start) -> None:
    controller, keys = start_sglang(daemon), page_keys(3, 8)
    _filled(controller, keys)
    assert controller.backend.batch_set_v1(keys[:4], controller.pool.slots(range(4))) == [True] * 4
    assert controller.backend.batch_exists(keys) == 4
    assert controller.backend.batch_get_v1(keys[:4], controller.pool.slots(range(4))) == [True] * 4
    wait_until(lambda: daemon.stats()["usage.loads"] > 0, "the load is reported")
    counted = daemon.stats()
    page_tokens = counted["usage.loaded_tokens"] // 4
    # The first page that is not there ends the question.
    assert counted["usage.lookup_tokens"] == 5 * page_tokens
    assert counted["usage.hit_rate"] == pytest.approx(4 / 5, abs=1e-3)


def test_pages_of_a_batch_are_one_save_of_a_connection(
    start_daemon: Callable[..., Daemon], start_sglang: Start
) -> None:
    daemon = start_daemon(server__max_reservations=1)
    controller, keys = start_sglang(daemon), page_keys(3, 16)
    _filled(controller, keys)
    assert controller.backend.batch_set_v1(keys, controller.pool.slots(range(16))) == [True] * 16
    assert controller.backend.batch_exists(keys) == 16
    assert daemon.problems() == []


class Expiring:
    """A Deadline that passes when it has been asked so many times whether it has."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def has_passed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def remaining_s(self) -> float:
        return float(TIMEOUT_S)


def _late(controller: Controller) -> list[int]:
    counters = controller.backend.counters()
    return [counters[f"late_{call}_pages"] for call in ("load", "save")]


def test_pages_for_which_a_batch_has_no_time_are_counted(
    large: Daemon, start_sglang: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_size, "CHUNKS_AT_ONCE", 16)
    monkeypatch.setattr(part_store, "SAVES_AT_ONCE", 16)
    controller, keys = start_sglang(large, HostPool(pages=PAGES)), page_keys(6, PAGES)
    store, slots = controller.backend._store, controller.pool.slots(range(PAGES))
    _filled(controller, keys)
    assert controller.backup(keys[:40], range(40)) == 40
    assert controller.prefetch(keys, range(PAGES)) == 40
    assert _late(controller) == [0, 0], "a page that is not there is no late one"
    monkeypatch.setattr(part_store, "Deadline", lambda _: Expiring(1))
    assert store.save(keys, slots) == [False] * 32 + [True] * 16
    assert _late(controller) == [0, 32]
    monkeypatch.setattr(part_store, "Deadline", lambda _: Expiring(2))
    assert store.load(keys, slots) == [True] * 32 + [False] * 16
    assert _late(controller) == [16, 32]
    assert store.present(keys) == [True] * 48


def test_loads_of_a_backend_that_is_not_connected_are_counted_as_refused(
    shared_daemon: Daemon, start_sglang: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, keys = start_sglang(shared_daemon), page_keys(7, 4)
    store = controller.backend._store
    store._close_parts()
    monkeypatch.setattr(store, "_connect", lambda: None)
    assert store.load(keys, controller.pool.slots(range(4))) == [False] * 4
    assert controller.backend.counters()["refused_reading"] == 4


@pytest.mark.parametrize(
    ("requests", "word"),
    [
        ([], "batch has 0"),
        ([b""] * (bm.BATCH_MAX + 1), "batch has 257"),
        (["text"], "str"),
        ([b"\xc1"], "msgpack"),
        ([m.encode(one_way.DropLeases(b""), 0)[4:]], "kind 62"),
        ([m.encode(bm.Batch([]), 0)[4:]], "kind 60"),
        ([m.encode(m.Acquire(b"short"), 0)[4:]], "keys column"),
    ],
)
def test_a_batch_that_breaks_the_protocol_ends_only_its_connection(
    shared_daemon: Daemon, start_sglang: Start, requests: list[Any], word: str
) -> None:
    from kvpool.errors import Refused
    from kvpool_client.sglang import Shard, describe_host_pool

    controller, keys = start_sglang(shared_daemon), page_keys(4, 2)
    layout = describe_host_pool(HostPool(), Shard())[0].layout
    hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, "tiny", layout.to_wire())
    connection = BlockingConnection(shared_daemon.socket, hello, TIMEOUT_S)
    try:
        with pytest.raises(Refused, match=word):
            connection.call(bm.Batch(requests), bm.Batched)
    finally:
        connection.close()
    _filled(controller, keys)
    assert controller.backup(keys, range(2)) == 2
    assert shared_daemon.problems() == []
