"""Leases of groups from disk in a DRAM that has room for few of them: they are served one after the other."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.clock import Deadline
from kvpool.index.parts import Step
from kvpool.pool.readers.hold_task import HoldTask, WaitingTasks
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import load, store
from tests.rigs.payload import tokens_of

CHUNKS, WINDOW, PROMPTS = 60, 40, 8
# Within this time each of the leases must come, on any machine.
DEADLINE_S = 120.0
SHAPE = {"head_dim": 16, "dtype": "float16", "layers": 2}
LAYOUT = kv.Layout(
    chunk_tokens=32,
    groups=(
        kv.Group(kv_heads=2, **SHAPE),  # type: ignore[arg-type]
        kv.Group(kind="window", window=32 * WINDOW, kv_heads=1, **SHAPE),  # type: ignore[arg-type]
        kv.Group(kind="state", layers=1, state_bytes=32 * 24),
    ),
)


class OneChain:
    """A run of one chain, of one rank."""

    ranks = 1

    def __len__(self) -> int:
        return 1


class WaitingTask(HoldTask):
    """A task for which there is no room; some of what it needs is held."""

    is_held = False

    def _advance(self, now_ns: int) -> Step:
        self.is_held = True
        return Step.WAIT

    def _release(self, now_ns: int) -> None:
        self.is_held = False


def test_of_the_tasks_that_wait_only_the_first_keeps_its_holds() -> None:
    """Were each to keep what it has while it waits, hardly any of them would get all of it."""
    waiting: WaitingTasks = {}
    nothing: Any = SimpleNamespace(groups=("a group",))
    run: Any = OneChain()
    tasks = [
        WaitingTask(nothing, nothing, nothing, [run], holder=None, ending=nothing, chunks=1, waiting=waiting)
        for _ in range(3)
    ]
    every = list(tasks)

    def held_after_an_advance() -> list[bool]:
        for task in tasks:
            assert task.advance(0) is Step.WAIT
        return [task.is_held for task in every]

    assert held_after_an_advance() == [True, False, False]
    assert held_after_an_advance() == [True, False, False]
    tasks.pop(0).release_holds(0)
    assert held_after_an_advance() == [False, True, False]
    tasks.pop().release_holds(0)
    assert held_after_an_advance() == [False, True, False]


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_leases_that_wait_for_room_at_once_are_all_served(
    start_daemon: Callable[..., Daemon], tmp_path: Path, rounds: int
) -> None:
    """Each needs a third of DRAM."""
    ssd = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB", "ssd__watermark": "1"}
    daemon = start_daemon(dram__capacity="8MiB", **ssd)
    with daemon.connect(LAYOUT, timeout_s=20.0) as pool, daemon.admin() as admin:
        for number in range(PROMPTS):
            assert store(pool, pool.keys(tokens_of(number, CHUNKS * 32 + 1)), [CHUNKS]).declined == 0
        assert admin.demote_all(60.0)["left"] == 0
    daemon.stop()
    daemon = start_daemon(dram__capacity="1600KiB", **ssd)
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    served = [0] * PROMPTS
    deadline = Deadline(DEADLINE_S)

    def ask(number: int) -> None:
        with daemon.connect(LAYOUT, timeout_s=20.0) as pool:
            keys = pool.keys(tokens_of(number, CHUNKS * 32 + 1))
            while served[number] < rounds and not deadline.has_passed():
                with pool.acquire(pool.lookup(keys)) as lease:
                    if lease.chunks:
                        result, _ = load(pool, lease)
                        served[number] += result.chunks == CHUNKS

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(PROMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served == [rounds] * PROMPTS
    assert daemon.problems() == []
