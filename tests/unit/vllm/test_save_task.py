"""Save task: what is stored behind chunks that are on their way is saved again with them, and counted once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvpool.clock import MonotonicClock
from kvpool.types import SaveState
from kvpool_client.verbs.results import SaveResult
from kvpool_client.vllm.worker.save_task import SaveTask

PRESENT, STORED, PENDING = SaveState.PRESENT, SaveState.STORED, SaveState.PENDING


def committed(task: SaveTask, states: Sequence[SaveState]) -> bool:
    """Whether the task has ended with a save that has this result."""
    save: Any = SimpleNamespace(commit=lambda: SaveResult.of(list(states)))
    task._save = save
    return task.commit()


def task_of(first_chunk: int) -> SaveTask:
    order: Any = SimpleNamespace(first_chunk=first_chunk, request_id="a")
    unused: Any = None
    return SaveTask(order, unused, wait_budget_s=10.0, clock=MonotonicClock())


def test_chunks_stored_behind_pending_ones_are_counted_once() -> None:
    task = task_of(7)
    assert not committed(task, [PRESENT, PENDING, PENDING, STORED, STORED])
    assert task.next_chunk == 8
    assert not committed(task, [PRESENT, PENDING, PENDING, PENDING])
    assert task.next_chunk == 9
    assert committed(task, [PRESENT, PRESENT, PRESENT])
    assert (task.counts["saved_chunks"], task.counts["present_chunks"]) == (2, 3)


def test_chunks_that_went_with_what_failed_are_stored_again() -> None:
    task = task_of(0)
    assert not committed(task, [PENDING, STORED])
    assert committed(task, [STORED, STORED])
    assert (task.counts["saved_chunks"], task.counts["present_chunks"]) == (2, 0)
    assert not any(name.startswith("declined") for name in task.counts)
