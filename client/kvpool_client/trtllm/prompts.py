"""Prompts: the scheduler half's requests in flight. Which may share KV, what was claimed, what was saved.

Facts about a request come from the engine's own request object at its one lookup; tokens and blocks come with every step.
A request that was never looked up, or whose KV depends on more than tokens, salt and adapter, is neither loaded nor saved.
Pure bookkeeping; the executor's thread only.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.states import DEFAULT_PRIORITY
from kvpool_client.trtllm.adapters import Adapters
from kvpool_client.trtllm.claims.claim import NO_CLAIM, Claim
from kvpool_client.trtllm.geometry import Geometry
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
    """One request. `refusal` begins with the word under which it is counted. `tables`: its blocks by layer group; `promised`:
    the token behind the claim, until its first step; `junction`: the chunk up to which full groups had it at its lookup, 0
    where that was its hit.

    Invariant: `saved` chunks were ordered to be saved, or are in the pool because they were claimed.
    """

    request: Any
    request_id: int
    salt: bytes | None
    adapter: str
    refusal: str
    is_prompt: bool = True
    claim: Claim = NO_CLAIM
    promised: int = 0
    junction: int = 0
    tokens: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
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
            request=request,
            request_id=int(request.request_id),
            salt=salt,
            adapter=adapter,
            refusal=refusal or unknown,
            is_prompt=not is_dummy and not _is_true(request, "is_generation_only_request"),
        )

    def begin_steps(self, first_saved: int) -> None:
        """The request is scheduled for the first time, or again from its start."""
        self.tokens.clear()
        self.tables.clear()
        self.priorities.clear()
        self.saved = first_saved

    def add_step(self, data: Any) -> None:
        """Add a step's RequestData. A salt other than the request's own ends the sharing."""
        self.tokens += [int(token) for token in data.new_tokens]
        new_blocks = tables_of(data)
        self.tables += [[] for _ in range(len(new_blocks) - len(self.tables))]
        for table, blocks in zip(self.tables, new_blocks, strict=True):
            table += blocks
        self.priorities += _priorities_of(data, len(new_blocks[0]))
        if hasattr(data, "cache_salt") and self.salt is not None and not self.salt.startswith(b"id:"):
            text = None if data.cache_salt is None else str(data.cache_salt).encode()
            self.refusal = self.refusal or ("" if text == self.salt else _OTHER_SALT)
        elif getattr(data, "cache_salt", None) is not None and self.salt is None:
            self.refusal = self.refusal or _OTHER_SALT

    def position(self, data: Any) -> int:
        """How many tokens are computed before a request's first step, as far as the engine shows it.

        The position that it passes leaves out what was promised. Too low is safe: the next step catches up.
        """
        position, matched = int(data.computed_position), self.matched
        return position + matched if matched and position + matched == self.promised else position

    @property
    def has_begun(self) -> bool:
        """Whether the request was scheduled: until it ends it waits for whatever keeps the executor."""
        return bool(self.tokens)

    @property
    def matched(self) -> int | None:
        """Tokens of the promise that the engine takes, where this version shows it."""
        matched = getattr(self.request, "py_num_connector_matched_tokens", None)
        return None if matched is None else int(matched)

    def order_save(self, computed: range, geometry: Geometry) -> SaveOrder | None:
        """The chunks that are whole once this step has computed these tokens and were not saved, up to a block that has no
        page."""
        size = geometry.tokens_per_block
        whole = min(computed.stop, len(self.tokens)) // size
        if self.refusal or not self.is_prompt or len(self.tables) != len(geometry.groups):
            return None
        for group, table in zip(geometry.groups, self.tables, strict=True):
            blocks = table[self.saved : whole]
            whole = self.saved + len(blocks)
            if group.is_full and NO_BLOCK in blocks:
                whole = self.saved + blocks.index(NO_BLOCK)
        if whole <= self.saved:
            return None
        windows = tuple(self._window(number, computed.start, whole, geometry) for number in range(len(self.tables)))
        first, self.saved = self.saved, whole
        self.has_saves = True
        return SaveOrder(
            request_id=self.request_id,
            tokens=np.array(self.tokens[: whole * size], dtype=np.int32).tobytes(),
            salt=self.salt or b"",
            adapter=self.adapter,
            first_chunk=first,
            end=whole,
            block_ids=tuple(
                tuple(table[first:whole]) if group.is_full else tuple(table[chunk] for chunk in chunks)
                for group, table, chunks in zip(geometry.groups, self.tables, windows, strict=True)
            ),
            priorities=tuple(self.priorities[first:whole]),
            windows=windows,
        )

    def _window(self, number: int, position: int, whole: int, geometry: Geometry) -> tuple[int, ...]:
        """The chunks of a group with a window that a later prompt needs at the step's end, or where others have left this
        prompt's way; those before the chunks of this step were saved in earlier ones.

        The engine still has what a request attends to that has computed `position` tokens and one more: a first decoding step
        that is scheduled before the last prefill's token is known has a position one token late, and its window's pages not.
        """
        group, table = geometry.groups[number], self.tables[number]
        if group.is_full:
            return ()
        ends = [end for end in (self.junction, whole) if self.saved < end <= whole]
        return tuple(
            chunk
            for chunk in range(max(self.saved, group.oldest_block(position + 1)), whole)
            if any(group.needed_from(end) <= chunk < end for end in ends) and table[chunk] != NO_BLOCK
        )


def tables_of(data: Any) -> list[list[int]]:
    """The blocks that a step's RequestData adds to each layer group."""
    by_group = getattr(data, "new_block_ids_by_layer_group", None) or []
    lists = by_group if len(by_group) > 1 else [data.new_block_ids]
    return [[int(block) for block in blocks] for blocks in lists]


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
