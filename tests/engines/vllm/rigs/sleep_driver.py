"""A process in which another release's own engine core, executor and worker put a scripted engine to sleep: `DIRECTORY SOCKET`.

DIRECTORY has the Python files of that release's wheel, whose native parts nothing here calls. Its methods run on stand-ins for
what they have no device for: the allocator takes the scripted engine's memory, and checks that nobody writes to it. Prints a
JSON object of what was seen.
"""

import json
import sys
from types import MethodType, SimpleNamespace
from typing import Any

sys.path.insert(0, sys.argv[1])

import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu_worker import Worker

from kvpool_client.vllm import connector, plugin
from kvpool_client.vllm.event_feed import _maker_of
from kvpool_client.vllm.worker.weight_watch import MARK
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StillClock, ask, prompt

TOKENS = prompt(1, 5 * CHUNK + 1)


class SleepingMemory:
    """vLLM's allocator: what it takes away is the scripted engine's KV; `taken` says whether it has."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.taken = False

    def suspend(self, _level: int) -> None:
        self._engine.memory.take_away()
        self.taken = True

    def discard(self, tags: tuple[str, ...]) -> None:
        assert tags == ("kv_cache",)
        self.suspend(1)

    def resume(self, tags: list[str] | None) -> None:
        if self.taken and (tags is None or "kv_cache" in tags):
            self._engine.memory.bring_back()
            self.taken = False


def worker_of(engine: ScriptedEngine) -> Any:
    """This release's worker, without a device."""
    worker = Worker.__new__(Worker)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=[])
    worker._sleep_mode_backend = SleepingMemory(engine)
    worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers, worker._sleep_saved_parameters = {}, {}, {}
    worker.model_runner = SimpleNamespace(model=torch.nn.Linear(1, 1), get_model=lambda: torch.nn.Linear(1, 1))
    worker.get_draft_model = lambda: None
    worker.synchronize_device = lambda: None
    return worker


class OneWorker(Executor):
    """This release's executor of one worker in this process."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.sleeping_tags: set[str] = set()
        self.worker = worker_of(engine)
        self._engine = engine

    def _init_executor(self) -> None: ...

    def check_health(self) -> None: ...

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def get_kv_connector_handshake_metadata(self) -> Any:
        shown = self._engine.workers[0].get_handshake_metadata()
        return [None if shown is None else {(0, 0): shown}]

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...


def scheduler_of(engine: ScriptedEngine) -> Any:
    """What the engine core asks its scheduler, answered by the scripted engine."""
    scheduler = SimpleNamespace(
        running=[],
        connector=engine.scheduler,
        log_stats=False,
        aux_output_connector=None,
        kv_cache_manager=engine.blocks,
        pause_state=PauseState.UNPAUSED,
        prev_step_scheduled_req_ids=set(),
        get_kv_connector=lambda: engine.scheduler,
        has_requests=lambda: bool(engine.requests),
        has_unfinished_requests=lambda: bool(engine.requests),
        reset_encoder_cache=lambda: None,
    )
    for name in ("reset_prefix_cache", "reset_connector_cache"):
        setattr(scheduler, name, MethodType(getattr(Scheduler, name), scheduler))
    scheduler.finish_requests = lambda *_: engine.abort_all()
    scheduler.set_pause_state = lambda state: setattr(scheduler, "pause_state", state)
    return scheduler


def core_of(engine: ScriptedEngine) -> Any:
    core = EngineCore.__new__(EngineCore)
    core.scheduler, core.model_executor = scheduler_of(engine), OneWorker(engine)
    core.mm_receiver_cache = core.batch_queue = None
    return core


def cycle(engine: ScriptedEngine, name: str, sleep: Any, wake_up: Any) -> list[int]:
    """Tokens from the pool before the sleep, behind it, and once more."""
    found = [ask(engine, f"{name}-{when}", TOKENS).external for when in ("cold", "before")]
    engine.arrive(Request(f"{name}-running", prompt(7, 2 * CHUNK + 1), new_tokens=50))
    engine.step()
    sleep()
    assert engine.workers[0]._worker.pool is None, "its memory is gone"
    wake_up()
    assert engine.workers[0]._worker.pool is not None
    return found[1:] + [ask(engine, f"{name}-{when}", TOKENS).external for when in ("behind", "again")]


def main() -> None:
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.get_memory_info = lambda *_: (1, 2)
    plugin.register()
    own = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [own, own]},
    }
    sleeps = []
    for given in (own, several):
        config = KVTransferConfig(**given)
        sleeps.append(KVConnectorFactory.get_connector_class(config).supports_sleep_mode(config))
    extra: dict[str, Any] = {"kvpool__always_load": True, "kvpool__save": "all", "kvpool__wait_s": 60.0}
    engine = ScriptedEngine(connector.KVPoolConnector, sys.argv[2], kvpool__timeout_s=60.0, **extra)
    engine.scheduler._scheduler._offers._clock = StillClock()
    kv_transfer_state._KV_CONNECTOR_AGENT = engine.workers[0]
    core = core_of(engine)

    def wake_in_parts() -> None:
        assert not core.wake_up(["weights"])
        assert engine.workers[0]._worker.pool is None
        assert core.wake_up(["kv_cache"])

    def release() -> None:
        core.pause_scheduler("abort", False)
        core.release_kv_cache_memory()

    event = _maker_of(kv_events)(
        "BlockStored",
        {"block_hashes": [1], "parent_block_hash": None, "token_ids": [2], "block_size": 1, "lora_id": None}
        | {"medium": "CPU", "lora_name": None, "cache_salt": "unknown to vLLM"},
    )
    seen = {
        "version": vllm.__version__,
        "supports_sleep_mode": sleeps,
        "level 1": cycle(engine, "one", lambda: core.sleep(1), core.wake_up),
        "level 2, woken in parts": cycle(engine, "two", lambda: core.sleep(2), wake_in_parts),
        "released": cycle(engine, "released", release, lambda: core.wake_up(["kv_cache"])),
        "watched": [hasattr(method, MARK) for method in (Worker.update_weights, AutoWeightsLoader.load_weights)],
        "lookahead_token_ids": getattr(event, "lookahead_token_ids", None),
        "wrong_reads": engine.wrong_reads,
    }
    changed = engine.workers[0]._worker.weights.changed_after
    core.model_executor.worker.apply_model(lambda _: None)
    seen["apply_model is noticed"] = engine.workers[0]._worker.weights.changed_after > changed
    engine.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
