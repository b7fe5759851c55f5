"""SparseConfig: which tokens of a long sequence stay resident, and how much of the rest a step reads.

Immutable; any thread. The names of the environment variables are those of an existing vLLM plug-in for retrieval of
KV, so that its users keep their settings.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.errors import InvalidArgument

BLOCK_TOKENS_MAX = 255  # a summary counts a block's tokens in a byte
TOKENS_MAX = 1 << 31

_TOKENS_OF = {
    "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "init_tokens",
    "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "local_tokens",
    "VLLM_RETRIEVAL_DENSE_BOUNDARY": "dense_boundary",
    "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "offload_boundary",
}
_SHARE = "VLLM_RETRIEVAL_TOPK_PERCENT"


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Settings of compute by lookup, in tokens.

    The first `init_tokens` and the last `local_tokens` of a sequence are always attended. What lies between is cut
    into blocks of `block_tokens`, of which a step reads the share `topk_share` (0 to 1) for each KV head. Sequences
    shorter than `dense_boundary` are attended whole; from `offload_boundary` on, what has left the window lies in the
    pool's arena only. `init_tokens` is a multiple of `block_tokens`.

    Raises InvalidArgument, naming the field, its value and what was expected.
    """

    init_tokens: int = 1024
    local_tokens: int = 7192
    topk_share: float = 0.2
    block_tokens: int = 128
    dense_boundary: int = 32768
    offload_boundary: int = 65536

    def __post_init__(self) -> None:
        for name in ("init_tokens", "local_tokens", "dense_boundary", "offload_boundary"):
            _check_tokens(name, getattr(self, name))
        share = self.topk_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
            raise InvalidArgument(f"topk_share is {share!r}, expected a share of 0 to 1")
        block = self.block_tokens
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= BLOCK_TOKENS_MAX:
            raise InvalidArgument(f"block_tokens is {block!r}, expected an integer 1..{BLOCK_TOKENS_MAX}")
        if self.init_tokens % block:
            raise InvalidArgument(f"init_tokens is {self.init_tokens}, expected a multiple of block_tokens {block}")
        if self.offload_boundary < self.dense_boundary:
            raise InvalidArgument(
                f"offload_boundary is {self.offload_boundary}, expected at least dense_boundary {self.dense_boundary}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "SparseConfig":
        """The configuration that VLLM_RETRIEVAL_… variables describe; what they do not name has its default.

        `VLLM_RETRIEVAL_TOPK_PERCENT` is a share up to 1, or above 1 a percentage. Raises InvalidArgument, naming the
        variable.
        """
        found = os.environ if environment is None else environment
        values: dict[str, int | float] = {}
        for variable, name in _TOKENS_OF.items():
            if variable in found:
                values[name] = _integer(variable, found[variable])
        if _SHARE in found:
            values["topk_share"] = _share(found[_SHARE])
        try:
            return cls(**values)  # type: ignore[arg-type]  # the names are the fields
        except InvalidArgument as error:
            given = ", ".join(
                f"{variable}={found[variable]}" for variable in (*_TOKENS_OF, _SHARE) if variable in found
            )
            raise InvalidArgument(f"{error}; set by {given}") from None

    def middle_blocks(self, tokens: int) -> int:
        """The number of blocks between the first tokens and the window, in a sequence of so many tokens."""
        return max(0, (tokens - self.init_tokens - self.local_tokens) // self.block_tokens)

    def blocks_to_take(self, blocks: int) -> int:
        """How many of so many middle blocks a step reads for each KV head."""
        return min(blocks, math.ceil(round(self.topk_share * blocks, 9)))  # 0.07 of 100 are 7


def _check_tokens(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= TOKENS_MAX:
        raise InvalidArgument(f"{name} is {value!r}, expected a number of tokens 0..{TOKENS_MAX}")


def _integer(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{variable} is {text!r}, expected a number of tokens") from None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidArgument(f"{_SHARE} is {text!r}, expected a share of 0 to 1 or a percentage") from None
    if not 0.0 <= value <= 100.0:
        raise InvalidArgument(f"{_SHARE} is {text!r}, expected a share of 0 to 1 or a percentage up to 100")
    return value if value <= 1.0 else value / 100.0
