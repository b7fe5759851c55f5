"""Saves of many requests that end in one step, over a stand-in for a Pool: all are stored, as many at once as have room."""

import logging
from types import SimpleNamespace
from typing import Any

import kvpool_client as kv
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.trtllm import Geometry, SaveOrder
from kvpool_client.trtllm.geometry import GroupGeometry
from kvpool_client.trtllm.saves.rank_saves import RankSaves
from kvpool_client.trtllm.saves.save_room import SAVE_BYTES_MAX, SAVES_MAX, SaveRoom
from kvpool_client.trtllm.saves.save_source import SaveSource
from kvpool_client.trtllm.saves.window_memory import WindowMemory

MIB = 1 << 20
BLOCKS = 23


class StandInSave:
    """A save of BLOCKS blocks that ends when a test has it."""

    def __init__(self) -> None:
        self.is_done = self.is_committed = False

    def commit(self, wait: bool) -> None:
        assert not wait
        self.is_committed = True

    def abort(self) -> None:
        self.is_done = True

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> kv.SaveResult:
        return kv.SaveResult(BLOCKS, 0, 0, (), {})


class StandInPool:
    """Its saves, in their order; `fails`: none can begin."""

    def __init__(self) -> None:
        self.saves: list[StandInSave] = []
        self.fails = False

    def keys(self, *_: Any, **__: Any) -> None: ...

    def save(self, *_: Any, **__: Any) -> StandInSave:
        if self.fails:
            raise OSError("no more threads")
        self.saves.append(StandInSave())
        return self.saves[-1]


def _rig(chunk_bytes: int) -> tuple[RankSaves, SaveSource, Any]:
    pool: Any = StandInPool()
    geometry = Geometry((GroupGeometry(1, 1, 1, 4, "f", is_replicated=False),))
    cache: Any = SimpleNamespace(layout=SimpleNamespace(chunk_bytes=chunk_bytes))
    settings: Any = SimpleNamespace(tokens_per_block=4, retention_s=1.0)
    memory = WindowMemory(geometry, geometry.layout(0, 1), [cache], 0)
    source = SaveSource(pool, geometry, [cache], memory, settings, FailureGuard(logging.getLogger(__name__)))
    return RankSaves(source), source, pool


def _order(request_id: int) -> SaveOrder:
    return SaveOrder(request_id, b"", b"", "", 0, BLOCKS, (tuple(range(BLOCKS)),), (50,) * BLOCKS, ((),))


def _under_way(pool: Any) -> list[StandInSave]:
    return [save for save in pool.saves if not save.is_done]


def _begin(saves: RankSaves, requests: int) -> None:
    saves.begin_step([_order(number) for number in range(requests)])
    saves.finish_step(None, None)


def test_all_prompts_that_end_in_one_step_are_saved_and_their_bytes_bounded() -> None:
    """200 prompts of 46 MiB."""
    saves, source, pool = _rig(2 * MIB)
    _begin(saves, 200)
    turns = 0
    while saves.busy_requests():
        assert len(_under_way(pool)) == min(
            SAVE_BYTES_MAX // (BLOCKS * 2 * MIB), 200 - len(pool.saves) + len(_under_way(pool))
        )
        for save in _under_way(pool):
            save.is_done = True
        saves.advance_saves()
        turns += 1
    assert turns == 10, "22 saves of 46 MiB are in 1 GiB"
    assert (len(pool.saves), source.counts["saved_blocks"], source.counts["declined_blocks"]) == (200, 200 * BLOCKS, 0)
    assert source.counts["deferred_saves"] == 200 - 22


def test_small_saves_are_bounded_in_number_and_large_ones_go_alone() -> None:
    saves, _, pool = _rig(1)
    _begin(saves, 200)
    assert len(_under_way(pool)) == SAVES_MAX
    room = SaveRoom()
    assert room.take_bytes(1, 2 * SAVE_BYTES_MAX)
    assert not room.take_bytes(2, 1)
    room.give_back_bytes(1)
    assert room.take_bytes(2, 1)


def test_a_later_save_of_a_request_without_room_goes_with_its_first() -> None:
    saves, source, pool = _rig(SAVE_BYTES_MAX)
    _begin(saves, 2)
    later = SaveOrder(1, b"", b"", "", BLOCKS, BLOCKS + 1, ((99,),), (50,), ((),))
    saves.begin_step([later])
    saves.finish_step(None, None)
    assert (len(pool.saves), set(saves.busy_requests())) == (1, {0, 1})
    assert saves._waiting[1].order.block_ids == ((*range(BLOCKS), 99),)
    pool.saves[0].is_done = True
    saves.advance_saves()
    assert (len(pool.saves), set(saves.busy_requests())) == (2, {1})
    assert source.counts["deferred_saves"] == 1


def test_saves_that_are_given_up_while_they_wait_are_counted() -> None:
    saves, source, pool = _rig(SAVE_BYTES_MAX)
    _begin(saves, 3)
    saves.drop_request(1)
    assert source.counts["declined_blocks"] == BLOCKS
    saves.drop_request(0)
    saves.advance_saves()
    assert (len(pool.saves), set(saves.busy_requests())) == (2, {2})


def test_saves_that_cannot_begin_are_counted_and_keep_no_room() -> None:
    saves, source, pool = _rig(SAVE_BYTES_MAX)
    pool.fails = True
    _begin(saves, 2)
    assert not saves.busy_requests()
    assert (source.counts["declined_blocks"], source.guard.failures) == (2 * BLOCKS, 2)
    pool.fails = False
    _begin(saves, 1)
    assert set(saves.busy_requests()) == {0}


def test_of_a_step_whose_forward_pass_fails_nothing_is_stored() -> None:
    """The engine ends no such step: its blocks were not written, and are others' before the next one."""
    saves, source, pool = _rig(SAVE_BYTES_MAX // BLOCKS)
    _begin(saves, 1)
    saves.begin_step([SaveOrder(0, b"", b"", "", BLOCKS, BLOCKS + 1, ((99,),), (50,), ((),)), _order(1)])
    pool.saves[0].is_done = True
    saves.advance_saves()
    assert not saves.busy_requests()
    _begin(saves, 1)
    saves.begin_step([_order(2)])
    saves.begin_step([])
    saves.advance_saves()
    assert [(save.is_committed, save.is_done) for save in pool.saves] == [(True, True), (True, False)]
    assert source.counts["declined_blocks"] == 1 + 2 * BLOCKS
    saves.drop_request(0)
    saves.begin_step([_order(3)])
    saves.begin_step([_order(4)])
    assert [(save.is_committed, save.is_done) for save in pool.saves[2:]] == [(False, True), (False, False)]
