"""TensorRT-LLM's executor as a connector sees it, for tests without TensorRT-LLM: requests and a scripted loop.

Written after TensorRT-LLM main in autumn 2026: one lookup for each allocation, positions that leave a claim out in its first
step, cumulative blocks, plans that are broadcast, no report about loads. Both cache managers: the first (`v1`, alone in
release 1.2.1) registers one pool tensor and passes priorities; the second (`v2`) registers a page layout, hands over requests
whose flags are methods, and passes none; `windowed` has it with several layer groups. An owner of attention data parallelism is
an executor of its own. The executor computes KV from the tokens before it and checks every KV that it attends to, on every
rank: a wrong byte fails the test where it is read.
"""

import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.engines.trtllm.interface import KvCacheConnectorScheduler, RequestData, SchedulerOutput, llm_args
from tests.engines.trtllm.pages_rig import pages_apart, pages_together
from tests.rigs.daemon import wait_until

WIDTH = 8
GARBAGE = -1


@dataclass
class Request:
    """LlmRequest, and the executor's state of it."""

    request_id: int
    tokens: list[int]
    to_generate: int
    cache_salt: str | None = None
    lora_task_id: int | None = None
    lora_weights: Any = None
    py_lora_path: str | None = None
    is_generation_only: bool = False
    multimodal_hashes: list[Any] | None = None
    priorities: list[int] | None = None  # of its blocks, from the first one on; 35 where it ends
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    claimed: int = 0
    sent_tokens: int = 0
    sent_blocks: int = 0
    was_sent: bool = False

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    @property
    def is_generation_only_request(self) -> Any:
        return self.is_generation_only


class PythonRequest(Request):
    """The Python LlmRequest that the second cache manager hands over."""

    @property
    def is_generation_only_request(self) -> Any:
        return lambda: self.is_generation_only


class Stream:
    """A CUDA stream that has nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        raise AssertionError("no events exist on the CPU")


class Executor:
    """PyExecutor's loop over ranks in one process. `blocks` of `block_tokens` tokens, KV of int16."""

    _fails = False  # whether this iteration's forward pass does

    def __init__(
        self,
        tools: types.ModuleType,
        *,
        ranks: int = 1,
        blocks: int = 64,
        planes: int = 2,
        step_tokens: int = 1 << 20,
        device: str = "cpu",
        manager: str = "v1",
        owner: int | None = None,
        shows_matched: bool = True,
        **args: Any,
    ) -> None:
        """`manager`: v1, v2, or v2-apart, with a region for K and one for V. `owner`: of attention data parallelism.
        `shows_matched`: requests have the number of tokens that the runtime has taken of a promise."""
        from kvpool_client.trtllm import KVPoolScheduler, KVPoolWorker

        arguments = llm_args(**{"tensor_parallel_size": ranks, "enable_attention_dp": owner is not None, **args})
        self._is_v2, self._owner, self._layer_groups = manager != "v1", owner, 1
        self.shows_matched = shows_matched
        self.finished_pages: list[list[list[int]]] = []  # by group, of each request that ended
        self.block_tokens, self.layers, self._planes = arguments.kv_cache_config.tokens_per_block, 3, planes
        self._step_tokens = step_tokens
        is_apart = manager == "v2-apart"
        inner = (planes, self.layers) if is_apart else (self.layers, planes)
        shape = (blocks, *inner, self.block_tokens * WIDTH)
        self.device = device
        memory = [torch.full(shape, GARBAGE, dtype=torch.int16, device=device) for _ in range(ranks)]
        self.tensors = [tensor.permute(0, 2, 1, 3) for tensor in memory] if is_apart else memory
        self.scheduler: Any = KVPoolScheduler(arguments)  # type: ignore[operator]
        self.workers: list[Any] = []
        for rank in range(ranks):
            vars(tools)["mpi_rank"] = lambda rank=owner or rank: rank
            self.workers.append(KVPoolWorker(arguments))  # type: ignore[operator]
            if self._is_v2:
                describe = pages_apart if is_apart else pages_together
                self.workers[-1].register_kv_cache_layout(describe(self.tensors[rank], self.block_tokens))
            else:
                self.workers[-1].register_kv_caches(self.tensors[rank])
        self._check_bring_up()
        self._free = list(np.random.default_rng(1).permutation(blocks).tolist())
        self._active: list[Request] = []
        self._saving: dict[int, Request] = {}
        self._next_id = 1
        self.after_match: Any = lambda: None
        self.layer_number: Any = lambda layer: layer

    def warm_up(self) -> None:
        """Steps with a dummy request, as the engine makes before it serves, until the connector is ready."""

        def is_ready() -> bool:
            request = self._admit(Request(0, [1, 2], 1))
            request.is_dummy_request = True  # type: ignore[attr-defined]
            self.run()
            pools = [worker.half.stats().get("connected") for worker in self.workers]
            claims = self.scheduler.half._claims
            return (
                self.scheduler.half.is_serving and all(pools) and all(pool.connected for pool in claims._stager._pools)
            )

        wait_until(is_ready, "the connector serves")

    def ask(self, tokens: Sequence[int], generate: int = 1, held: int = 0, **fields: Any) -> Request:
        """Admit a request, of whose prompt the engine's own cache has `held` tokens."""
        self._next_id += 1
        kind = PythonRequest if self._is_v2 else Request
        request = self._admit(kind(self._next_id, list(tokens), generate, **fields), held)
        self.after_match()
        return request

    def answer(self, tokens: Sequence[int], generate: int = 1, **fields: Any) -> tuple[int, list[int]]:
        """Run one request to its end: tokens claimed, tokens generated."""
        request = self.ask(tokens, generate, **fields)
        self.run()
        return request.claimed, request.tokens[len(tokens) :]

    def run(self) -> None:
        """Steps until every request has ended and its blocks are free."""
        while self._active:
            self.step()
        wait_until(self._nothing_is_saved, "saves have ended")

    def step(self) -> None:
        """One iteration."""
        output, scheduled = SchedulerOutput(attention_dp_rank=self._owner), []
        for request in self._active:
            left = len(request.tokens) - request.computed
            count = min(left, self._step_tokens)
            while len(request.blocks) * self.block_tokens < request.computed + count:
                request.blocks.append(self._free.pop())
            hidden = request.claimed if not request.was_sent else 0
            fresh = request.blocks[request.sent_blocks :]
            data = RequestData(
                request.request_id,
                request.tokens[request.sent_tokens :],
                fresh,
                request.computed - hidden,
                count,
                priorities=None if self._is_v2 else self._priorities(request),
                cache_salt=request.cache_salt,
                new_block_ids_by_layer_group=[pages[request.sent_blocks :] for pages in self._by_group(request)],
            )
            (output.cached_requests if request.was_sent else output.new_requests).append(data)
            request.was_sent, request.sent_tokens, request.sent_blocks = True, len(request.tokens), len(request.blocks)
            scheduled.append((request, count))
        self._forward(pickle.dumps(self.scheduler.build_connector_meta(output)), scheduled)
        for request, count in scheduled if not self._fails else ():
            request.computed += count
            if request.computed == len(request.tokens):
                self._generate(request)
        self._nothing_is_saved()

    def fail_step(self) -> None:
        """One iteration whose forward pass fails behind its first layer, and with it every request."""
        self._fails = True
        self.step()
        self._fails = False
        for request in list(self._active):
            self._end(request)
        self._nothing_is_saved()

    def abort(self, request: Request) -> None:
        """The runtime takes the request's blocks away; it runs again from its start, as a new request."""
        self.scheduler.request_reset(request)
        self._release(request)
        self._allocate_blocks(request)
        request.computed, request.claimed, request.was_sent = 0, 0, False
        request.sent_tokens, request.sent_blocks = 0, 0

    def replay(self, request: Request) -> None:
        """The runtime takes the request's blocks away and looks it up again, without a notification."""
        self._active.remove(request)
        self._release(request)
        request.was_sent, request.sent_tokens, request.sent_blocks = False, 0, 0
        self._admit(request)

    def hold(self, request: Request, start: int, end: int) -> None:
        """The engine's own cache has these tokens of the request's prompt; the rest of their last block is garbage."""
        for position in range(start - start % self.block_tokens, end, self.block_tokens):
            block = request.blocks[position // self.block_tokens]
            for rank, tensor in enumerate(self.tensors):
                for layer in range(self.layers):
                    kv = self._layer_kv(rank, layer, request.tokens[: position + self.block_tokens])[:, position:]
                    tensor[block, layer].view(self._planes, -1, WIDTH)[:, : kv.shape[1]] = kv

    def close(self) -> None:
        for worker in self.workers:
            worker.half.close()
        self.scheduler.half.close()

    def _check_bring_up(self) -> None:
        """Checks for settings with which PyExecutor refuses to start."""
        if self._owner is not None:
            assert all(type(half).supports_attention_dp is True for half in (self.scheduler, self.workers[0]))
        for name in ("update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"):
            is_flat = getattr(type(self.scheduler), name) is getattr(KvCacheConnectorScheduler, name)
            assert self._layer_groups == 1 or not is_flat, f"{name} is wanted with several layer groups"

    def _finish(self, request: Request) -> bool:
        if self._is_v2:
            self.finished_pages.append(self._by_group(request))
            return bool(self.scheduler.request_finished_by_layer_group(request, self.finished_pages[-1]))
        return bool(self.scheduler.request_finished(request, list(request.blocks)))

    def _admit(self, request: Request, held: int = 0) -> Request:
        self._allocate_blocks(request)
        self.hold(request, 0, held)
        claimed, is_async = self.scheduler.get_num_new_matched_tokens(request, held)
        assert not is_async
        assert 0 <= claimed < len(request.tokens) - held
        assert claimed % self.block_tokens == 0
        request.claimed, request.computed = claimed, held + claimed
        if self.shows_matched:
            request.py_num_connector_matched_tokens = claimed  # type: ignore[attr-defined]
        self.scheduler.update_state_after_alloc(request, list(request.blocks))
        self._active.append(request)
        return request

    def _allocate_blocks(self, request: Request) -> None:
        """Blocks for the whole prompt."""
        for _ in range(0, len(request.tokens), self.block_tokens):
            request.blocks.append(self._free.pop())

    def _by_group(self, request: Request) -> list[list[int]]:
        """get_page_indices_by_layer_group, of one group."""
        return [list(request.blocks)] if self._is_v2 else []

    def _priorities(self, request: Request) -> list[int] | None:
        """The result of KVCacheManager.get_priority_by_block_id for the blocks that are sent."""
        if request.priorities is None:
            return None
        priorities = [*request.priorities, *[35] * len(request.blocks)]
        return priorities[request.sent_blocks : len(request.blocks)]

    def _forward(self, plan: bytes, scheduled: list[tuple[Request, int]]) -> None:
        stream = Stream() if self.device == "cpu" else torch.cuda.current_stream()
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_meta(pickle.loads(plan))
            worker.start_load_kv(stream)
            for layer in range(1 if self._fails else self.layers):
                worker.wait_for_layer_load(self.layer_number(layer), stream)
                for request, count in scheduled:
                    self._attend(rank, layer, request, count)
                worker.save_kv_layer(self.layer_number(layer), stream)
            if not self._fails:
                worker.wait_for_save(stream)

    def _attend(self, rank: int, layer: int, request: Request, count: int) -> None:
        """Check the layer's KV of every token before, and write that of the `count` new ones."""
        tensor, last = self.tensors[rank], request.computed + count
        wanted = self._layer_kv(rank, layer, request.tokens[:last])
        for position in range(0, last, self.block_tokens):
            block = tensor[request.blocks[position // self.block_tokens], layer].view(self._planes, -1, WIDTH)
            old = min(max(0, request.computed - position), self.block_tokens)
            new = min(last - position, self.block_tokens)
            right = wanted[:, position : position + old]
            assert torch.equal(block[:, :old], right), f"rank {rank}, layer {layer}, tokens from {position}"
            block[:, old:new] = wanted[:, position + old : position + new]

    def _layer_kv(self, rank: int, layer: int, tokens: Sequence[int]) -> Any:
        """The layer's KV [planes, tokens, WIDTH] as the model would compute it: each token's depends on all before it."""
        chain, chains = 17, []
        for token in tokens:
            chain = (chain * 31 + token + 7) % 32003
            chains.append(chain)
        shard = 0 if self._planes == 1 else rank
        factors = np.arange(1, self._planes + 1) + 2 * layer
        rows = (np.array(chains)[None] * factors[:, None] + 101 * shard) % 32003
        return torch.from_numpy((rows[:, :, None] + np.arange(WIDTH)).astype(np.int16)).to(self.device)

    def _generate(self, request: Request) -> None:
        request.to_generate -= 1
        request.tokens.append(sum(request.tokens) % 997)
        if request.to_generate == 0:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._active.remove(request)
        if self._finish(request):
            self._saving[request.request_id] = request
            self._new_saving = [*getattr(self, "_new_saving", []), request.request_id]
        else:
            self._release(request)

    def _nothing_is_saved(self) -> bool:
        ended, self._new_saving = getattr(self, "_new_saving", []), []
        answers = [worker.get_finished(list(ended), []) for worker in self.workers]
        self._done = [set(done) | set(saved) for done, (saved, _) in zip(self._dones(), answers, strict=True)]
        for request_id in set.intersection(*self._done):
            self._release(self._saving.pop(request_id))
            self._done = [done - {request_id} for done in self._done]
        return not self._saving

    def _dones(self) -> list[set[int]]:
        return getattr(self, "_done", [set() for _ in self.workers])

    def _release(self, request: Request) -> None:
        for block in request.blocks:
            for tensor in self.tensors:
                tensor[block] = GARBAGE
            self._free.append(block)
        request.blocks = []
