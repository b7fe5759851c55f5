"""Settings of SGLang's two doors: the content of `--hicache-storage-backend-extra-config`, and of a linker's extra config.

Pure; any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.keys import namespace_name
from kvpool.socket_path import find_socket
from kvpool_client.engines.settings import read_settings, seconds, switch

# The keys by which SGLang itself finds the backend; it removes its own prefetch keys before.
_SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}
HICACHE, LINKER = "hicache-storage-backend-extra-config", "unified-cache-external-linker-config"
_OWN = {
    HICACHE: {"batch_timeout_s": seconds()},
    LINKER: {
        "batch_timeout_s": seconds(),
        "promise_s": seconds(0.1),
        "scheduler_timeout_s": seconds(),
        "updates_are_named": switch,
    },
}


@dataclass(frozen=True, slots=True)
class Settings:
    """`model` and `revision` name the weights; `timeout_s` bounds a round trip, `batch_timeout_s` one call of SGLang's.

    `priority`: that of pages without a hint; None: the pool's default. `source`: the option of SGLang's whose content they are.
    Of a linker alone: `promise_s`, how long pages that a request was promised stay leased at most; `scheduler_timeout_s` bounds
    a round trip for which SGLang's scheduler waits; `updates_are_named`: each update of the weights has a version, which all
    engines of the model have for the same weights and for no others.
    """

    model: str
    socket: str = field(default_factory=find_socket)
    revision: str = ""
    salt: str = ""
    timeout_s: float = 1.0
    batch_timeout_s: float = 10.0
    copy_threads: int = 2
    priority: int | None = None
    promise_s: float = 10.0
    scheduler_timeout_s: float = 0.05
    updates_are_named: bool = False
    source: str = HICACHE

    @classmethod
    def read(cls, extra: Mapping[str, object] | None, model_name: str | None, source: str = HICACHE) -> "Settings":
        """The settings of an extra config. Raises ConfigError, naming every key that is wrong."""
        given = {key: value for key, value in (extra or {}).items() if source == LINKER or key not in _SGLANG_KEYS}
        faults = []
        if source == HICACHE and not (extra or {}).get("interface_v1"):
            faults.append("interface_v1 is not set, expected 1: without it SGLang copies every page twice")
        if not (given.get("model") or model_name):
            faults.append("model is empty and SGLang names none, expected the model's name")
        values = read_settings(cls, given, _OWN[source], where=f"{source}: ", faults=faults)
        return cls(source=source, **{**values, "model": values.get("model") or model_name})

    @property
    def identity(self) -> str:
        """The model's name in the pool: chunks are shared only where this is equal."""
        return namespace_name(self.model, self.revision)
