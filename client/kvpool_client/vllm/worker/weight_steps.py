"""Weight steps: after which step a rank's weights were changed in place, in the scheduler's numbers of its plans.

A step without work computes no KV, so a change behind one comes after the last step with work. Invariant: the number never
decreases, and a change behind a step with work has a number of its own. The thread that runs the model.
"""

from kvpool_client.vllm.plan import StepPlan


class WeightSteps:
    """See the module. `changed_after`: the last step with work before the last change, 0: none; −1: there was no change."""

    def __init__(self) -> None:
        self.changed_after = -1
        self._last = self._last_with_work = 0
        self._is_numbered = False

    def __repr__(self) -> str:
        return f"<WeightSteps changed after {self.changed_after}, step {self._last}>"

    def begin_step(self, plan: StepPlan) -> None:
        """A step begins. One whose plan has failed has a number nevertheless: the next one."""
        if plan.step:
            self._last, self._is_numbered = plan.step, True
        else:  # before there is a scheduler's half, which counts from one, all are the first
            self._last = self._last + 1 if self._is_numbered else 1
        if plan.loads or not plan.is_idle:
            self._last_with_work = self._last

    def note_change(self) -> None:
        """The weights have been changed in place."""
        self.changed_after = max(self.changed_after, self._last_with_work)
