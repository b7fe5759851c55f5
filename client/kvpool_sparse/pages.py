"""Pages of a sequence: the KV of one chunk's tokens, in memory of this process or in a slot of the arena.

    OWN, filling ──full, saved and leased──► replaced by a page IN THE ARENA, never written
       └──shared by a fork: copied before it is written

A page has the bytes of a chunk, so that it can be saved as it is, and whoever reads it needs its address alone:

    layer l, plane p, token t     base + l * layer_bytes + p * plane_bytes + t * token_bytes
    summary of layer l, block b   summaries + (l * blocks + b) * block_summary_bytes

Invariant: `references` counts the sequences that have the page; one that several have is not written.
`has_summaries`: every block of every layer has its summary.
One thread at a time.
"""

import ctypes
from typing import Final

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.layout import Layout
from kvpool_client.copying.leased_memory import LeasedMemory
from kvpool_sparse.arrays import stored_dtype

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[np.generic]
FREE_PAGES_MAX = 4


class PageForm:
    """Sizes that all pages of a pool's sequences have in common, in bytes, and the form of their summaries. Immutable.

    `blocks`: blocks in a page. `plane_bytes`: from a token's key to its value. `token_stride`: from one token's to the next.
    `block_summary_bytes`: of the summaries of one block, of all KV heads; `layer_summary_bytes`, `page_summary_bytes`: of all
    summaries of a page's layer, and of a page.
    """

    def __init__(self, layout: Layout, block_tokens: int, summary_form: str) -> None:
        self.layout: Final = layout
        self.block_tokens: Final = block_tokens
        self.summary_form: Final = summary_form
        self.blocks: Final = layout.chunk_tokens // block_tokens
        self.token_stride: Final = layout.token_plane_bytes
        self.plane_bytes: Final = layout.chunk_tokens * self.token_stride
        self.layer_bytes: Final = layout.layer_bytes
        self.block_summary_bytes: Final = layout.kv_heads * kvpool_native.summary_bytes(summary_form, layout.head_dim)
        self.layer_summary_bytes: Final = self.blocks * self.block_summary_bytes
        self.page_summary_bytes: Final = layout.layers * self.layer_summary_bytes


class Page:
    """One page. `own` is its memory, None where the arena has it; then `memory` keeps that mapped."""

    def __init__(
        self, form: PageForm, base: int, *, own: Bytes | None = None, memory: LeasedMemory | None = None
    ) -> None:
        self.form = form
        self.base = base
        self.own = own
        self.own_summaries: Bytes | None = None
        self.summaries = 0
        self.has_summaries = False
        self.references = 1
        self._memory = memory

    @property
    def own_bytes(self) -> int:
        """Bytes of this process's memory."""
        return sum(array.nbytes for array in (self.own, self.own_summaries) if array is not None)

    def whole(self) -> Bytes:
        """All bytes where they lie."""
        raw = (ctypes.c_uint8 * self.form.layout.chunk_bytes).from_address(self.base)
        return np.ctypeslib.as_array(raw)

    def items(self, layer: int) -> Items:
        """Keys and values of a layer where they lie, [plane, tokens, kv_heads, head_dim]; to be written only in a
        page of its own."""
        layout = self.form.layout
        raw = (ctypes.c_uint8 * layout.layer_bytes).from_address(self.base + layer * layout.layer_bytes)
        rows = np.ctypeslib.as_array(raw).view(stored_dtype(layout))
        return rows.reshape(layout.planes, layout.chunk_tokens, layout.kv_heads, layout.head_dim)

    def use_pool_summaries(self, address: int) -> None:
        """Have the summaries that the arena has of it."""
        self.summaries = address
        self.has_summaries = True

    def use_own_summaries(self, summaries: Bytes | None = None, *, are_whole: bool = False) -> Bytes:
        """Have summaries in memory of this process: these, or those it has, or new ones."""
        if summaries is not None:
            self.own_summaries = summaries
        if self.own_summaries is None:
            self.own_summaries = np.zeros(self.form.page_summary_bytes, np.uint8)
        self.summaries = self.own_summaries.ctypes.data
        self.has_summaries = self.has_summaries or are_whole
        return self.own_summaries


class PageMemory:
    """Memory for pages, of which a few are held back for the next ones: fresh memory costs a fault for each 4 KiB."""

    def __init__(self, form: PageForm) -> None:
        self.form = form
        self._free: list[Bytes] = []

    def new_page(self) -> Page:
        """An empty page."""
        own = self._free.pop() if self._free else np.empty(self.form.layout.chunk_bytes, np.uint8)
        return Page(self.form, own.ctypes.data, own=own)

    def copy_of(self, page: Page) -> Page:
        """A page with the same bytes, which its one sequence may write."""
        copy = self.new_page()
        assert copy.own is not None
        copy.own[:] = page.whole()
        if page.own_summaries is not None:
            copy.use_own_summaries(page.own_summaries.copy())
        return copy

    def release(self, page: Page) -> None:
        """One sequence fewer has the page."""
        page.references -= 1
        if not page.references and page.own is not None and len(self._free) < FREE_PAGES_MAX:
            self._free.append(page.own)
