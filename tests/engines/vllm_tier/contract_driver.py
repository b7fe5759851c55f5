"""A process in which vLLM's own tiering, out of its wheel, drives the tier: `DIRECTORY SCENARIO…`.

DIRECTORY has vLLM's Python files. Each scenario has a daemon of its own. Prints what each has seen as JSON, or the traceback of
one that failed: a byte that is wrong is an AssertionError, and so is what vLLM itself asserts.
"""

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401 - before the stubs: it is a real one

from tests.engines.vllm_tier.engine_files import open_files
from tests.engines.vllm_tier.region import ROW_BYTES, TOKENS, bytes_of, keys_of
from tests.rigs.daemon import Daemon

SETTINGS: dict[str, Any] = {"revision": "1", "timeout_s": 60.0, "batch_timeout_s": 60.0}
NAP_S = 0.001


def _prompt(number: int, chunks: int) -> list[int]:
    """Tokens of a prompt: so many full blocks and a part of one."""
    return [number * 10_000 + token for token in range(chunks * TOKENS + 3)]


# --- the tiering manager alone


class Manager:
    """vLLM's tiering manager over a region, and a script in the place of its scheduler and worker."""

    def __init__(self, rows: int = 64, **tier: Any) -> None:
        from vllm.v1.kv_offload import config as made
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        entry = {"type": "KVPoolTier", "module_path": "kvpool_client.vllm.tier", **SETTINGS, **tier}
        parallel = {
            "rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "data_parallel_index": 0,
            "data_parallel_size": 1, "data_parallel_rank_local": None, "is_parallelism_agnostic": True,
        }  # fmt: skip
        config = made.OffloadingConfig(
            groups=(made.OffloadingGroupConfig(tokens_per_block=TOKENS, layer_names=("a",), group_id=0),),
            worker_kv_bytes_per_block=ROW_BYTES,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": rows * ROW_BYTES, "secondary_tiers": [entry]},
            engine_id=f"kvpool-test-{time.monotonic_ns()}",
            model=made.OffloadingModelConfig(name="/models/tiny", dtype="float16"),
            cache=made.OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
            parallel=made.OffloadingParallelConfig(**parallel),
        )
        self.spec = TieringOffloadingSpec(config)
        self.vllm = self.spec.get_manager()
        (self.tier,) = self.vllm.secondary_tiers
        self._count = 0

    def request(self, keys: list[bytes]) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        self._count += 1
        context = ReqContext(req_id=f"r{self._count}")
        self.vllm.on_new_request(context)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, (place + 1) * TOKENS)
        return context

    def settle(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        while True:
            self.vllm.on_schedule_end(ScheduleEndContext((), ()))
            if not self.vllm.has_pending_work():
                return
            time.sleep(NAP_S)

    def store(self, keys: list[bytes]) -> Any:
        """A request has these computed: copied into the region, and offered to the tier."""
        context = self.request(keys)
        made = self.vllm.prepare_store(keys, context)
        if made.keys_to_store:
            self._rows()[made.store_spec.chunk_ids] = np.stack([bytes_of(key) for key in made.keys_to_store]).view(
                np.int8
            )
            self.vllm.complete_store(set(made.keys_to_store), context)
        self.settle()
        self.vllm.on_request_finished(context)
        return context

    def load(self, keys: list[bytes], context: Any = None) -> int:
        """A request looks these up; how many of them, from the first on, the region has in the end, with their bytes."""
        context = context or self.request(keys)
        self.lookup(keys, context)
        self.settle()
        found = self.lookup(keys, context)
        spec = self.vllm.prepare_load(keys[:found], context)
        rows = self._rows()
        for key, row in zip(keys, spec.chunk_ids, strict=False):
            assert np.array_equal(rows[row].view(np.uint8), bytes_of(key)), "other bytes in a row"
        self.vllm.complete_load(keys[:found], context)
        return found

    def lookup(self, keys: list[bytes], context: Any) -> int:
        """As vLLM's scheduler: up to the first miss. How many are ready."""
        ready = 0
        for key in keys:
            name = self.vllm.lookup(key, context).name
            assert name != "RETRY"
            if name == "MISS":
                break
            ready += name == "HIT"
        return ready

    def reset(self) -> None:
        self.vllm.reset_cache()
        getattr(self.vllm, "on_reset_flushed", lambda: None)()

    def close(self) -> None:
        self.vllm.shutdown()

    def _rows(self) -> Any:
        return np.asarray(self.vllm.primary_tier.get_kv_memoryview())


def manager_stores_and_loads(daemon: Daemon) -> dict[str, Any]:
    first, keys = Manager(socket=daemon.socket), keys_of(1, 20)
    first.store(keys)
    first.close()
    second = Manager(socket=daemon.socket, locality="REMOTE")
    seen = {
        "locality": second.tier.locality.value,
        "loaded": second.load(keys),
        "again": second.load(keys),
        "stats": second.tier.get_stats().reduce(),
    }
    seen["defined"] = set(seen["stats"]) <= set(type(second.tier).build_metric_definitions({}))
    second.reset()
    seen["after_reset"] = second.load(keys)
    second.close()
    return seen


def manager_loses_some(daemon: Daemon) -> dict[str, Any]:
    """Between lookup and load some chunks are dropped: these are computed, and asked for only once."""
    from kvpool_client.engines.flushing import flush_model

    first, keys = Manager(socket=daemon.socket), keys_of(1, 12)
    first.store(keys)
    first.close()
    one = Manager(socket=daemon.socket)
    context = one.request(keys)
    one.lookup(keys, context)
    assert flush_model(daemon.socket, one.tier._jobs._rows.model, 60.0) == ""
    other = Manager(socket=daemon.socket)
    other.store(keys[:5])
    one.settle()
    seen = {"ready": one.lookup(keys, context), "again": one.lookup(keys, context)}
    one.settle()
    other.store(keys)
    seen["later"] = one.lookup(keys, context)
    seen["another request"] = one.load(keys)
    one.close()
    other.close()
    return seen


def manager_without_a_daemon(daemon: Daemon) -> dict[str, Any]:
    one, keys = Manager(socket=daemon.socket, timeout_s=0.5), keys_of(1, 8)
    one.store(keys)
    one.reset()
    daemon.kill()
    one.store(keys)
    seen = {"away": one.load(keys_of(2, 4)), "region": one.load(keys)}
    one.reset()
    one.close()
    absent = Manager(socket="/nowhere/kvpool.sock", timeout_s=0.5)
    absent.store(keys)
    seen["absent"] = absent.load(keys_of(3, 2))
    absent.close()
    return seen


# --- vLLM's whole scheduler


def _engine(daemon: Daemon, **given: Any) -> Any:
    from tests.engines.vllm_tier.scripted_engine import ScriptedEngine

    return ScriptedEngine(**{"socket": daemon.socket, **SETTINGS, **given})


def scheduler_serves_prompts(daemon: Daemon) -> dict[str, Any]:
    first = _engine(daemon)
    seen = {"first": [first.serve(_prompt(number, 12), 20) for number in range(3)]}
    first.close()
    second = _engine(daemon)
    requests = [second.add(_prompt(number, 12), 20) for number in range(3)]
    second.run(*requests)
    seen["second"] = [second.loaded[request.request_id] for request in requests]
    second.close()
    return seen


def scheduler_resets(daemon: Daemon) -> dict[str, Any]:
    """Before and after a reset with jobs open: what was stored before is stale for this engine, and there for others."""
    one, prompt = _engine(daemon), _prompt(1, 12)
    seen = {"cold": one.serve(prompt)}
    one.forget()
    seen["region"] = one.serve(prompt)
    one.reset()
    seen["after_reset"] = one.serve(prompt)
    one.forget()
    running = one.add(_prompt(2, 40), 4)
    one.step()
    one.step()
    one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    one.run(running)
    seen["running"] = str(running.status.name)
    one.close()
    other = _engine(daemon)
    seen["other"] = other.serve(prompt)
    other.close()
    node = _engine(daemon, reset="node")
    node.reset()
    node.close()
    last = _engine(daemon)
    seen["after_reset_of_node"] = last.serve(prompt)
    last.close()
    return seen


def scheduler_has_new_weights(daemon: Daemon) -> dict[str, Any]:
    """They come with requests waiting behind a reset, with one running, and without any reset: how many chunks are stored."""

    known = 0

    def stored(*asked: list[int]) -> int:
        """When these are served too, of all since the last call."""
        nonlocal known
        for prompt in asked:
            one.serve(prompt)
        before, known = known, int(daemon.stats()["dram.chunks"])
        return known - before

    one = _engine(daemon)
    seen = {"old": stored(_prompt(1, 4))}
    one.reset()
    waiting = one.add(_prompt(2, 4))
    one.collective_rpc("update_weights")
    one.run(waiting)
    seen["behind a reset"] = stored(_prompt(2, 4), _prompt(3, 4))
    seen["checked"] = len(one.collective_rpc("compute_weight_checksums")) * stored(_prompt(4, 4))
    running = one.add(_prompt(5, 4), 20)
    one.step()
    one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    one.collective_rpc("update_weights")
    one.run(running)
    seen["beside one that runs again"] = stored(_prompt(6, 4))
    one.collective_rpc("update_weights")
    seen["without a reset"] = stored(_prompt(7, 4), _prompt(1, 4))
    one.forget()
    seen["behind a reset of the prefix cache alone"] = stored(_prompt(8, 4))
    one.reset()
    seen["reset at last"] = stored(_prompt(8, 4))
    one.close()
    return seen


def scheduler_has_a_hot_prompt(daemon: Daemon) -> dict[str, Any]:
    """A prompt that the region serves six times survives two others that fill the pool."""
    one, hot = _engine(daemon, blocks=256, region_rows=160), _prompt(1, 20)
    one.serve(hot)
    one.serve(_prompt(2, 20))
    seen: dict[str, Any] = {"region": []}
    for _ in range(5):
        one.forget()
        seen["region"].append(one.serve(hot))
    one.serve(_prompt(3, 25))
    one.close()
    two = _engine(daemon, blocks=256, region_rows=160)
    seen["found"] = two.serve(hot)
    seen["others"] = two.serve(_prompt(2, 20)) < 20
    two.close()
    return seen


def scheduler_aborts_and_preempts(daemon: Daemon) -> dict[str, Any]:
    from vllm.v1.request import RequestStatus

    stored = _engine(daemon)
    stored.serve(_prompt(1, 12), 4)
    stored.close()
    one = _engine(daemon, blocks=40)
    aborted = one.add(_prompt(1, 12), 4)
    one.step()
    one.scheduler.finish_requests(aborted.request_id, RequestStatus.FINISHED_ABORTED)
    one.run()
    requests = [one.add(_prompt(number, 12), 60) for number in range(1, 5)]
    one.run(*requests)
    seen = {
        "preempted": one.preempted > 0,
        "loaded": one.loaded[requests[0].request_id] > 0,
        "ended": [request.num_output_tokens for request in requests],
    }
    one.close()
    return seen


def scheduler_loses_its_daemon(daemon: Daemon) -> dict[str, Any]:
    first = _engine(daemon)
    first.serve(_prompt(1, 12), 4)
    first.close()
    one = _engine(daemon, timeout_s=0.5)
    requests = [one.add(_prompt(number, 12), 4) for number in range(1, 5)]
    one.step()
    daemon.kill()
    one.run(*requests)
    seen = {"ended": [request.num_output_tokens for request in requests], "cold": one.serve(_prompt(9, 12))}
    daemon.start()
    while "connected" not in repr(one.tier):
        time.sleep(NAP_S)
    one.serve(_prompt(9, 13))
    one.close()
    two = _engine(daemon)
    seen["back"] = two.serve(_prompt(9, 13)) > 0
    two.close()
    return seen


def scheduler_has_a_full_line(daemon: Daemon) -> dict[str, Any]:
    one = _engine(daemon, queue_jobs=1)
    requests = [one.add(_prompt(number, 12), 20) for number in range(6)]
    one.run(*requests)
    seen = {"ended": [request.num_output_tokens for request in requests]}
    one.close()
    return seen


SCENARIOS = {name: value for name, value in list(globals().items()) if name.startswith(("manager_", "scheduler_"))}


def main(directory: Path, scenarios: list[str]) -> None:
    open_files(directory.resolve())
    seen: dict[str, Any] = {}
    for name in scenarios:
        # A socket's path has a bound.
        with (
            tempfile.TemporaryDirectory(prefix="kvt") as short,
            Daemon(Path(short), **{"dram.capacity": "4MiB"}) as daemon,
        ):
            try:
                seen[name] = SCENARIOS[name](daemon)
            except Exception:
                seen[name] = traceback.format_exc()
            daemon.forgive_logged_errors()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
