"""TensorRT-LLM's executor as a connector sees it, for tests without TensorRT-LLM: requests and a scripted loop.

Written after TensorRT-LLM main in autumn 2026: one lookup for each allocation, positions that leave a claim out in its first
step, cumulative blocks, plans that are broadcast, no report about loads. Both cache managers: the first (`v1`, alone in
release 1.2.1) registers one pool tensor, gives a prompt all of its blocks at once and passes priorities; the second (`v2`)
registers a page layout, hands over requests whose flags are methods, and passes none. An owner of attention data parallelism is
an executor of its own.

Each layer group has pages of its own, and a list of a request's pages in it: −1 for blocks that its window has passed. After a
step the manager takes those pages back, overwrites them and gives them to whoever needs one next, without a call. A promise is
accepted by moving a request's history to its end, whereby groups with a window get pages for their last blocks alone; parts of
it can be handed back (`hand_back`). The executor computes KV from the tokens before it and checks every KV that it attends to,
within the layer's window, on every rank: a wrong byte fails the test where it is read.
"""

import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.engines.trtllm.interface import KvCacheConnectorScheduler, RequestData, SchedulerOutput, llm_args
from tests.engines.trtllm.pages_rig import Group, PageLayout, Region, group_region, regions_apart
from tests.rigs.daemon import wait_until

WIDTH = 8
GARBAGE = -1
NO_PAGE = -1
# Layers of an engine with one group, and of each of several: any two windows' layers lie between one another.
LAYERS, GROUP_LAYERS = 3, 2


@dataclass
class Request:
    """LlmRequest, and the executor's state of it. `pages`: by layer group, as far as they were `sent`; `history`: tokens
    computed, by which the manager takes pages back."""

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
    pages: list[list[int]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    history: int = 0
    prompt_tokens: int = 0
    computed: int = 0
    claimed: int = 0
    sent_tokens: int = 0
    was_sent: bool = False

    def begin_pages(self, groups: int) -> None:
        """It is admitted, or runs again: it has no pages."""
        self.pages, self.sent = [[] for _ in range(groups)], [0] * groups
        self.history, self.sent_tokens, self.was_sent = 0, 0, False
        self.prompt_tokens = len(self.tokens)

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
    """PyExecutor's loop over ranks in one process, KV of int16. `windows`: of each layer group, None for full attention;
    `blocks`: pages of each group."""

    def __init__(
        self,
        tools: types.ModuleType,
        *,
        manager: str = "v1",
        windows: Sequence[int | None] = (None,),
        ranks: int = 1,
        blocks: int = 64,
        planes: int = 2,
        step_tokens: int = 1 << 20,
        device: str = "cpu",
        layer_groups: Sequence[Sequence[int]] | None = None,
        owner: int | None = None,
        shows_matched: bool = True,
        overlaps: bool = False,
        **args: Any,
    ) -> None:
        """`manager`: v1, v2, or v2-apart, with a region for K and one for V. `layer_groups`: the model's layers of each group;
        None: in turns. `owner`: of attention data parallelism. `shows_matched`: requests have the number of tokens that the
        runtime has taken of a promise. `overlaps`: a step is scheduled before the last one's token is known, so that decoding
        is reported, and pages are taken back, one token late."""
        from kvpool_client.trtllm import KVPoolScheduler, KVPoolWorker

        scratch = args.pop("enable_swa_scratch_reuse", False)
        arguments = llm_args(**{"tensor_parallel_size": ranks, "enable_attention_dp": owner is not None, **args})
        arguments.kv_cache_config.enable_swa_scratch_reuse = scratch
        self._manager, self._is_v2, self._owner = manager, manager != "v1", owner
        self.windows, self.shows_matched, self.overlaps = tuple(windows), shows_matched, overlaps
        self.block_tokens, self._planes = arguments.kv_cache_config.tokens_per_block, planes
        self._step_tokens, self.device = step_tokens, device
        count = len(windows)
        in_turns = (
            [range(LAYERS)] if windows == (None,) else [range(at, GROUP_LAYERS * count, count) for at in range(count)]
        )
        self.layer_groups = layer_groups or in_turns
        self.memory = [[self._kv(blocks, len(layers)) for layers in self.layer_groups] for _ in range(ranks)]
        self.scheduler: Any = KVPoolScheduler(arguments)  # type: ignore[operator]
        self.workers: list[Any] = []
        for rank in range(ranks):
            vars(tools)["mpi_rank"] = lambda rank=owner or rank: rank
            self.workers.append(KVPoolWorker(arguments))  # type: ignore[operator]
            if self._is_v2:
                self.workers[-1].register_kv_cache_layout(self._layout(rank))
            else:
                self.workers[-1].register_kv_caches(self.memory[rank][0])
        self._check_bring_up()
        self.free = [np.random.default_rng(1).permutation(blocks).tolist() for _ in windows]
        self._lost: list[tuple[int, int]] = []
        self._active: list[Request] = []
        self._saving: dict[int, Request] = {}
        self._new_saving: list[int] = []
        self._done: list[set[int]] = [set() for _ in self.workers]
        self._next_id = 1
        self._fails = False  # whether this iteration's forward pass does
        self.after_match: Any = lambda: None
        self.layer_number: Any = lambda layer: layer

    def warm_up(self) -> None:
        """Steps with a dummy request, as the engine makes before it serves, until the connector is ready."""

        def is_ready() -> bool:
            request = self._admit(self._request(0, [1, 2], 1))
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
        request = self._admit(self._request(self._next_id, list(tokens), generate, **fields), held)
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
        """One iteration: pages that it leaves behind are others' in the next one."""
        output, scheduled = SchedulerOutput(attention_dp_rank=self._owner), []
        for request in self._active:
            count = min(len(request.tokens) - request.computed, self._step_tokens)
            self._allocate(request, request.computed + count)
            hidden = request.claimed if not request.was_sent else self._late(request)
            known = len(request.tokens) - self._late(request)
            fresh = [table[sent:] for table, sent in zip(request.pages, request.sent, strict=True)]
            data = RequestData(
                request.request_id,
                request.tokens[request.sent_tokens : known],
                list(fresh[0]) if len(self.windows) == 1 else [],
                request.computed - hidden,
                count,
                priorities=None if self._is_v2 else self._priorities(request),
                cache_salt=request.cache_salt,
                new_block_ids_by_layer_group=fresh if self._is_v2 else [],
            )
            (output.cached_requests if request.was_sent else output.new_requests).append(data)
            request.was_sent, request.sent_tokens = True, known
            request.sent = [len(table) for table in request.pages]
            scheduled.append((request, count))
        self._forward(pickle.dumps(self.scheduler.build_connector_meta(output)), scheduled)
        for request, count in scheduled if not self._fails else ():
            late = self._late(request)
            request.computed += count
            self._move_history(request, request.computed - late)
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
        """The runtime takes the request's pages away; it runs again from its start, as a new request."""
        self.scheduler.request_reset(request)
        self._lose(request)
        request.begin_pages(len(self.windows))
        self._allocate_prompt(request)
        request.computed, request.claimed = 0, 0

    def replay(self, request: Request) -> None:
        """The runtime takes the request's pages away and looks it up again, without a notification."""
        self._active.remove(request)
        self._lose(request)
        self._admit(request)

    def hold(self, request: Request, start: int, end: int) -> None:
        """The engine's own cache has these tokens of the request's prompt, as far as their windows reach."""
        for number, table in enumerate(request.pages):
            for position in range(start - start % self.block_tokens, end, self.block_tokens):
                block = position // self.block_tokens
                if block >= len(table) or table[block] == NO_PAGE:
                    continue
                for rank in range(len(self.workers)):
                    for at, layer in enumerate(self.layer_groups[number]):
                        kv = self._layer_kv(rank, layer, request.tokens[: position + self.block_tokens])[:, position:]
                        self._page(rank, number, table[block], at)[:, : kv.shape[1]] = kv

    def hand_back(self, request: Request, start: int, end: int) -> None:
        """The runtime does not take these tokens of a promise, before the request's first step."""
        first, last = request.computed - request.claimed, request.computed
        if start == first:
            self.hold(request, start, end)
            taken = (end, last)
        else:
            taken = (first, start)
        if end - start == last - first:
            taken = (first, first)
        self._take_pages(request)
        request.history = 0
        request.pages = [[] for _ in self.windows]
        self._allocate(request, taken[0], history=taken[0])
        self.hold(request, 0, taken[0])
        self._allocate(request, taken[1], history=taken[1])
        request.computed, request.claimed = taken[1], taken[1] - taken[0]
        self._show_matched(request)
        self.scheduler.cancel_load(request, start, end)

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
            assert len(self.windows) == 1 or not is_flat, f"{name} is wanted with several layer groups"

    def _request(self, *given: Any, **fields: Any) -> Request:
        return (PythonRequest if self._is_v2 else Request)(*given, **fields)

    def _show_matched(self, request: Request) -> None:
        if self.shows_matched:
            request.py_num_connector_matched_tokens = request.claimed  # type: ignore[attr-defined]

    def _late(self, request: Request) -> int:
        is_decoding = request.computed == len(request.tokens) - 1 and request.sent_tokens > 0
        return int(self.overlaps and is_decoding and request.computed >= request.prompt_tokens)

    def oldest(self, number: int, history: int) -> int:
        """The first block that a group's window has not passed."""
        window = self.windows[number]
        return 0 if window is None else max(0, history + 1 - window) // self.block_tokens

    def _kv(self, blocks: int, layers: int) -> Any:
        """A layer group's KV, [blocks, layers, planes, tokens and their values]."""
        inner = (self._planes, layers) if self._manager == "v2-apart" else (layers, self._planes)
        memory = torch.full((blocks, *inner, self.block_tokens * WIDTH), GARBAGE, dtype=torch.int16, device=self.device)
        return memory.permute(0, 2, 1, 3) if self._manager == "v2-apart" else memory

    def _layout(self, rank: int) -> PageLayout:
        groups = []
        for number, (layers, window) in enumerate(zip(self.layer_groups, self.windows, strict=True)):
            memory = self.memory[rank][number]
            regions: Sequence[Region] = (
                [group_region(memory, layers)] if self._manager == "v2" else regions_apart(memory)
            )
            groups.append(Group(number, tuple(reversed(layers)), window, tuple(regions)))
        return PageLayout(self.block_tokens, tuple(groups))

    def _page(self, rank: int, number: int, page: int, at: int) -> Any:
        return self.memory[rank][number][page, at].view(self._planes, -1, WIDTH)

    def _finish(self, request: Request) -> bool:
        if self._is_v2:
            pages = [list(table) for table in request.pages]
            return bool(self.scheduler.request_finished_by_layer_group(request, pages))
        return bool(self.scheduler.request_finished(request, list(request.pages[0])))

    def _admit(self, request: Request, held: int = 0) -> Request:
        request.begin_pages(len(self.windows))
        self._allocate_prompt(request)
        self._allocate(request, held, history=held)
        self.hold(request, 0, held)
        claimed, is_async = self.scheduler.get_num_new_matched_tokens(request, held)
        assert not is_async
        assert 0 <= claimed < len(request.tokens) - held
        assert claimed % self.block_tokens == 0
        request.claimed, request.computed = claimed, held + claimed
        self._show_matched(request)
        self._allocate(request, request.computed, history=request.computed)
        if self._is_v2:
            pages = [list(table) for table in request.pages]
            self.scheduler.update_state_after_alloc_by_layer_group(request, pages)
        else:
            self.scheduler.update_state_after_alloc(request, list(request.pages[0]))
        self._active.append(request)
        return request

    def _allocate_prompt(self, request: Request) -> None:
        """The first manager gives a prompt all of its blocks at once."""
        if not self._is_v2:
            self._allocate(request, len(request.tokens))

    def _priorities(self, request: Request) -> list[int] | None:
        """The result of KVCacheManager.get_priority_by_block_id for the blocks that are sent."""
        if request.priorities is None:
            return None
        (pages,), (sent,) = request.pages, request.sent
        return [*request.priorities, *[35] * len(pages)][sent : len(pages)]

    def _allocate(self, request: Request, tokens: int, history: int | None = None) -> None:
        """Pages for so many tokens: none where the window has passed a block already."""
        if history is not None:
            self._move_history(request, history)
        for number, table in enumerate(request.pages):
            while len(table) * self.block_tokens < tokens:
                is_passed = len(table) < self.oldest(number, request.history)
                table.append(NO_PAGE if is_passed else self.free[number].pop())

    def _move_history(self, request: Request, history: int) -> None:
        """So many tokens are computed: pages that windows have passed are taken back."""
        request.history = history
        for number, table in enumerate(request.pages):
            for block in range(min(self.oldest(number, history), len(table))):
                self._take_page(number, table, block)

    def _take_page(self, number: int, table: list[int], block: int) -> None:
        page, table[block] = table[block], NO_PAGE
        if page == NO_PAGE:
            return
        for memory in self.memory:
            memory[number][page] = GARBAGE
        self.free[number].append(page)  # the next request that needs one gets this one

    def _take_pages(self, request: Request) -> None:
        for number, table in enumerate(request.pages):
            for block in range(len(table)):
                self._take_page(number, table, block)

    def _lose(self, request: Request) -> None:
        """A request's pages are taken away between two steps: nothing overwrites them before the next forward pass."""
        self._lost += [
            (number, page) for number, table in enumerate(request.pages) for page in table if page != NO_PAGE
        ]
        request.pages = [[] for _ in self.windows]

    def _overwrite_lost(self) -> None:
        for number, page in self._lost:
            self._take_page(number, [page], 0)
        self._lost.clear()

    def _forward(self, plan: bytes, scheduled: list[tuple[Request, int]]) -> None:
        group_of = {layer: number for number, layers in enumerate(self.layer_groups) for layer in layers}
        stream = Stream() if self.device == "cpu" else torch.cuda.current_stream()
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(plan))
        self._overwrite_lost()
        for rank, worker in enumerate(self.workers):
            worker.start_load_kv(stream)
            for layer in sorted(group_of)[: 1 if self._fails else None]:
                worker.wait_for_layer_load(self.layer_number(layer), stream)
                for request, count in scheduled:
                    self._attend_within(rank, (group_of[layer], layer), request, count)
                worker.save_kv_layer(self.layer_number(layer), stream)
            if not self._fails:
                worker.wait_for_save(stream)

    def _attend_within(self, rank: int, place: tuple[int, int], request: Request, count: int) -> None:
        """Check the layer's KV of every earlier token in the window of the first new one, and write that of the new ones."""
        number, layer = place
        at, table = self.layer_groups[number].index(layer), request.pages[number]
        first, last, size = request.computed, request.computed + count, self.block_tokens
        window = self.windows[number]
        lowest = 0 if window is None else max(0, first + 1 - window)
        wanted = self._layer_kv(rank, layer, request.tokens[:last])
        for block in range(lowest // size, -(-last // size)):
            start = block * size
            old = range(max(lowest, start), min(first, start + size))
            new = range(max(first, start), min(last, start + size))
            assert table[block] != NO_PAGE, f"layer {layer} attends to block {block}, which has no page"
            page = self._page(rank, number, table[block], at)
            if old:
                found = page[:, old.start - start : old.stop - start]
                right = wanted[:, old.start : old.stop]
                what = f"rank {rank}, group {number}, layer {layer}, tokens {old.start} to {old.stop} of {request.request_id}"
                assert torch.equal(found, right), what
            if new:
                page[:, new.start - start : new.stop - start] = wanted[:, new.start : new.stop]

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
            self._new_saving.append(request.request_id)
        else:
            self._take_pages(request)

    def _nothing_is_saved(self) -> bool:
        ended, self._new_saving = self._new_saving, []
        answers = [worker.get_finished(list(ended), []) for worker in self.workers]
        self._done = [done | set(saved) for done, (saved, _) in zip(self._done, answers, strict=True)]
        for request_id in set.intersection(*self._done):
            self._take_pages(self._saving.pop(request_id))
            self._done = [done - {request_id} for done in self._done]
        return not self._saving
