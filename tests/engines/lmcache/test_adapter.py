"""LMCache's plug-in over a real daemon, driven as LMCache's controllers drive it (see standin)."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.errors import InvalidArgument
from kvpool_client.lmcache import Settings
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


def test_serialized_objects_are_found_by_the_form_that_was_moved(daemon: Daemon, start: Start) -> None:
    """LMCache describes the KV to a lookup, and stores and loads other bytes."""
    controller, serialized = start(daemon), Desc([Shape((700,))], [UINT8])
    keys = controller.keys(1, 2)
    controller.store(keys, desc=serialized)
    assert controller.lookup(keys, ONE_LAYER) == [True, True]
    assert controller.load(keys, serialized) == [True, True]


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
    controller = start(daemon, lock_timeout_s=0.001)
    keys = controller.keys(1, 2)
    controller.store(keys)
    for _ in range(3):
        assert controller.lookup(keys) == [True, True]
    wait_until(lambda: controller.adapter.submit_unlock([]) is None and _held(daemon) == 0, "the locks are over")


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
    from kvpool_client.lmcache.object_names import names_of
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
    controller = start(daemon)
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
    late = start(daemon, task_timeout_s=0.001)
    held = threading.Event()
    late.adapter._loads.submit("load", held.wait, lambda _: None)
    others = [late.adapter._loads.submit("load", held.wait, lambda _: None) for _ in range(3)]
    objects = [late.l1.allocate() for _ in keys]
    task = late.adapter.submit_load_task(keys, objects)
    threading.Event().wait(0.01)
    held.set()
    assert all(others)
    assert late.ended_load(task, keys, objects) == [False, False]


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


def test_settings_that_are_wrong_are_named_at_once() -> None:
    wrong = {"sockt": "/x", "revision": 1, "timeout_s": 0, "copy_threads": 1.5, "priority": True, "socket": ""}
    with pytest.raises(InvalidArgument) as caught:
        Settings.read(wrong)
    text = str(caught.value)
    assert text.startswith("l2-adapter adapter_params: ")
    assert all(name in text for name in (*wrong, "is no setting, did you mean socket", "expected 0.001..3600"))
    assert Settings.read({"socket": "/run/x.sock"}).task_timeout_s == 10.0


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
