"""A scripted executor: TensorRT-LLM's loop without a model, over a KV cache manager.

Each step admits, prepares, computes, samples, ends and updates, in the order of TensorRT-LLM's executor. The KV of a token
derives from all tokens up to it; attention reads all of a request's KV in every step, and a write to a block that another
request or the prefix tree has fails. Random from a seed.
"""

import random
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpool_blocks.executor import CacheType, KVCacheManager, RequestState
from tests.rigs.blocks.prefix_engine import DEVICE

KV_BYTES = 8
LAYERS = 2


@dataclass(eq=False)
class ScriptedRequest:
    """The fields of an LlmRequest that a cache reads."""

    py_request_id: int
    tokens: list[int]
    max_new_tokens: int
    is_speculative: bool = False
    state: RequestState = RequestState.CONTEXT_INIT
    context_current_position: int = 0
    context_chunk_size: int = 0
    py_draft_tokens: list[int] = field(default_factory=list)
    py_rewind_len: int = 0
    reused: int = 0
    sampling_config: Any = field(default_factory=lambda: SimpleNamespace(beam_width=1))

    def __post_init__(self) -> None:
        self.prompt_len = self.orig_prompt_len = len(self.tokens)
        self.cached = 0  # tokens whose KV is in the cache

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == 0

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    def set_prepopulated_prompt_len(self, tokens: int, tokens_per_block: int) -> None:
        assert 0 <= tokens < self.prompt_len
        self.context_current_position = self.cached = self.reused = tokens
        self.context_chunk_size = min(self.context_chunk_size, self.prompt_len - tokens)

    def pause(self) -> None:
        """Back to the queue: everything it has so far is its prompt."""
        self.max_new_tokens -= len(self.tokens) - self.prompt_len
        self.prompt_len = len(self.tokens)
        self.state = RequestState.CONTEXT_INIT
        self.context_current_position = self.cached = 0
        self.py_draft_tokens, self.py_rewind_len = [], 0


def manager_of(max_tokens: int, size: int = 4, **others: Any) -> KVCacheManager:
    """A manager on the processor, or where `make test-gpu` has it; `others` replace its arguments."""
    arguments: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_kv_heads": 1,
        "head_dim": KV_BYTES,
        "tokens_per_block": size,
        "max_seq_len": 4096,
        "max_batch_size": 8,
        "mapping": SimpleNamespace(tp_size=1, enable_attention_dp=False),
        "dtype": "uint8",
        "device": DEVICE,
        **others,
    }
    return KVCacheManager(SimpleNamespace(max_tokens=max_tokens), CacheType.SELF, **arguments)


class ScriptedExecutor:
    """See the module. With `may_preempt` it admits what fits now and pauses others when blocks run out."""

    def __init__(self, manager: KVCacheManager, seed: int, *, may_preempt: bool) -> None:
        self.manager = manager
        self.size = manager.tokens_per_block
        self._random = random.Random(seed)
        self._may_preempt = may_preempt
        self._waiting: list[ScriptedRequest] = []
        self.active: list[ScriptedRequest] = []
        self._buffers = [manager.get_buffers(layer).numpy() for layer in range(LAYERS)]
        self.counts = dict.fromkeys(("batches", "finished", "cancelled", "paused", "reused", "refused"), 0)
        self._last_id = 0

    def submit(self) -> None:
        """A random request whose prompt may share its head with others."""
        self._last_id += 1
        head = [self._random.randrange(2)] * self._random.randrange(1, 20)
        tail = [self._random.randrange(3) for _ in range(self._random.randrange(8))]
        request = ScriptedRequest(
            self._last_id, head + tail, self._random.randrange(1, 16), is_speculative=self._random.random() < 0.3
        )
        if self.manager.get_needed_resource_to_completion(request) < self.manager.get_max_resource_count():
            self.queue(request)

    def queue(self, request: ScriptedRequest) -> None:
        """A request that waits for its turn."""
        self._waiting.append(request)

    def step(self) -> None:
        """One batch."""
        self._admit()
        batch = self._schedule()
        refused = self.manager.prepare_resources(batch)
        assert self._may_preempt or not refused, f"{len(refused)} requests were admitted and refused"
        self._leave_out(batch, refused)
        self._cancel_one(batch)
        for request in [*batch.context_requests, *batch.generation_requests]:
            self._forward(request)
        self._sample(batch)
        self._end_some()
        self.manager.update_resources(batch)
        self._check()
        self.counts["batches"] += 1

    def drain(self) -> None:
        """End everything."""
        for request in self.active:
            self.manager.free_resources(request)
        self.active, self._waiting = [], []

    def _admit(self) -> None:
        manager = self.manager
        if self._may_preempt:
            room = manager.get_num_free_blocks()
        else:
            room = manager.get_max_resource_count()
            room -= sum(manager.get_needed_resource_to_completion(request) for request in self.active)
        while self._waiting and len(self.active) < manager.max_batch_size:
            request = self._waiting[0]
            whole = manager.get_needed_resource_to_completion(request)
            needed = manager.get_num_kv_blocks(request.prompt_len) if self._may_preempt else whole
            if needed > room:
                break
            room -= needed
            self.active.append(self._waiting.pop(0))

    def _schedule(self) -> SimpleNamespace:
        context, generation = [], []
        for request in self.active:
            if self._random.random() < 0.1:
                continue  # not every request runs in each step
            if request.state == RequestState.CONTEXT_INIT:
                left = request.prompt_len - request.context_current_position
                chunk = self.size * self._random.randrange(1, 5)
                request.context_chunk_size = min(left, chunk)
                context.append(request)
            else:
                if request.is_speculative:
                    left = request.max_new_tokens - (len(request.tokens) - request.prompt_len)
                    drafts = self._random.randrange(min(4, left))
                    request.py_draft_tokens = [self._random.randrange(3) for _ in range(drafts)]
                generation.append(request)
        return SimpleNamespace(context_requests=context, generation_requests=generation)

    def _leave_out(self, batch: SimpleNamespace, refused: list[ScriptedRequest]) -> None:
        self.counts["refused"] += len(refused)
        for requests in (batch.context_requests, batch.generation_requests):
            requests[:] = [request for request in requests if request not in refused]
        if refused:
            idle = [r for r in self.active if r not in batch.context_requests and r not in batch.generation_requests]
            self._pause(self._random.choice(idle))

    def _cancel_one(self, batch: SimpleNamespace) -> None:
        """At times a request ends after it was prepared, and its step does not run."""
        requests = self._random.choice([batch.context_requests, batch.generation_requests])
        if requests and self._random.random() < 0.05:
            request = requests.pop()
            self.manager.free_resources(request)
            self.active.remove(request)
            self.counts["cancelled"] += 1

    def _pause(self, request: ScriptedRequest) -> None:
        self.manager.free_resources(request)
        request.pause()
        self.active.remove(request)
        self._waiting.append(request)
        self.counts["paused"] += 1

    def _forward(self, request: ScriptedRequest) -> None:
        if request.state == RequestState.CONTEXT_INIT:
            if request.cached == request.reused == request.context_current_position:
                self.counts["reused"] += request.reused
            tokens = request.tokens[: request.context_current_position + request.context_chunk_size]
        else:
            tokens = request.tokens + request.py_draft_tokens
        table = self.manager.get_cache_indices(request)
        rows = _kv_rows(tokens)
        start, end = request.cached, len(tokens)
        self._read(request, table, rows[:start])
        for number in range(start // self.size, -(-end // self.size)):
            self._assert_own(request, table[number])
        for layer in range(LAYERS):
            for plane in range(2):
                for at in range(start, end):
                    self._buffers[layer][table[at // self.size], plane, at % self.size, 0] = rows[at] ^ (
                        2 * layer + plane
                    )

    def _read(self, request: ScriptedRequest, table: list[int], rows: Any) -> None:
        for layer in range(LAYERS):
            for plane in range(2):
                for at, row in enumerate(rows):
                    found = self._buffers[layer][table[at // self.size], plane, at % self.size, 0]
                    assert (found == row ^ (2 * layer + plane)).all(), f"request {request.py_request_id}, token {at}"

    def _assert_own(self, request: ScriptedRequest, block: int) -> None:
        for other in self.active:
            if other is not request and other.py_request_id in self.manager._served:
                assert block not in self.manager.get_cache_indices(other), f"block {block} is shared and written"
        assert self.manager.blocks.priority_of(block) is None, f"block {block} of the prefix tree is written"

    def _sample(self, batch: SimpleNamespace) -> None:
        for request in batch.context_requests:
            request.context_current_position += request.context_chunk_size
            request.cached = request.context_current_position
            if request.cached == request.prompt_len:
                request.state = RequestState.GENERATION_IN_PROGRESS
                request.tokens.append(self._random.randrange(3))
        for request in batch.generation_requests:
            accepted = self._random.randint(0, len(request.py_draft_tokens))
            request.py_rewind_len = len(request.py_draft_tokens) - accepted
            request.cached += 1 + accepted
            request.tokens += [*request.py_draft_tokens[:accepted], self._random.randrange(3)]
            assert request.cached == len(request.tokens) - 1
            request.py_draft_tokens = []
        for request in self.active:
            if len(request.tokens) - request.prompt_len >= request.max_new_tokens:
                request.state = RequestState.GENERATION_COMPLETE

    def _end_some(self) -> None:
        """Complete requests are freed before the update, as others are that are cancelled or paused."""
        for request in list(self.active):
            if request.state == RequestState.GENERATION_COMPLETE:
                self.counts["finished"] += 1
            elif self._random.random() < 0.02:
                self.counts["cancelled"] += 1
            elif self._may_preempt and self._random.random() < 0.02:
                self._pause(request)
                continue
            else:
                continue
            self.manager.free_resources(request)
            self.active.remove(request)

    def _check(self) -> None:
        """Blocks are counted anew: each request has those of its tokens and no more, and together they are what is not free."""
        used = set()
        for request in self.active:
            if request.py_request_id not in self.manager._served:
                continue
            table = self.manager.get_cache_indices(request)
            positions = request.prompt_len if request.state == RequestState.CONTEXT_INIT else request.cached
            assert len(table) == self.manager.get_num_kv_blocks(positions), (
                f"{len(table)} blocks for {positions} tokens"
            )
            used |= set(table)
        unused = self.manager.get_max_resource_count() - len(used)
        if self.manager.blocks.stats()["offloads_under_way"]:
            assert self.manager.get_num_free_blocks() <= unused  # a block that is just read stays until it is saved
        else:
            assert self.manager.get_num_free_blocks() == unused


def _kv_rows(tokens: list[int]) -> Any:
    """The KV of each token, [tokens, KV_BYTES]."""
    rows, state = [], b""
    for token in tokens:
        state = blake2b(state + bytes([token]), digest_size=KV_BYTES).digest()
        rows.append(state)
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, KV_BYTES)
