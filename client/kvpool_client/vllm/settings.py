"""Settings of the vLLM connector: the `kvpool.*` keys of `kv_connector_extra_config`.

A wrong value refuses the engine's start and names the key, the value and what was expected, all faults at once: that is
the one moment at which raising is right. Immutable; any thread.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvpool.errors import ConfigError, did_you_mean
from kvpool.socket_path import fault_of_path, find_socket
from kvpool_client.engines.given_names import MODEL_EXPECTED, is_model_name

PREFIX = "kvpool."
# Reuses 97 % of what blocks of 16 tokens would at prompts of 300 to 1500 tokens, 256 reuses 86 % (docs/engines.md).
CHUNK_TOKENS_WANTED = 64
SECONDS_MAX = 3600.0
THREADS_MAX = 64
SIGHTINGS_WANTED_MAX = 1000
HEAD_GROUPS_WANTED_MAX = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """An operator's settings.

    `socket`: the daemon's. `chunk_tokens`: a multiple of the engine's block; 0: the largest one up to 64, at least one
    block. `timeout_s`: one round trip, and a load's or save's longest time without progress. `wait_s`: how long a request
    may be held back: half for an answer that is late, half for chunks that another engine is just saving. `load`: "async" or
    "sync". `always_load`: take a hit even where computing is quicker. `copy_threads`: native threads that copy for a
    worker. `load_threads`: asynchronous loads under way at once. `announce`: report waiting requests to the daemon, so that
    their chunks are promoted to DRAM meanwhile. `model`: the operator's name for the model; where neither a directory nor a
    commit identifies the weights, this name alone does. `save`: "prompt", or "all" with what is generated; a request may choose
    otherwise. `save_after`: store a chunk when so many requests have had it. `events`: publish the pool's chunks in vLLM's own
    stream of KV events. `reset`: the scope of vLLM's reset of the cache: "engine": for itself alone, "node": the model's
    chunks, for all. `head_groups`: engines of any tensor-parallel size up to this one, and of any pipeline stages, share
    chunks; 0: only those of the same sizes do.
    """

    socket: str = field(default_factory=find_socket)
    chunk_tokens: int = 0
    timeout_s: float = 1.0
    wait_s: float = 0.2
    load: str = "async"
    always_load: bool = False
    copy_threads: int = 1
    load_threads: int = 2
    announce: bool = True
    save: str = "prompt"
    save_after: int = 1
    events: bool = False
    model: str = ""
    reset: str = "engine"
    head_groups: int = 0

    @property
    def is_async(self) -> bool:
        """Whether loads run between engine steps."""
        return self.load == "async"

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> "Settings":
        """The settings in `kv_connector_extra_config`. Raises ConfigError with every fault."""
        known = {PREFIX + field.name: field.name for field in fields(cls)}
        faults = [
            f"{key} is unknown{did_you_mean(str(key), known)}; expected one of {', '.join(known)}"
            for key in extra
            if str(key).startswith(PREFIX) and key not in known
        ]
        values = {known[key]: value for key, value in extra.items() if key in known}
        faults += [fault for name, value in values.items() if (fault := _fault(name, value))]
        if faults:
            raise ConfigError(faults)
        if "socket" in values:
            values["socket"] = os.fsdecode(values["socket"])  # type: ignore[arg-type]  # a path by the check above
        return cls(**values)  # type: ignore[arg-type]  # every value was checked above

    def chunk_tokens_for(self, block_tokens: int, *, has_states: bool = False) -> int:
        """Tokens of a chunk for an engine with such blocks. Raises ConfigError unless they are whole blocks.

        With recurrent states it is one block: vLLM keeps the state at the end of a prompt's last whole block alone.
        """
        if not self.chunk_tokens:
            return block_tokens if has_states else max(1, CHUNK_TOKENS_WANTED // block_tokens) * block_tokens
        if self.chunk_tokens % block_tokens:
            raise ConfigError(
                [
                    f"{PREFIX}chunk_tokens is {self.chunk_tokens}, expected a multiple of the engine's block, {block_tokens}"
                ]
            )
        return self.chunk_tokens


def _fault(name: str, value: object) -> str:
    text = f"{PREFIX}{name} is {value!r}, expected "
    if name == "socket":
        fault = fault_of_path(value)
        return text + fault if fault else ""
    if name == "model":
        return "" if is_model_name(value) else text + MODEL_EXPECTED
    if name == "reset":
        return "" if value in ("engine", "node") else text + "'engine' or 'node'"
    if name == "load":
        return "" if value in ("async", "sync") else text + "'async' or 'sync'"
    if name == "save":
        return "" if value in ("prompt", "all") else text + "'prompt' or 'all'"
    if name in ("always_load", "announce", "events"):
        return "" if isinstance(value, bool) else text + "true or false"
    if name in ("timeout_s", "wait_s"):
        lowest_is_in = name == "wait_s"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_right = is_number and (0 < value <= SECONDS_MAX or (lowest_is_in and value == 0))  # type: ignore[operator]  # a number
        return "" if is_right else text + f"seconds above 0 and at most {SECONDS_MAX:.0f}"
    most = {"chunk_tokens": 1 << 20, "save_after": SIGHTINGS_WANTED_MAX, "head_groups": HEAD_GROUPS_WANTED_MAX}
    least = 0 if name in ("chunk_tokens", "head_groups") else 1
    is_count = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most.get(name, THREADS_MAX)
    return "" if is_count else text + f"an integer {least}..{most.get(name, THREADS_MAX)}"
