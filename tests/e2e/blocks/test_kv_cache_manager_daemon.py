"""KV cache manager over a real daemon: an executor that restarts, a daemon that dies, random batches with offloads."""

from types import SimpleNamespace

import pytest

import kvpool_client as kv
from tests.rigs.daemon import Daemon, wait_connected, wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks import KVCacheManager
from kvpool_blocks.executor import RequestState
from tests.rigs.blocks.executor import KV_BYTES, LAYERS, ScriptedExecutor, ScriptedRequest, manager_of

pytestmark = pytest.mark.torch

LAYOUT = kv.Layout(layers=LAYERS, kv_heads=1, head_dim=KV_BYTES, dtype="uint8", chunk_tokens=8)


def _start(daemon: Daemon, max_tokens: int) -> tuple[kv.Pool, KVCacheManager]:
    pool = daemon.connect(LAYOUT, timeout_s=60.0)
    wait_connected(pool)
    return pool, manager_of(max_tokens, pool=pool)


def _run_one(manager: KVCacheManager) -> ScriptedRequest:
    executor = ScriptedExecutor(manager, 1, may_preempt=False)
    request = ScriptedRequest(1, list(range(43)), 5)
    executor.queue(request)
    while executor.counts["finished"] + executor.counts["cancelled"] == 0:
        executor.step()
    return request


def test_an_executor_that_restarts_reuses_what_the_first_computed(daemon: Daemon) -> None:
    for reused in (0, 40):
        pool, manager = _start(daemon, 400)
        assert _run_one(manager).reused == reused
        manager.shutdown()
        pool.close()
    daemon.kill()
    daemon.start()
    pool, manager = _start(daemon, 400)
    assert _run_one(manager).reused == 0
    manager.shutdown()
    pool.close()


def test_dummy_requests_that_are_freed_leave_nothing_here_and_on_the_node(daemon: Daemon) -> None:
    pool, manager = _start(daemon, 400)
    for is_complete in (False, True):
        dummies = manager.add_dummy_requests([1, 2], [17, 33], is_gen=True, max_num_draft_tokens=2)
        assert dummies is not None
        for _ in range(9):
            batch = SimpleNamespace(context_requests=[], generation_requests=dummies)
            assert manager.prepare_resources(batch) == []
            for request in dummies:
                request.tokens.append(1)
                request.py_rewind_len = 1
            manager.update_resources(batch)
        for request in dummies:
            if is_complete:
                request.state = RequestState.GENERATION_COMPLETE
            manager.free_resources(request)
        stats = manager.blocks.stats()
        assert [stats[name] for name in ("requests", "tree_blocks", "offloads_under_way", "offloaded_chunks")] == [
            0
        ] * 4
        assert manager.get_num_free_blocks() == manager.get_max_resource_count()
    manager.shutdown()
    assert daemon.stats()["reservations"] == 0
    assert [chunk for part in pool.snapshot() for chunk in part.chunks] == []
    pool.close()


@pytest.mark.parametrize("is_by_verb", [False, True])
def test_accepted_drafts_keep_their_kv_when_an_offload_ends_before_the_update(daemon: Daemon, is_by_verb: bool) -> None:
    pool, manager = _start(daemon, 160)
    ended, drafting = (ScriptedRequest(number, list(range(1, 9)), 20, context_chunk_size=8) for number in (1, 2))
    prompts = SimpleNamespace(context_requests=[ended, drafting], generation_requests=[])
    assert manager.prepare_resources(prompts) == []
    manager.update_resources(prompts)
    for request in (ended, drafting):
        request.state = RequestState.GENERATION_IN_PROGRESS
        request.tokens.append(9)
    drafting.py_draft_tokens = [10, 11]
    step = SimpleNamespace(context_requests=[], generation_requests=[drafting])
    assert manager.prepare_resources(step) == []
    blocks = manager.get_cache_indices(drafting)
    buffers = [manager.get_buffers(layer) for layer in range(LAYERS)]
    for buffer in buffers:
        buffer[blocks[2], :, :3] = 77
    manager.free_resources(ended)
    (offload,) = manager.blocks._link._under_way
    wait_until(offload.commit.done, "the offload of the request that has ended")  # its blocks are free at the next call
    if is_by_verb:
        manager.rewind_kv_cache(drafting, 1)
    else:
        drafting.py_rewind_len = 1
    drafting.tokens += [10, 12]
    manager.update_resources(step)
    assert manager.get_cache_indices(drafting) == blocks
    for buffer in buffers:
        assert buffer[blocks[2], :, :2].eq(77).all()
    assert manager.verify() == []
    manager.shutdown()
    pool.close()


@pytest.mark.parametrize(
    ("batches", "is_killed"),
    [
        pytest.param(100, False, id="alive"),
        pytest.param(140, True, id="killed"),
        pytest.param(300, False, id="alive-for-long", marks=pytest.mark.slow),
        pytest.param(300, True, id="killed-after-long", marks=pytest.mark.slow),
    ],
)
def test_random_batches_offload_and_load_and_no_byte_is_wrong(daemon: Daemon, batches: int, is_killed: bool) -> None:
    pool, manager = _start(daemon, 4 * 20)
    executor = ScriptedExecutor(manager, 7, may_preempt=True)
    for number in range(batches):
        executor.submit()
        executor.step()
        if is_killed and number == batches // 2:
            daemon.kill()
    assert manager.verify() == []
    executor.drain()
    stats = manager.blocks.stats()
    assert stats["offloaded_chunks"] > 10
    assert stats["loaded_tokens"] > 0
    assert executor.counts["finished"] > 20
    manager.shutdown()
    assert manager.verify() == []
    assert manager.get_num_free_blocks() == manager.get_max_resource_count()
    pool.close()
