"""Settings of SGLang's two doors: the content of `--hicache-storage-backend-extra-config`, and of a linker's extra config.

Read once, checked whole; every fault is named at once. Pure; any thread.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.errors import InvalidArgument, did_you_mean
from kvpool.keys import namespace_name
from kvpool.socket_path import fault_of_path, find_socket
from kvpool.states import PRIORITY_MAX
from kvpool_client.arguments import is_text
from kvpool_client.engines.given_names import MODEL_EXPECTED, is_model_name

# The keys by which SGLang itself finds the backend; it removes its own prefetch keys before.
_SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}
HICACHE, LINKER = "hicache-storage-backend-extra-config", "unified-cache-external-linker-config"


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
        """The settings of an extra config. Raises InvalidArgument, naming every key that is wrong."""
        given = {key: value for key, value in (extra or {}).items() if source == LINKER or key not in _SGLANG_KEYS}
        faults = []
        if source == HICACHE and not (extra or {}).get("interface_v1"):
            faults.append("interface_v1 is not set, expected 1: without it SGLang copies every page twice")
        texts = {"model": lambda value: value == "" or is_model_name(value), "revision": is_text, "salt": is_text}
        numbers = {
            "timeout_s": (0.001, 3600.0),
            "batch_timeout_s": (0.001, 3600.0),
            "copy_threads": (1, 64),
            "priority": (0, PRIORITY_MAX),
        }
        if source == LINKER:
            numbers |= {"promise_s": (0.1, 3600.0), "scheduler_timeout_s": (0.001, 3600.0)}
        switches = ["updates_are_named"] if source == LINKER else []
        known = ["socket", *texts, *numbers, *switches]
        faults += [
            f"{key} is {given[key]!r}, expected true or false"
            for key in switches
            if not isinstance(given.get(key, False), bool)
        ]
        faults += [f"{key} is no setting{did_you_mean(str(key), known)}" for key in given if key not in known]
        faults += [
            f"{key} is {given[key]!r}, expected {MODEL_EXPECTED if key == 'model' else 'a string'}"
            for key, is_right in texts.items()
            if key in given and not is_right(given[key])
        ]
        if "socket" in given and (fault := fault_of_path(given["socket"])):
            faults.append(f"socket is {given['socket']!r}, expected {fault}")
        for key, (least, most) in numbers.items():
            value = given.get(key, least)
            kinds = int if key in ("copy_threads", "priority") else (int, float)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:  # type: ignore[operator]  # a number by the line above
                faults.append(f"{key} is {value!r}, expected {least}..{most}")
        if not given.get("model") and not model_name:
            faults.append("model is empty and SGLang names none, expected the model's name")
        if faults:
            raise InvalidArgument(f"{source}: " + "; ".join(faults))
        if "socket" in given:
            given["socket"] = os.fsdecode(given["socket"])  # type: ignore[arg-type]  # a path by the check above
        given["model"] = given.get("model") or model_name
        return cls(source=source, **given)  # type: ignore[arg-type]  # each was checked above

    @property
    def identity(self) -> str:
        """The model's name in the pool: chunks are shared only where this is equal."""
        return namespace_name(self.model, self.revision)
