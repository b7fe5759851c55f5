"""What the scheduler half knows of the requests in flight: who may share KV, what was claimed, what was saved.

Facts about a request come from the engine's own request object at its one lookup; tokens and blocks come with every step.
A request that was never looked up, or whose KV depends on more than tokens, salt and adapter, is neither loaded nor saved.
Pure bookkeeping; the executor's thread only.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.types import DEFAULT_PRIORITY
from kvpool_client.trtllm.claims import NO_CLAIM, Claim
from kvpool_client.trtllm.plan import NO_BLOCK, SaveOrder

REQUESTS_MAX = 1 << 16
# Anything of these that is set makes the KV depend on more than token ids.
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


@dataclass(slots=True)
class Prompt:
    """One request. Invariant: `saved` chunks were ordered to be saved, or are in the pool because they were claimed."""

    request_id: int
    salt: bytes | None
    adapter: str
    refusal: str
    claim: Claim = NO_CLAIM
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    saved: int = 0
    has_saves: bool = False

    @classmethod
    def of(cls, request: Any) -> "Prompt":
        """What the engine's request says."""
        refusal = "".join(f"{name} is set" for name in _FURTHER_INPUTS if _is_set(getattr(request, name, None)))
        salt = getattr(request, "cache_salt", None)
        if salt is None and not hasattr(request, "cache_salt"):
            salt_id = getattr(request, "cache_salt_id", None)
            salt = None if salt_id is None else f"id:{salt_id}"
            refusal = refusal or ("" if hasattr(request, "cache_salt_id") else "the request does not say its salt")
        if getattr(request, "is_dummy_request", False) or getattr(request, "is_generation_only_request", False):
            refusal = refusal or "the request is no prompt"
        lora = getattr(request, "lora_task_id", None)
        return cls(
            request_id=int(request.request_id),
            salt=None if salt is None else str(salt).encode(),
            adapter="" if lora is None else f"lora:{lora}",
            refusal=refusal,
        )

    def begin(self, first_saved: int) -> None:
        """The request is scheduled for the first time, or again from its start."""
        self.tokens.clear()
        self.block_ids.clear()
        self.priorities.clear()
        self.saved = first_saved

    def advance(self, data: Any) -> None:
        """What a step's RequestData adds. Another salt than the request's own ends the sharing."""
        self.tokens += [int(token) for token in data.new_tokens]
        new_blocks = [int(block) for block in data.new_block_ids]
        self.block_ids += new_blocks
        self.priorities += _priorities_of(data, len(new_blocks))
        if hasattr(data, "cache_salt") and self.salt is not None and not self.salt.startswith(b"id:"):
            said = None if data.cache_salt is None else str(data.cache_salt).encode()
            self.refusal = self.refusal or ("" if said == self.salt else "the step has another salt than the request")
        elif getattr(data, "cache_salt", None) is not None and self.salt is None:
            self.refusal = self.refusal or "the step has a salt and the request none"

    def order_save(self, computed_tokens: int, tokens_per_block: int) -> SaveOrder | None:
        """The chunks that are whole once this step has run and were not saved, up to a block that has no page."""
        whole = min(computed_tokens, len(self.tokens)) // tokens_per_block
        blocks = self.block_ids[self.saved : whole]
        if NO_BLOCK in blocks:
            blocks = blocks[: blocks.index(NO_BLOCK)]
        if self.refusal or not blocks:
            return None
        first, self.saved = self.saved, self.saved + len(blocks)
        self.has_saves = True
        tokens = np.array(self.tokens[: self.saved * tokens_per_block], dtype=np.int32).tobytes()
        kept = tuple(self.priorities[first : self.saved])
        return SaveOrder(self.request_id, tokens, self.salt or b"", self.adapter, first, tuple(blocks), kept)


def _priorities_of(data: Any, new_blocks: int) -> list[int]:
    """The engine's priority of each new block; the default where this version or a layer-grouped cache gives none."""
    said = getattr(data, "priorities", None)
    if said is None or len(said) != new_blocks:
        return [DEFAULT_PRIORITY] * new_blocks
    return [DEFAULT_PRIORITY if priority is None else int(priority) for priority in said]


def _is_set(value: Any) -> bool:
    if value is None:
        return False
    return bool(len(value)) if hasattr(value, "__len__") else True
