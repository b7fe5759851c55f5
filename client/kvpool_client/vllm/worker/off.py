"""Absent worker: the worker's half where this rank cannot store KV. It loads and saves nothing, and reports so.

The scheduler's half plans for all ranks, and vLLM waits for what was planned. So every order that reaches this rank ends here:
a load as failed, its blocks as never filled, a save as ended. Invariant: each order is answered once, in its step.
Has the methods of `worker.WorkerHalf`. The thread that runs the model.
"""

import contextlib
from collections.abc import Mapping

from kvpool_client.vllm.plan import NO_PLAN, LoadOutcome, StepPlan, StepReport
from kvpool_client.vllm.save_board import RankSaves
from kvpool_client.vllm.statistics import Tally
from kvpool_client.vllm.surface import Tensor
from kvpool_client.vllm.worker.weight_steps import WeightSteps


class AbsentWorker:
    """See the module. `off`: the reason."""

    loads_by_layer = saves_by_layer = False

    def __init__(self, off: str, rank: int) -> None:
        self.tally = Tally()
        self._rank = rank
        self._board = RankSaves()
        self._off = off
        self._plan = NO_PLAN
        self.weights = WeightSteps()
        self._outcomes: dict[str, LoadOutcome] = {}
        self._finished: set[str] = set()
        self._failed_loads: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed_step = 0
        self._ended: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<AbsentWorker step {self._plan.step}, {self._off!r}>"

    def register(self, tensors: Mapping[str, Tensor]) -> bool:
        """Do nothing with them. True: the reason was logged and counted before."""
        del tensors
        return True

    def unregister(self) -> None:
        """There is nothing."""

    def note_new_weights(self) -> None:
        """For the half that may take its place."""
        self.weights.note_change()

    def begin_step(self, plan: StepPlan) -> None:
        """A step begins: its loads fail."""
        self._plan = plan
        self.weights.begin_step(plan)
        if plan.board and not self._board.has_attached:
            with contextlib.suppress(OSError):  # without it a reset of vLLM's prefixes fails while others save
                self._board.attach(plan.board, self._rank)
        for order in plan.loads:
            self._outcomes[order.request_id] = LoadOutcome(order.chunks, 0, "no-pool", 0.0, order.tiers, 0.0)
            if order.may_be_cut:
                self._bad_blocks.update(block for block in order.block_ids[0] if block >= 0)
            else:
                self._failed_loads.add(order.request_id)
            self.tally.count("short_loads_no-pool")
            if order.is_async:
                self._finished.add(order.request_id)
            else:
                self._failed_step = plan.step
        for save in plan.saves:
            if save.pin:
                self._ended[save.pin] = 1

    def start_loads(self) -> None:
        """Do nothing: the loads have failed already."""

    def wait_layer(self, name: str) -> None:
        """Nothing comes."""

    def save_layer(self, name: str) -> None:
        """Nothing is saved."""

    def end_forward(self) -> None:
        """Nothing is under way."""

    def drop_saves(self) -> None:
        """There are none."""

    def drain(self, timeout_s: float) -> dict[int, int]:
        """Pinned saves that were ordered since the last call: each ended at once."""
        del timeout_s
        ended, self._ended = self._ended, {}
        return ended

    def take_finished(self) -> set[str]:
        """Requests whose asynchronous load was ordered since the last call."""
        taken, self._finished = self._finished, set()
        return taken

    def take_failed(self) -> set[str]:
        """The same, where vLLM is not notified of blocks."""
        taken, self._failed_loads = self._failed_loads, set()
        return taken

    def take_bad_blocks(self) -> set[int]:
        """Blocks that a load should have filled, since the last call."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def report(self) -> StepReport:
        """The report: why this rank is off, and the outcomes of its orders."""
        loads, self._outcomes = self._outcomes, {}
        ended = self.drain(0.0)
        step, changed_after = self._plan.step, self.weights.changed_after
        return StepReport(step, self._failed_step, loads, self._off, ended, weights_step=changed_after)

    def close(self) -> None:
        """End what the scheduler's half reads."""
        self._board.close()
