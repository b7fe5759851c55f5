"""The process around one vLLM engine: executes lines of JSON from stdin and answers each with one on stdout.

    python -m tests.engines.vllm.rigs.driver '{"model": …, "engine": {…}, "transfer": {…} or null}'

What vLLM prints goes to stderr. A command that raises is answered with its traceback and the process lives on. Commands
that look into the connector need the engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0).
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

import kvpool_client as kv
from kvpool import failpoint
from kvpool_client.verbs.set_hold import SetHold
from tests.engines.vllm.rigs import step_costs

Answer = dict[str, Any]
STEPS_MAX = 20
SETTLE_S, IDLE_STEP_S = 60.0, 0.001
SHOWN_METRICS = (
    "vllm:kvpool_",
    "vllm:prompt_tokens_cached_by_source",
    "vllm:external_prefix_cache",
    "vllm:kv_offload_tiering",
)
FOR_NEW_REQUESTS = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")


class Driver:
    """The engine and its commands: every public method is one."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM  # takes ten seconds, and only this process has it
        from vllm.config import KVEventsConfig

        self._pools = _watch_pools()
        if options["takes_every_hit"]:
            _take_every_hit()

        events = options["engine"].pop("kv_events", None)
        self._llm = LLM(
            kv_events_config=None if events is None else KVEventsConfig(**events),
            model=options["model"],
            skip_tokenizer_init=True,
            disable_log_stats=False,
            kv_transfer_config=options["transfer"],
            **{"enforce_eager": True, "distributed_executor_backend": "uni", **options["engine"]},
        )
        self._spent = ConnectorTime()
        self._unplugged: tuple[Any, Any] = (None, None)
        self._unplugged_tiers: list[Any] = []
        self._is_spoiled = self._has_struck = self._counts_blocks = False
        self._blocks_most = 0
        self._restore_waits: Callable[[], Any] = lambda: None

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salt: str | None = None,
        with_gaps: bool = False,
        params: list[dict[str, Any] | None] | None = None,
    ) -> Answer:
        """Greedy tokens of all prompts, given to the engine at once, and what it took.

        `with_gaps`: also by how much each prompt's most doubtful token was ahead of the next best one. `params`: each request's
        `kv_transfer_params`.
        """
        from vllm import SamplingParams

        asked: list[Any] = [
            {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt is not None else {})} for prompt in prompts
        ]
        greedy = [
            SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=2 if with_gaps else None,
                extra_args={"kv_transfer_params": param} if param is not None else None,
            )
            for param in params or [None] * len(prompts)
        ]
        self._spent.begin()
        cpu_before, unhindered_before, before = (
            time.process_time(),
            step_costs.unhindered_seconds(),
            time.perf_counter(),
        )
        outputs = self._llm.generate(asked, greedy, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - before,
            "unhindered_seconds": step_costs.unhindered_seconds() - unhindered_before,
            "cpu_seconds": time.process_time() - cpu_before,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "reasons": [output.outputs[0].finish_reason for output in outputs],
            "params": [output.kv_transfer_params for output in outputs],
            "gaps": [_least_gap(output.outputs[0].logprobs) for output in outputs] if with_gaps else [],
        }

    def generate_hinted(self, prompt: list[int], tokens: int, hints: dict[str, Any]) -> Answer:
        """Greedy tokens of a prompt that comes with an envelope of hints in vLLM's own form."""
        from vllm import SamplingParams
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        actions = [KvHintAction(**action) for action in hints["actions"]]
        envelope = KvHintsEnvelope(**{**hints, "actions": actions})
        engine: Any = self._llm.llm_engine
        engine.add_request("hinted", {"prompt_token_ids": prompt}, greedy, kv_hints=envelope)
        output: Any = None
        while engine.has_unfinished_requests():
            output = next(iter(engine.step()), output)
        return {"tokens": list(output.outputs[0].token_ids), "params": output.kv_transfer_params}

    def token_gaps(self, prompts: list[list[int]], tokens: int, copied_bytes: int = 0) -> Answer:
        """The seconds between two tokens of a request, of all requests, which are given to the engine at once.

        `wall`: by the clock; `gaps`: without the time for which others had the processors. `seconds`: until the last token.

        `copied_bytes`: what a thread beside the engine copies, by one plain copy, for each request that has been computed.
        """
        from vllm import SamplingParams

        engine: Any = self._llm.llm_engine
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        source, target = np.ones(copied_bytes, np.uint8), np.zeros(copied_bytes * len(prompts), np.uint8)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"gap-{number}", {"prompt_token_ids": prompt}, greedy)
        begun = time.perf_counter()
        last: dict[str, tuple[int, np.ndarray]] = {}
        gaps: list[np.ndarray] = []
        with ThreadPoolExecutor(1) as copier:
            while engine.has_unfinished_requests():
                outputs = engine.step()
                now = np.array([time.perf_counter(), step_costs.unhindered_seconds()])
                for output in outputs:
                    count = len(output.outputs[0].token_ids)
                    known, before = last.get(output.request_id, (0, now))
                    if known:
                        gaps += [(now - before) / (count - known)] * (count - known)
                    elif copied_bytes:
                        place = len(last) * copied_bytes
                        copier.submit(np.copyto, target[place : place + copied_bytes], source)
                    last[output.request_id] = (count, now)
        wall, unhindered = np.transpose(gaps).tolist()
        return {"wall": wall, "gaps": unhindered, "seconds": float(now[0]) - begun}

    def steps_in_turns(self, prompts: list[list[int]], rounds: int) -> Answer:
        """See `step_costs`: of the steps that decode behind these prompts, when their saves have ended."""
        from vllm import SamplingParams

        engine: Any = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        endless = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True, detokenize=False)
        names = [f"step-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, endless)
        answered: set[str] = set()
        while len(answered) < len(names) or scheduler.connector.has_pending_push_work():
            answered |= {output.request_id for output in engine.step()}
        costs = step_costs.steps_in_turns(engine, rounds)
        engine.abort_request(names)
        engine.step()
        return costs

    def forget(self, of_connector: bool = False) -> Answer:
        """Empty the engine's own prefix cache. `of_connector`: its connector's too, as an update of weights does."""
        return {"done": bool(self._llm.reset_prefix_cache(reset_connector=of_connector))}

    def lose_region(self) -> Answer:
        """Empty the engine's own prefix cache and the region of its tiered offloading: the pool's tier ends its jobs, and
        stays in its epoch."""
        tiers: list[Any] = [getattr(tier, "_jobs", None) for tier in self._tier_manager.secondary_tiers]
        epochs = [(jobs, jobs._epoch) for jobs in tiers if hasattr(jobs, "_epoch")]
        answer = self.forget(of_connector=True)
        for jobs, epoch in epochs:
            jobs._epoch = epoch
        return answer

    def settle(self) -> Answer:
        """Step until the connector has ended what it does for requests that have ended: other engines do so by themselves."""
        engine: Any = self._llm.llm_engine
        scheduler, deadline = engine.engine_core.engine_core.scheduler, time.monotonic() + SETTLE_S
        while scheduler.has_requests() and time.monotonic() < deadline:
            engine.step()
            time.sleep(IDLE_STEP_S)
        return {"settled": not scheduler.has_requests()}

    def shut_down(self) -> Answer:
        """End the engine within its process, as a server does that stops."""
        self._llm.llm_engine.engine_core.shutdown()
        return {}

    def sleep(self, level: int, prompts: list[list[int]]) -> Answer:
        """vLLM's own sleep while these prompts run, and what its later releases do in a worker, where it ignores sleep on the
        CPU: the connector lets go, and then the memory is gone."""
        from vllm import SamplingParams

        endless = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True, detokenize=False)
        engine: Any = self._llm.llm_engine
        names = [f"asleep-{number}" for number in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, endless)
        for _ in range(3 * bool(prompts)):
            engine.step()
        self._llm.sleep(level=level)
        engine.abort_request(names)  # in one process the front end does not hear of it
        self._llm.collective_rpc(memory_gone)
        return {}

    def wake_up(self) -> Answer:
        """The same for waking up: the connector registers again and is introduced again, then requests may come."""
        self._llm.collective_rpc(memory_back)
        core = self._llm.llm_engine.engine_core.engine_core
        shown: dict[Any, Any] = {}
        for of_worker in core.model_executor.get_kv_connector_handshake_metadata() or ():
            shown.update(of_worker or {})
        core.scheduler.connector.set_xfer_handshake_metadata_pp_aware(shown)
        self._llm.wake_up()
        return {}

    def change_weights(self, path: str, way: str) -> Answer:
        """Load a model's weights in place, by vLLM's own call for it or by a method of a trainer's in the worker."""
        if way == "reload_weights":
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        else:
            self._llm.collective_rpc(load_weights, args=(path,))
        return {}

    def change_weights_while_running(self, prompt: list[int], tokens: int, path: str) -> Answer:
        """The same in the midst of a request, which goes on."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine: Any = self._llm.llm_engine
        engine.add_request("through", {"prompt_token_ids": prompt}, params)
        for _ in range(tokens // 2):
            engine.step()
        self.change_weights(path, "load_weights")
        while engine.has_unfinished_requests():
            engine.step()
        return {}

    def forget_amid_saves(self, prompts: list[list[int]]) -> Answer:
        """Empty the engine's own prefix cache as an update of weights does, right after prompts were computed."""
        from vllm import SamplingParams

        once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], once, use_tqdm=False)
        return {"done": bool(self._llm.reset_prefix_cache(reset_running_requests=True))}

    def blocks_in_use(self) -> Answer:
        """The most blocks that had a reference at once, since the call before; the first one begins to count."""
        pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        most, self._blocks_most = self._blocks_most, 0
        if not self._counts_blocks:
            self._counts_blocks, give = True, pool.get_new_blocks

            def counting(*args: Any, **more: Any) -> Any:
                blocks = give(*args, **more)
                self._blocks_most = max(self._blocks_most, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
                return blocks

            pool.get_new_blocks = counting
        return {"most": most}

    def preemptions(self) -> Answer:
        """The number of preemptions so far."""
        return {
            "count": sum(
                int(getattr(metric, "value", 0))
                for metric in self._llm.get_metrics()
                if metric.name == "vllm:num_preemptions"
            )
        }

    def counters(self) -> Answer:
        """vLLM's Prometheus metrics of the connector and of external hits: value by name and last label."""
        shown: Answer = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith(SHOWN_METRICS):
                known = ("model_name", "engine")
                labels = [value for name, value in metric.labels.items() if name not in known]
                shown["/".join([metric.name.removeprefix("vllm:"), *labels])] = getattr(metric, "value", 0)
        return shown

    def abort_while_loading(self, prompt: list[int], others: list[list[int]], tokens: int) -> Answer:
        """Abort a prompt as soon as vLLM waits for its load, and ask for the others at once: their greedy tokens."""
        from vllm import SamplingParams

        engine: Any = self._llm.llm_engine
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request("aborted", {"prompt_token_ids": prompt}, greedy)
        scheduler = engine.engine_core.engine_core.scheduler
        waiting = ["WAITING"]
        for _ in range(STEPS_MAX):  # on a busy machine the daemon's promise comes a step later
            if waiting == ["WAITING"]:
                engine.step()
                waiting = [request.status.name for request in scheduler.requests.values()]
        engine.abort_request(["aborted"])
        answer = self.generate(others, tokens)
        return {**answer, "waiting": waiting, "left": len(scheduler.requests)}

    def reset_while_loading(self, prompt: list[int], tokens: int) -> Answer:
        """Empty the engine's caches as soon as a secondary tier loads for a prompt: its greedy tokens, and whether one did."""
        from vllm import SamplingParams

        engine, jobs = self._llm.llm_engine, self._tier_manager._transfer_jobs
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request("reset", {"prompt_token_ids": prompt}, greedy)
        for _ in range(STEPS_MAX):
            if not jobs:
                engine.step()
        loads = any(job.transfer_job.is_promotion for job in jobs.values())
        done = self._llm.reset_prefix_cache(reset_connector=True)
        last: list[Any] = []
        while engine.has_unfinished_requests():
            last = engine.step() or last
        (output,) = last[0].outputs
        return {"loads": loads, "done": done, "tokens": [list(output.token_ids)], "reasons": [output.finish_reason]}

    def strike(self, pid: int, layer: int) -> Answer:
        """Kill a process in the middle of the next load: when `layer` is waited for, or, if negative, when the load is."""
        waits = (kv.Load.wait_layer, kv.Load.wait)
        self._has_struck = False

        def strike() -> None:
            if not self._has_struck:
                self._has_struck = True
                os.kill(pid, signal.SIGKILL)

        def wait_layer(load: kv.Load, number: int, *args: Any) -> bool:
            if number == layer:
                strike()
            return waits[0](load, number, *args)

        def wait(load: kv.Load, *args: Any) -> kv.LoadResult:
            if layer < 0:
                strike()
            return waits[1](load, *args)

        kv.Load.wait_layer, kv.Load.wait = wait_layer, wait  # type: ignore[method-assign,assignment]

        def restore_waits() -> None:
            kv.Load.wait_layer, kv.Load.wait = waits  # type: ignore[method-assign]

        self._restore_waits = restore_waits
        return {}

    def has_struck(self) -> Answer:
        """True if the process was killed; no other will be."""
        self._restore_waits()
        return {"struck": self._has_struck}

    def watch_connector(self) -> Answer:
        """From now on measure the time spent in the connector."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

        core: Any = self._llm.llm_engine.engine_core
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        halves = (core.engine_core.scheduler.connector, get_kv_transfer_group())
        if hasattr(halves[0], "_scheduler"):
            self._spent.watch_promises(halves[0]._scheduler._promise_line)
        self._spent.watch(halves, [name for name in vars(KVConnectorBase_V1) if not name.startswith("__")])
        return {}

    def plug(self, is_plugged: bool) -> Answer:
        """Take the connector out of the engine, which then runs as if it had none, or put it back. Between requests."""
        from vllm.distributed.kv_transfer import kv_transfer_state as state

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        if (scheduler.connector is not None) != is_plugged:
            halves = (scheduler.connector, state._KV_CONNECTOR_AGENT)
            (scheduler.connector, state._KV_CONNECTOR_AGENT), self._unplugged = self._unplugged, halves
        return {}

    def plug_tiers(self, is_plugged: bool) -> Answer:
        """Take the secondary tiers out of vLLM's tiered offloading, which then has its region alone, or put them back. When no
        job is open."""
        tiers = self._tier_manager.secondary_tiers
        if bool(tiers) != is_plugged:
            tiers[:], self._unplugged_tiers = self._unplugged_tiers, tiers[:]
        return {}

    def tier_steps(self, prompt: list[int], steps: int) -> Answer:
        """Seconds inside the first secondary tier, and of the whole step, of steps that decode behind a stored prompt."""
        from vllm import SamplingParams

        engine: Any = self._llm.llm_engine
        (tier, *_), spent = self._tier_manager.secondary_tiers, ConnectorTime()
        spent.watch((tier,), [name for name in dir(tier) if not name.startswith("_")])
        endless = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True, detokenize=False)
        engine.add_request("steps", {"prompt_token_ids": prompt}, endless)
        scheduler = engine.engine_core.engine_core.scheduler
        while not engine.step() or scheduler.connector.has_pending_push_work():
            pass
        inside, whole = [], []
        for _ in range(steps):
            spent.begin()
            begun = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - begun)
            inside.append(sum(spent.by_method.values()))
        engine.abort_request(["steps"])
        engine.step()
        for name in [name for name in vars(tier) if not name.startswith("_") and callable(vars(tier)[name])]:
            delattr(tier, name)
        return {"inside": inside, "steps": whole, "calls": sorted(spent.by_method)}

    @property
    def _tier_manager(self) -> Any:
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        return scheduler.connector.connector_scheduler.manager

    def connector_seconds(self) -> Answer:
        """Since `generate` began: inside the connector's methods, from its first lookup until a load was reported, how long
        each request waited for an answer to its first lookup, when each promise had come after the first one, and the
        processor time of what the connector did for new requests in each step."""
        return {
            "inside": sum(self._spent.by_method.values()),
            "by_method": self._spent.by_method,
            "until_answered": [after - before for before, after in self._spent.answered.values()],
            "promised": [at - self._spent.asked_at for at in self._spent.promised_at],
            "steps": [step for step in self._spent.steps if step],
            "until_loaded": self._spent.loaded_at - self._spent.asked_at if self._spent.loaded_at else 0.0,
        }

    def pools(self) -> Answer:
        """Every Pool of this process: whether it is served, by which life of the daemon, and its counters."""
        return {
            "pools": [{"connected": pool.connected, "epoch": pool.epoch.hex(), **pool.stats()} for pool in self._pools]
        }

    def arm(self, points: str) -> Answer:
        """Arm client failpoints in this process from now on; empty: none."""
        with failpoint._lock:
            failpoint._armed.clear()
            failpoint._armed.update(failpoint.parse(points))
        failpoint.reach = failpoint._act
        return {}

    def spoil(self, chunk: int, is_set: bool = False) -> Answer:
        """Flip a bit of a leased chunk in the arena when the next load begins; negative counts from the end. `is_set`: the next
        load of a set."""
        verb = "load_set" if is_set else "load"
        load, self._is_spoiled = getattr(kv.Pool, verb), False

        def spoiling(pool: kv.Pool, lease: kv.Lease, *args: Any, **more: Any) -> Any:
            if lease.chunks and lease.hold.session is not None:
                setattr(kv.Pool, verb, load)
                rows = lease.hold.held_rows if isinstance(lease.hold, SetHold) else lease.hold.rows
                np.asarray(lease.hold.session.arena.view())[int(rows.offsets[chunk]) + 1237] ^= 16
                self._is_spoiled = True
            return load(pool, lease, *args, **more)

        setattr(kv.Pool, verb, spoiling)
        return {}

    def roll_embeddings(self, by: int) -> Answer:
        """Change the model's weights in place, as training does between rollouts: the embedding of each token becomes that of
        another. The opposite number undoes it."""

        def roll(model: Any) -> None:
            weights = model.model.embed_tokens.weight.data
            weights.copy_(weights.roll(by, dims=0))

        self._llm.apply_model(roll)
        return {}

    def has_spoiled(self) -> Answer:
        """True if a load has met the flipped bit."""
        return {"spoiled": self._is_spoiled}


def memory_gone(worker: Any) -> None:
    """In a worker: before the memory of the KV goes, and then nothing is in it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        get_kv_transfer_group().unregister_kv_caches()
    for cache in worker.model_runner.kv_caches:
        cache.fill_(float("nan"))


def memory_back(worker: Any) -> None:
    """In a worker: there is memory again, the same, with zeros in it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    for cache in worker.model_runner.kv_caches:
        assert bool(cache.isnan().all()), "somebody has written to memory that was gone"
        cache.zero_()
    if has_kv_transfer_group():
        get_kv_transfer_group().restore_kv_caches()


def load_weights(worker: Any, path: str) -> None:
    """In a worker, as the methods do that trainers add to it."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.model
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)  # the processor's form of the weights is not the checkpoint's
        model.load_weights(load_file(f"{path}/model.safetensors").items())
        finalize_layerwise_reload(model, worker.model_config)


def _watch_pools() -> list[kv.Pool]:
    """A list of every Pool that this process makes from now on."""
    pools: list[kv.Pool] = []
    make = kv.Pool.__init__

    def noting(pool: kv.Pool, *args: Any, **more: Any) -> None:
        make(pool, *args, **more)
        pools.append(pool)

    kv.Pool.__init__ = noting  # type: ignore[method-assign,assignment]
    return pools


def _take_every_hit() -> None:
    """Let no hit be declined because computing is faster: with models this small the two are close, and a test of bytes
    needs them loaded. The client does so while the prefill rate is unknown."""
    from kvpool_client.engines import load_cost

    rates = load_cost.RateEstimator.rates

    def unknown(self: load_cost.RateEstimator) -> load_cost.Rates:
        return replace(rates(self), prefill_tokens_per_s=0.0)

    load_cost.RateEstimator.rates = unknown  # type: ignore[method-assign]


def _least_gap(steps: list[dict[int, Any]]) -> float:
    """Over all tokens of an answer, the least distance in log probability of the best one to the second."""
    best = [sorted((entry.logprob for entry in step.values()), reverse=True)[:2] for step in steps]
    return float(min(first - second for first, second in best))


class ConnectorTime:
    """Time spent in the connector since `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.by_method: dict[str, float] = {}
        self.steps: list[dict[str, float]] = [{}]
        self.promised_at: list[float] = []
        self.asked_at = self.loaded_at = 0.0
        self.answered: dict[str, tuple[float, float]] = {}
        self._waiting: dict[str, float] = {}

    def watch_promises(self, line: Any) -> None:
        settle = line._settle

        def noting(*question: Any) -> None:
            settle(*question)
            self.promised_at.append(time.perf_counter())

        line._settle = noting

    def watch(self, halves: tuple[object, ...], names: list[str]) -> None:
        for half in halves:
            for name in names:
                method = getattr(half, name, None)
                if callable(method):
                    setattr(half, name, self._timed(name, method))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            before, cpu_before = time.perf_counter(), time.thread_time()
            try:
                answer = method(*args, **more)
                if name == "get_num_new_matched_tokens":
                    self._note_answer(args[0].request_id, answer[0] is not None, before)
                return answer
            finally:
                after = time.perf_counter()
                self.by_method[name] = self.by_method.get(name, 0.0) + after - before
                if name in FOR_NEW_REQUESTS:
                    self.steps[-1][name] = self.steps[-1].get(name, 0.0) + time.thread_time() - cpu_before
                if name == "build_connector_meta":
                    self.steps.append({})
                if name == "get_num_new_matched_tokens":
                    self.asked_at = self.asked_at or before
                if name == "update_connector_output" and args[0].finished_recving:
                    self.loaded_at = after

        return timed

    def _note_answer(self, request_id: str, is_final: bool, before: float) -> None:
        begun = self._waiting.setdefault(request_id, before)
        if is_final and request_id not in self.answered:
            self.answered[request_id] = (begun, time.perf_counter())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver(json.loads(sys.argv[1]))
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(driver, command.pop("do"))(**command)
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
