"""Geometry of an engine's KV by layer group, as every rank must have it, and the Layout of the chunks that it makes.

Nothing here acts; any thread.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from math import gcd
from typing import Any

from kvpool.layout import Layout
from kvpool.layouts.groups import FULL, WINDOW, Group

_HEAD_DIM_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The KV of one layer group on one rank. `is_replicated`: every rank has the same bytes (MLA's latent KV). `window`: tokens
    that a token attends to, itself among them; 0: all."""

    layers: int
    planes: int
    token_bytes: int
    tokens_per_block: int
    format: str
    is_replicated: bool
    window: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.planes * self.tokens_per_block * self.token_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a block, which is a chunk."""
        return self.layers * self.layer_bytes

    @property
    def is_full(self) -> bool:
        """Whether a prompt goes on only with all of its blocks."""
        return not self.window

    @property
    def window_before(self) -> int:
        """Tokens before the next one that it attends to; 1 at least, as a group of a Layout has."""
        return max(1, self.window - 1)

    @property
    def run(self) -> int:
        """Blocks before a block's end with which a prompt goes on there; 0 for all."""
        return 0 if self.is_full else -(-self.window_before // self.tokens_per_block)

    def oldest_block(self, tokens: int) -> int:
        """The first block that a request with so many computed tokens still has: the engine takes back those that its next
        token does not attend to."""
        return 0 if self.is_full else max(0, tokens + 1 - self.window) // self.tokens_per_block

    def needed_from(self, chunks: int) -> int:
        """The first of the chunks with which a prompt goes on behind so many."""
        return 0 if self.is_full else max(0, chunks - self.run)

    def shape(self) -> dict[str, Any]:
        """Fields of a Layout or a Group: a block is a chunk of opaque bytes."""
        head_dim = gcd(self.token_bytes, _HEAD_DIM_MAX)
        return {
            "layers": self.layers,
            "kv_heads": self.token_bytes // head_dim,
            "head_dim": head_dim,
            "dtype": "uint8",
            "planes": self.planes,
            "format": self.format,
            "block_tokens": self.tokens_per_block,
        }


@dataclass(frozen=True)
class Geometry:
    """The KV of one rank, by layer group."""

    groups: tuple[GroupGeometry, ...]

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block in every group."""
        return self.groups[0].tokens_per_block

    @cached_property
    def has_windows(self) -> bool:
        """Whether a prompt goes on only where the blocks of a window were stored for."""
        return not all(group.is_full for group in self.groups)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank has the same bytes, in all groups."""
        return all(group.is_replicated for group in self.groups)

    def shards(self, ranks: int) -> int:
        """How many different shards the ranks have between them."""
        return 1 if self.is_replicated else ranks

    def layout(self, rank: int, ranks: int) -> Layout:
        """The Layout of a rank's shard; of one group of full attention a plain one."""
        own, world = 0 if self.is_replicated else rank, self.shards(ranks)
        groups = tuple(
            Group(kind=FULL, **group.shape())
            if group.is_full
            else Group(kind=WINDOW, window=group.window_before, **group.shape())
            for group in self.groups
        )
        return Layout(chunk_tokens=self.tokens_per_block, groups=groups, rank=own, world=world)

    def to_bytes(self) -> bytes:
        """The form on the board."""
        return json.dumps([asdict(group) for group in self.groups], sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Geometry":
        """The geometry that a rank wrote on the board."""
        return cls(tuple(GroupGeometry(**group) for group in json.loads(data)))
