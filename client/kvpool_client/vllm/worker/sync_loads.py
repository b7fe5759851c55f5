"""Synchronous loads (`kvpool.load: sync`), and the engines in which vLLM recovers from one that fails.

After a failed synchronous load vLLM takes back the tokens that it had counted. With its V2 model runner it takes them back from
a copy that the device does not read, and with asynchronous scheduling or pipeline stages further steps are planned before they
are taken back.
Either way tokens would depend on KV that never came, so loads run between steps there. Reads the configuration alone. Any
thread.
"""

from dataclasses import replace

from kvpool_client.vllm.ranks.stages import stage_count
from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.surface import EngineConfig


def broken_recovery(config: EngineConfig, *, may_cut_hits: bool) -> str:
    """Why vLLM does not recover from a synchronous load that fails; empty where it does."""
    if not may_cut_hits:
        return "vLLM cannot be notified that one has failed where layers need different tokens of a prompt"
    if getattr(getattr(config, "scheduler_config", None), "async_scheduling", False):
        return "vLLM schedules asynchronously (--no-async-scheduling would allow it)"
    if stage_count(config.parallel_config) > 1:
        return "vLLM plans further steps while one is in its pipeline (without --pipeline-parallel-size it is allowed)"
    if getattr(config, "use_v2_model_runner", False):
        return "vLLM runs its V2 model runner (VLLM_USE_V2_MODEL_RUNNER=0 would allow it)"
    return ""


def served_loads(settings: Settings, config: EngineConfig, *, may_cut_hits: bool) -> tuple[Settings, str]:
    """The settings with a kind of load that vLLM recovers from, and the reason where it differs from the requested one."""
    reason = "" if settings.is_async else broken_recovery(config, may_cut_hits=may_cut_hits)
    return (replace(settings, load="async"), reason) if reason else (settings, "")
