"""A scripted engine that calls a connector in vLLM's order, and knows what every byte of its KV must be.

KV of a token derives from layer, shard and all tokens up to it. The forward pass reads every earlier token's KV, layer by
layer; where it finds wrong bytes it writes wrong ones from there on, on every rank, as a model would. `wrong_reads` counts
wrong bytes that no load error of the same step explains: it must stay 0. Plans and reports cross as bytes, as they do
between processes.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

from tests.rigs.daemon import wait_until
from tests.rigs.vllm import token_kv
from tests.rigs.vllm.blocks import ScriptedBlocks
from tests.rigs.vllm.config import caches_of, config_of, stage_spans
from tests.rigs.vllm.fake_vllm import AllBlocksCleared, KVConnectorRole
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.specs import HEADS, LAYERS, NAMES, WIDTH, FullAttentionSpec


class Blocks:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self._ids),)


class ScriptedEngine:
    """One engine with `ranks` workers for each of its `stages`. `budget`: tokens of a step; `on_layer` is called before each
    layer of a forward pass."""

    def __init__(
        self,
        connector: Any,
        socket: str,
        *,
        ranks: int = 1,
        replicas: int = 1,
        stages: Sequence[int] = (LAYERS,),
        blocks: int = 64,
        budget: int = 4096,
        worker_specs: Mapping[int, Any] | None = None,
        holds_blocks: bool = True,
        is_speculative: bool = False,
        heads: int = 0,
        **extra: Any,
    ) -> None:
        """`heads`: of the whole model; 0: HEADS on each rank. `worker_specs`: what single workers are shown as the spec.
        `holds_blocks`: the connector can hold blocks. `is_speculative`: loads are asked about before a forward pass ends."""
        spans = [range(first, end) for first, end in stage_spans(stages)]
        self.heads = heads // (ranks // replicas)  # of a rank
        here = self.heads or HEADS
        spec = FullAttentionSpec(num_kv_heads=here, page_size_bytes=BLOCK * here * WIDTH)
        caches = caches_of(blocks, replicas, spec, layers=spans[0])
        self.budget = budget
        self.on_layer: Callable[[int], None] = lambda _layer: None
        self.on_asked: Callable[[], None] = lambda: None
        self.on_allocated: Callable[[], None] = lambda: None
        self.scheduler = connector(config_of(socket, ranks, stages=stages, **extra), KVConnectorRole.SCHEDULER, caches)
        self.workers = []
        self.kv: list[dict[int, torch.Tensor]] = []
        self.shards = [rank % ranks // replicas for rank in range(ranks * len(stages))]
        for rank in range(ranks * len(stages)):
            layers = spans[rank // ranks]
            shown = caches_of(blocks, replicas, (worker_specs or {}).get(rank, spec), layers=layers)
            config = config_of(socket, ranks, rank, stages=stages, **extra)
            worker = connector(config, KVConnectorRole.WORKER, shown)
            kv = {layer: torch.full((blocks, here, BLOCK, WIDTH), 255, dtype=torch.uint8) for layer in layers}
            worker.register_kv_caches({NAMES[layer]: tensor for layer, tensor in kv.items()})
            self.workers.append(worker)
            self.kv.append(kv)
        self.requests: list[Request] = []
        self.blocks = ScriptedBlocks(blocks, self._overwrite, self._blocks_in_use)
        self.is_speculative = is_speculative
        self.wrong_reads = 0
        self.recomputed = 0
        self.steps = 0
        self.running_max = 1 << 16
        self.events: list[Any] = []
        if extra.get("kvpool__events"):
            self.blocks.on_reset = lambda: self.events.append(AllBlocksCleared())
        bound = self.blocks if holds_blocks else SimpleNamespace(evict_blocks=self.blocks.evict_blocks)
        self.scheduler.bind_gpu_block_pool(bound)
        self._arrived: set[str] = set()
        self._received: dict[str, int] = {}
        self._failed: set[str] = set()

    def close(self) -> None:
        for connector in [*self.workers, self.scheduler]:
            connector.shutdown()

    def forget(self) -> None:
        """`reset_prefix_cache`: the engine's own cache is empty, and nothing of it is left in the blocks."""
        assert not self.requests
        self.idle()
        assert self.blocks.reset_prefix_cache()

    @property
    def arrived_loads(self) -> set[str]:  # of requests that wait for their turn
        return self._arrived

    def ranks_with_load(self, request: Request) -> int:
        """How many ranks have reported that the request's load has ended, while not all have."""
        return self._received.get(request.request_id, 0)

    def new_weights(self) -> bool:
        """vLLM's `reset_prefix_cache(reset_connector=True)`: its own blocks first, if nobody holds any, then the connector."""
        self.blocks.reset_prefix_cache()
        return bool(self.scheduler.reset_cache())

    def idle(self) -> None:
        """Step on without requests for as long as the connector has work."""
        if self.scheduler.has_pending_push_work():
            self.step_until(lambda: not self.scheduler.has_pending_push_work(), "the connector's work has ended")

    def step_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
        """Step, and on until the condition holds; fails with `what` after the time."""

        def has_come() -> bool:
            self.step()
            return condition()

        wait_until(has_come, what, timeout_s)

    def run(self, *requests: Request) -> None:
        """Until the requests have ended, and without others what the connector does behind them."""
        self.arrive(*requests)
        wait_until(lambda: self._has_stepped_to_the_end(requests), f"the requests have ended: {requests}")
        if not self.requests:
            self.idle()

    def arrive(self, *requests: Request) -> None:
        """Queue requests up."""
        for request in requests:
            if request not in self.requests:
                self.requests.append(request)
                self.scheduler.on_new_request(request)

    def give_input(self, session: Request, tokens: list[int], *, new_tokens: int = 1) -> None:
        """The next input of a paused session: what was generated belongs to its prompt, but for the last token, which was not
        computed."""
        assert session.state == "paused"
        session.tokens = [*session.tokens[: session.num_computed], *tokens]
        session.num_prompt_tokens = len(session.tokens)
        session.generated, session.new_tokens = 0, new_tokens
        session.state, session.is_fresh = "waiting", True
        self.run(session)

    def end_session(self, session: Request) -> None:
        """No more input comes."""
        assert session.state == "paused"
        self.abort(session)
        self.idle()

    def abort(self, request: Request) -> None:
        self.scheduler.request_finished_all_groups(request, (request.table,))
        if request.state == "loading" and request.request_id not in self._arrived:
            request.state = "aborted"
            return
        self._remove(request)

    def preempt(self, request: Request) -> None:
        """Its blocks are reused at once: they are filled with bytes that belong to no token."""
        assert request.state == "running"
        self._release(request, overwrite=True)
        request.state, request.num_computed = "preempted", 0

    def step(self) -> None:
        self.steps += 1
        scheduled, output = self._schedule()
        plan = self.scheduler.build_connector_meta(output)
        has_sync = any(request.external and not order_is_async for request, order_is_async in self._just_allocated)
        results = self._forward(pickle.dumps(plan), scheduled, has_sync)
        self._update(scheduled, results)

    def _has_stepped_to_the_end(self, requests: Sequence[Request]) -> bool:
        """One step, and on while there is something to compute."""
        self.step()
        while self._spoiled and any(request in self.requests and request.state != "paused" for request in requests):
            self.step()
        return not any(request in self.requests and request.state != "paused" for request in requests)

    def _schedule(self) -> tuple[dict[Request, int], Any]:
        budget = self.budget
        scheduled: dict[Request, int] = {}
        new, cached = [], SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
        self._just_allocated: list[tuple[Request, bool]] = []
        for request in list(self.requests):
            if request.state == "paused":
                continue
            is_admitted = request.state not in ("waiting", "preempted", "loading")
            if not is_admitted and len(scheduled) >= self.running_max:
                continue
            if not is_admitted and not self._admit(request):
                continue
            count = min(budget, request.num_tokens - request.num_computed)
            if request.state == "aborted" or not count:
                continue
            fresh = self._allocate(request, request.num_computed + count)
            budget -= count
            scheduled[request] = count
            if request.is_fresh:
                new.append(
                    SimpleNamespace(
                        req_id=request.request_id,
                        block_ids=(list(request.table),),
                        num_computed_tokens=request.num_computed,
                    )
                )
                request.is_fresh = False
                continue
            cached.req_ids.append(request.request_id)
            cached.num_computed_tokens.append(request.num_computed)
            if request.state == "resumed":
                cached.resumed_req_ids.add(request.request_id)
                cached.new_block_ids.append((list(request.table),))
            else:
                cached.new_block_ids.append((fresh,) if fresh else None)
        for request in scheduled:
            request.state = "running"
        counts = {request.request_id: count for request, count in scheduled.items()}
        return scheduled, SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=counts
        )

    def _admit(self, request: Request) -> bool:
        """True if a waiting request can run in this step."""
        if request.state == "loading":
            if request.request_id not in self._arrived:
                return False
            self._arrived.discard(request.request_id)
            if request.request_id in self._failed:
                self._failed.discard(request.request_id)
                if not request.num_computed:
                    self._release(request)
            request.state = "resumed" if not request.is_fresh else "waiting"
        if request.num_computed == 0:
            return self._ask(request)
        self._allocate(request, request.num_tokens)
        self.scheduler.update_state_after_alloc(request, Blocks(request.table), 0)
        return True

    def _ask(self, request: Request) -> bool:
        hashes = request.block_hashes[: (request.num_tokens - 1) // BLOCK]
        local = self.blocks.local
        held = next((place for place, value in enumerate(hashes) if value not in local), len(hashes))
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, held * BLOCK)
        if external is None:
            return False
        assert external >= 0
        assert external > 0 or not is_async
        assert held * BLOCK + external < request.num_tokens
        assert external % BLOCK == 0
        if external:
            self.on_asked()
        request.table = [local[value] for value in hashes[:held]]
        request.held, request.external = held * BLOCK, external
        request.offers.append(external)
        self._allocate(request, request.num_tokens)
        self.scheduler.update_state_after_alloc(request, Blocks(request.table), external)
        self.on_allocated()
        self._just_allocated.append((request, is_async))
        request.num_computed = held * BLOCK + external
        if not is_async:
            request.state = "waiting" if request.is_fresh else "resumed"
            self._remember(request)
            return True
        request.state = "loading"
        return False

    def _forward(self, plan: bytes, scheduled: dict[Request, int], has_sync: bool) -> list[Any]:
        for worker in self.workers:
            worker.handle_preemptions(pickle.loads(plan))
            worker.bind_connector_metadata(pickle.loads(plan))
            if has_sync:
                worker.start_load_kv(None)
        spoiled: dict[Request, bool] = dict.fromkeys(scheduled, False)
        for layer, name in enumerate(NAMES if scheduled else ()):
            self.on_layer(layer)
            ranks = [rank for rank, layers in enumerate(self.kv) if layer in layers]
            for rank in ranks:
                self.workers[rank].wait_for_layer_load(name)
            for request in scheduled:
                spoiled[request] |= not all(self._is_right(rank, layer, request) for rank in ranks)
            for rank in ranks:
                for request, count in scheduled.items():
                    self._write(rank, layer, request, count, spoiled=spoiled[request])
                self.workers[rank].save_kv_layer(name, self.kv[rank][layer], None)
        self._spoiled = spoiled
        results = []
        for worker in self.workers:
            if not has_sync:
                worker.start_load_kv(None)
            if not self.is_speculative:
                worker.wait_for_save()
            transfers = worker.get_transfer_results(set())
            bad = worker.get_block_ids_with_load_errors()
            meta = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
            if self.is_speculative:
                worker.wait_for_save()
            worker.clear_connector_metadata()
            results.append((transfers.finished_recving, bad, meta))
        return results

    def _update(self, scheduled: dict[Request, int], results: list[Any]) -> None:
        bad = set().union(*(result[1] for result in results))
        report = results[0][2]
        for _, _, other in results[1:]:
            report = report.aggregate(other)
        done = self._all_ranks(results)
        marked: set[int] = set()
        affected = {request for request in self.requests if self._truncate(request, bad, marked)}
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=report, finished_recving=done, invalid_block_ids=bad)
        )
        self.events += self.scheduler.take_events()
        self.wrong_reads += sum(self._spoiled[request] for request in scheduled if request not in affected)
        for request in [entry for entry in self.requests if entry.request_id in done]:
            if request.state == "aborted":
                self._remove(request)
            else:
                self._arrived.add(request.request_id)
                self._remember(request)
        for request, count in scheduled.items():
            if request not in affected:
                request.num_computed += count
                self._remember(request)
                self._decode(request)

    def _all_ranks(self, results: list[Any]) -> set[str]:
        done = set()
        for received, _, _ in results:
            for request_id in received:
                self._received[request_id] = self._received.get(request_id, 0) + 1
                if self._received[request_id] == len(results):
                    done.add(request_id)
                    del self._received[request_id]
        return done

    def _truncate(self, request: Request, bad: set[int], marked: set[int]) -> bool:
        """As vLLM, which has a bad block that requests share computed again by the first of them: it is `marked` then."""
        blocks = request.table[: -(-request.num_computed // BLOCK)]
        places = [place for place, block in enumerate(blocks) if block in bad]
        if not places:
            return False
        first = next((place for place in places if blocks[place] not in marked), None)
        marked.update(blocks[place] for place in places)
        if first is None:
            return True
        self.recomputed += 1
        request.num_computed = first * BLOCK
        if request.state == "loading":
            self._failed.add(request.request_id)
        for value, block in list(self.blocks.local.items()):
            if block in bad and request.state != "running":
                del self.blocks.local[value]
        return True

    def _decode(self, request: Request) -> None:
        if request.num_computed < request.num_tokens:
            return
        request.generated += 1
        if request.generated >= request.new_tokens and request.is_session:
            request.tokens.append(sum(request.tokens) * 31 % 997)
            request.state = "paused"
            return
        if request.generated >= request.new_tokens:
            _, request.answer = self.scheduler.request_finished_all_groups(request, (request.table,))
            self._remove(request)
            return
        request.tokens.append(sum(request.tokens) * 31 % 997)

    def _allocate(self, request: Request, tokens: int) -> list[int]:
        fresh = [self.blocks.free.pop() for _ in range(-(-tokens // BLOCK) - len(request.table))]
        request.table += fresh
        return fresh

    def _remember(self, request: Request) -> None:
        for place, value in enumerate(request.block_hashes[: request.num_computed // BLOCK]):
            self.blocks.local.setdefault(value, request.table[place])

    def _remove(self, request: Request) -> None:
        self.requests.remove(request)
        self._release(request)

    def _release(self, request: Request, *, overwrite: bool = False) -> None:
        left, request.table = request.table, []
        blocks, shared = self.blocks, self._blocks_in_use()
        if overwrite:
            mine = set(left) - shared
            blocks.local = {value: block for value, block in blocks.local.items() if block not in mine}
        kept = shared | set(blocks.local.values())
        blocks.give_back([block for block in left if block not in kept], overwrite=overwrite)

    def _overwrite(self, blocks: list[int]) -> None:
        for layers in self.kv:
            for tensor in layers.values():
                tensor[blocks] = 254

    def _blocks_in_use(self) -> set[int]:
        return {block for request in self.requests for block in request.table}

    def _is_right(self, rank: int, layer: int, request: Request) -> bool:
        end = request.num_computed
        found = token_kv.read(self.kv[rank][layer].numpy(), request.table, 0, end)
        return np.array_equal(found, self._kv_of(rank, layer, request, 0, end))

    def _write(self, rank: int, layer: int, request: Request, count: int, *, spoiled: bool) -> None:
        first = request.num_computed
        values = self._kv_of(rank, layer, request, first, first + count)
        token_kv.write(self.kv[rank][layer].numpy(), request.table, first, 255 - values if spoiled else values)

    def _kv_of(self, rank: int, layer: int, request: Request, first: int, end: int) -> token_kv.Bytes:
        """The right KV of a span of a request's tokens on a rank."""
        count = self.heads or HEADS
        # Heads of a whole model have other numbers than those that each rank has of its own.
        lowest = self.shards[rank] * count + (1000 if self.heads else 0)
        adapter = getattr(request.lora_request, "lora_name", "")
        return token_kv.kv_of(layer, range(lowest, lowest + count), request.tokens[:end], adapter, first=first)
