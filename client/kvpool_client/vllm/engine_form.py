"""What orders the bytes inside a block beyond the configuration: the engine's version, the device, its instruction set.

The CPU backend packs K for the widest instructions there are, so a block written with AMX means nothing to an engine
without. Asks vLLM and torch where they are loaded, which they are in an engine. Any thread.
"""

import platform
import sys
from collections.abc import Callable

from kvpool_client.vllm.surface import EngineConfig

CPU_FEATURES = ("_is_amx_tile_supported", "_is_avx512_supported", "_is_avx2_supported")


def engine_form(config: EngineConfig) -> str:
    """A name for the order of bytes inside this engine's blocks."""
    version = getattr(sys.modules.get("vllm"), "__version__", "unknown")
    device = str(getattr(getattr(config, "device_config", None), "device_type", "cpu"))
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    parts = [str(version), device, str(getattr(backend, "name", backend))]
    parts.append(_cpu_features() if device == "cpu" else _device_name())
    return "/".join(parts)


def _cpu_features() -> str:
    probes: object = getattr(sys.modules.get("torch"), "cpu", None)
    found = [name for name in CPU_FEATURES if _says_yes(getattr(probes, name, None))]
    return "+".join([platform.machine(), *(name.removeprefix("_is_").removesuffix("_supported") for name in found)])


def _device_name() -> str:
    """The accelerator's name, by which vLLM chooses its attention backend."""
    current = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    ask = getattr(current, "get_device_name", None)
    return str(ask()) if callable(ask) else ""


def _says_yes(probe: Callable[[], object] | None) -> bool:
    return probe is not None and bool(probe())
