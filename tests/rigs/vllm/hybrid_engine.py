"""A scripted engine whose layers are in several KV cache groups, as vLLM's hybrid manager has them.

A block table for each group, out of one pool of blocks; a layer's tensor is shared with the layers of the other groups. In
place of blocks that a window has left the table has the null block, and they are overwritten at once. No prefix cache of its
own.

A group of recurrent states has a block at the end of its table alone. Steps of a prompt end at ends of blocks, and the next one
writes the state into another block; vLLM names the blocks of the states that it keeps itself (`boundary_state_offloads`), those
at the last ends of prompts.
`wrong_reads` counts KV that a layer would attend to and that is not what the tokens make it: it must stay 0.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.rigs.daemon import wait_until
from tests.rigs.vllm.blocks import ScriptedBlocks
from tests.rigs.vllm.config import config_of, stage_spans
from tests.rigs.vllm.divided_states import DividedStates
from tests.rigs.vllm.fake_vllm import KVConnectorRole
from tests.rigs.vllm.hybrid_memory import HybridMemory
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.specs import (
    HEADS,
    WIDTH,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

# Windows of the groups, 0 for one that attends to all tokens; STATE has none.
MIXED = (0, 12, 12)
STATE = -1
LAYERS = 2
NULL = 0


class Tables:
    """The block tables of a request, as vLLM passes them."""

    def __init__(self, tables: Sequence[list[int]]) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self._tables)


class HybridEngine:
    """See the module. `windows`: of each group; `ranks`: workers, each with its heads of every layer; `budget`: tokens of a
    step."""

    def __init__(
        self,
        connector: Any,
        socket: str,
        *,
        windows: Sequence[int] = MIXED,
        ranks: int = 1,
        heads: int = HEADS,
        blocks: int = 200,
        budget: int = 4096,
        shows_tables: bool = False,
        is_local: bool = False,
        is_odd: bool = False,
        layers: Sequence[Sequence[int]] = (),
        stages: Sequence[int] = (),
        of_states: dict[str, Any] | None = None,
        divided: DividedStates | None = None,
        **extra: Any,
    ) -> None:
        """`heads`: of the whole model. `shows_tables`: the plan's step has the tables as they are, as in later releases of
        vLLM. `is_local`: windows are pieces of a prompt. `is_odd`: the second layer of a group has twice as many heads, which
        only workers see in its spec. `layers`: the numbers of the model's layers in each group, LAYERS each; none: in a row.
        `stages`: the model's layers in each pipeline stage.
        `of_states`: fields of the specs of states; `divided`: states of which each rank has its part."""
        self.of_states = of_states or {}
        if divided is not None:
            self.of_states = {"page_size_bytes": max(1, heads // ranks) * BLOCK * WIDTH, **divided.spec(ranks)}
        self.windows, self.is_local = windows, is_local
        self.budget = budget
        here = max(1, heads // ranks)
        self.heads = [here * (1 + is_odd * layer) for layer in range(LAYERS)]  # of a rank
        self.layers = layers or [range(LAYERS * group, LAYERS * (group + 1)) for group in range(len(windows))]
        self.memory = HybridMemory(self.layers, self.heads, ranks=ranks, heads=heads, blocks=blocks, divided=divided)
        self.names = [[f"model.layers.{number}.attn" for number in numbers] for numbers in self.layers]
        self.stages, self.ranks = tuple(stages) or (LAYERS * len(windows),), ranks

        def config(rank: int = 0) -> Any:
            made = config_of(socket, ranks, rank, stages=self.stages, **extra)
            made.model_config.get_total_num_kv_heads = lambda: heads
            described = {"num_key_value_heads": heads, "linear": {"num_heads": 3}}
            described |= divided.described() if divided is not None else {}
            made.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: described)
            return made

        self.scheduler = connector(config(), KVConnectorRole.SCHEDULER, self._caches(blocks))
        self.workers = []
        for worker in range(ranks * len(self.stages)):
            stage, rank = divmod(worker, ranks)
            caches = self._caches(blocks, shows_each=is_odd, stage=stage)
            self.workers.append(connector(config(worker), KVConnectorRole.WORKER, caches))
            self.workers[-1].register_kv_caches(
                {
                    names[at]: self.memory.kv[rank][at] if window != STATE else self.memory.states(rank, at)
                    for group, (names, window) in enumerate(zip(self.names, windows, strict=True))
                    for at in self._layers_of(group, stage)
                }
            )
        self.requests: list[Request] = []
        self.tables: dict[Request, list[list[int]]] = {}
        self.blocks = ScriptedBlocks(blocks, self.memory.overwrite, self._blocks_in_use)
        self.scheduler.bind_gpu_block_pool(self.blocks)
        shown = {divmod(at, ranks): worker.get_handshake_metadata() for at, worker in enumerate(self.workers)}
        if any(each is not None for each in shown.values()):
            self.scheduler.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(shown)))
        self.shows_tables = shows_tables
        self.wrong_reads = self.recomputed = self.blocks_most = 0
        self.on_allocated: Callable[[], None] = lambda: None
        self._arrived: set[str] = set()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    @property
    def worker(self) -> Any:
        """The first rank's half of the connector."""
        return self.workers[0]

    def _layers_of(self, group: int, stage: int) -> list[int]:
        """Which of a group's layers a stage has."""
        first, end = stage_spans(self.stages)[stage]
        return [at for at, number in enumerate(self.layers[group]) if first <= number < end]

    def _caches(self, blocks: int, *, shows_each: bool = False, stage: int = 0) -> Any:
        """vLLM's KVCacheConfig of a stage; `shows_each`: with a spec for each layer, as workers alone are shown."""
        groups, tensors = [], []
        for group, (of_model, window) in enumerate(zip(self.names, self.windows, strict=True)):
            names = [of_model[at] for at in self._layers_of(group, stage)]
            made: list[Any] = [
                MambaSpec(**self.of_states)
                if window == STATE
                else ChunkedLocalAttentionSpec(page_size_bytes=page, num_kv_heads=heads, attention_chunk_size=window)
                if window and self.is_local
                else SlidingWindowSpec(page_size_bytes=page, num_kv_heads=heads, sliding_window=window)
                if window
                else FullAttentionSpec(page_size_bytes=page, num_kv_heads=heads)
                for heads, page in ((heads, heads * BLOCK * WIDTH) for heads in self.heads[: len(names) or 1])
            ]
            spec: Any = UniformTypeKVCacheSpecs(dict(zip(names, made, strict=True))) if shows_each else made[0]
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=spec))
            for name, one in zip(names, made, strict=False):  # a stage may have none
                page = one.page_size_bytes
                tensors.append(SimpleNamespace(layers=[name], layer_stride=page * blocks, block_stride=page))
        return SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups, kv_tp_replicas=1, kv_cache_tensors=tensors)

    def close(self) -> None:
        for half in (*self.workers, self.scheduler):
            half.shutdown()

    def forget(self) -> None:
        """It has no prefix cache of its own."""

    def run(self, *requests: Request) -> None:
        """Until these requests have ended, and what the connector does behind them."""
        self.arrive(*requests)
        self.step_until(lambda: not any(request in self.requests for request in requests), "the requests have ended")
        self.settle()

    def arrive(self, *requests: Request) -> None:
        """Queue requests up."""
        for request in requests:
            if request not in self.requests:
                self.requests.append(request)
                self.scheduler.on_new_request(request)

    def settle(self) -> None:
        """Step on for as long as the connector has work, where no request is left."""
        if not self.requests:
            self.step_until(lambda: not self.scheduler.has_pending_push_work(), "the connector's work has ended")

    def step_until(self, condition: Callable[[], bool], what: str) -> None:
        def has_come() -> bool:
            self.step()
            return condition()

        wait_until(has_come, what)

    def preempt(self, request: Request) -> None:
        self._release(request)
        request.state, request.num_computed = "preempted", 0

    def step(self) -> None:
        scheduled: dict[Request, int] = {}
        new, cached = [], SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
        budget = self.budget
        for request in list(self.requests):
            if request.state != "running" and not self._admit(request):
                continue
            count = self._cut(request, min(budget, request.num_tokens - request.num_computed))
            if not count:
                continue
            self._slide(request)
            fresh = self._allocate(request, request.num_computed + count)
            budget -= count
            scheduled[request] = count
            tables = tuple(list(table) for table in self.tables[request])
            if request.is_fresh:
                new.append(
                    SimpleNamespace(
                        req_id=request.request_id, block_ids=tables, num_computed_tokens=request.num_computed
                    )
                )
                request.is_fresh = False
            else:
                cached.req_ids.append(request.request_id)
                cached.num_computed_tokens.append(request.num_computed)
                if request.state == "resumed":
                    cached.resumed_req_ids.add(request.request_id)
                    cached.new_block_ids.append(tables)
                else:
                    cached.new_block_ids.append(tuple(fresh) if any(fresh) else None)
            request.state = "running"
        step = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: count for request, count in scheduled.items()},
        )
        if self.shows_tables or STATE in self.windows:
            by_id = {request.request_id: Tables(self.tables[request]).get_block_ids() for request in scheduled}
            offers = {request.request_id: self._offers(request, count) for request, count in scheduled.items()}
            step.kv_connector_block_state = SimpleNamespace(get_block_ids=by_id.get, boundary_state_offloads=offers)
        self.blocks_most = max(self.blocks_most, len(self._blocks_in_use() | set(self.blocks.held)))
        self._forward(pickle.dumps(self.scheduler.build_connector_meta(step)), scheduled)

    def _cut(self, request: Request, count: int) -> int:
        """Tokens of a step of so many at most: with states a prompt's steps end at ends of blocks, and one at its last."""
        last = (request.num_tokens - 1) // BLOCK * BLOCK
        begun = request.num_computed
        if STATE not in self.windows or begun >= last:
            return count
        end = min(begun + count, last)
        aligned = end // BLOCK * BLOCK
        return (aligned if aligned > begun else end) - begun

    def _offers(self, request: Request, count: int) -> list[tuple[int, int, int]]:
        """The states at a prompt's last end of a block that a step makes: group, block, tokens."""
        end = request.num_computed + count
        if end != (len(request.tokens) - 1) // BLOCK * BLOCK:
            return []
        return [
            (group, self.tables[request][group][end // BLOCK - 1], end)
            for group, window in enumerate(self.windows)
            if window == STATE and end % BLOCK == 0
        ]

    def _admit(self, request: Request) -> bool:
        """Whether a request that does not run can begin in this step."""
        if request.state == "loading":
            if request.request_id not in self._arrived:
                return False
            self._arrived.discard(request.request_id)
            request.state = "waiting" if request.is_fresh else "resumed"
            if request.request_id in self._failed:
                self._failed.discard(request.request_id)
                self.recomputed += 1
                self._release(request)
                request.num_computed = 0
        if request.num_computed:
            self.scheduler.update_state_after_alloc(request, Tables(self.tables[request]), 0)
            return True
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        if external is None:
            return False
        assert 0 <= external < request.num_tokens
        assert external % BLOCK == 0
        assert is_async == (external > 0)
        request.offers.append(external)
        request.external = external
        self.tables[request] = [[] for _ in self.windows]
        request.num_computed = external
        if external:
            self._slide(request, external)
            self._allocate(request, external)
        self.scheduler.update_state_after_alloc(request, Tables(self.tables[request]), external)
        self.on_allocated()
        if external:
            request.state = "loading"
            return False
        request.state = "waiting" if request.is_fresh else "resumed"
        return True

    def _first_read(self, window: int, computed: int) -> int:
        """The first token that the next one attends to."""
        if window == STATE:
            return max(0, computed - 1)
        if self.is_local and window:
            return computed // window * window
        return max(0, computed - window + 1) if window else 0

    def _slide(self, request: Request, ahead: int = 0) -> None:
        """Let go of the blocks that no window reaches back to; `ahead`: or begin the tables without them."""
        for window, table in zip(self.windows, self.tables[request], strict=True):
            gone = self._first_read(window, request.num_computed) // BLOCK
            if ahead:
                table += [NULL] * (gone - len(table))
            for place in range(min(gone, len(table))):
                if table[place] != NULL:
                    block, table[place] = table[place], NULL
                    self.blocks.give_back([block], overwrite=True)

    def _allocate(self, request: Request, tokens: int) -> list[list[int]]:
        fresh = []
        for window, table in zip(self.windows, self.tables[request], strict=True):
            count = max(0, -(-tokens // BLOCK) - len(table))
            null = max(0, count - 1) if window == STATE else 0
            blocks = [NULL] * null + [self.blocks.free.pop() for _ in range(count - null)]
            table += blocks
            fresh.append(blocks)
        return fresh

    def _forward(self, plan: bytes, scheduled: dict[Request, int]) -> None:
        report: Any = None
        for number, worker in enumerate(self.workers):
            stage, rank = divmod(number, self.ranks)
            worker.handle_preemptions(pickle.loads(plan))
            worker.bind_connector_metadata(pickle.loads(plan))
            for group, names in enumerate(self.names):
                for layer in self._layers_of(group, stage) if scheduled else ():
                    worker.wait_for_layer_load(names[layer])
                    self._compute(rank, group, layer, scheduled)
                    worker.save_kv_layer(names[layer], self.memory.kv[rank][layer], None)
            worker.start_load_kv(None)
            worker.wait_for_save()
            transfers = worker.get_transfer_results(set())
            assert not worker.get_block_ids_with_load_errors(), "vLLM cannot know whose they are"
            assert transfers.failed_recving <= transfers.finished_recving
            meta = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
            report = meta if report is None else report.aggregate(meta)
            worker.clear_connector_metadata()
            self._failed |= transfers.failed_recving
            self._received.update(transfers.finished_recving)
        finished = {request_id for request_id, ranks in self._received.items() if ranks == len(self.workers)}
        for request_id in finished:
            del self._received[request_id]
        self._arrived |= finished
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=report, finished_recving=finished, invalid_block_ids=set())
        )
        for request, count in scheduled.items():
            request.num_computed += count
            if request.num_computed == request.num_tokens:
                request.generated += 1
                if request.generated < request.new_tokens:
                    request.tokens.append(sum(request.tokens) * 31 % 997)
                    continue
                self.scheduler.request_finished_all_groups(request, Tables(self.tables[request]).get_block_ids())
                self.requests.remove(request)
                self._release(request)

    def _compute(self, rank: int, group: int, layer: int, scheduled: dict[Request, int]) -> None:
        """A rank's part of a layer: it reads what came before, and writes."""
        window, memory = self.windows[group], self.memory
        for request, count in scheduled.items():
            table, computed = self.tables[request][group], request.num_computed
            before, tokens = request.tokens[:computed], request.tokens[: computed + count]
            if window == STATE:
                self.wrong_reads += not memory.is_right_state(rank, group, layer, table=table, tokens=before)
                memory.write_state(rank, group, layer, table=table, tokens=tokens)
                continue
            first = self._first_read(window, computed)
            self.wrong_reads += not memory.is_right(rank, group, layer, table=table, tokens=before, first=first)
            memory.write(rank, group, layer, table=table, tokens=tokens, first=computed)

    def _release(self, request: Request) -> None:
        left = [block for table in self.tables.pop(request, []) for block in table if block != NULL]
        self.blocks.give_back(left, overwrite=True)

    def _blocks_in_use(self) -> set[int]:
        return {block for tables in self.tables.values() for table in tables for block in table if block != NULL}


def flip_at_the_next_load(engine: Any, row: int) -> None:
    """Change a bit of a leased chunk in the arena when the next load begins."""
    memory = engine.worker._worker._memory
    load = memory.load

    def spoiling(lease: Any, order: Any) -> Any:
        memory.load = load
        np.asarray(lease.hold.session.arena.view())[int(lease.hold.rows.offsets[row]) + 13] ^= 16
        return load(lease, order)

    memory.load = spoiling
