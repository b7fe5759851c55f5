"""Sequence: one request's tokens, its block table, and how much of its KV is computed.

    0 ────────── computed ────────── length ────────── slots ──────────► positions
      KV in place         tokens known      room without tokens yet (drafts, a token not sampled yet)

`blocks[i]` holds the tokens from i × tokens_per_block on. `path[i]` is the tree's node with the key of block i: the block
itself, or, where another request has computed the same prefix, that one's block, which the path protects along with its
ancestors. It decides nothing about sharing; see `block_pool`. One thread.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.ids import TOKEN_BYTES
from kvpool.key_column import KeyColumn
from kvpool.states import DEFAULT_PRIORITY, KEEP_PRIORITY, TokenRange
from kvpool_blocks.restoring import Restoring
from kvpool_blocks.tree.prefix_tree import Node
from kvpool_blocks.tree.scope import Scope
from kvpool_client.key_chain import KeyChain
from kvpool_client.retention import plan_retention
from kvpool_client.torch.restored import Restored

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention that a request asks for, as `Pool.save` takes it."""

    ranges: Items[TokenRange] = ()
    decode_priority: int | None = None
    decode_duration_s: float | None = None

    def __bool__(self) -> bool:
        return bool(self.ranges) or self.decode_priority is not None


class Sequence:
    """See the module. Invariant: computed ≤ length ≤ slots ≤ room of `blocks`; `path` has each full computed block."""

    def __init__(self, scope: Scope, retention: Retention, tokens_per_block: int) -> None:
        self.scope = scope
        self.retention = retention
        self.prompt_tokens = 0
        self.blocks: list[int] = []
        self.path: list[Node] = []
        self.computed = 0
        self.slots = 0
        self.load: Restored | None = None  # what its allocation waits on
        self.restoring: Restoring | None = None
        self.chain: KeyChain | None = None
        self.chain_tokens = 0
        self._tokens_per_block = tokens_per_block
        self._tokens = bytearray()
        self._root_key = scope.root_key(tokens_per_block)
        self._keys: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Sequence {self.computed}/{self.length} tokens in {len(self.blocks)} blocks>"

    @property
    def length(self) -> int:
        """Known tokens."""
        return len(self._tokens) // TOKEN_BYTES

    @property
    def root_key(self) -> bytes:
        """The key of its root."""
        return self._root_key

    def token_bytes(self, first: int, end: int) -> bytes:
        """Token ids, packed int32."""
        return bytes(self._tokens[first * TOKEN_BYTES : end * TOKEN_BYTES])

    def token_ids(self, first: int, end: int) -> npt.NDArray[np.int32]:
        """Token ids."""
        return np.frombuffer(self.token_bytes(first, end), dtype="<i4")

    def extend(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append known tokens."""
        self._tokens += tokens.astype("<i4", copy=False).tobytes()
        self.slots = max(self.slots, self.length)

    def keys(self, blocks: int) -> list[bytes]:
        """The keys of the first `blocks` blocks, which are full; hashes only new ones."""
        known, size = len(self._keys), self._tokens_per_block
        if known < blocks:
            leaves = kvpool_native.hash_leaves(self.token_ids(known * size, blocks * size), size)
            self._keys += KeyColumn(kvpool_native.chain_keys(self._keys[-1] if known else self._root_key, leaves))
        return self._keys[:blocks]

    def key(self, block: int) -> bytes:
        """The key of a full block."""
        if block >= len(self._keys):
            self.keys(block + 1)
        return self._keys[block]

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, and all room without tokens."""
        del self._tokens[length * TOKEN_BYTES :]
        del self._keys[length // self._tokens_per_block :]
        if self.chain_tokens > length:
            self.chain, self.chain_tokens = None, 0
        self.computed = min(self.computed, length)
        self.prompt_tokens = min(self.prompt_tokens, length)
        self.slots = length

    def retention_of(self, first: int, end: int) -> list[tuple[int, int] | None]:
        """Priority and duration in nanoseconds of blocks `first` up to `end`; None: unchanged."""
        if not self.retention:
            return [None] * (end - first)
        columns = plan_retention(
            self.retention.ranges,
            chunks=end,
            chunk_tokens=self._tokens_per_block,
            prompt_tokens=self.prompt_tokens,
            decode_priority=self.retention.decode_priority,
            decode_duration_s=self.retention.decode_duration_s,
        )
        rows = zip(columns.priorities[first:].tolist(), columns.durations_ms[first:].tolist(), strict=True)
        return [None if priority == KEEP_PRIORITY else (priority, ms * NS_PER_MS) for priority, ms in rows]


def ranges_of(nodes: Items[Node], chunk_blocks: int, *, first: int, chunk_tokens: int) -> list[TokenRange]:
    """The retention that chunks get, from their blocks; `first`: the number of the first chunk."""
    ranges = []
    for number in range(len(nodes) // chunk_blocks):
        best = max(
            nodes[number * chunk_blocks : (number + 1) * chunk_blocks],
            key=lambda node: (node.priority, not node.duration_ns),
        )
        if best.priority != DEFAULT_PRIORITY:
            start = (first + number) * chunk_tokens
            duration_s = best.duration_ns / 1e9 if best.duration_ns else None
            ranges.append(TokenRange(start, start + chunk_tokens, best.priority, duration_s))
    return ranges
