"""Host pages: SGLang's host pool described as pages of opaque bytes in a few parts, each part at a fixed stride.

HiCache keeps KV in registered host memory, in pages; `get_page_buffer_meta` returns the addresses of a page's parts (K and V
for page_first, one for MLA, one for each layer and plane for layer_first, states and convolutions for Mamba). A part becomes a
layer of a packed Layout, so a page is one chunk, and loads and saves move its bytes straight between host page and arena: one
copy, none on the way. Parts at other strides have a Layout of their own. What the parts hold is in the Layout's format: engines
share pages only where the formats are equal.

Pure but for reading the pool's attributes; keeps no memory alive (the backend keeps the pool). Any thread.
"""

import ctypes
import hashlib
import sys
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import LayoutMismatch
from kvpool.layout import Layout

FORMAT_BYTES_MAX = 200
_HEAD_DIM_MAX = 1 << 16
KV = "kv"
_KV_FIELDS = ("layer_num", "head_num", "head_dim", "kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer")
# What gives the bytes of other pools their meaning: states of Mamba, keys of indexers, compressed KV.
_OTHER_FIELDS = (
    "num_mamba_layers",
    "temporal_dtype",
    "temporal_state_shape",
    "conv_state_shapes",
    "v_head_dim",
    "indexer_dtype",
    "indexer_page_stride_size",
    "item_bytes",
    "state_page_bytes",
)
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
class PoolPages:
    """Parts of one size and stride of every page of one of SGLang's pools, bytes [pages, part_bytes] each, and the Layout that
    makes them a chunk. `ready_at`: of each part, at which layer of the engine's the forward reads it; none for a host pool."""

    layout: Layout
    parts: tuple[Any, ...]
    page_tokens: int
    ready_at: tuple[int, ...] = ()

    def page_numbers(self, indices: object, pages: int) -> list[int]:
        """The pages that SGLang's token slots cover. Raises LayoutMismatch for slots that are no whole pages."""
        slots = np.asarray(indices.tolist() if hasattr(indices, "tolist") else indices, dtype=np.int64)
        if slots.size != pages * self.page_tokens:
            raise LayoutMismatch(f"{slots.size} slots are given for {pages} pages of {self.page_tokens} tokens")
        rows = slots.reshape(pages, self.page_tokens)
        first = rows[:, 0]
        is_whole = not (first % self.page_tokens).any() and (rows == first[:, None] + np.arange(self.page_tokens)).all()
        if not is_whole or (first < 0).any():
            raise LayoutMismatch("slots are not whole pages in order")
        numbers: list[int] = (first // self.page_tokens).tolist()
        return numbers


def describe_host_pool(pool: Any, shard: Shard, name: str = KV) -> tuple[PoolPages, ...]:
    """The pages of a HostKVCache, their parts by size and stride. Raises LayoutMismatch for one whose pages are not the same
    parts at fixed strides.

    `name`: SGLang's name of a pool beside the KV, which shares with pools of the same name alone.
    """
    page_tokens = int(pool.page_size)
    pages = int(pool.size) // page_tokens
    if pages < 1:
        raise LayoutMismatch(
            f"the host pool has {pool.size} tokens, expected at least a page of {page_tokens}: "
            "raise --hicache-size or --hicache-ratio"
        )
    bases, sizes = _page_parts(pool, 0, page_tokens)
    strides = _strides(pool, bases, sizes, pages)
    if any(stride < size or size % page_tokens for stride, size in zip(strides, sizes, strict=True)):
        raise LayoutMismatch(
            f"page parts of {sizes[:8]} bytes at strides {strides[:8]} do not hold {page_tokens} tokens: {_OTHER_LAYOUT}"
        )
    kinds = list(dict.fromkeys(zip(sizes, strides, strict=True)))
    found = []
    for number, (size, stride) in enumerate(kinds):
        own = [base for base, *kind in zip(bases, sizes, strides, strict=True) if tuple(kind) == (size, stride)]
        parts = tuple(_part_array(base, stride, pages, size) for base in own)
        words = _format_of(pool, shard, name, f"part {number} of {sizes}" if len(kinds) > 1 else "")
        layout = packed_layout(shard, len(parts), part_bytes=size, page_tokens=page_tokens, words=words)
        found.append(PoolPages(layout, parts, page_tokens))
    return tuple(found)


def packed_layout(shard: Shard, parts: int, *, part_bytes: int, page_tokens: int, words: str) -> Layout:
    """The Layout of pages of so many parts, whose meaning `words` have."""
    token_bytes = part_bytes // page_tokens
    head_dim = gcd(token_bytes, _HEAD_DIM_MAX)
    return Layout(
        layers=parts,
        kv_heads=token_bytes // head_dim,
        head_dim=head_dim,
        dtype="uint8",
        chunk_tokens=page_tokens,
        planes=1,
        rank=0 if shard.is_replicated else shard.tp_rank,
        world=1 if shard.is_replicated else shard.tp_size,
        format=words,
        block_tokens=page_tokens,
    )


def is_logical(pool: Any) -> bool:
    """Whether a host pool only counts slots, and other pools have the bytes of its pages (DeepSeek V4)."""
    return hasattr(pool, "kv_buffer") and pool.kv_buffer is None


def _strides(pool: Any, bases: list[int], sizes: list[int], pages: int) -> list[int]:
    """The bytes from a page's parts to those of the next one. Raises LayoutMismatch where they differ from page to page."""
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise LayoutMismatch("host pools of one shared allocation move their pages: run without a unified host memory")
    strides = list(sizes)
    page_tokens = int(pool.page_size)
    for number in sorted({1, pages - 1} - {0}) if pages > 1 else ():
        addresses, further = _page_parts(pool, number, page_tokens)
        if number == 1 and len(addresses) == len(bases):
            strides = [address - base for address, base in zip(addresses, bases, strict=True)]
        expected = [base + number * stride for base, stride in zip(bases, strides, strict=True)]
        if addresses != expected or further != sizes:
            raise LayoutMismatch(
                f"pages of host layout {pool.layout!r} are not the same parts at fixed strides: {_OTHER_LAYOUT}"
            )
    return strides


def _page_parts(pool: Any, number: int, page_tokens: int) -> tuple[list[int], list[int]]:
    # A tensor, as SGLang passes it: some of its pools call methods that numpy's arrays lack.
    arrays: Any = sys.modules.get("torch", np)
    addresses, sizes = pool.get_page_buffer_meta(arrays.arange(number * page_tokens, (number + 1) * page_tokens))
    if not addresses or len(addresses) != len(sizes) or min(sizes) < 1:
        raise LayoutMismatch(f"host layout {pool.layout!r} names no buffers for a page: {_OTHER_LAYOUT}")
    return [int(address) for address in addresses], [int(size) for size in sizes]


def _part_array(base: int, stride: int, pages: int, part_bytes: int) -> npt.NDArray[np.uint8]:
    span = (pages - 1) * stride + part_bytes
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(base))
    return np.lib.stride_tricks.as_strided(whole, (pages, part_bytes), (stride, 1))


def _format_of(pool: Any, shard: Shard, name: str, part: str) -> str:
    """The meaning of a page's bytes, as the Layout's format."""
    names = _KV_FIELDS if name == KV else _KV_FIELDS + _OTHER_FIELDS
    geometry = " ".join(f"{field}={getattr(pool, field)}" for field in names if hasattr(pool, field))
    tag = getattr(pool, "storage_format_tag", None) or "plain"
    words = f"sglang-hicache-1 {pool.layout} {pool.dtype} {geometry} {tag} {shard.words()}"
    if part:
        words += f" {part}"
    if name != KV:
        words += f" pool={name}"
    return format_of_words(words, "sglang-hicache-1" if name == KV else f"sglang-hicache-1 pool={name[:64]}")


def format_of_words(words: str, head: str) -> str:
    """A Layout's format with this meaning: the words, or where they are too long their digest behind `head`."""
    if len(words.encode()) <= FORMAT_BYTES_MAX:
        return words
    return f"{head} {hashlib.blake2b(words.encode(), digest_size=32).hexdigest()}"
