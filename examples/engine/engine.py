"""Engine: a model, its block pool, and the requests that have blocks. A scheduler says who begins, who goes on, who ends.

With `reuse` requests share prefixes, and an exact repeat of a prompt reuses the logits that followed it: it runs no forward
pass. With a `pool` the node's daemon is behind the blocks. A request that begins has room for all of its tokens, so that it
never waits for others later. One thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

import kvpool_client as kv
from examples.engine.attention import TILE, Span
from examples.engine.model import Model
from examples.engine.sampling import Sampler
from examples.engine.workload import Request
from kvpool_client.blocks import Allocation, BlockPool
from kvpool_client.torch import gated

LOGITS_MAX = 256


class NoRoom(Exception):
    """A request does not fit into the blocks even alone."""


@dataclass(slots=True)
class Running:
    """A request that has blocks, and its answer so far."""

    request: Request
    sampler: Sampler
    block_ids: torch.Tensor
    answer: list[int]

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete."""
        return len(self.answer) >= self.request.answer_tokens


@dataclass(slots=True)
class Counts:
    """Seconds and tokens of an engine's life."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    reused_logits: int = 0


@dataclass(slots=True)
class Engine:
    """See the module."""

    model: Model
    num_blocks: int
    reuse: bool = True
    pool: kv.Pool | None = None
    counts: Counts = field(default_factory=Counts)
    answers: dict[int, list[int]] = field(default_factory=dict)
    blocks: BlockPool = field(init=False)
    _pages: list[torch.Tensor] = field(init=False)
    _logits: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.model.shape
        self.blocks = BlockPool(
            **shape.kv_shape,
            num_blocks=self.num_blocks,
            tokens_per_block=TILE,
            dtype="float32",
            device="cpu",
            pool=self.pool,
        )
        self._pages = [self.blocks.buffers(layer) for layer in range(shape.layers)]

    def begin(self, request: Request) -> Running | None:
        """Prefill a request and choose its first token; None where there is no room now."""
        began = perf_counter()
        prompt = tuple(request.prompt)
        known = self._logits.get(prompt) if self.reuse else None
        # Prefixes with different salts are never shared.
        salt = None if self.reuse else request.number.to_bytes(8, "little")
        allocation = self.blocks.allocate(request.number, request.prompt, salt=salt, has_logits=known is not None)
        if allocation is None:
            return None
        if not self.blocks.reserve(request.number, request.answer_tokens - 1):
            self.blocks.free(request.number)
            return None
        block_ids = torch.tensor(self.blocks.block_ids(request.number))
        logits = self._prefill(request, allocation, block_ids, known)
        self.blocks.computed(request.number, allocation.reused_tokens, len(prompt))
        if self.reuse:
            self._logits[prompt] = logits
            if len(self._logits) > LOGITS_MAX:
                del self._logits[next(iter(self._logits))]
        sampler = Sampler(top_p=request.top_p, seed=request.seed)
        running = Running(request, sampler, block_ids, [sampler.choose(logits)])
        self.counts.prompt_tokens += len(prompt)
        self.counts.completion_tokens += 1
        self.counts.reused_tokens += allocation.reused_tokens
        self.counts.prefill_s += perf_counter() - began
        return running

    def decode(self, batch: Sequence[Running]) -> None:
        """One more token for each of these requests."""
        began = perf_counter()
        spans = []
        for running in batch:
            number, start = running.request.number, self.blocks.length(running.request.number)
            if not self.blocks.append(number, running.answer[-1:]):
                raise NoRoom(f"request {number} has no room that it has reserved")
            spans.append(Span(running.answer[-1:], start, running.block_ids))
        for running, span, logits in zip(batch, spans, self.model(spans, self._pages), strict=True):
            self.blocks.computed(running.request.number, span.start, span.end)
            running.answer.append(running.sampler.choose(logits))
        self.counts.completion_tokens += len(batch)
        self.counts.decode_s += perf_counter() - began

    def end(self, running: Running) -> None:
        """Free a request's blocks: they stay reusable while there is room."""
        self.answers[running.request.number] = running.answer
        self.blocks.free(running.request.number)

    def close(self) -> list[str]:
        """End; what is wrong with the blocks, nothing if all are free and counted rightly. Saves to the node's pool first."""
        self.blocks.close()
        leaked = self.blocks.shape.num_blocks - self.blocks.num_free_blocks
        return self.blocks.verify() + ([f"{leaked} blocks are not free at the end"] if leaked else [])

    def _prefill(
        self, request: Request, allocation: Allocation, block_ids: torch.Tensor, known: torch.Tensor | None
    ) -> torch.Tensor:
        def forward(start: int) -> torch.Tensor:
            if start == len(request.prompt):
                start = allocation.settle()  # a load may come shorter, and the logits are not enough then
            if start == len(request.prompt) and known is not None:
                self.counts.reused_logits += 1
                return known
            spans = [Span(request.prompt[start:], start, block_ids)]
            logits: torch.Tensor = self.model(spans, self._pages)[0]
            return logits

        with gated(allocation.load, self.model.layers):
            return allocation.prefill(forward)
