"""Prompts: the scheduler half's requests in flight. Which may share KV, what was claimed, what was saved.

Facts about a request come from the engine's own request object at its one lookup; tokens and blocks come with every step.
A request that was never looked up, or whose KV depends on more than tokens, salt and adapter, is neither loaded nor saved.
Pure bookkeeping; the executor's thread only.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.types import DEFAULT_PRIORITY
from kvpool_client.trtllm.adapters import Adapters
from kvpool_client.trtllm.claims import NO_CLAIM, Claim
from kvpool_client.trtllm.plan import NO_BLOCK, SaveOrder

REQUESTS_MAX = 1 << 16
# Attributes that, when set, make the KV depend on more than token ids.
_FURTHER_INPUTS = (
    "multimodal_hashes",
    "multimodal_embedding",
    "multimodal_positions",
    "py_multimodal_data",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
    "encoder_tokens",
    "cross_attention_mask",
)
_OTHER_SALT = "salt: the step has another salt than the request; this TensorRT-LLM is not served with salts"


@dataclass(slots=True)
class Prompt:
    """One request. `refusal` begins with the word under which it is counted.

    Invariant: `saved` chunks were ordered to be saved, or are in the pool because they were claimed.
    """

    request_id: int
    salt: bytes | None
    adapter: str
    refusal: str
    is_prompt: bool = True
    claim: Claim = NO_CLAIM
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    saved: int = 0
    has_saves: bool = False

    @classmethod
    def of(cls, request: Any, adapters: Adapters) -> "Prompt":
        """A Prompt from the engine's request."""
        salt, refusal = _salt_of(request)
        further = next((name for name in _FURTHER_INPUTS if _is_set(getattr(request, name, None))), "")
        adapter, unknown = adapters.name_of(request)
        if further:
            refusal = f"inputs: {further} is set and its KV depends on more than tokens; send prompts of text alone"
        is_dummy = bool(getattr(request, "is_dummy_request", False))
        return cls(
            request_id=int(request.request_id),
            salt=salt,
            adapter=adapter,
            refusal=refusal or unknown,
            is_prompt=not is_dummy and not _is_true(request, "is_generation_only_request"),
        )

    def begin(self, first_saved: int) -> None:
        """The request is scheduled for the first time, or again from its start."""
        self.tokens.clear()
        self.block_ids.clear()
        self.priorities.clear()
        self.saved = first_saved

    def advance(self, data: Any) -> None:
        """Add a step's RequestData. A salt other than the request's own ends the sharing."""
        self.tokens += [int(token) for token in data.new_tokens]
        new_blocks = [int(block) for block in data.new_block_ids]
        self.block_ids += new_blocks
        self.priorities += _priorities_of(data, len(new_blocks))
        if hasattr(data, "cache_salt") and self.salt is not None and not self.salt.startswith(b"id:"):
            text = None if data.cache_salt is None else str(data.cache_salt).encode()
            self.refusal = self.refusal or ("" if text == self.salt else _OTHER_SALT)
        elif getattr(data, "cache_salt", None) is not None and self.salt is None:
            self.refusal = self.refusal or _OTHER_SALT

    def order_save(self, computed_tokens: int, tokens_per_block: int) -> SaveOrder | None:
        """The chunks that are whole once this step has run and were not saved, up to a block that has no page."""
        whole = min(computed_tokens, len(self.tokens)) // tokens_per_block
        blocks = self.block_ids[self.saved : whole]
        if NO_BLOCK in blocks:
            blocks = blocks[: blocks.index(NO_BLOCK)]
        if self.refusal or not self.is_prompt or not blocks:
            return None
        first, self.saved = self.saved, self.saved + len(blocks)
        self.has_saves = True
        tokens = np.array(self.tokens[: self.saved * tokens_per_block], dtype=np.int32).tobytes()
        kept = tuple(self.priorities[first : self.saved])
        return SaveOrder(self.request_id, tokens, self.salt or b"", self.adapter, first, tuple(blocks), kept)


def _salt_of(request: Any) -> tuple[bytes | None, str]:
    """A request's salt, or the engine's number that stands for it; and the reason, where it is unknown."""
    if hasattr(request, "cache_salt"):
        return (None if request.cache_salt is None else str(request.cache_salt).encode()), ""
    if not hasattr(request, "cache_salt_id"):
        return None, "salt: the request does not carry its salt; use a TensorRT-LLM whose requests have cache_salt"
    number = request.cache_salt_id
    return (None if number is None else f"id:{number}".encode()), ""


def _is_true(request: Any, name: str) -> bool:
    """An attribute of the engine's native requests that is a method of its Python ones."""
    value = getattr(request, name, False)
    return bool(value() if callable(value) else value)


def _priorities_of(data: Any, new_blocks: int) -> list[int]:
    """The engine's priority of each new block; the default where this version or a layer-grouped cache gives none."""
    text = getattr(data, "priorities", None)
    if text is None or len(text) != new_blocks:
        return [DEFAULT_PRIORITY] * new_blocks
    return [DEFAULT_PRIORITY if priority is None else int(priority) for priority in text]


def _is_set(value: Any) -> bool:
    if value is None:
        return False
    return bool(len(value)) if hasattr(value, "__len__") else True
