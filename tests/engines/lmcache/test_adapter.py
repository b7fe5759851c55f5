"""LMCache's plug-in over a real daemon, driven as LMCache's controllers drive it (see standin)."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import LayoutMismatch
from kvpool.states import DRAM
from kvpool_client.engines import lease_size, weights
from kvpool_client.lmcache import locks, model_weights
from kvpool_client.lmcache.object_names import names_of
from tests.engines.lmcache.standin import BFLOAT16, ONE_LAYER, UINT8, Controller, Desc, Memory, Meta, Raw, Shape
from tests.rigs.daemon import Daemon, in_both_write_modes, wait_until
from tests.rigs.held_weights import HeldWeights, begun_now, held_weights
from tests.rigs.store.scripted_store import SharedDirectory
from tests.rigs.store.store_daemon import StoreDaemon

__all__ = ["begun_now", "held_weights"]

Start = Callable[..., Controller]
SIZE = 2 * 8 * 64 * 2
WIDE = Desc([Shape((2, 2, 8, 64)), Shape((3, 5))], [BFLOAT16, UINT8])


@pytest.fixture
def start(start_lmcache: Start) -> Start:
    return start_lmcache


def _held(daemon: Daemon) -> int:
    leases: int = daemon.stats()["leases"]
    return leases


@in_both_write_modes
def test_objects_are_found_locked_loaded_and_unlocked(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    keys = controller.keys(*range(9))
    assert controller.lookup(keys) == [False] * 9
    assert controller.store(keys[:6]) == 6 * SIZE
    assert controller.store(keys[:6]) == 0  # present: nothing was moved
    assert controller.lookup(keys) == [True] * 6 + [False] * 3
    assert _held(daemon) == 1
    assert controller.load(keys[:4]) == [True] * 4
    controller.adapter.submit_unlock(keys[4:6])
    assert _held(daemon) == 1
    controller.adapter.submit_unlock(keys[:4])
    wait_until(lambda: _held(daemon) == 0, "no lock is left")
    assert controller.adapter.accessed == keys[:4]
    assert controller.notified == (2, 2, 1)
    assert daemon.problems() == []


def test_a_second_lmcache_has_the_objects_of_the_first_at_its_first_lookup(daemon: Daemon, start: Start) -> None:
    first = start(daemon)
    keys = first.keys(*range(5))
    first.store(keys)
    second = start(daemon)
    assert second.lookup(keys) == [True] * 5
    assert second.load(keys) == [True] * 5


@pytest.mark.parametrize(
    "fields",
    [{"kv_rank": (2 << 24) + (2 << 8)}, {"object_group_id": 1}, {"cache_salt": "tenant"}, {"model_name": "other"}],
    ids=lambda fields: next(iter(fields)),
)
def test_ranks_groups_salts_and_models_share_nothing(daemon: Daemon, start: Start, fields: dict[str, Any]) -> None:
    controller = start(daemon)
    keys, others = controller.keys(1, 2), controller.keys(1, 2, **fields)
    controller.store(keys)
    assert controller.lookup(others) == [False, False]
    controller.store(others)
    assert controller.lookup([*keys, *others]) == [True] * 4
    assert controller.load([*keys, *others]) == [True] * 4


def test_a_salt_and_a_hash_are_not_taken_for_another_salt_and_hash(daemon: Daemon, start: Start) -> None:
    """The bytes of both in a row are equal."""
    controller = start(daemon)
    (one,) = controller.keys(0x4141414141414141, cache_salt="AA")
    other = replace(one, chunk_hash=one.chunk_hash[1:], cache_salt="AAA")
    controller.store([one])
    assert controller.lookup([one, other]) == [True, False]


def test_hashes_of_other_lengths_are_names_too(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    (key,) = controller.keys(7)
    keys = [type(key)(bytes(length), key.model_name, key.kv_rank) for length in (4, 16, 31, 32, 64)]
    controller.store(keys)
    assert controller.load(keys) == [True] * 5


def test_other_weights_have_no_object(daemon: Daemon, start: Start) -> None:
    first, second = start(daemon), start(daemon, revision="other")
    keys = first.keys(1, 2)
    first.store(keys)
    assert second.lookup(keys) == [False, False]
    assert second.load(keys) == [False, False]


def test_objects_of_several_sizes_are_one_task(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    narrow, wide = controller.keys(1, 2, 3), controller.keys(1, 2, 3, object_group_id=1)
    mixed = [key for pair in zip(narrow, wide, strict=True) for key in pair]
    descs = {0: ONE_LAYER, 1: WIDE}
    l1 = controller.l1
    objects = [controller.filled([key], descs[key.object_group_id])[0] for key in mixed]
    assert controller.store(mixed, objects) == 3 * (SIZE + 2 * SIZE + 15)
    fresh = start(daemon)
    found = fresh.ended_lookup(fresh.adapter.submit_lookup_and_lock_task(mixed, descs))
    assert found == [True] * 6
    targets = [l1.allocate(descs[key.object_group_id]) for key in mixed]
    task = fresh.adapter.submit_load_task(mixed, targets)
    assert fresh.ended_load(task, mixed, targets) == [True] * 6
    fresh.adapter.submit_unlock(mixed)
    wait_until(lambda: _held(daemon) == 0, "no lock is left")


def test_the_same_bytes_of_another_shape_are_another_object(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    other = Desc([Shape((1, 2, 8, 64))], [BFLOAT16])
    keys = controller.keys(1)
    controller.store(keys)
    assert controller.load(keys, other) == [False]


def test_a_lookup_without_a_description_finds_what_was_moved_before(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    keys = controller.keys(1, 2)
    assert controller.lookup(keys, None) == [False, False]
    assert controller.lookup(keys, Desc([], [])) == [False, False]
    controller.store(keys)
    assert controller.lookup(keys, None) == [True, True]


SERIALIZED = Desc([Shape((700,))], [UINT8])


def test_serialized_objects_are_found_by_the_form_that_was_moved(daemon: Daemon, start: Start) -> None:
    """LMCache describes the KV to a lookup, and stores and loads other bytes."""
    controller = start(daemon)
    keys = controller.keys(1, 2)
    assert controller.store(keys, desc=SERIALIZED) == 1400
    assert controller.lookup(keys, None) == [True, True]
    assert controller.load(keys, SERIALIZED) == [True, True]
    controller.adapter.submit_unlock(keys)
    assert controller.lookup(keys) == [False, False]  # of what they were made was not known when they were stored
    assert controller.load(keys, SERIALIZED) == [False, False]
    assert controller.store(keys, desc=SERIALIZED) == 1400
    assert controller.lookup(keys) == [True, True]
    assert controller.load(keys, SERIALIZED) == [True, True]


@pytest.mark.parametrize(
    "other", [Desc([Shape((2, 1, 8, 64))], [UINT8]), Desc([Shape((1, 2, 8, 64))], [BFLOAT16])], ids=["type", "shape"]
)
def test_objects_serialized_from_other_kv_are_other_objects(daemon: Daemon, start: Start, other: Desc) -> None:
    first, second = start(daemon), start(daemon)
    keys, others = first.keys(1), first.keys(2)
    first.lookup(keys)
    assert first.store(keys, desc=SERIALIZED) == 700
    assert second.lookup(keys, other) == [False]
    assert second.store(others, desc=SERIALIZED) in (0, 700)
    assert second.lookup(keys, other) == [False]
    assert second.load(keys, SERIALIZED) == [False]
    assert first.load(keys, SERIALIZED) == [True]
    # Of two descriptions of one kind it is not known which an object is of.
    assert second.lookup(others) == [False]
    assert second.load(others, SERIALIZED) == [False]
    assert second.store(keys, desc=SERIALIZED) == -1
    assert second.adapter.report_status()["refused_serde"] > 0


@pytest.mark.parametrize("desc", [SERIALIZED, Desc([Shape((2, 1, 8, 64))], [UINT8])], ids=["serde", "fp8"])
def test_bytes_whose_format_is_not_known_are_refused_without_a_revision(
    daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, desc: Desc
) -> None:
    """vLLM calls fp8_e4m3 and fp8_e5m2 torch.uint8."""
    monkeypatch.setattr(model_weights, "weights_of", lambda *_: "1" * 40)
    controller = start(daemon, revision="", salt="s")
    keys = controller.keys(1, 2)
    assert controller.lookup(keys) == [False, False]
    assert controller.store(keys, desc=desc) == -1
    assert controller.lookup(keys, desc) == [False, False]
    assert controller.load(keys, desc) == [False, False]
    assert controller.adapter.report_status()["refused_format"] == 6
    lines = [record for record in caplog.records if "is stored or found" in record.getMessage()]
    assert len(lines) == 1
    assert "set revision in adapter_params" in lines[0].getMessage()
    assert controller.store(keys) == 2 * SIZE


def test_objects_without_shapes_of_several_tensors_are_stored(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    keys = controller.keys(1)
    (memory,) = controller.filled(keys)
    memory.metadata = Meta(ONE_LAYER.shapes[0], BFLOAT16)
    assert controller.store(keys, [memory]) == SIZE
    assert controller.load(keys) == [True]


def test_two_locks_of_an_object_end_one_by_one(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    keys = controller.keys(1, 2, 3)
    controller.store(keys)
    assert controller.lookup(keys) == [True] * 3
    assert controller.lookup(keys[1:]) == [True] * 2
    assert _held(daemon) == 2
    controller.adapter.submit_unlock(keys)
    wait_until(lambda: _held(daemon) == 1, "one lock is left")
    assert controller.load(keys[1:]) == [True, True]
    controller.adapter.submit_unlock(keys[1:])
    wait_until(lambda: _held(daemon) == 0, "no lock is left")
    controller.adapter.submit_unlock(keys)  # never raises
    assert controller.adapter.report_status()["locks"] == 0


def test_a_lock_that_nobody_ends_ends_by_itself(daemon: Daemon, start: Start) -> None:
    """Without a further call."""
    controller = start(daemon, lock_timeout_s=0.001)
    keys = controller.keys(1, 2)
    controller.store(keys)
    for _ in range(3):
        assert controller.lookup(keys) == [True, True]
    wait_until(lambda: _held(daemon) == 0, "the locks are over")
    wait_until(lambda: controller.adapter.report_status()["locks"] == 0, "and not counted")
    assert controller.lookup(keys) == [True, True]
    wait_until(lambda: _held(daemon) == 0, "a later one too")


class Held:
    """A lease; counts its releases."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_an_unlock_that_comes_after_its_lock_ends_no_other_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCKS_MAX", 1)
    held, leases = locks.Locks(3600.0), [Held() for _ in range(4)]
    held.add_lock(["a", "b"], [leases[0]])  # type: ignore[list-item]
    held.add_lock(["a"], [leases[1]])  # type: ignore[list-item]  # takes the place of the first
    assert [lease.released for lease in leases] == [1, 0, 0, 0]
    held.unlock(["a", "b"])  # the first one's, late
    assert [lease.released for lease in leases] == [1, 0, 0, 0]
    held.unlock(["a"])
    assert [lease.released for lease in leases] == [1, 1, 0, 0]
    # The unlock of the first never comes: the second one's counts as that, and the third has its own again.
    held.add_lock(["a"], [leases[2]])  # type: ignore[list-item]
    held.add_lock(["a"], [leases[3]])  # type: ignore[list-item]
    held.unlock(["a"])
    last = Held()
    held.add_lock(["a"], [last])  # type: ignore[list-item]
    assert [lease.released for lease in leases] == [1, 1, 1, 1]
    held.unlock(["a"])
    assert last.released == 1
    held.close()


def test_late_unlocks_are_remembered_of_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCKS_MAX", 1)
    monkeypatch.setattr(locks, "LATE_MAX", 2)
    held, leases = locks.Locks(3600.0), [Held() for _ in range(6)]
    for number, lease in enumerate(leases):
        held.add_lock([number], [lease])  # type: ignore[list-item]
    assert len(held._late) == 2
    held.close()
    assert all(lease.released == 1 for lease in leases)


def test_a_locked_object_outlives_a_full_pool_and_one_that_is_not_is_a_miss(
    start_daemon: Callable[..., Daemon], start: Start
) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    controller, large = start(daemon), Desc([Shape((2, 512, 8, 64))], [BFLOAT16])
    keys = controller.keys(*range(40))
    assert controller.store(keys[:3], desc=large) == 3 * 512 * SIZE
    assert controller.lookup(keys[:2], large) == [True, True]
    for number in range(4, 10):
        controller.l1 = type(controller.l1)()
        controller.store(keys[number : number + 1], desc=large)
    controller.l1 = type(controller.l1)()
    assert controller.load(keys[:3], large) == [True, True, False]
    controller.adapter.submit_unlock(keys[:2])
    assert daemon.problems() == []


def test_objects_of_a_higher_priority_outlive_others(start_daemon: Callable[..., Daemon], start: Start) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    large = Desc([Shape((2, 512, 8, 64))], [BFLOAT16])
    first, other = start(daemon, priority=100), start(daemon)
    kept, *others = first.keys(*range(8))
    first.store([kept], desc=large)
    for key in others:
        other.l1 = type(other.l1)()
        other.store([key], desc=large)
    assert other.lookup([kept, others[0]], large) == [True, False]


def test_a_pool_that_is_full_of_locks_declines_the_store_and_the_task_fails(
    start_daemon: Callable[..., Daemon], start: Start
) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    controller, large = start(daemon), Desc([Shape((2, 512, 8, 64))], [BFLOAT16])
    keys = controller.keys(*range(10))
    for number in range(5):
        controller.l1 = type(controller.l1)()
        controller.store(keys[number : number + 1], desc=large)
        controller.lookup(keys[number : number + 1], large)
    controller.l1 = type(controller.l1)()
    assert controller.store(keys[5:8], desc=large) == -1
    stats = controller.adapter._object_stores.find("tiny", *_only_form(controller)).stats()
    assert stats["declined_objects"] > 0
    assert daemon.problems() == []


def _only_form(controller: Controller) -> list[Any]:
    return list(controller.adapter._forms.values())[:1]


def test_a_flipped_bit_is_a_miss_of_its_object_alone(daemon: Daemon, start: Start) -> None:
    from tests.rigs.payload import flip_bit

    controller = start(daemon)
    keys = controller.keys(*range(6))
    controller.store(keys)
    assert controller.lookup(keys) == [True] * 6
    store = controller.adapter._object_stores.find("tiny", *_only_form(controller))
    with store._pool.acquire_set(names_of(keys[3:4])) as lease:
        flip_bit(lease, 0, at=100, mask=16)
    assert controller.load(keys) == [True, True, True, False, True, True]
    controller.adapter.submit_unlock(keys)
    wait_until(lambda: controller.lookup(keys[3:4]) == [False], "the chunk is dropped")
    assert controller.store(keys[3:4]) == SIZE
    assert controller.load(keys) == [True] * 6


def test_a_daemon_that_is_killed_between_lookup_and_load(start_daemon: Callable[..., Daemon], start: Start) -> None:
    daemon = start_daemon()
    controller = start(daemon, timeout_s=10.0)
    keys = controller.keys(1, 2, 3)
    controller.store(keys)
    assert controller.lookup(keys) == [True] * 3
    daemon.kill()
    assert controller.load(keys) == [False] * 3
    assert controller.store(keys) == -1
    controller.adapter.submit_unlock(keys)
    assert controller.lookup(keys) == [False] * 3
    daemon.start()
    wait_until(lambda: controller.adapter.report_status()["is_connected"], "connected again")
    assert controller.lookup(keys) == [False] * 3
    assert controller.store(keys) == 3 * SIZE
    assert controller.lookup(keys) == [True] * 3
    assert controller.load(keys) == [True] * 3
    assert controller.notified == (3, 4, 2)


def test_without_a_daemon_every_task_ends_and_it_is_found_when_it_comes(
    start_daemon: Callable[..., Daemon], start: Start
) -> None:
    daemon = start_daemon()
    daemon.kill()
    controller = start(daemon)
    keys = controller.keys(1, 2)
    assert controller.lookup(keys) == [False, False]
    assert controller.store(keys) == -1
    assert controller.load(keys) == [False, False]
    assert controller.adapter.report_status()["is_healthy"] is True
    daemon.start()
    wait_until(lambda: controller.store(keys) >= 0, "stored")
    assert controller.load(keys) == [True, True]


def test_tasks_end_though_the_daemon_hangs(start_daemon: Callable[..., Daemon], start: Start) -> None:
    daemon = start_daemon()
    controller = start(daemon, timeout_s=0.2, task_timeout_s=0.5)
    keys = controller.keys(1, 2)
    wait_until(lambda: controller.store(keys) >= 0, "stored")
    daemon.signal(signal.SIGSTOP)
    try:
        assert controller.lookup(keys) == [False, False]
        assert controller.load(keys) == [False, False]
        assert controller.store(controller.keys(3)) == -1
    finally:
        daemon.signal(signal.SIGCONT)
    wait_until(lambda: controller.lookup(keys) == [True, True], "it answers again")


def test_a_load_that_is_late_ends_by_its_own_deadline(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    keys = controller.keys(1, 2)
    controller.store(keys)
    late = start(daemon, timeout_s=0.001, task_timeout_s=0.001)
    held = threading.Event()
    late.adapter._loads.submit("load", held.wait, lambda _: None)
    others = [late.adapter._loads.submit("load", held.wait, lambda _: None) for _ in range(3)]
    objects = [late.l1.allocate() for _ in keys]
    task = late.adapter.submit_load_task(keys, objects)
    threading.Event().wait(0.01)
    held.set()
    assert all(others)
    assert late.ended_load(task, keys, objects) == [False, False]
    assert late.adapter.report_status()["tiny 2x1x8x64 torch.bfloat16"]["late_load_objects"] == 2


def test_a_load_without_progress_is_waited_for_as_long_as_its_task_has(
    start_daemon: Callable[..., Daemon], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only as long as a round trip may take."""
    from kvpool_client.verbs.load import Load

    seen, waited = list[float](), Load.wait_watched
    controller = start(start_daemon(), timeout_s=1.0, task_timeout_s=50.0)

    def watch(load: Load, watched: Any, deadline: Any) -> Any:
        if watched is not None:
            seen.append(watched._deadline.remaining_s())
        return waited(load, watched, deadline)

    monkeypatch.setattr(Load, "wait_watched", watch)
    keys = controller.keys(1, 2)
    wait_until(lambda: controller.store(keys) >= 0, "stored")
    wait_until(lambda: controller.load(keys) == [True, True], "loaded")
    assert 1.0 < max(seen) <= 50.0


def test_more_tasks_than_a_line_takes_end_at_once_without_success(daemon: Daemon, start: Start) -> None:
    controller, held = start(daemon), threading.Event()
    from kvpool_client.lmcache.adapter import LOOKUPS_MAX, TRANSFERS_MAX

    (key,) = controller.keys(1)
    for line, most in ((controller.adapter._stores, TRANSFERS_MAX), (controller.adapter._loads, TRANSFERS_MAX)):
        for _ in range(most):
            assert line.submit("held", held.wait, lambda _: None)
    for _ in range(LOOKUPS_MAX):
        assert controller.adapter._lookups.submit("held", held.wait, lambda _: None)
    try:
        assert controller.store([key]) == -1
        assert controller.load([key]) == [False]
        assert controller.lookup([key]) == [False]
    finally:
        held.set()
    wait_until(lambda: not controller.adapter.report_status()["open_stores"], "the line is empty")
    assert controller.store([key]) == SIZE
    assert controller.notified == (2, 1, 1)


def test_close_ends_every_task_and_writes_to_no_descriptor_afterwards(daemon: Daemon, start: Start) -> None:
    controller, held, is_running = start(daemon), threading.Event(), threading.Event()
    keys = controller.keys(1, 2)
    controller.store(keys)
    adapter = controller.adapter
    descriptors = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(descriptors) == 3

    def run() -> None:
        is_running.set()
        held.wait()

    adapter._stores.submit("held", run, lambda _: None)
    assert is_running.wait(60)
    waiting = adapter.submit_store_task(controller.keys(3), controller.filled(controller.keys(3)))
    closing = threading.Thread(target=adapter.close)
    closing.start()
    wait_until(lambda: adapter._stored.take(waiting) is not None, "what waited has ended")
    held.set()
    closing.join(60)
    assert not closing.is_alive()
    mine = {os.open(os.devnull, os.O_RDONLY) for _ in range(8)} & descriptors
    assert mine
    assert adapter.submit_lookup_and_lock_task(keys, {}) > 0
    assert adapter.submit_load_task(keys, controller.filled(keys)) > 0
    assert adapter.submit_store_task(keys, controller.filled(keys)) > 0
    adapter.submit_unlock(keys)
    adapter.close()
    assert adapter.report_status()["is_healthy"] is False
    wait_until(lambda: _held(daemon) == 0, "no lock is left")


def test_memory_that_is_no_memory_of_the_host_fails_its_task(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    keys = controller.keys(1, 2)
    objects = controller.filled(keys)
    objects[1] = Memory(Raw(objects[1].raw_data.view, "cuda"), objects[1].metadata)
    assert controller.store(keys, objects) == -1
    short = controller.filled(keys)
    short[0].raw_data = Raw(short[0].raw_data.view[: SIZE - 1])
    assert controller.store(keys, short) == -1
    assert controller.lookup(keys) == [False, False]


def _freed(controller: Controller, objects: list[Memory]) -> int:
    """LMCache frees objects, and gives their bytes to others."""
    for memory in objects:
        memory.valid = False
        memory.raw_data.view[:] = 0xA5
    stats = controller.adapter._object_stores.find("tiny", *_only_form(controller)).stats()
    return int(stats["freed_objects"])


def test_what_lmcache_frees_while_its_task_waits_is_neither_stored_nor_written(daemon: Daemon, start: Start) -> None:
    controller, held = start(daemon), threading.Event()
    adapter, keys, others = controller.adapter, controller.keys(1, 2), controller.keys(3, 4)
    controller.store(keys)
    for line, threads in ((adapter._stores, 1), (adapter._loads, 4)):
        for _ in range(threads):
            line.submit("held", held.wait, lambda _: None)
    saved, targets = controller.filled(others), [controller.l1.allocate() for _ in keys]
    store = adapter.submit_store_task(others, saved)
    load = adapter.submit_load_task(keys, targets)
    _freed(controller, [saved[1], targets[0]])
    held.set()
    assert controller.ended_store(store) == -1
    assert controller.ended_load(load, keys, targets) == [False, False]
    assert all((memory.raw_data.view == 0xA5).all() for memory in targets)
    assert controller.lookup(others) == [False, False]
    assert _freed(controller, []) == 4


def test_what_lmcache_frees_while_it_is_copied_is_not_committed(
    daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool_client.verbs.save import Save

    controller = start(daemon)
    keys, copy = controller.keys(1, 2), Save.copy
    controller.store(controller.keys(9))
    objects = controller.filled(keys)

    def copy_and_free(save: Save, deadline: Any) -> bool:
        _freed(controller, objects[1:])  # amid the copy: the pool has other bytes under this key
        return copy(save, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(Save, "copy", copy_and_free)
        assert controller.store(keys, objects) == -1
    assert controller.lookup(keys) == [False, False]
    assert controller.store(keys) == 2 * SIZE
    assert controller.load(keys) == [True, True]
    assert daemon.problems() == []


def test_a_load_into_memory_that_is_freed_meanwhile_ends(
    daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a slow disk, which the load's watch need not wait for."""
    from kvpool_client.verbs.load import Load

    controller = start(daemon)
    keys = controller.keys(1, 2)
    controller.store(keys)
    objects = [controller.l1.allocate() for _ in keys]
    waited, ended = Load.wait_watched, list[bool]()

    def free_and_wait(load: Load, stall: Any, deadline: Any) -> Any:
        if stall is not None:
            _freed(controller, objects)
            ended.append(stall.has_lasted())
        return waited(load, stall, deadline)

    monkeypatch.setattr(Load, "wait_watched", free_and_wait)
    task = controller.adapter.submit_load_task(keys, objects)
    controller._wait(controller.adapter.get_load_event_fd())
    assert controller.adapter.query_load_result(task).bits == [False, False]
    assert ended == [True]


def test_a_load_is_watched_while_the_next_lease_is_waited_for(
    daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next objects come from a slow disk, and LMCache frees those that are just being written."""
    from kvpool_client.verbs.load import Load

    monkeypatch.setattr(lease_size, "CHUNKS_AT_ONCE", 1)
    controller = start(daemon)
    keys = controller.keys(1, 2)
    controller.store(keys)
    objects = [controller.l1.allocate() for _ in keys]
    acquire, waited = lease_size.LeaseSize.acquire_set, Load.wait_watched
    asked, is_brought, ended = list[int](), threading.Event(), list[bool]()

    def bring(size: Any, names: Any) -> Any:
        asked.append(len(names))
        if len(asked) == 2:
            assert is_brought.wait(60)
        return acquire(size, names)

    def free_and_wait(load: Load, stall: Any, deadline: Any) -> Any:
        if stall is not None:
            _freed(controller, objects[:1])
            ended.append(stall.has_lasted())
        result = waited(load, stall, deadline)
        is_brought.set()
        return result

    monkeypatch.setattr(lease_size.LeaseSize, "acquire_set", bring)
    monkeypatch.setattr(Load, "wait_watched", free_and_wait)
    task = controller.adapter.submit_load_task(keys, objects)
    controller._wait(controller.adapter.get_load_event_fd())
    assert controller.adapter.query_load_result(task).bits == [False, False]
    assert (asked, ended) == ([1, 1], [True])
    wait_until(lambda: _held(daemon) == 0, "what was leased ahead is released")


def test_more_objects_than_dram_has_room_for_are_loaded_from_the_ssd_tier(
    start_daemon: Callable[..., Daemon], start: Start, tmp_path: Path
) -> None:
    """A lease leaves out what finds no room, and the next ones bring it."""
    options = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB", "ssd__admission": "all"}
    daemon = start_daemon(dram__capacity="4MiB", **options)
    daemon.wait_open()
    controller, large = start(daemon), Desc([Shape((2, 256, 8, 64))], [BFLOAT16])
    keys = controller.keys(*range(16))
    for key in keys:
        controller.l1 = type(controller.l1)()
        wait_until(lambda key=key: controller.store([key], desc=large) >= 0, "stored")  # type: ignore[misc]
    controller.l1 = type(controller.l1)(16 * 256 * SIZE)
    assert controller.load(keys, large) == [True] * 16
    wait_until(lambda: _held(daemon) == 0, "the leases have ended")
    assert daemon.problems() == []


def test_objects_that_overlap_are_not_loaded_and_a_key_twice_is(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    (key,) = controller.keys(1)
    controller.store([key])
    assert controller.load([key, key]) == [True, True]
    memory = controller.l1.allocate()
    task = controller.adapter.submit_load_task([key, key], [memory, memory])
    controller._wait(controller.adapter.get_load_event_fd())
    assert controller.adapter.query_load_result(task).bits == [False, False]


def test_a_task_of_no_keys_ends(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    assert controller.lookup([]) == []
    assert controller.load([]) == []
    assert controller.store([]) == 0


def test_what_is_nowhere_is_answered_without_a_request(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    keys = controller.keys(*range(50))
    controller.store(keys[:1])
    daemon.signal(signal.SIGSTOP)
    try:
        task = controller.adapter.submit_lookup_and_lock_task(keys[1:], {0: ONE_LAYER})
        assert controller.adapter.query_lookup_and_lock_result(task).bits == [False] * 49
    finally:
        daemon.signal(signal.SIGCONT)


def test_objects_in_the_ssd_tier_are_found_unlocked_and_loaded(
    start_daemon: Callable[..., Daemon], start: Start, tmp_path: Any
) -> None:
    options = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB", "ssd__admission": "all"}
    daemon = start_daemon(**options)
    controller = start(daemon)
    keys = controller.keys(*range(20))
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    controller.store(keys)
    daemon.stop()
    daemon.start()
    daemon.wait_open()
    warm = start(daemon)
    wait_until(lambda: warm.lookup(keys) == [True] * 20, "found in the tier")
    assert _held(daemon) == 0
    assert warm.load(keys) == [True] * 20
    # A load has what lands; the daemon counts it as DRAM's a moment later.
    store = warm.adapter._object_stores.find("tiny", *_only_form(warm))
    wait_until(lambda: bool((store.probe(names_of(keys)) == DRAM).all()), "they are in DRAM")
    assert warm.lookup(keys) == [True] * 20
    assert _held(daemon) == 1
    warm.adapter.submit_unlock(keys)
    assert daemon.problems() == []


def test_objects_that_only_a_shared_store_has_are_found_and_loaded(start: Start, tmp_path: Any) -> None:
    shared = SharedDirectory(tmp_path)
    with (
        StoreDaemon(tmp_path / "there", shared, **{"store.publish": "all"}) as there,
        StoreDaemon(tmp_path / "here", shared) as here,
    ):
        owner, loader = start(there), start(here)
        keys = owner.keys(*range(6))
        owner.store(keys[:4])
        there.wait_published(4)
        wait_until(lambda: loader.lookup(keys) == [True] * 4 + [False] * 2, "found in the store")
        assert loader.load(keys) == [True] * 4 + [False] * 2


def test_the_objects_of_a_prompts_end_are_evicted_first_of_all_ranks(
    start_daemon: Callable[..., Daemon], start: Start
) -> None:
    """LMCache names one rank's chunks after the other's; a prefix counts as far as both have it."""
    daemon = start_daemon(dram__capacity="4MiB")
    controller, large = start(daemon), Desc([Shape((2, 64, 8, 64))], [BFLOAT16])
    ranks = [(2 << 24) + (rank << 16) + (2 << 8) + rank for rank in range(2)]
    rows = [controller.keys(*range(8), kv_rank=rank) for rank in ranks]
    for row in rows:
        controller.store(row, desc=large)
    both = [key for row in rows for key in row]
    assert controller.lookup(both, large) == [True] * 16
    controller.adapter.submit_unlock(both)
    controller.l1 = type(controller.l1)()
    others = controller.keys(*range(100, 120))
    controller.store(others, desc=large)
    found = controller.lookup(both, large)
    prefixes = [row.index(False) if False in row else len(row) for row in (found[:8], found[8:])]
    assert sum(found) == sum(prefixes), "only ends are gone"
    assert 0 < sum(found) < 16
    assert abs(prefixes[0] - prefixes[1]) <= 1
    controller.adapter.submit_unlock(both)


def test_the_status_has_each_form_and_is_connected_once_a_daemon_answers(daemon: Daemon, start: Start) -> None:
    controller = start(daemon)
    assert controller.adapter.report_status()["is_connected"] is False
    other = Desc([Shape((1, 2, 8, 64))], [BFLOAT16])  # of the same size
    assert controller.store(controller.keys(1, 2, 3)) == 3 * SIZE
    assert controller.store(controller.keys(4, object_group_id=1), desc=other) == SIZE
    status = controller.adapter.report_status()
    assert status["is_connected"] is True
    assert status["tiny 2x1x8x64 torch.bfloat16"]["saved_objects"] == 3
    assert status["tiny 1x2x8x64 torch.bfloat16"]["saved_objects"] == 1


def test_a_model_without_an_identity_is_refused_in_one_line_and_counted(
    daemon: Daemon, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    controller = start(daemon, revision="")
    controller.model = "nobody/has-this-model"
    keys = controller.keys(1, 2)
    assert controller.store(keys) == -1
    assert controller.lookup(keys) == [False, False]
    assert controller.adapter.report_status()["refused_weights"] == 4
    lines = [record for record in caplog.records if "is stored or found" in record.getMessage()]
    assert len(lines) == 1
    assert "set revision in adapter_params" in lines[0].getMessage()


def test_while_weights_are_read_everything_is_a_miss_and_then_objects_are_shared(
    daemon: Daemon, start: Start, held_weights: HeldWeights
) -> None:
    controller = start(daemon, revision="")
    controller.model = f"{held_weights.path}##lmcache-dcp-layout-v1-d2-interleave1"
    keys = controller.keys(1)
    assert controller.store(keys) == -1
    assert controller.lookup(keys) == [False]
    assert controller.adapter.report_status()["refused_reading"] == 2
    held_weights.release()
    wait_until(lambda: controller.store(keys) == SIZE, "the weights are read")
    other = start(daemon, revision="")
    wait_until(lambda: other.lookup(keys) == [True], "another LMCache has the same weights")


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lookup and store looks at the weights again."""
    monkeypatch.setattr(model_weights, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(model_weights, "RETRY_S", 0.0)


@pytest.mark.usefixtures("looks_at_once")
def test_weights_that_are_replaced_are_refused_until_lmcache_starts_again(
    daemon: Daemon, start: Start, held_weights: HeldWeights
) -> None:
    """The engine starts again with them, LMCache does not."""
    held_weights.release()
    controller = start(daemon, revision="")
    controller.model = held_weights.path
    keys, before = controller.keys(1), held_weights.file.read_bytes()
    wait_until(lambda: controller.store(keys) == SIZE, "the weights are read")
    assert controller.lookup(keys) == [True]
    controller.adapter.submit_unlock(keys)
    held_weights.file.write_bytes(before + b"tuned")
    assert controller.lookup(keys) == [False]
    assert controller.load(keys) == [False]
    assert controller.store(controller.keys(2)) == -1
    held_weights.file.write_bytes(before)
    assert controller.store(controller.keys(2)) == -1
    assert controller.adapter.report_status()["refused_others"] == 4
    again = start(daemon, revision="")
    again.model = controller.model
    wait_until(lambda: again.lookup(keys) == [True], "the old weights are back, and found by their bytes")


@pytest.mark.usefixtures("looks_at_once")
def test_a_commit_of_the_hub_that_moves_is_refused(
    daemon: Daemon, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tmp_path / "models--org--m" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("a" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(weights, "first_younger", lambda *_: "")
    controller = start(daemon, revision="")
    controller.model = "org/m"
    keys = controller.keys(1)
    assert controller.store(keys) == SIZE
    reference.write_text("b" * 40)
    assert controller.lookup(keys) == [False]
    assert controller.load(keys) == [False]


@pytest.mark.usefixtures("looks_at_once")
def test_weights_that_cannot_be_looked_at_for_a_moment_are_looked_at_again(
    daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str | Exception] = [OSError("not mounted"), "1" * 40, OSError("not mounted"), "1" * 40]

    def look(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(model_weights, "weights_of", look)
    controller = start(daemon, revision="")
    keys = controller.keys(1)
    assert [controller.store(keys) for _ in range(4)] == [-1, SIZE, -1, 0]


def test_files_that_do_not_answer_hold_up_no_other_model(
    daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()

    def look(place: str, *_: object) -> str:
        if place == "hung":
            hangs.wait()
        return "1" * 40

    monkeypatch.setattr(model_weights, "weights_of", look)
    controller = start(daemon, revision="")
    keys, hung = controller.keys(1), controller.keys(1, model_name="hung")
    assert controller.store(keys) == SIZE
    monkeypatch.setattr(model_weights, "LOOK_WAIT_S", 0.0)
    try:
        assert controller.lookup(hung) == [False]
        assert controller.store(hung) == -1
        monkeypatch.setattr(model_weights, "LOOK_WAIT_S", 60.0)
        assert controller.lookup(keys) == [True]
        assert controller.adapter.report_status()["refused_looking"] == 2
    finally:
        hangs.set()
    wait_until(lambda: controller.store(hung) == SIZE, "the files answer")


def test_models_beyond_the_bound_take_the_place_of_refused_ones(
    daemon: Daemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_weights, "MODELS_MAX", 2)
    monkeypatch.setattr(model_weights, "weights_of", _of_models_that_begin_with_m)
    controller = start(daemon, revision="")
    stored = [controller.store(controller.keys(1, model_name=name)) for name in ("x", "m1", "y", "m2", "m3")]
    assert stored == [-1, SIZE, -1, SIZE, -1]
    assert controller.adapter.report_status()["refused_models"] == 1


def _of_models_that_begin_with_m(place: str, *_: object) -> str:
    if place[0] != "m":
        raise LayoutMismatch("nothing identifies them")
    return "1" * 40
