"""Processes of vLLM: is an idle engine stepped, and is its worker's connector in this process.

An engine in a process of its own steps on while a connector says that it has work; one inside its caller's process (`LLM`
without V1 multiprocessing) runs only while the caller waits for output. Asks vLLM's modules where they are loaded. Any thread.
"""

import sys


def is_stepped_while_idle() -> bool:
    """Whether the engine steps on without requests where its connector wants that."""
    envs = sys.modules.get("vllm.envs")
    return bool(getattr(envs, "VLLM_ENABLE_V1_MULTIPROCESSING", False))


def worker_here() -> object | None:
    """The connector of kvpool's that keeps KV for the worker in this process, or none."""
    transfer = sys.modules.get("vllm.distributed.kv_transfer")
    has, get = getattr(transfer, "has_kv_transfer_group", None), getattr(transfer, "get_kv_transfer_group", None)
    if not callable(has) or not callable(get) or not has():
        return None
    group = get()
    children = (group, *getattr(group, "_connectors", ()))
    return next((child for child in children if getattr(child, "has_worker", False)), None)
