"""TensorRT-LLM's executor with layer groups, as its second cache manager serves them, for tests without TensorRT-LLM.

Each group has pages of its own, and a list of a request's pages in it: −1 for blocks that its window has passed. After a step
the manager takes those pages back, overwrites them and gives them to whoever needs one next, without a call. A promise is
accepted by moving a request's history to its end, whereby groups with a window get pages for their last blocks alone; parts of
it can be handed back (`hand_back`). The executor checks every KV that a layer attends to, within its window, on every rank.
"""

import pickle
import types
from collections.abc import Sequence
from typing import Any

import torch

from tests.engines.trtllm.interface import RequestData, SchedulerOutput, llm_args
from tests.engines.trtllm.pages_rig import Group, PageLayout, group_region
from tests.engines.trtllm.standin import GARBAGE, WIDTH, Executor, PythonRequest, Request, Stream

NO_PAGE = -1
# The model's layers of each group: any two windows' layers lie between one another.
GROUP_LAYERS = 2


class WindowedRequest(PythonRequest):
    """A request with pages by layer group. `history`: tokens computed, by which the manager takes pages back."""

    def begin(self, groups: int) -> None:
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.sent: list[int] = [0] * groups
        self.history = 0
        self.prompt_tokens = len(self.tokens)


class WindowedExecutor(Executor):
    """See the module. `windows`: of each layer group, None for full attention; `blocks`: pages of each group."""

    def __init__(
        self,
        tools: types.ModuleType,
        *,
        windows: Sequence[int | None] = (None, 8),
        ranks: int = 1,
        blocks: int = 64,
        planes: int = 2,
        step_tokens: int = 1 << 20,
        layer_groups: Sequence[Sequence[int]] | None = None,
        owner: int | None = None,
        shows_matched: bool = True,
        overlaps: bool = False,
        **args: Any,
    ) -> None:
        """`layer_groups`: the model's layers of each group; None: in turns. `shows_matched`: requests have the number of tokens
        that the runtime has taken of a promise. `overlaps`: a step is scheduled before the last one's token is known, so that
        decoding is reported, and pages are taken back, one token late."""
        from kvpool_client.trtllm import KVPoolScheduler, KVPoolWorker

        scratch = args.pop("enable_swa_scratch_reuse", False)
        arguments = llm_args(**{"tensor_parallel_size": ranks, "enable_attention_dp": owner is not None, **args})
        arguments.kv_cache_config.enable_swa_scratch_reuse = scratch
        self.windows, self._owner, self._is_v2, self._layer_groups = tuple(windows), owner, True, len(windows)
        self.shows_matched, self.overlaps = shows_matched, overlaps
        self.block_tokens, self._planes, self._step_tokens = (
            arguments.kv_cache_config.tokens_per_block,
            planes,
            step_tokens,
        )
        count = len(windows)
        self.layer_groups = layer_groups or [
            [number + count * at for at in range(GROUP_LAYERS)] for number in range(count)
        ]
        self.layers = sum(len(layers) for layers in self.layer_groups)
        self.device, self.finished_pages = "cpu", []
        shapes = [(blocks, len(layers), planes, self.block_tokens * WIDTH) for layers in self.layer_groups]
        self.memory = [[torch.full(shape, GARBAGE, dtype=torch.int16) for shape in shapes] for _ in range(ranks)]
        self.scheduler: Any = KVPoolScheduler(arguments)  # type: ignore[operator]
        self.workers: list[Any] = []
        for rank in range(ranks):
            vars(tools)["mpi_rank"] = lambda rank=owner or rank: rank
            self.workers.append(KVPoolWorker(arguments))  # type: ignore[operator]
            self.workers[-1].register_kv_cache_layout(self._layout(rank))
        self._check_bring_up()
        self.free = [list(range(blocks)) for _ in windows]
        self._lost: list[tuple[int, int]] = []
        self._active: list[Request] = []
        self._saving: dict[int, Request] = {}
        self._next_id = 1
        self.after_match: Any = lambda: None
        self.on_admitted: Any = lambda request: None
        self.layer_number: Any = lambda layer: layer

    def ask(self, tokens: Sequence[int], generate: int = 1, held: int = 0, **fields: Any) -> Request:
        self._next_id += 1
        request: WindowedRequest = self._admit(WindowedRequest(self._next_id, list(tokens), generate, **fields), held)
        self.after_match()
        return request

    def step(self) -> None:
        """One iteration: pages that it leaves behind are others' in the next one."""
        output, scheduled = SchedulerOutput(attention_dp_rank=self._owner), []
        active: list[Any] = self._active
        for request in active:
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
                cache_salt=request.cache_salt,
                new_block_ids_by_layer_group=fresh,
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

    def abort(self, request: Any) -> None:
        self.scheduler.request_reset(request)
        self._lose(request)
        request.begin(len(self.windows))
        request.computed, request.claimed, request.was_sent, request.sent_tokens = 0, 0, False, 0

    def replay(self, request: Any) -> None:
        self._active.remove(request)
        self._lose(request)
        request.was_sent, request.sent_tokens = False, 0
        self._admit(request)

    def hold(self, request: Any, start: int, end: int) -> None:
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

    def hand_back(self, request: Any, start: int, end: int) -> None:
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
        if self.shows_matched:
            request.py_num_connector_matched_tokens = request.claimed
        self.scheduler.cancel_load(request, start, end)

    def _late(self, request: Any) -> int:
        is_decoding = request.computed == len(request.tokens) - 1 and request.sent_tokens > 0
        return int(self.overlaps and is_decoding and request.computed >= request.prompt_tokens)

    def oldest(self, number: int, history: int) -> int:
        """The first block that a group's window has not passed."""
        window = self.windows[number]
        return 0 if window is None else max(0, history + 1 - window) // self.block_tokens

    def _layout(self, rank: int) -> PageLayout:
        regions = [
            group_region(memory, layers) for memory, layers in zip(self.memory[rank], self.layer_groups, strict=True)
        ]
        groups = zip(self.layer_groups, self.windows, regions, strict=True)
        return PageLayout(
            self.block_tokens,
            tuple(
                Group(number, tuple(layers), window, (region,))
                for number, (layers, window, region) in enumerate(groups)
            ),
        )

    def _page(self, rank: int, number: int, page: int, at: int) -> Any:
        return self.memory[rank][number][page, at].view(self._planes, -1, WIDTH)

    def _finish(self, request: Any) -> bool:
        self.finished_pages.append([list(table) for table in request.pages])
        return bool(self.scheduler.request_finished_by_layer_group(request, self.finished_pages[-1]))

    def _admit(self, request: Any, held: int = 0) -> Any:
        if not isinstance(request, WindowedRequest):  # the dummy request of the warm-up
            request = WindowedRequest(request.request_id, request.tokens, request.to_generate)
        request.begin(len(self.windows))
        self._allocate(request, held, history=held)
        self.hold(request, 0, held)
        claimed, is_async = self.scheduler.get_num_new_matched_tokens(request, held)
        assert not is_async
        assert 0 <= claimed < len(request.tokens) - held
        request.claimed, request.computed = claimed, held + claimed
        if self.shows_matched:
            request.py_num_connector_matched_tokens = claimed
        self._allocate(request, request.computed, history=request.computed)
        self.scheduler.update_state_after_alloc_by_layer_group(request, [list(table) for table in request.pages])
        self._active.append(request)
        self.on_admitted(request)
        return request

    def _allocate(self, request: Any, tokens: int, history: int | None = None) -> None:
        """Pages for so many tokens: none where the window has passed a block already."""
        if history is not None:
            self._move_history(request, history)
        for number, table in enumerate(request.pages):
            while len(table) * self.block_tokens < tokens:
                is_passed = len(table) < self.oldest(number, request.history)
                table.append(NO_PAGE if is_passed else self.free[number].pop())

    def _move_history(self, request: Any, history: int) -> None:
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

    def _take_pages(self, request: Any) -> None:
        for number, table in enumerate(request.pages):
            for block in range(len(table)):
                self._take_page(number, table, block)

    def _lose(self, request: Any) -> None:
        """A request's pages are taken away between two steps: nothing overwrites them before the next forward pass."""
        self._lost += [
            (number, page) for number, table in enumerate(request.pages) for page in table if page != NO_PAGE
        ]
        request.pages = [[] for _ in self.windows]

    def _overwrite_lost(self) -> None:
        for number, page in self._lost:
            self._take_page(number, [page], 0)
        self._lost.clear()

    def _release(self, request: Any) -> None:
        self._take_pages(request)
        request.pages = [[] for _ in self.windows]

    def _forward(self, plan: bytes, scheduled: list[tuple[Request, int]]) -> None:
        group_of = {layer: number for number, layers in enumerate(self.layer_groups) for layer in layers}
        stream = Stream()
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(plan))
        self._overwrite_lost()
        for rank, worker in enumerate(self.workers):
            worker.start_load_kv(stream)
            for layer in sorted(group_of)[: 1 if self._fails else None]:
                worker.wait_for_layer_load(layer, stream)
                for request, count in scheduled:
                    self._attend_within(rank, (group_of[layer], layer), request, count)
                worker.save_kv_layer(layer, stream)
            if not self._fails:
                worker.wait_for_save(stream)

    def _attend_within(self, rank: int, place: tuple[int, int], request: Any, count: int) -> None:
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
