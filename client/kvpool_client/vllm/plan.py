"""Plan and report: what crosses between the two halves, to the workers before each step and back after it.

vLLM carries both between processes, so they are plain records of plain values; the two that every step has are tuples, which
cost least to make and to carry. Invariant: a plan has everything a worker needs for its step; of earlier plans a worker retains
only running orders. Immutable; any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpool.states import TokenRange
from kvpool_client.vllm.ranks.stage_layers import StageLayers


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load leased chunks `first_chunk` up to `chunks` into blocks.

    `tickets`: see `Ranks`; none: report the blocks as failed.
    `block_ids`: by part of the engine (see `parts`) the blocks of those chunks, of one that is not full those of the last
    chunks, −1 where a block is not to be written. `tiers`: the level of each chunk. `may_be_cut`: see `Geometry`; else vLLM is
    notified of a load that fails by its request alone.
    """

    request_id: str
    tickets: tuple[bytes, ...]
    first_chunk: int
    chunks: int
    block_ids: tuple[tuple[int, ...], ...]
    tiers: bytes
    is_async: bool
    may_be_cut: bool


@dataclass(frozen=True, slots=True)
class SaveRetention:
    """Retention of a save: the prompt's chunks by `ranges`, chunks decoded after `prompt_tokens` with `decode_priority`."""

    ranges: tuple[TokenRange, ...]
    prompt_tokens: int
    decode_priority: int | None = None
    decode_duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save chunks `first_chunk` on, which are whole when this step's forward pass has run.

    `hashes`: the engine's hash for each chunk from the root of the prompt on; `chunks`: by part of the engine those to save, in
    ascending order, and `block_ids` their blocks.
    `tokens`: the token ids of the saved ones, i32, or none where their KV depends on more than those. `lora_name`: the
    adapter's name in events. `retention`: what the request asks for, if anything. `pin`: the number under which their blocks
    are held until every rank has reported that it has ended; 0: they are read by no rank after the step.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    salt: bytes
    adapter: str
    first_chunk: int
    chunks: tuple[Sequence[int], ...]
    block_ids: tuple[tuple[int, ...], ...]
    tokens: bytes = b""
    lora_name: str = ""
    retention: SaveRetention | None = None
    pin: int = 0


class StepPlan(NamedTuple):
    """Plan of one step: what to load, what to save, which loads are cancelled.

    `acknowledged`: the last step of which the scheduler knows that a synchronous load failed in it. What a worker computes
    between a failure and its acknowledgement may depend on KV that never came, and is not saved. `is_idle`: the step computes
    nothing.
    `renewed`: the last step whose KV is not of the scheduler's epoch of weights, because it knows of a change after it; −1:
    none. A worker whose weights have changed since loads and saves nothing.
    `node`: where the scheduler runs. `board`: where save threads post what they read (see `save_board`), if anywhere.
    `stage_layers`: of a hybrid model in several stages, and `name`: the model's with its revision, where its files had to be
    read; each until every worker has it.
    """

    step: int
    acknowledged: int = 0
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    cancelled: tuple[str, ...] = ()
    is_idle: bool = False
    node: str = ""
    board: str = ""
    stage_layers: StageLayers | None = None
    name: tuple[str, str] | None = None
    renewed: int = -1


NO_PLAN = StepPlan(0)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Outcome of a load on one rank. `wanted` and `chunks` count from the root; `seconds`: time on its thread, for claiming and
    for waiting for bytes. `cost_s`: of that its part, where others were under way at the same time (see `divided_time`)."""

    wanted: int
    chunks: int
    reason: str
    seconds: float
    tiers: bytes
    cost_s: float

    @property
    def cost_of_all_s(self) -> float:
        """What every chunk would have cost, at the pace of those that came, or of one where none did."""
        missing = max(0, self.wanted - self.chunks)
        return self.cost_s * len(self.tiers) / max(1, len(self.tiers) - missing)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk came."""
        return self.chunks >= self.wanted


_NONE: Mapping[Any, Any] = {}  # nobody adds to a report


class StepReport(NamedTuple):
    """Report of a worker after a step. `failed_step`: the last step in which a synchronous load failed; `off`: why it has no
    pool.

    `ended_saves`: how many ranks have ended a pinned save, by its number. `unsaved`: the first chunk of a request that was not
    saved because another save was just writing it. `weights_step`: the last step with work before this rank's weights were
    changed in place, 0: before the first; −1: they never were.
    """

    step: int
    failed_step: int = 0
    loads: Mapping[str, LoadOutcome] = _NONE
    off: str = ""
    ended_saves: Mapping[int, int] = _NONE
    unsaved: Mapping[str, int] = _NONE
    weights_step: int = -1

    def aggregate(self, other: "StepReport") -> "StepReport":
        """The combined report of two ranks: of each load the shorter one, then the one that has cost more; ended saves are
        counted."""
        loads = dict(self.loads)
        for request_id, outcome in other.loads.items():
            loads[request_id] = shorter_outcome(loads.get(request_id, outcome), outcome)
        ended = dict(self.ended_saves)
        for pin, ranks in other.ended_saves.items():
            ended[pin] = ended.get(pin, 0) + ranks
        unsaved = dict(self.unsaved)
        for request_id, chunk in other.unsaved.items():
            unsaved[request_id] = min(chunk, unsaved.get(request_id, chunk))
        return StepReport(
            step=max(self.step, other.step),
            failed_step=max(self.failed_step, other.failed_step),
            loads=loads,
            off=_joined(self.off, other.off),
            ended_saves=ended,
            unsaved=unsaved,
            weights_step=max(self.weights_step, other.weights_step),
        )


def _joined(*reasons: str) -> str:
    """Reasons of several ranks, each once."""
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def shorter_outcome(one: LoadOutcome, other: LoadOutcome) -> LoadOutcome:
    """Of two ranks' outcomes the one with fewer chunks, of equal ones the one that has cost more."""
    return min(one, other, key=lambda outcome: (outcome.chunks, -outcome.cost_s))
