"""Save task: what is stored behind chunks that are on their way is saved again with them, and counted once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvpool.clock import MonotonicClock
from kvpool.states import SaveState
from kvpool_client.verbs.results import SaveResult
from kvpool_client.vllm.worker.save_task import SaveTask

ABSENT, PRESENT, STORED, PENDING = SaveState.NO_PARENT, SaveState.PRESENT, SaveState.STORED, SaveState.PENDING
FULL, WINDOW = SimpleNamespace(is_full=True), SimpleNamespace(is_full=False)


def committed(task: SaveTask, *states: Sequence[SaveState]) -> bool:
    """Whether the task has ended with a save that has this result, of each part."""
    results = [SaveResult.of(list(of_part)) for of_part in states]
    save: Any = SimpleNamespace(commit=lambda: SaveResult.joined(results) if results[1:] else results[0])
    task._save = save
    return task.commit()


def task_of(*chunks: range, is_writer_of: Sequence[bool] = (True, True)) -> SaveTask:
    """A task of two blocks for each chunk, of a full part and perhaps one with a window."""
    blocks = [tuple(range(2 * of_part.start, 2 * of_part.stop)) for of_part in chunks]
    order: Any = SimpleNamespace(request_id="a", chunks=chunks, block_ids=blocks, hashes=[b""] * chunks[0].stop)
    parts = [FULL, WINDOW][: len(chunks)]
    memory: Any = SimpleNamespace(geometry=SimpleNamespace(parts=parts), is_writer_of=is_writer_of[: len(chunks)])
    return SaveTask(order, memory, wait_budget_s=10.0, clock=MonotonicClock())


def left(task: SaveTask) -> list[tuple[list[int], list[int]]]:
    return [(list(part.chunks), list(part.blocks)) for part in task._left]


def test_chunks_stored_behind_pending_ones_are_counted_once() -> None:
    task = task_of(range(7, 12))
    assert not committed(task, [PRESENT, PENDING, PENDING, STORED, STORED])
    assert task.next_chunk == 8
    assert left(task) == [([8, 9, 10, 11], [16, 17, 18, 19, 20, 21, 22, 23])]
    assert not committed(task, [PRESENT, PENDING, PENDING, PENDING])
    assert task.next_chunk == 9
    assert committed(task, [PRESENT, PRESENT, PRESENT])
    assert task.next_chunk == 12
    assert (task.counts["saved_chunks"], task.counts["present_chunks"]) == (2, 3)


def test_chunks_that_went_with_what_failed_are_stored_again() -> None:
    task = task_of(range(2))
    assert not committed(task, [PENDING, STORED])
    assert committed(task, [STORED, STORED])
    assert (task.counts["saved_chunks"], task.counts["present_chunks"]) == (2, 0)
    assert not any(name.startswith("declined") for name in task.counts)


def test_of_a_window_only_the_declined_chunks_are_saved_again() -> None:
    task = task_of(range(3), range(1, 4))
    assert not committed(task, [STORED, PENDING, ABSENT], [STORED, PENDING, PRESENT])
    assert left(task) == [([1, 2], [2, 3, 4, 5]), ([2], [4, 5])]
    assert committed(task, [STORED, STORED], [PRESENT])
    assert (task.counts["saved_chunks"], task.counts["present_chunks"]) == (4, 2)


def test_chunks_that_another_rank_saves_are_left_out() -> None:
    task = task_of(range(3), range(1, 4), is_writer_of=(False, True))
    assert left(task) == [([], []), ([1, 2, 3], [2, 3, 4, 5, 6, 7])]
    assert task.next_chunk == 3
