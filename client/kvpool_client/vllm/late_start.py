"""Late starts: connectors that begin once they have what vLLM or the disk did not have for them at the engine's start.

    StagedStart   the layers of all pipeline stages of a hybrid model (`ranks/stage_layers`)
    NamedStart    the model's name, while the files of its weights are read (`identity/identity`)

Until then the engine runs without the pool. A worker gets both with the scheduler's first plan that has them, so that all
halves of an engine agree. One thread at a time.
"""

from collections.abc import Callable

from kvpool_client.vllm.identity.identity import ModelName
from kvpool_client.vllm.plan import StepPlan
from kvpool_client.vllm.ranks.stage_layers import OwnLayers
from kvpool_client.vllm.surface import BlockPool


class LateStart:
    """See the module. `blocks`: vLLM's, which it has given the connector meanwhile."""

    # The layers that this process shows the scheduler, where those of all stages are awaited.
    own: OwnLayers | None = None

    def __init__(self) -> None:
        self.blocks: BlockPool | None = None

    def start_with(self, plan: StepPlan) -> Callable[[], None] | None:
        """How a worker begins, where the plan has what it lacks."""
        raise NotImplementedError


class StagedStart(LateStart):
    """`own`: what it shows; `start_half`: with what finds the layers of all stages."""

    def __init__(self, own: OwnLayers, start_half: Callable[..., None]) -> None:
        super().__init__()
        self.own = own
        self.start_half = start_half

    def start_with(self, plan: StepPlan) -> Callable[[], None] | None:
        """See LateStart."""
        layers = plan.stage_layers
        return None if layers is None else lambda: self.start_half(find=lambda: layers)


class NamedStart(LateStart):
    """`name`: what is read, `start_half`: with what has the name. `has_new_weights`: they were changed in place meanwhile."""

    def __init__(self, name: ModelName, start_half: Callable[..., None]) -> None:
        super().__init__()
        self.name = name
        self.start_half = start_half
        self.has_new_weights = False
        self._taken_bytes = 0

    def start_with(self, plan: StepPlan) -> Callable[[], None] | None:
        """See LateStart."""
        name = plan.name
        return None if name is None else lambda: self.start_half(name=lambda: name)

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to be read."""
        return all(reading.wait(0) for reading in self.name.revision.readings)

    def take_read_bytes(self) -> int:
        """Bytes of the weights' files that were read since the last call."""
        before, self._taken_bytes = self._taken_bytes, self.name.revision.done
        return max(0, self._taken_bytes - before)
