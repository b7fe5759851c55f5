"""An engine without a model: the KV of a token derives from all tokens up to it, so that wrong sharing shows as wrong bytes.

It writes only what it is to compute, and asserts before each write that no other request and no prefix tree has the block.
"""

import os
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch

from kvpool_blocks import Allocation, BlockPool

# Where the blocks are: `make test-gpu` sets it.
DEVICE = os.environ.get("KVPOOL_TEST_TORCH_DEVICE", "cpu")
KV_BYTES = 8
LAYERS = 2


def kv_rows(tokens: list[int], layer: int, plane: int) -> tuple[bytes, ...]:
    """The KV that each token must have in a layer's plane."""
    return _rows(tuple(tokens), layer, plane)


@lru_cache(maxsize=8192)
def _rows(tokens: tuple[int, ...], layer: int, plane: int) -> tuple[bytes, ...]:
    rows, state = [], b""
    for token in tokens:
        state = blake2b(state + token.to_bytes(4, "little"), digest_size=KV_BYTES).digest()
        rows.append(bytes(byte ^ (31 * layer + plane + 1) for byte in state))
    return tuple(rows)


class PrefixEngine:
    """Requests on a BlockPool, their tokens, and what has been computed."""

    def __init__(self, num_blocks: int, size: int = 4, **options: Any) -> None:
        self.size = size
        self.blocks = BlockPool(
            layers=LAYERS,
            num_blocks=num_blocks,
            tokens_per_block=size,
            kv_heads=1,
            head_dim=KV_BYTES,
            dtype=torch.uint8,
            device=DEVICE,
            **options,
        )
        self.tokens: dict[Any, list[int]] = {}
        self.computed: dict[Any, int] = {}

    def start(self, request: Any, tokens: list[int], **options: Any) -> Allocation | None:
        """Allocate; checks what is reused."""
        allocation = self.blocks.allocate(request, tokens, **options)
        if allocation is not None:
            self.tokens[request] = list(tokens)
            self.computed[request] = allocation.settle()
            assert self.computed[request] < len(tokens) + bool(options.get("has_logits"))
            self.check(request)
        return allocation

    def compute(self, request: Any, end: int | None = None) -> None:
        """Compute the tokens up to `end`, and report it."""
        start = self.computed[request]
        end = len(self.tokens[request]) if end is None else end
        self.write(request, start, end)
        assert self.blocks.computed(request, start, end)
        self.computed[request] = max(start, end)

    def write(self, request: Any, start: int, end: int) -> None:
        """Write the KV of tokens `start` up to `end` as a forward pass does."""
        table = self.blocks.block_ids(request)
        for number in range(start // self.size, -(-end // self.size) if start < end else 0):
            self.assert_own(request, table[number])
        for layer in range(LAYERS):
            for plane in range(2):
                rows = kv_rows(self.tokens[request][:end], layer, plane)
                for at in range(start, end):
                    self.blocks.buffers(layer)[table[at // self.size], plane, at % self.size, 0] = torch.frombuffer(
                        bytearray(rows[at]), dtype=torch.uint8
                    )

    def assert_own(self, request: Any, block: int) -> None:
        """Nobody else has this block: it may be written."""
        others = [other for other in self.tokens if other != request and block in self.blocks.block_ids(other)]
        assert not others, f"request {request!r} would write block {block} of {others}"
        assert self.blocks.priority_of(block) is None, f"request {request!r} would write block {block} of the tree"

    def run(self, request: Any, tokens: list[int], **options: Any) -> int | None:
        """Allocate and compute; the reused tokens, or None."""
        allocation = self.start(request, tokens, **options)
        if allocation is None:
            return None
        self.compute(request)
        return allocation.reused_tokens

    def append(self, request: Any, tokens: list[int]) -> bool:
        """Append, and compute what was appended."""
        if not self.blocks.append(request, tokens):
            return False
        self.tokens[request] += tokens
        self.compute(request)
        return True

    def fork(self, request: Any, new: Any) -> bool:
        """Fork, and compute what was not shared."""
        allocation = self.blocks.fork(request, new)
        if allocation is None:
            return False
        self.tokens[new] = list(self.tokens[request])
        self.computed[new] = allocation.reused_tokens
        return True

    def rewind(self, request: Any, count: int) -> None:
        """Take tokens back."""
        self.blocks.rewind(request, count)
        del self.tokens[request][len(self.tokens[request]) - count :]
        self.computed[request] = min(self.computed[request], len(self.tokens[request]))

    def free(self, request: Any) -> None:
        """End a request."""
        self.blocks.free(request)
        del self.tokens[request], self.computed[request]

    def check(self, *requests: Any) -> None:
        """The computed tokens of these requests, or of all, have their bytes."""
        for request in requests or tuple(self.tokens):
            table, end = self.blocks.block_ids(request), self.computed[request]
            assert len(table) >= -(-len(self.tokens[request]) // self.size)
            assert len(set(table)) == len(table)
            for layer in range(LAYERS):
                buffer = self.blocks.buffers(layer)
                for plane in range(2):
                    items = buffer[table, plane, :, 0].reshape(-1, KV_BYTES).tolist()[:end]
                    for at, (row, found) in enumerate(
                        zip(kv_rows(self.tokens[request][:end], layer, plane), items, strict=True)
                    ):
                        assert bytes(found) == row, f"request {request!r}, layer {layer}, plane {plane}, token {at}"

    def verify(self) -> None:
        """Nothing is counted wrongly, and every byte is right."""
        problems = self.blocks.verify()
        assert problems == [], problems
        used = {block for request in self.tokens for block in self.blocks.block_ids(request)}
        if not self.blocks.stats()["offloads_under_way"]:
            assert self.blocks.num_free_blocks == self.blocks.shape.num_blocks - len(used)
        self.check()
