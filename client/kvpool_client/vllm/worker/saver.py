"""Saver: this rank's saves. Some end with their step, others go on after it because their blocks are pinned.

    of the step: opened at its first layer, copied layer by layer, published when the forward pass has ended
    pinned:      passed on when the forward pass has ended ──thread──► stored, or dropped ──report──► unpinned

Where another save is just writing chunks of an order, a pinned one waits between steps; one of the step is planned again by the
scheduler's half, unless the other one was of the same step. Invariants: of one request one pinned order is under way at a
time, because each needs the one before; each pinned order is reported as ended exactly once, and after that nothing reads its
blocks. The thread that runs the model; `_carry_out` alone runs on the save threads.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

from kvpool.clock import Clock, Deadline
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.vllm.identity.geometry import LayerPlace
from kvpool_client.vllm.plan import SaveOrder
from kvpool_client.vllm.save_board import RankSaves
from kvpool_client.vllm.statistics import Tally
from kvpool_client.vllm.worker.engine_memory import EngineMemory
from kvpool_client.vllm.worker.save_task import SaveTask

# Saves under way at once: one copies while another one asks the daemon.
SAVE_THREADS = 2
LOOK_S = 0.001


class Saver:
    """See the module. `is_writer`: this rank stores what several ranks have; `wait_budget_s`: an order may take this long."""

    def __init__(
        self,
        tally: Tally,
        guard: FailureGuard,
        *,
        is_writer: bool,
        wait_budget_s: float,
        clock: Clock,
    ) -> None:
        self._tally = tally
        self._guard = guard
        self._is_writer = is_writer
        self._wait_budget_s = wait_budget_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(SAVE_THREADS, thread_name_prefix="kvpool-save")
        self.board = RankSaves()
        self._memory: EngineMemory | None = None
        self._orders: Sequence[SaveOrder] = ()
        self._open: list[SaveTask] | None = None
        self._running: list[tuple[SaveTask, Future[bool]]] = []
        self._waiting: list[SaveTask] = []
        self._behind: list[tuple[SaveTask, Callable[[], None]]] = []
        self._ended: dict[int, int] = {}
        self._unsaved: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Saver {len(self._running)} run, {len(self._waiting)} wait for another save>"

    @property
    def is_busy(self) -> bool:
        """Whether pinned orders are under way."""
        return bool(self._running or self._waiting or self._behind)

    @property
    def has_work(self) -> bool:
        """Whether orders are under way, or have ended and were not reported yet."""
        return bool(self._orders or self._open or self.is_busy or self._ended or self._unsaved)

    def use_memory(self, memory: EngineMemory) -> None:
        """Set where blocks are read and stored from now on."""
        self._memory = memory

    def leave_memory(self) -> None:
        """End every order, those that do not end within the time of one without success. After it has returned, nothing reads
        a block, and until there is memory again orders end at once."""
        self.drop()
        self._memory = None
        self.drain(self._wait_budget_s)  # then all of them are late
        while self.is_busy:
            wait_for_futures([future for _, future in self._running])
            self.poll()

    def begin_step(self, orders: Sequence[SaveOrder]) -> None:
        """A step begins. Give up what an unfinished step has left."""
        self.drop()
        self._orders = orders

    def layer(self, place: LayerPlace, *, may_save: bool) -> None:
        """The forward pass has written a layer."""
        for task in self._opened(may_save=may_save):
            task.layer(place)

    def end_step(self, *, may_save: bool) -> None:
        """The forward pass has ended: publish the step's own saves and start the pinned ones, or give all of them up."""
        if not may_save:
            self.drop()
            return
        waiting = [task for task in self._opened(may_save=True) if not self._commit_in_step(task)]
        orders, self._orders, self._open = self._orders, (), None
        for task in waiting:
            self._try_again(task)
        mark = self._mark()
        for order in orders:
            if order.pin:
                self._hand_over(order, mark)

    def drop(self) -> None:
        """Give up the orders that this step has not started. After it has returned, nothing reads those blocks."""
        orders, self._orders = self._orders, ()
        opened, self._open = self._open or [], None
        for task in opened:
            self._guard.call("giving a save up", None, task.abort)
        pinned = [order for order in orders if order.pin]
        for order in pinned:
            self._end_order(order)
        if self._is_writer:
            self._tally.count("dropped_saves", len(opened) + len(pinned))

    def poll(self) -> None:
        """Check the saves that run or wait between steps."""
        running, self._running = self._running, []
        for task, future in running:
            if not future.done():
                self._running.append((task, future))
            elif not future.result():
                self._waiting.append(task)
            else:
                self._end_task(task)
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            is_held_up = self._guard.call("waiting for another save", False, task.waits_for_another)
            if task.is_late:
                self._guard.call("giving a save up", None, task.abort)
                self._end_task(task)
            elif is_held_up:
                self._waiting.append(task)
            else:
                self._submit(task, None)
        behind, self._behind = self._behind, []
        for task, mark in behind:
            self._submit_in_turn(task, mark)

    def wait_a_moment(self, others: Iterable[Future[Any]]) -> None:
        """Wait until a save between steps, or one of the others, ends; LOOK_S at most."""
        futures = [*others, *(future for _, future in self._running)]
        if futures:
            wait_for_futures(futures, LOOK_S, FIRST_COMPLETED)
        elif self._waiting:
            threading.Event().wait(LOOK_S)

    def drain(self, timeout_s: float) -> None:
        """Wait until no save runs between steps, or time is over."""
        deadline = Deadline(timeout_s, self._clock)
        self.poll()
        while self.is_busy and not deadline.has_passed():
            self.wait_a_moment(())
            self.poll()

    def take_ended(self) -> dict[int, int]:
        """How often each pinned order has ended since the last call."""
        taken, self._ended = self._ended, {}
        return taken

    def take_unsaved(self) -> dict[str, int]:
        """By request, the first chunk that another save was just writing, since the last call."""
        taken, self._unsaved = self._unsaved, {}
        return taken

    def close(self) -> None:
        """End what is under way, and the threads."""
        self.drop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for task in [*self._waiting, *(task for task, _ in [*self._running, *self._behind])]:
            self._guard.call("giving a save up", None, task.abort)
        self.board.close()

    def _opened(self, *, may_save: bool) -> list[SaveTask]:
        """The saves that end with this step, opened at the first layer that is ready."""
        if self._open is None:
            self._open = []
            is_on = self._is_writer and may_save
            for order in self._orders if is_on else ():
                task = self._new(order) if not order.pin else None
                if task is not None and self._did("opening a save", task.open):
                    self._open.append(task)
        return self._open

    def _new(self, order: SaveOrder) -> SaveTask | None:
        if self._memory is None:
            return None
        return SaveTask(order, self._memory, wait_budget_s=self._wait_budget_s, clock=self._clock)

    def _commit_in_step(self, task: SaveTask) -> bool:
        """Commit a save of this step. Whether it has ended."""
        if is_over := self._commit_task(task):
            self._count_task(task)
        return is_over

    def _commit_task(self, task: SaveTask) -> bool:
        """Commit a save. Whether it has ended: else it waits for another one."""
        is_over = self._guard.call("ending a save", None, task.commit)
        if is_over is None:
            self._guard.call("giving a save up", None, task.abort)
        return is_over is not False

    def _try_again(self, task: SaveTask) -> None:
        """The step's own saves have ended: orders that waited for one of them can be stored now, the rest is planned again."""
        is_held_up = self._guard.call("waiting for another save", True, task.waits_for_another)
        if not is_held_up and (not self._did("opening a save", task.open) or self._commit_in_step(task)):
            return
        self._unsaved[task.order.request_id] = task.next_chunk
        self._count_task(task)

    def _hand_over(self, order: SaveOrder, mark: Callable[[], None] | None) -> None:
        task = self._new(order) if self._is_writer else None
        if task is None or mark is None:
            self._end_order(order)
            return
        self._submit_in_turn(task, mark)

    def _submit_in_turn(self, task: SaveTask, mark: Callable[[], None]) -> None:
        request_id = task.order.request_id
        under_way = [*self._waiting, *(earlier for earlier, _ in [*self._running, *self._behind])]
        if any(earlier.order.request_id == request_id for earlier in under_way):
            self._behind.append((task, mark))
        else:
            self._submit(task, mark)

    def _submit(self, task: SaveTask, mark: Callable[[], None] | None) -> None:
        self._running.append((task, self._threads.submit(self._carry_out, task, mark)))

    def _carry_out(self, task: SaveTask, mark: Callable[[], None] | None) -> bool:
        """Carry an order out, on a save thread. Whether it has ended."""
        with self.board.reading(task.order.pin) as may_read:
            return self._carry_out_if(task, mark, is_wanted=may_read and not task.is_late)

    def _carry_out_if(self, task: SaveTask, mark: Callable[[], None] | None, *, is_wanted: bool) -> bool:
        is_on = is_wanted and (mark is None or self._did("waiting for the device", mark))
        if not is_on or not self._did("opening a save", task.open):
            task.drop()
            return True
        return self._commit_task(task)

    def _end_task(self, task: SaveTask) -> None:
        self._count_task(task)
        self._end_order(task.order)

    def _count_task(self, task: SaveTask) -> None:
        for name, amount in task.counts.items():
            self._tally.count(name, amount)

    def _end_order(self, order: SaveOrder) -> None:
        self._ended[order.pin] = self._ended.get(order.pin, 0) + 1

    def _mark(self) -> Callable[[], None] | None:
        """A call that waits for everything the engine has queued so far; None where there is none."""
        if self._memory is None:
            return None
        return self._guard.call("marking the device's work", None, self._memory.engine_mark)

    def _did(self, what: str, function: Callable[[], None]) -> bool:
        """Whether the call came back."""

        def run() -> bool:
            function()
            return True

        return self._guard.call(what, False, run)
