"""Engine: a model, its block pool, and the requests that have blocks. A scheduler decides who begins, goes on and ends.

With `reuse` requests share prefixes, and an exact repeat of a prompt reuses the logits that followed it: it runs no forward
pass. With a `pool` the node's daemon is behind the blocks. A request that begins has room for all of its tokens, so that it
never waits for others later. One thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

import kvpool_client as kv
from examples.engine.attention import TILE, Span
from examples.engine.model import Model
from examples.engine.sampling import Sampler
from examples.engine.workload import Request
from kvpool_blocks import Allocation, BlockPool
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
        return len(self.answer) == self.request.answer_tokens


@dataclass(slots=True)
class Counts:
    """Seconds and tokens of an engine's life."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    reused_logits: int = 0


class Engine:
    """See the module."""

    def __init__(self, model: Model, num_blocks: int, *, reuse: bool = True, pool: kv.Pool | None = None) -> None:
        shape = model.shape
        self.blocks = BlockPool(
            layers=shape.layers,
            num_blocks=num_blocks,
            tokens_per_block=TILE,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.float32,
            device="cpu",
            pool=pool,
        )
        self.counts = Counts()
        self.answers: dict[int, list[int]] = {}
        self._model, self._reuse = model, reuse
        self._pages = [self.blocks.buffers(layer) for layer in range(shape.layers)]
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}  # of the last prompts

    def begin(self, request: Request) -> Running | None:
        """Prefill a request and choose its first token; None where there is no room now."""
        began, number, prompt = perf_counter(), request.number, tuple(request.prompt)
        logits = self._logits.get(prompt)
        # Prefixes with different salts are never shared.
        salt = None if self._reuse else number.to_bytes(8, "little")
        allocation = self.blocks.allocate(number, request.prompt, salt=salt, has_logits=logits is not None)
        if allocation is None:
            return None
        if not self.blocks.reserve(number, request.answer_tokens - 1):
            self.blocks.free(number)
            return None
        block_ids = torch.tensor(self.blocks.block_ids(number))
        if logits is None or allocation.settle() < len(prompt):
            logits = self._prefill(request, allocation, block_ids)
        else:
            self.counts.reused_logits += 1
        self.blocks.computed(number, allocation.reused_tokens, len(prompt))
        if self._reuse:
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
        began, spans = perf_counter(), []
        for running in batch:
            number, start = running.request.number, self.blocks.length(running.request.number)
            if not self.blocks.append(number, running.answer[-1:]):
                raise NoRoom(f"request {number} has no room that it has reserved")
            spans.append(Span(running.answer[-1:], start, running.block_ids))
        for running, span, logits in zip(batch, spans, self._model(spans, self._pages), strict=True):
            self.blocks.computed(running.request.number, span.start, span.end)
            running.answer.append(running.sampler.choose(logits))
        self.counts.completion_tokens += len(batch)
        self.counts.decode_s += perf_counter() - began

    def end(self, running: Running) -> None:
        """Free a request's blocks: they stay reusable while there is room."""
        self.answers[running.request.number] = running.answer
        self.blocks.free(running.request.number)

    def close(self) -> list[str]:
        """Save what the node's pool lacks; what is wrong with the blocks: nothing if all are free and counted rightly."""
        self.blocks.close()
        leaked = self.blocks.shape.num_blocks - self.blocks.num_free_blocks
        return self.blocks.verify() + ([f"{leaked} blocks are not free at the end"] if leaked else [])

    def _prefill(self, request: Request, allocation: Allocation, block_ids: torch.Tensor) -> torch.Tensor:
        def forward(start: int) -> torch.Tensor:
            logits: torch.Tensor = self._model([Span(request.prompt[start:], start, block_ids)], self._pages)[0]
            return logits

        with gated(allocation.load, self._model.layers):
            return allocation.prefill(forward)
