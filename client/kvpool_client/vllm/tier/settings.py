"""Settings of the tier: what stands beside `type` and `module_path` in an entry of vLLM's `secondary_tiers`.

A wrong value refuses the engine's start and names the key, the value and what was expected, all faults at once: that is the
one moment at which raising is right. Immutable; any thread.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvpool.errors import ConfigError, did_you_mean
from kvpool.socket_path import fault_of_path, find_socket
from kvpool.states import PRIORITY_MAX
from kvpool_client.arguments import is_text
from kvpool_client.engines.given_names import MODEL_EXPECTED, is_model_name

_TEXTS = {
    "model": (is_model_name, MODEL_EXPECTED),
    "revision": (is_text, "a string"),
    "salt": (is_text, "a string"),
    "reset": (lambda value: value in ("engine", "node"), "'engine' or 'node'"),
    "locality": (lambda value: value in ("LOCAL", "REMOTE"), "'LOCAL' or 'REMOTE'"),
}
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "timeout_s": (0.001, 3600.0),
    "batch_timeout_s": (0.001, 3600.0),
    "copy_threads": (1, 64),
    "queue_jobs": (1, 65536),
    "priority": (0, PRIORITY_MAX),
}
_WHOLE = ("copy_threads", "queue_jobs", "priority")


@dataclass(frozen=True, slots=True)
class Settings:
    """An operator's settings.

    `socket`: the daemon's. `timeout_s`: one round trip, a copy's longest time without progress, and how long a reset waits for
    jobs before it withdraws them. `batch_timeout_s`: one job of vLLM's. `copy_threads`: native threads that copy.
    `queue_jobs`: jobs of each direction that are open at once; more end without success. `model`: the operator's name for the
    model; where neither a directory nor a commit identifies the weights, this name alone does. `revision`: stands for the
    weights where nothing else does, and parts chunks in any case. `salt`: a tenant's. `priority`: that of chunks without a
    hint; None: the pool's default. `reset`: the scope of a reset of vLLM's cache: "engine": it finds nothing older, "node": the
    model's chunks are dropped for all besides. `locality`: vLLM's own, by which a request may choose tiers.
    """

    socket: str = field(default_factory=find_socket)
    timeout_s: float = 1.0
    batch_timeout_s: float = 10.0
    copy_threads: int = 2
    queue_jobs: int = 256
    model: str = ""
    revision: str = ""
    salt: str = ""
    priority: int | None = None
    reset: str = "engine"
    locality: str = ""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> "Settings":
        """The settings of an entry. Raises ConfigError with every fault."""
        known = [each.name for each in fields(cls)]
        faults = [f"{key} is no setting{did_you_mean(str(key), known)}" for key in given if key not in known]
        if "socket" in given and (fault := fault_of_path(given["socket"])):
            faults.append(f"socket is {given['socket']!r}, expected {fault}")
        for key, (is_right, expected) in _TEXTS.items():
            if key in given and not is_right(given[key]):
                faults.append(f"{key} is {given[key]!r:.80}, expected {expected}")
        for key, (least, most) in _NUMBERS.items():
            value = given.get(key, least)
            kinds = int if key in _WHOLE else (int, float)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:  # type: ignore[operator]  # a number by the line above
                faults.append(f"{key} is {value!r:.80}, expected {least}..{most}")
        if faults:
            raise ConfigError([f"secondary_tiers, kvpool's: {fault}" for fault in faults])
        values = dict(given)
        if "socket" in values:
            values["socket"] = os.fsdecode(values["socket"])  # type: ignore[arg-type]  # a path by the check above
        return cls(**values)  # type: ignore[arg-type]  # every value was checked above
