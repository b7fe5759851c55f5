"""Settings of the tier: what stands beside `type` and `module_path` in an entry of vLLM's `secondary_tiers`.

Immutable; any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.socket_path import find_socket
from kvpool_client.engines.settings import choice, integer, read_settings, seconds

_OWN = {
    "batch_timeout_s": seconds(),
    "queue_jobs": integer(1, 65536),
    "reset": choice("engine", "node"),
    "locality": choice("LOCAL", "REMOTE"),
}


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
        return cls(**read_settings(cls, given, _OWN, where="secondary_tiers, kvpool's: "))
