"""TensorRT-LLM's KV cache connector, loaded by configuration with nothing patched.

    KvCacheConnectorConfig(connector_module="kvpool_client.trtllm",
                           connector_scheduler_class="KVPoolScheduler", connector_worker_class="KVPoolWorker")

The rest of the configuration is in the environment (`settings`). The two classes are made when they are asked for, because
their base classes are TensorRT-LLM's: importing this package imports no engine.
"""

from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.plan import LoadOrder, Plan, SaveOrder
from kvpool_client.trtllm.scheduler_half import SchedulerHalf
from kvpool_client.trtllm.settings import Settings
from kvpool_client.trtllm.worker_half import WorkerHalf

__all__ = [
    "Geometry",
    "KVPoolScheduler",
    "KVPoolWorker",
    "LoadOrder",
    "Plan",
    "SaveOrder",
    "SchedulerHalf",
    "Settings",
    "WorkerHalf",
]


def __getattr__(name: str) -> object:
    """The connector's classes, once TensorRT-LLM asks for them."""
    if name not in ("KVPoolScheduler", "KVPoolWorker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool_client.trtllm import connector  # optional heavy dependency: tensorrt_llm

    found: object = getattr(connector, name)
    return found
