"""Watch of a thread's steps: an endless one is noticed, and waiting or many steps are not."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool.server.events import step_watch
from kvpool.server.events.step_watch import StepWatch
from tests.rigs.nodes.peers import until


class Worker:
    """A thread that computes, as one step, in many or with pauses, or waits, until it has to end."""

    def __init__(self, kind: str) -> None:
        self.steps = 0
        self.has_ended = threading.Event()
        self._kind = kind
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.has_ended.is_set():
            if self._kind == "waits":
                self.has_ended.wait(20.0)
            if self._kind == "pauses":
                self.has_ended.wait(0.05)
            self.steps += self._kind == "steps"


@contextmanager
def working(kind: str) -> Iterator[Worker]:
    worker = Worker(kind)
    worker.thread.start()
    yield worker
    worker.has_ended.set()
    worker.thread.join()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["computes", "steps", "pauses", "waits"])
async def test_a_step_without_an_end_is_noticed_and_nothing_else(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "STEP_S_MAX", 0.01 if kind == "computes" else 0.0)
    noticed: list[int] = []
    looks = 0
    with working(kind) as worker:

        def steps() -> int:
            nonlocal looks
            looks += 1
            return worker.steps

        watch = StepWatch(worker.thread, steps, lambda: noticed.append(1), asyncio.get_running_loop())
        await until(lambda: bool(noticed) if kind == "computes" else looks > 5, "it was looked at")
        watch.close()
        if kind != "computes":
            assert not noticed
        seen = looks
    assert looks == seen


@pytest.mark.asyncio
async def test_a_thread_that_has_ended_is_no_endless_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "LOOK_S", 0.01)
    looks: list[int] = []

    def steps() -> int:
        looks.append(1)
        return 0

    with working("waits") as worker:
        watch = StepWatch(worker.thread, steps, lambda: pytest.fail("it waits"), asyncio.get_running_loop())
    before = len(looks)
    await until(lambda: len(looks) > before + 3, "it was looked at again")
    watch.close()
