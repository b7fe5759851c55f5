"""Cost of a step of an engine in this process with and without a connector: the same requests' steps, in turns.

Two engines, or two rounds of one, differ by more than a connector costs; two consecutive steps do not. On a shared machine
wall-clock time includes other programs: processor time is compared, or time without waits for a processor.
"""

import time
from pathlib import Path
from typing import Any

SCHEDULED = Path("/proc/thread-self/schedstat")


def unhindered_seconds() -> float:
    """A clock that does not count the time in which this thread waits for a processor."""
    waited_ns = int(SCHEDULED.read_text().split()[1])
    return time.perf_counter() - waited_ns / 1e9


def empty_connectors(engine: Any) -> tuple[Any, Any]:
    """Both halves of a connector that does nothing: vLLM's own cost of having one."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    class NoOrders(base.KVConnectorMetadata):
        """Nothing to do."""

    class EmptyConnector(base.KVConnectorBase_V1):
        """Every call that vLLM requires, without a body."""

        def start_load_kv(self, *_arguments: Any, **_more: Any) -> None: ...

        def wait_for_layer_load(self, layer_name: str) -> None: ...

        def save_kv_layer(self, *_arguments: Any, **_more: Any) -> None: ...

        def wait_for_save(self) -> None: ...

        def get_num_new_matched_tokens(self, *_arguments: Any) -> tuple[int, bool]:
            return 0, False

        def update_state_after_alloc(self, *_arguments: Any) -> None: ...

        def build_connector_meta(self, *_arguments: Any) -> Any:
            return NoOrders()

    caches = engine.engine_core.engine_core.scheduler.kv_cache_config
    roles = base.KVConnectorRole.SCHEDULER, base.KVConnectorRole.WORKER
    scheduler, worker = (EmptyConnector(engine.vllm_config, role, caches) for role in roles)
    return scheduler, worker


def steps_in_turns(engine: Any, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step, and processor time of its thread, without a connector, with an empty one and with its own.

    Requires: requests that only decode from here on, for 3 × `rounds` steps, with nothing of them left to save.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    scheduler = engine.engine_core.engine_core.scheduler
    own = scheduler.connector, state._KV_CONNECTOR_AGENT
    halves = {"none": (None, None), "empty": empty_connectors(engine), "pool": own}
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in halves}
    names = list(halves)
    for number in range(rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            scheduler.connector, state._KV_CONNECTOR_AGENT = halves[name]
            before, cpu_before = time.perf_counter(), time.thread_time()
            engine.step()
            cpu_after, after = time.thread_time(), time.perf_counter()
            costs[name].append((after - before, cpu_after - cpu_before))
    scheduler.connector, state._KV_CONNECTOR_AGENT = own
    return costs
