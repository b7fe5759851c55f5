"""A scripted engine that calls a connector in vLLM's order, and knows what every byte of its KV must be.

KV of a token derives from layer, head and all tokens up to it. The forward pass reads every earlier token's KV that it attends
to, layer by layer; where it finds wrong bytes it writes wrong ones from there on, on every rank, as a model would.
`wrong_reads` counts wrong bytes that no load error of the same step explains: it must stay 0. Plans and reports cross as bytes,
as they do between processes.

A model whose layers are in several KV cache groups, or that have a window, has a block table for each group, out of one pool of
blocks. In place of blocks that a window has left the table has the null block, and they are overwritten at once. Only a plain
model has a prefix cache in the engine.

A group of recurrent states has a block at the end of its table alone. Steps of a prompt end at ends of blocks, and the next one
writes the state into another block; vLLM names the blocks of the states that it keeps itself (`boundary_state_offloads`), those
at the last ends of prompts.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tests.rigs.daemon import wait_until
from tests.rigs.vllm.blocks import ScriptedBlocks
from tests.rigs.vllm.config import config_of
from tests.rigs.vllm.divided_states import DividedStates
from tests.rigs.vllm.fake_vllm import AllBlocksCleared, KVConnectorRole
from tests.rigs.vllm.memory import ScriptedMemory
from tests.rigs.vllm.model import PLAIN, STATE, ScriptedModel
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.specs import HEADS, WIDTH

NULL = 0


class Tables:
    """The block tables of a request, as vLLM passes them."""

    def __init__(self, tables: Sequence[list[int]]) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self._tables)


class ScriptedEngine:
    """One engine with `ranks` workers for each stage of its model. `budget`: tokens of a step; `on_layer` is called before each
    layer of a forward pass."""

    def __init__(
        self,
        connector: Any,
        socket: str,
        *,
        windows: Sequence[int] = PLAIN,
        ranks: int = 1,
        replicas: int = 1,
        stages: Sequence[int] = (),
        layers: Sequence[Sequence[int]] = (),
        heads: int = 0,
        blocks: int = 200,
        budget: int = 4096,
        worker_specs: Mapping[int, Any] | None = None,
        holds_blocks: bool = True,
        shows_tables: bool = False,
        is_speculative: bool = False,
        is_local: bool = False,
        is_odd: bool = False,
        of_states: dict[str, Any] | None = None,
        divided: DividedStates | None = None,
        **extra: Any,
    ) -> None:
        """`windows`, `layers`, `stages` and `is_local`: see ScriptedModel. `heads`: of the whole model; 0: HEADS on each rank.
        `worker_specs`: what single workers are shown as the spec. `holds_blocks`: the connector can hold blocks.
        `shows_tables`: the plan's step has the tables as they are, as in later releases of vLLM. `is_speculative`: loads are
        asked about before a forward pass ends. `is_odd`: the last layer of a group has twice as many heads, which only workers
        see in its spec. `of_states`: fields of the specs of states; `divided`: states of which each rank has its part."""
        self.model = model = ScriptedModel(windows, layers, stages, is_local=is_local)
        heads = heads or (0 if model.is_plain else HEADS)
        alike = max(replicas, ranks // heads) if heads else replicas  # ranks with the same heads
        here = heads // (ranks // alike) if heads else HEADS
        heads_of = [here] * (model.group_layers - 1) + [here * (1 + is_odd)]
        # Heads of a whole model have other numbers than those that each rank has of its own.
        first_heads = [rank // alike * here + (1000 if heads else 0) for rank in range(ranks)]
        self.memory = ScriptedMemory(model.numbers, heads_of, first_heads, blocks=blocks, divided=divided)
        of_states = of_states or {}
        if divided is not None:
            of_states = {"page_size_bytes": here * BLOCK * WIDTH, **divided.spec(ranks)}

        def config(worker: int = 0) -> Any:
            made = config_of(socket, ranks, worker, stages=model.stages, **extra)
            if heads:
                made.model_config.get_total_num_kv_heads = lambda: heads
                described = {"num_key_value_heads": heads, "linear": {"num_heads": 3}}
                described |= divided.described() if divided is not None else {}
                made.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: described)
            return made

        def caches(stage: int = 0, *, shows_each: bool = False) -> Any:
            return model.caches(
                blocks, heads_of, replicas=replicas, stage=stage, of_states=of_states, shows_each=shows_each
            )

        self.scheduler = connector(config(), KVConnectorRole.SCHEDULER, caches())
        self.workers = []
        self.ranks = ranks
        for worker in range(ranks * len(model.stages)):
            stage, rank = divmod(worker, ranks)
            shown = caches(stage, shows_each=is_odd)
            if worker in (worker_specs or {}):
                shown.kv_cache_groups[0].kv_cache_spec, shown.kv_cache_tensors = (worker_specs or {})[worker], []
            self.workers.append(connector(config(worker), KVConnectorRole.WORKER, shown))
            self.workers[-1].register_kv_caches(
                {
                    names[at]: self.memory.states(rank, at) if window == STATE else self.memory.kv[rank][at]
                    for group, (names, window) in enumerate(zip(model.names, model.windows, strict=True))
                    for at in model.layers_of(group, stage)
                }
            )
        self.requests: list[Request] = []
        self.blocks = ScriptedBlocks(blocks, self.memory.overwrite, self._blocks_in_use)
        bound = self.blocks if holds_blocks else SimpleNamespace(evict_blocks=self.blocks.evict_blocks)
        self.scheduler.bind_gpu_block_pool(bound)
        self._shake_hands()
        self.budget = budget
        self.shows_tables = shows_tables or model.has_states
        self.is_speculative = is_speculative
        self.on_layer: Callable[[int], None] = lambda _layer: None
        self.on_asked: Callable[[], None] = lambda: None
        self.on_allocated: Callable[[], None] = lambda: None
        self.wrong_reads = 0
        self.recomputed = 0
        self.steps = 0
        self.blocks_most = 0
        self.running_max = 1 << 16
        self.events: list[Any] = []
        if extra.get("kvpool__events"):
            self.blocks.on_reset = lambda: self.events.append(AllBlocksCleared())
        self._arrived: set[str] = set()
        self._received: Counter[str] = Counter()
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
        return self._received[request.request_id]

    def new_weights(self) -> bool:
        """vLLM's `reset_prefix_cache(reset_connector=True)`: its own blocks first, if nobody holds any, then the connector."""
        self.blocks.reset_prefix_cache()
        return bool(self.scheduler.reset_cache())

    def sleep(self) -> None:
        """vLLM's sleep: requests end, caches are reset, workers let go of their KV, whose memory goes."""
        self.abort_all()
        assert self.blocks.reset_prefix_cache()
        assert self.scheduler.reset_cache() is not False
        self.take_memory()

    def take_memory(self) -> None:
        """The workers' part of it."""
        for worker in self.workers:
            worker.unregister_kv_caches()
        self.memory.take_away()

    def wake_up(self) -> None:
        """The memory is there again, with nothing in it; workers register it again and are introduced again."""
        self.memory.bring_back()
        for worker in self.workers:
            worker.restore_kv_caches()
        self._shake_hands()

    def _shake_hands(self) -> None:
        own_layers = {divmod(at, self.ranks): worker.get_handshake_metadata() for at, worker in enumerate(self.workers)}
        shown = {place: own for place, own in own_layers.items() if own is not None}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(shown)))

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
        self.scheduler.request_finished_all_groups(request, Tables(request.tables).get_block_ids())
        if request.state == "loading" and request.request_id not in self._arrived:
            request.state = "aborted"
            return
        self._remove(request)

    def abort_all(self) -> None:
        for request in list(self.requests):
            self.abort(request)

    def preempt(self, request: Request) -> None:
        """Its blocks are reused at once: they are filled with bytes that belong to no token."""
        assert request.state == "running"
        self._release(request, overwrite=True)
        request.state, request.num_computed = "preempted", 0

    def step(self) -> None:
        self.steps += 1
        scheduled, output = self._schedule()
        if self.shows_tables:
            output.kv_connector_block_state = self._block_state(scheduled)
        self.blocks_most = max(self.blocks_most, len(self._blocks_in_use() | set(self.blocks.held)))
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
            count = self._cut(request, min(budget, request.num_tokens - request.num_computed))
            if request.state == "aborted" or not count:
                continue
            self._slide(request)
            fresh = self._allocate(request, request.num_computed + count)
            budget -= count
            scheduled[request] = count
            tables = Tables(request.tables).get_block_ids()
            if request.is_fresh:
                new.append(
                    SimpleNamespace(
                        req_id=request.request_id, block_ids=tables, num_computed_tokens=request.num_computed
                    )
                )
                request.is_fresh = False
                continue
            cached.req_ids.append(request.request_id)
            cached.num_computed_tokens.append(request.num_computed)
            if request.state == "resumed":
                cached.resumed_req_ids.add(request.request_id)
                cached.new_block_ids.append(tables)
            else:
                cached.new_block_ids.append(tuple(fresh) if any(fresh) else None)
        for request in scheduled:
            request.state = "running"
        counts = {request.request_id: count for request, count in scheduled.items()}
        return scheduled, SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )

    def _cut(self, request: Request, count: int) -> int:
        """Tokens of a step of so many at most: with states a prompt's steps end at ends of blocks, and one at its last."""
        last = (request.num_tokens - 1) // BLOCK * BLOCK
        begun = request.num_computed
        if not self.model.has_states or begun >= last:
            return count
        end = min(begun + count, last)
        aligned = end // BLOCK * BLOCK
        return (aligned if aligned > begun else end) - begun

    def _block_state(self, scheduled: dict[Request, int]) -> Any:
        """The tables as they are, and the states that vLLM keeps."""
        by_id = {request.request_id: Tables(request.tables).get_block_ids() for request in scheduled}
        offers = {request.request_id: self._offers(request, count) for request, count in scheduled.items()}
        return SimpleNamespace(get_block_ids=by_id.get, boundary_state_offloads=offers)

    def _offers(self, request: Request, count: int) -> list[tuple[int, int, int]]:
        """The states at a prompt's last end of a block that a step makes: group, block, tokens."""
        end = request.num_computed + count
        if end != (len(request.tokens) - 1) // BLOCK * BLOCK:
            return []
        return [
            (group, request.tables[group][end // BLOCK - 1], end)
            for group, window in enumerate(self.model.windows)
            if window == STATE and end % BLOCK == 0
        ]

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
        self.scheduler.update_state_after_alloc(request, Tables(request.tables), 0)
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
        request.tables = [[local[value] for value in hashes[:held]] for _ in self.model.windows]
        request.held, request.external = held * BLOCK, external
        request.offers.append(external)
        request.num_computed = held * BLOCK + external
        self._begin_tables(request)
        self._allocate(request, request.num_tokens if self.model.is_plain else request.num_computed)
        self.scheduler.update_state_after_alloc(request, Tables(request.tables), external)
        self.on_allocated()
        self._just_allocated.append((request, is_async))
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
        for stage in range(len(self.model.stages) if scheduled else 0):
            for group, names in enumerate(self.model.names):
                for layer in self.model.layers_of(group, stage):
                    self.on_layer(self.model.numbers[group][layer])
                    self._compute(stage, group, layer, scheduled, spoiled=spoiled, name=names[layer])
        self._spoiled = spoiled
        results = []
        for worker in self.workers:
            if not has_sync:
                worker.start_load_kv(None)
            if not self.is_speculative:
                worker.wait_for_save()
            transfers = worker.get_transfer_results(set())
            bad = worker.get_block_ids_with_load_errors()
            assert self.model.is_plain or not bad, "vLLM cannot know whose they are"
            assert transfers.failed_recving <= transfers.finished_recving
            meta = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
            if self.is_speculative:
                worker.wait_for_save()
            worker.clear_connector_metadata()
            results.append((transfers, bad, meta))
        return results

    def _update(self, scheduled: dict[Request, int], results: list[Any]) -> None:
        bad = set().union(*(result[1] for result in results))
        report = results[0][2]
        for _, _, other in results[1:]:
            report = report.aggregate(other)
        done = self._all_ranks(results)
        marked: set[int] = set()
        affected = {request for request in self.requests if self._truncate(request, bad, marked)}
        self._fail(set().union(*(result[0].failed_recving for result in results)))
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

    def _compute(
        self,
        stage: int,
        group: int,
        layer: int,
        scheduled: dict[Request, int],
        *,
        spoiled: dict[Request, bool],
        name: str,
    ) -> None:
        """A layer of a stage: its ranks read what came before, and write."""
        workers = self.workers[stage * self.ranks :][: self.ranks]
        for worker in workers:
            worker.wait_for_layer_load(name)
        for request in scheduled:
            spoiled[request] |= not all(self._is_right(rank, group, layer, request) for rank in range(self.ranks))
        for rank, worker in enumerate(workers):
            for request, count in scheduled.items():
                first, end = request.num_computed, request.num_computed + count
                if self.model.windows[group] == STATE:
                    self.memory.write_state(rank, group, layer, request, end, is_spoiled=spoiled[request])
                else:
                    self.memory.write(rank, group, layer, request, range(first, end), is_spoiled=spoiled[request])
            worker.save_kv_layer(name, self.memory.kv[rank][layer], None)

    def _is_right(self, rank: int, group: int, layer: int, request: Request) -> bool:
        end = request.num_computed
        if self.model.windows[group] == STATE:
            return self.memory.is_right_state(rank, group, layer, request, end)
        return self.memory.is_right(rank, group, layer, request, range(self.model.first_read(group, end), end))

    def _all_ranks(self, results: list[Any]) -> set[str]:
        """The requests whose loads have now ended on every rank."""
        for transfers, _, _ in results:
            self._received.update(transfers.finished_recving)
        done = {request_id for request_id, ranks in self._received.items() if ranks == len(results)}
        for request_id in done:
            del self._received[request_id]
        return done

    def _fail(self, failed: set[str]) -> None:
        """As vLLM, which computes all tokens of a request whose load has failed."""
        for request in self.requests:
            if request.request_id in failed - self._failed:
                self._failed.add(request.request_id)
                self.recomputed += 1
                request.num_computed = 0

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
            tables = Tables(request.tables).get_block_ids()
            _, request.answer = self.scheduler.request_finished_all_groups(request, tables)
            self._remove(request)
            return
        request.tokens.append(sum(request.tokens) * 31 % 997)

    def _slide(self, request: Request) -> None:
        """Let go of the blocks that no window reaches back to."""
        for group, table in enumerate(request.tables):
            for place in range(min(self._gone(request, group), len(table))):
                if table[place] != NULL:
                    block, table[place] = table[place], NULL
                    self.blocks.give_back([block], overwrite=True)

    def _begin_tables(self, request: Request) -> None:
        """Begin the tables without the blocks that no window reaches back to."""
        for group, table in enumerate(request.tables):
            table += [NULL] * (self._gone(request, group) - len(table))

    def _gone(self, request: Request, group: int) -> int:
        return self.model.first_read(group, request.num_computed) // BLOCK

    def _allocate(self, request: Request, tokens: int) -> list[list[int]]:
        fresh = []
        for window, table in zip(self.model.windows, request.tables, strict=True):
            count = max(0, -(-tokens // BLOCK) - len(table))
            null = max(0, count - 1) if window == STATE else 0
            blocks = [NULL] * null + [self.blocks.free.pop() for _ in range(count - null)]
            table += blocks
            fresh.append(blocks)
        return fresh

    def _remember(self, request: Request) -> None:
        """Its blocks are in the engine's own prefix cache."""
        if self.model.is_plain:
            for place, value in enumerate(request.block_hashes[: request.num_computed // BLOCK]):
                self.blocks.local.setdefault(value, request.table[place])

    def _remove(self, request: Request) -> None:
        self.requests.remove(request)
        self._release(request)

    def _release(self, request: Request, *, overwrite: bool = False) -> None:
        left = [block for table in request.tables for block in table if block != NULL]
        request.tables = []
        blocks, shared = self.blocks, self._blocks_in_use()
        if overwrite:
            mine = set(left) - shared
            blocks.local = {value: block for value, block in blocks.local.items() if block not in mine}
        kept = shared | set(blocks.local.values())
        is_gone = overwrite or not self.model.is_plain
        blocks.give_back([block for block in left if block not in kept], overwrite=is_gone)

    def _blocks_in_use(self) -> set[int]:
        return {block for request in self.requests for table in request.tables for block in table if block != NULL}
