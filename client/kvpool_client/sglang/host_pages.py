"""Host pages: SGLang's host pool described as pages of opaque bytes in a few parts, each part at a fixed stride.

HiCache keeps KV in registered host memory, in pages; `get_page_buffer_meta` returns the addresses of a page's parts (K and V
for page_first, one for MLA, one for each layer and plane for layer_first). A part becomes a layer of a packed Layout, so a page
is one chunk, and loads and saves move its bytes straight between host page and arena: one copy, none on the way. What the parts
hold is in the Layout's format: engines share pages only where the formats are equal.

Pure but for reading the pool's attributes; keeps no memory alive (the backend keeps the pool). Any thread.
"""

import ctypes
import hashlib
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import LayoutMismatch
from kvpool.layout import Layout

FORMAT_BYTES_MAX = 200
_HEAD_DIM_MAX = 1 << 16
_OTHER_LAYOUT = "set --hicache-mem-layout to page_first or layer_first"


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model's KV that this rank has. Replicated KV (MLA) is one shard for all ranks of `tp_size`."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    is_replicated: bool = False

    @property
    def is_writer(self) -> bool:
        """Whether this rank stores: of ranks with equal bytes only the first does."""
        return not self.is_replicated or self.tp_rank == 0

    def words(self) -> str:
        """The parts of it that are not in the Layout's rank and world."""
        return f"pp{self.pp_rank}/{self.pp_size} cp{self.cp_rank}/{self.cp_size}"


@dataclass(frozen=True, slots=True)
class HostPages:
    """The parts of every page, uint8 [pages, part_bytes] each, and the Layout that makes a page a chunk."""

    layout: Layout
    parts: tuple[npt.NDArray[np.uint8], ...]
    page_tokens: int

    def page_numbers(self, host_indices: object, pages: int) -> list[int]:
        """The pages that SGLang's token slots cover. Raises LayoutMismatch for slots that are no whole pages."""
        slots = np.asarray(host_indices.tolist() if hasattr(host_indices, "tolist") else host_indices, dtype=np.int64)
        if slots.size != pages * self.page_tokens:
            raise LayoutMismatch(f"{slots.size} host slots are given for {pages} pages of {self.page_tokens} tokens")
        rows = slots.reshape(pages, self.page_tokens)
        first = rows[:, 0]
        is_whole = not (first % self.page_tokens).any() and (rows == first[:, None] + np.arange(self.page_tokens)).all()
        if not is_whole:
            raise LayoutMismatch("host slots are not whole pages in order")
        numbers: list[int] = (first // self.page_tokens).tolist()
        return numbers


def describe_host_pool(pool: Any, shard: Shard) -> HostPages:
    """The pages of a HostKVCache. Raises LayoutMismatch for one whose pages are not equal parts at fixed strides."""
    page_tokens = int(pool.page_size)
    pages = int(pool.size) // page_tokens
    if pages < 1:
        raise LayoutMismatch(
            f"the host pool has {pool.size} tokens, expected at least a page of {page_tokens}: "
            "raise --hicache-size or --hicache-ratio"
        )
    bases, sizes = _page_parts(pool, 0, page_tokens)
    part_bytes = sizes[0]
    strides = [part_bytes] * len(bases)
    for number in {1, pages - 1} - {0} if pages > 1 else ():
        addresses, further = _page_parts(pool, number, page_tokens)
        if number == 1:
            strides = [address - base for address, base in zip(addresses, bases, strict=True)]
        is_regular = addresses == [base + number * stride for base, stride in zip(bases, strides, strict=True)]
        if not is_regular or set(sizes + further) != {part_bytes}:
            raise LayoutMismatch(
                f"pages of host layout {pool.layout!r} are not equal parts at fixed strides: {_OTHER_LAYOUT}"
            )
    if any(stride < part_bytes for stride in strides) or part_bytes % page_tokens:
        raise LayoutMismatch(
            f"page parts of {part_bytes} bytes at strides {strides} do not hold {page_tokens} tokens: {_OTHER_LAYOUT}"
        )
    parts = tuple(_part_array(base, stride, pages, part_bytes) for base, stride in zip(bases, strides, strict=True))
    token_bytes = part_bytes // page_tokens
    head_dim = gcd(token_bytes, _HEAD_DIM_MAX)
    layout = Layout(
        layers=len(parts),
        kv_heads=token_bytes // head_dim,
        head_dim=head_dim,
        dtype="uint8",
        chunk_tokens=page_tokens,
        planes=1,
        rank=0 if shard.is_replicated else shard.tp_rank,
        world=1 if shard.is_replicated else shard.tp_size,
        format=_format_of(pool, shard),
        block_tokens=page_tokens,
    )
    return HostPages(layout, parts, page_tokens)


def _page_parts(pool: Any, number: int, page_tokens: int) -> tuple[list[int], list[int]]:
    slots = np.arange(number * page_tokens, (number + 1) * page_tokens)
    addresses, sizes = pool.get_page_buffer_meta(slots)
    if not addresses or len(addresses) != len(sizes):
        raise LayoutMismatch(f"host layout {pool.layout!r} names no buffers for a page: {_OTHER_LAYOUT}")
    return [int(address) for address in addresses], [int(size) for size in sizes]


def _part_array(base: int, stride: int, pages: int, part_bytes: int) -> npt.NDArray[np.uint8]:
    span = (pages - 1) * stride + part_bytes
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(base))
    return np.lib.stride_tricks.as_strided(whole, (pages, part_bytes), (stride, 1))


def _format_of(pool: Any, shard: Shard) -> str:
    """The meaning of a page's bytes, as the Layout's format."""
    names = ("layer_num", "head_num", "head_dim", "kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer")
    geometry = " ".join(f"{name}={getattr(pool, name)}" for name in names if hasattr(pool, name))
    tag = getattr(pool, "storage_format_tag", None) or "plain"
    words = f"sglang-hicache-1 {pool.layout} {pool.dtype} {geometry} {tag} {shard.words()}"
    if len(words.encode()) <= FORMAT_BYTES_MAX:
        return words
    return f"sglang-hicache-1 {hashlib.blake2b(words.encode(), digest_size=32).hexdigest()}"
