"""A request of the scripted engine (see `engine.py`), hashed block by block as vLLM does it."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

BLOCK = 4


@dataclass(eq=False)
class Request:
    """A request; `block_hashes` grows with its tokens as in vLLM. `is_session`: it pauses at its end, for more input; then
    `is_rehashed`, vLLM takes back the hash of the token that it drops."""

    request_id: str
    tokens: list[int]
    new_tokens: int = 1
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[str] = field(default_factory=list)
    num_computed: int = 0
    state: str = "waiting"
    held: int = 0
    external: int = 0
    offers: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)  # of blocks, one for each group of layers
    generated: int = 0
    is_fresh: bool = True
    is_session: bool = False
    is_rehashed: bool = True
    kv_transfer_params: Any = None
    kv_hints: Any = None
    answer: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self._hashes: list[bytes] = []

    @property
    def table(self) -> list[int]:
        """The blocks of the first group."""
        return self.tables[0] if self.tables else []

    @property
    def adapter(self) -> str:
        return getattr(self.lora_request, "lora_name", "")

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_computed_tokens(self) -> int:
        return self.num_computed

    @property
    def block_hashes(self) -> list[bytes]:
        hashes = [] if self.is_rehashed else self._hashes
        parent = hashes[-1] if hashes else b"root"
        for end in range((len(hashes) + 1) * BLOCK, len(self.tokens) + 1, BLOCK):
            salt = self.cache_salt if end == BLOCK else None
            extra = (self.adapter, salt, *self.mm_features)
            parent = hashlib.sha256(repr((parent, self.tokens[end - BLOCK : end], extra)).encode()).digest()
            hashes.append(parent)
        return hashes
