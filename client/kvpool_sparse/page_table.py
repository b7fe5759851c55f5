"""Page table of one sequence: where each run of `block_tokens` tokens lies, and what is done to runs in bulk.

Run r has the tokens r * block_tokens … of the sequence; it never straddles a page. Addresses of all runs and of their
summaries stand in columns, for layer 0; those of another layer lie a fixed way behind them.
One thread at a time.
"""

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool_sparse.arrays import stored_dtype
from kvpool_sparse.offload import SharedLease
from kvpool_sparse.pages import Bytes, Items, Page, PageForm, PageMemory
from kvpool_sparse.results import LOOSE_SHARE, TAIL_WEIGHT_MAX, Floats

Addresses = npt.NDArray[np.uint64]


class PageTable:
    """See the module."""

    def __init__(self, form: PageForm, memory: PageMemory | None = None) -> None:
        self.form = form
        self._memory = memory if memory is not None else PageMemory(form)
        self._pages: list[Page] = []
        self._keys: Addresses = np.empty(0, np.uint64)
        self._records: Addresses = np.empty(0, np.uint64)

    @property
    def own_bytes(self) -> int:
        """Bytes of this process's memory in its pages."""
        return sum(page.own_bytes for page in self._pages)

    def page(self, number: int) -> Page:
        """A page, whose bytes stay where they are for as long as somebody has it."""
        return self._pages[number]

    def page_to_save(self, number: int) -> Page:
        """A page whose bytes nobody changes: of one in the arena a copy, which counts only if its chunk is current
        afterwards."""
        page = self._pages[number]
        return page if page.own is not None else self._memory.copy_of(page)

    def write(self, layer: int, first: int, keys: Items, values: Items) -> None:
        """Write tokens of a layer from token `first` on."""
        page_tokens, written = self.form.layout.chunk_tokens, 0
        while written < len(keys):
            number, at = divmod(first + written, page_tokens)
            count = min(page_tokens - at, len(keys) - written)
            planes = self._writable(number).items(layer)
            planes[0, at : at + count] = keys[written : written + count]
            planes[1, at : at + count] = values[written : written + count]
            written += count

    def adopt(self, lease: SharedLease | None, moved: range) -> None:
        """Read these pages in the arena from now on. Those whose summaries are not good there lack them, unless the
        page was one of this process: what was built from the arena may be of other bytes."""
        if lease is None:
            return
        layers, summaries = lease.memory.layers, lease.memory.summaries
        is_usable = self.form.block_tokens == self.form.layout.summary_block_tokens
        for number in moved:
            page = Page(self.form, int(layers[number]), memory=lease.memory)
            old = self._pages[number] if number < len(self._pages) else None
            if is_usable and lease.good_summaries[number]:
                page.use_pool_summaries(int(summaries[number]))
            elif old is not None and old.own is not None and old.own_summaries is not None:
                page.use_own_summaries(old.own_summaries, are_whole=True)
            self._put(number, page)

    def missing_summaries(self, end: int) -> list[int]:
        """The first `end` pages' numbers, those that lie in the arena and lack summaries."""
        return [number for number in range(end) if not self._pages[number].has_summaries]

    def summarise_page(self, number: int) -> int:
        """Summarise all blocks of a full page, of all layers. Their number."""
        runs = range(number * self.form.blocks, (number + 1) * self.form.blocks)
        built = sum(self._build(layer, run) for layer in range(self.form.layout.layers) for run in runs)
        self._pages[number].has_summaries = True
        return built

    def summarise(self, layer: int, runs: range) -> int:
        """Summarise full runs of a layer, but for those that have it. How many were."""
        return sum(self._build(layer, run) for run in runs if not self._pages[run // self.form.blocks].has_summaries)

    def records(self, layer: int, first: int, count: int) -> Addresses:
        """Where the summaries of `count` runs from `first` on lie."""
        behind = layer * self.form.blocks * self.form.block_summary_bytes
        return self._records[first : first + count] + np.uint64(behind)

    def runs_of(self, tokens: int) -> int:
        """The number of runs of so many tokens, the last one perhaps not full."""
        return -(-tokens // self.form.block_tokens)

    def attend(
        self, layer: int, query: Floats, wanted: Bytes, *, tokens: int, team: "kvpool_native.WorkerTeam"
    ) -> tuple[Floats, Floats]:
        """Attention over the runs that each KV head wants, `wanted` [run, kv_heads]: `(logit [heads], value [heads,
        head_dim])`."""
        layout, block = self.form.layout, self.form.block_tokens
        counts = np.full(len(wanted), block, np.uint64)
        counts[-1:] = tokens - (len(wanted) - 1) * block
        return kvpool_native.attend(
            team,
            layout.dtype,
            query,
            self._keys[: len(wanted)] + np.uint64(layer * layout.layer_bytes),
            counts,
            wanted,
            value_offset=self.form.plane_bytes,
            token_stride=layout.token_plane_bytes,
        )

    def attend_by_lookup(
        self,
        layer: int,
        query: Floats,
        by: "kvpool_native.Recall",
        *,
        team: "kvpool_native.WorkerTeam",
        tokens: int,
        first: int,
        blocks: int,
        take: int,
    ) -> tuple[Floats, float, int, int]:
        """A step of a layer that reads `take` of the `blocks` middle ones from run `first` on: `(value [heads, head_dim],
        sum of kept masses, their number, KV heads that have read everything)`."""
        form = self.form
        return by.attend(
            team,
            form.layout.dtype,
            query,
            keys=self._keys,
            keys_behind=layer * form.layer_bytes,
            records=self._records,
            records_behind=layer * form.layer_summary_bytes,
            tokens=tokens,
            block_tokens=form.block_tokens,
            first=first,
            blocks=blocks,
            take=take,
            value_offset=form.plane_bytes,
            token_stride=form.token_stride,
            loose_share=LOOSE_SHARE,
            tail_weight_max=TAIL_WEIGHT_MAX,
        )

    def gather(self, layer: int, runs: npt.NDArray[np.int64]) -> tuple[Items, Items]:
        """Keys and values of full runs, `runs` [kv_heads, n]: each [kv_heads, n * block_tokens, head_dim]."""
        layout, block = self.form.layout, self.form.block_tokens
        shape = (layout.kv_heads, runs.shape[1] * block, layout.head_dim)
        keys, values = (np.empty(shape, stored_dtype(layout)) for _ in range(2))
        for head in range(layout.kv_heads):
            for at, run in enumerate(runs[head]):
                number, within = divmod(int(run), self.form.blocks)
                planes = self._pages[number].items(layer)
                here, there = slice(at * block, (at + 1) * block), slice(within * block, (within + 1) * block)
                keys[head, here] = planes[0, there, head]
                values[head, here] = planes[1, there, head]
        return keys, values

    def gather_all(self, layer: int, tokens: int) -> tuple[Items, Items]:
        """Keys and values of all tokens: each [kv_heads, tokens, head_dim]."""
        parts = [page.items(layer) for page in self._pages[: -(-tokens // self.form.layout.chunk_tokens)]]
        joined = np.concatenate(parts, axis=1)[:, :tokens] if parts else None
        if joined is None:
            return self.gather(layer, np.empty((self.form.layout.kv_heads, 0), np.int64))
        keys, values = np.ascontiguousarray(joined.transpose(0, 2, 1, 3))
        return keys, values

    def fork(self) -> "PageTable":
        """A table with the same pages."""
        child = PageTable(self.form, self._memory)
        child._pages = list(self._pages)
        child._keys, child._records = self._keys.copy(), self._records.copy()
        for page in self._pages:
            page.references += 1
        return child

    def close(self) -> None:
        """Let go of all pages."""
        for page in self._pages:
            self._memory.release(page)
        self._pages = []

    def _writable(self, number: int) -> Page:
        if number == len(self._pages):
            self._put(number, self._memory.new_page())
        page = self._pages[number]
        assert page.own is not None, "a page in the arena is never written"
        if page.references > 1:
            self._put(number, self._memory.copy_of(page))
        return self._pages[number]

    def _put(self, number: int, page: Page) -> None:
        if number == len(self._pages):
            self._pages.append(page)
            self._grow()
        else:
            old, self._pages[number] = self._pages[number], page
            self._memory.release(old)
        self._note(number)

    def _grow(self) -> None:
        needed = len(self._pages) * self.form.blocks
        if needed > len(self._keys):
            room = max(needed, 2 * len(self._keys))
            self._keys, self._records = (_grown(column, room) for column in (self._keys, self._records))

    def _note(self, number: int) -> None:
        """Enter a page's addresses."""
        form, page = self.form, self._pages[number]
        rows = slice(number * form.blocks, (number + 1) * form.blocks)
        blocks = np.arange(form.blocks, dtype=np.uint64)
        run_bytes = form.block_tokens * form.layout.token_plane_bytes
        self._keys[rows] = np.uint64(page.base) + blocks * np.uint64(run_bytes)
        self._records[rows] = np.uint64(page.summaries) + blocks * np.uint64(form.block_summary_bytes)

    def _build(self, layer: int, run: int) -> int:
        """Summarise one full run, in memory of this process."""
        form = self.form
        number, block = divmod(run, form.blocks)
        page = self._pages[number]
        page.use_own_summaries()
        self._note(number)  # a fork may have made them
        at = (layer * form.blocks + block) * form.block_summary_bytes
        assert page.own_summaries is not None
        keys = self._keys[run : run + 1] + np.uint64(layer * form.layout.layer_bytes)
        kvpool_native.build_summaries(
            form=form.summary_form,
            dtype=form.layout.dtype,
            head_dim=form.layout.head_dim,
            kv_heads=form.layout.kv_heads,
            keys=keys,
            values=keys + np.uint64(form.plane_bytes),
            token_stride=form.layout.token_plane_bytes,
            block_tokens=form.block_tokens,
            out=page.own_summaries[at : at + form.block_summary_bytes],
        )
        return 1


def _grown(column: Addresses, room: int) -> Addresses:
    grown = np.zeros(room, np.uint64)
    grown[: len(column)] = column
    return grown
