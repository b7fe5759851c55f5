"""This rank's saves: those that end with their step, and those that go on behind it because their blocks are pinned.

    of the step: opened at its first layer, copied layer by layer, published when the forward pass has ended
    pinned:      handed over when the forward pass has ended ──thread──► stored, or dropped ──report──► unpinned

Where another save is just writing chunks of an order, a pinned one waits between steps; one of the step is planned again by the
scheduler's half, unless the other one was of the same step. Invariants: of one request one pinned order is under way at a
time, because each builds on the one before; each pinned order is reported as ended exactly once, and
then none of its blocks is read any more. The thread that runs the model; `_carry_out` alone runs on the save threads.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

from kvpool.clock import Clock, Deadline
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.engine_mark import engine_mark
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.pool import Pool
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.plan import SaveOrder
from kvpool_client.vllm.save_board import RankSaves
from kvpool_client.vllm.statistics import Tally
from kvpool_client.vllm.worker.save_task import SaveTask

# Saves under way at once: one copies while another one asks the daemon.
SAVE_THREADS = 2
LOOK_S = 0.001


class Saver:
    """See the module. `is_writer`: this rank stores what several ranks have; `wait_budget_s`: an order may take this long."""

    def __init__(
        self,
        geometry: Geometry,
        tally: Tally,
        guard: FailureGuard,
        *,
        is_writer: bool,
        wait_budget_s: float,
        clock: Clock,
    ) -> None:
        self._geometry = geometry
        self._tally = tally
        self._guard = guard
        self._is_writer = is_writer
        self._wait_budget_s = wait_budget_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(SAVE_THREADS, thread_name_prefix="kvpool-save")
        self.board = RankSaves()
        self._memory: tuple[Pool, Cache] | None = None
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
        """Whether orders are under way, or were, and this was not told yet."""
        return bool(self._orders or self._open or self.is_busy or self._ended or self._unsaved)

    def use(self, pool: Pool, cache: Cache) -> None:
        """Where blocks are read and stored from now on."""
        self._memory = (pool, cache)

    def begin(self, orders: Sequence[SaveOrder]) -> None:
        """A step begins. What a step without an end has left is given up."""
        self.drop()
        self._orders = orders

    def layer(self, layer: int, *, may_save: bool) -> None:
        """The forward pass has written a layer."""
        for storing in self._opened(may_save=may_save):
            storing.layer(layer)

    def end_step(self, *, may_save: bool) -> None:
        """The forward pass has ended: publish the step's own saves and hand the pinned ones over, or give all of them up."""
        if not may_save:
            self.drop()
            return
        told_to_wait = [storing for storing in self._opened(may_save=True) if not self._commit(storing)]
        orders, self._orders, self._open = self._orders, (), None
        for storing in told_to_wait:
            self._try_again(storing)
        mark = self._mark()
        for order in orders:
            if order.pin:
                self._hand_over(order, mark)

    def drop(self) -> None:
        """Give up what this step has not handed over. When it returns none of those blocks is read any more."""
        orders, self._orders = self._orders, ()
        opened, self._open = self._open or [], None
        for storing in opened:
            self._guard.call("giving a save up", None, storing.abort)
        pinned = [order for order in orders if order.pin]
        for order in pinned:
            self._end(order)
        if self._is_writer:
            self._tally.add("dropped_saves", len(opened) + len(pinned))

    def poll(self) -> None:
        """Look after what runs and waits behind the steps."""
        running, self._running = self._running, []
        for storing, future in running:
            if not future.done():
                self._running.append((storing, future))
            elif not future.result():
                self._waiting.append(storing)
            else:
                self._settle(storing)
        waiting, self._waiting = self._waiting, []
        for storing in waiting:
            is_held_up = self._guard.call("waiting for another save", False, storing.waits_for_another)
            if storing.is_late:
                self._guard.call("giving a save up", None, storing.abort)
                self._settle(storing)
            elif is_held_up:
                self._waiting.append(storing)
            else:
                self._submit(storing, None)
        behind, self._behind = self._behind, []
        for storing, mark in behind:
            self._submit_in_turn(storing, mark)

    def wait_a_moment(self, others: Iterable[Future[Any]]) -> None:
        """Until something that runs behind the steps, or one of the others, ends; LOOK_S at most."""
        futures = [*others, *(future for _, future in self._running)]
        if futures:
            wait_for_futures(futures, LOOK_S, FIRST_COMPLETED)
        elif self._waiting:
            threading.Event().wait(LOOK_S)

    def drain(self, timeout_s: float) -> None:
        """Until nothing runs behind the steps, or time is over."""
        deadline = Deadline(timeout_s, self._clock)
        self.poll()
        while self.is_busy and not deadline.has_passed():
            self.wait_a_moment(())
            self.poll()

    def take_ended(self) -> dict[int, int]:
        """How often each pinned order has ended since the last time."""
        taken, self._ended = self._ended, {}
        return taken

    def take_unsaved(self) -> dict[str, int]:
        """Requests of whose chunks from one on another save was just writing, since the last time."""
        taken, self._unsaved = self._unsaved, {}
        return taken

    def close(self) -> None:
        """End what is under way, and the threads."""
        self.drop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for storing in [*self._waiting, *(storing for storing, _ in [*self._running, *self._behind])]:
            self._guard.call("giving a save up", None, storing.abort)
        self.board.close()

    def _opened(self, *, may_save: bool) -> list[SaveTask]:
        """The saves that end with this step, opened at the first layer that is ready."""
        if self._open is None:
            self._open = []
            is_on = self._is_writer and may_save
            for order in self._orders if is_on else ():
                storing = self._new(order) if not order.pin else None
                if storing is not None and self._did("opening a save", storing.open):
                    self._open.append(storing)
        return self._open

    def _new(self, order: SaveOrder) -> SaveTask | None:
        if self._memory is None:
            return None
        pool, cache = self._memory
        return SaveTask(order, self._geometry, pool, cache, wait_budget_s=self._wait_budget_s, clock=self._clock)

    def _commit(self, storing: SaveTask) -> bool:
        """Whether a save of this step is over."""
        is_over = self._guard.call("ending a save", None, storing.commit)
        if is_over is None:
            self._guard.call("giving a save up", None, storing.abort)
        if is_over is not False:
            self._count(storing)
        return is_over is not False

    def _try_again(self, storing: SaveTask) -> None:
        """The step's own saves have ended: what waited for one of them can be stored now, the rest is planned again."""
        is_held_up = self._guard.call("waiting for another save", True, storing.waits_for_another)
        if not is_held_up and (not self._did("opening a save", storing.open) or self._commit(storing)):
            return
        self._unsaved[storing.order.request_id] = storing.next_chunk
        self._count(storing)

    def _hand_over(self, order: SaveOrder, mark: Callable[[], None] | None) -> None:
        storing = self._new(order) if self._is_writer else None
        if storing is None or mark is None:
            self._end(order)
            return
        self._submit_in_turn(storing, mark)

    def _submit_in_turn(self, storing: SaveTask, mark: Callable[[], None]) -> None:
        request_id = storing.order.request_id
        under_way = [*self._waiting, *(earlier for earlier, _ in [*self._running, *self._behind])]
        if any(earlier.order.request_id == request_id for earlier in under_way):
            self._behind.append((storing, mark))
        else:
            self._submit(storing, mark)

    def _submit(self, storing: SaveTask, mark: Callable[[], None] | None) -> None:
        self._running.append((storing, self._threads.submit(self._carry_out, storing, mark)))

    def _carry_out(self, storing: SaveTask, mark: Callable[[], None] | None) -> bool:
        """Whether the order is over. On a save thread."""
        with self.board.reading(storing.order.pin) as may_read:
            return self._carry_out_if(storing, mark, is_wanted=may_read and not storing.is_late)

    def _carry_out_if(self, storing: SaveTask, mark: Callable[[], None] | None, *, is_wanted: bool) -> bool:
        is_on = is_wanted and (mark is None or self._did("waiting for the device", mark))
        if not is_on or not self._did("opening a save", storing.open):
            storing.drop()
            return True
        is_over = self._guard.call("ending a save", None, storing.commit)
        if is_over is None:
            self._guard.call("giving a save up", None, storing.abort)
        return is_over is not False

    def _settle(self, storing: SaveTask) -> None:
        self._count(storing)
        self._end(storing.order)

    def _count(self, storing: SaveTask) -> None:
        for name, amount in storing.counts.items():
            self._tally.add(name, amount)

    def _end(self, order: SaveOrder) -> None:
        self._ended[order.pin] = self._ended.get(order.pin, 0) + 1

    def _mark(self) -> Callable[[], None] | None:
        """What waits for everything that the engine has queued so far; None where it cannot be had."""
        if self._memory is None:
            return None
        device = self._memory[1].device
        return self._guard.call("marking the device's work", None, lambda: engine_mark(device))

    def _did(self, what: str, function: Callable[[], None]) -> bool:
        """Whether the call came back."""

        def run() -> bool:
            function()
            return True

        return self._guard.call(what, False, run)
