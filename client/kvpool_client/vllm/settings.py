"""Settings of the vLLM connector: the `kvpool.*` keys of `kv_connector_extra_config`. Immutable; any thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.errors import ConfigError
from kvpool.socket_path import find_socket
from kvpool_client.engines.settings import choice, integer, read_settings, seconds, switch

PREFIX = "kvpool."
# Reuses 97 % of what blocks of 16 tokens would at prompts of 300 to 1500 tokens, 256 reuses 86 % (docs/engines.md).
CHUNK_TOKENS_WANTED = 64
_OWN = {
    "chunk_tokens": integer(0, 1 << 20),
    "wait_s": seconds(0),
    "load": choice("async", "sync"),
    "always_load": switch,
    "load_threads": integer(1, 64),
    "announce": switch,
    "save": choice("prompt", "all"),
    "save_after": integer(1, 1000),
    "events": switch,
    "reset": choice("engine", "node"),
    "head_groups": integer(0, 1024),
}


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
        own = (key for key in extra if isinstance(key, str) and key.startswith(PREFIX))
        given = {key.removeprefix(PREFIX): extra[key] for key in own}
        return cls(**read_settings(cls, given, _OWN, spelled=PREFIX.__add__))

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
