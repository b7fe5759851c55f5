"""Engine process: whether an idle engine is stepped, and whether its worker's connector is in this process.

An engine in a process of its own steps on while a connector reports work; one inside its caller's process (`LLM` without V1
multiprocessing) runs only while the caller waits for output. Reads vLLM's modules where they are loaded. Any thread.
"""

import sys


def is_stepped_while_idle() -> bool:
    """Whether the engine steps on without requests while its connector reports work."""
    envs = sys.modules.get("vllm.envs")
    return bool(getattr(envs, "VLLM_ENABLE_V1_MULTIPROCESSING", False))


def worker_here() -> object | None:
    """The kvpool connector of the worker in this process, with or without a pool, or none."""
    transfer = sys.modules.get("vllm.distributed.kv_transfer")
    has, get = getattr(transfer, "has_kv_transfer_group", None), getattr(transfer, "get_kv_transfer_group", None)
    if not callable(has) or not callable(get) or not has():
        return None
    group = get()
    children = (group, *getattr(group, "_connectors", ()))
    return next((child for child in children if getattr(child, "has_worker", False)), None)
