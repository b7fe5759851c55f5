"""Measured sequence: a SparseSequence whose parts of a step can be called one by one, over memory in huge pages.

Its KV is made up: normally distributed, and the same few million numbers again and again at other places. To such keys every
block is alike, so that no cluster may be left out of the tail: for recall the hardest case there is. One thread.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
import kvpool_native
from kvpool_sparse import SparseConfig, SparseSequence
from kvpool_sparse.page_table import PageTable
from kvpool_sparse.pages import Page, PageForm, PageMemory
from kvpool_sparse.results import Floats
from kvpool_sparse.tally import Tally
from kvpool_sparse.teams import team_of
from kvpool_tools.bench.lookup_attention.choice import Sizes
from kvpool_tools.bench.measure import timed_with_cpu_s

SEED = 11
# Tokens of made-up KV from which all pages are filled.
TABLE_TOKENS = 4096
HUGE_PAGE_BYTES = 2 << 20
# The time and CPU time of one call, in seconds.
Timed = tuple[float, float]


class HugeMemory(PageMemory):
    """Pages one behind the other in one region, each with its summaries behind it, in huge pages where the kernel gives
    them: as chunks lie in an arena."""

    def __init__(self, form: PageForm, pages: int) -> None:
        super().__init__(form)
        page_bytes = form.layout.chunk_bytes + -(-form.page_summary_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = pages * page_bytes
        # One huge page more, so that the pages can begin at one.
        region = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(region, np.uint8)
        begin = -whole.ctypes.data % HUGE_PAGE_BYTES
        self._pages = iter(whole[begin : begin + size].reshape(pages, -1))

    def new_page(self) -> Page:
        """The next page of the region."""
        whole, kv_bytes = next(self._pages), self.form.layout.chunk_bytes
        page = Page(self.form, whole.ctypes.data, own=whole[:kv_bytes])
        page.use_own_summaries(whole[kv_bytes : kv_bytes + self.form.page_summary_bytes])
        return page


class MeasuredSequence(SparseSequence):
    """See the module. Invariant: every block has its summary in every layer, so that resident set and budget may change."""

    def __init__(self, pool: kv.Pool, sizes: Sizes) -> None:
        whole = SparseConfig(local_tokens=sizes.tokens, dense_boundary=0, offload_boundary=2 * sizes.tokens)
        super().__init__(pool, whole, threads=1)
        self._sizes = sizes
        self._count = sizes.tokens // self.layout.chunk_tokens
        self._table = PageTable(self._table.form, HugeMemory(self._table.form, self._count))
        self._random = np.random.default_rng(SEED)
        self._turn = 0

    def fill(self) -> Iterator[None]:
        """Append all tokens, a page at a time, without summaries."""
        layout, page = self.layout, self.layout.chunk_tokens
        shape = (TABLE_TOKENS + page, layout.kv_heads, layout.head_dim)
        table = self._random.standard_normal(shape, np.float32).view(np.uint32) >> np.uint32(16)
        items = table.astype(np.uint16)
        for _ in range(self._count):
            for layer in range(layout.layers):
                at = self._random.integers(0, TABLE_TOKENS, 2)
                self.append(layer, items[at[0] : at[0] + page], items[at[1] : at[1] + page])
            yield

    def summarise_page(self, number: int) -> Timed:
        """Build the summaries of a page, of all layers."""
        return timed_with_cpu_s(lambda: self._table.summarise_page(number))

    def read_page(self, number: int) -> Timed:
        """Read a page and do nothing with it."""
        address = np.array([self._table.page(number).base], np.uint64)
        size = self.layout.chunk_bytes
        return timed_with_cpu_s(lambda: kvpool_native.read_plainly(self._team, address, run_bytes=size))

    @property
    def page_form(self) -> PageForm:
        """Sizes of the pages."""
        return self._table.form

    @property
    def threads(self) -> int:
        """Threads of a step."""
        return self._team.threads

    def huge_bytes(self) -> int:
        """Bytes of this process in huge pages; 0 where the kernel does not say."""
        try:
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))

    @property
    def pages(self) -> int:
        """The number of pages."""
        return self._count

    def become(self, config: SparseConfig, threads: int) -> None:
        """Have this resident set and budget from now on, and so many threads."""
        self._config = config  # every page has summaries of all its blocks
        self._team = team_of(self.pool, threads)
        self._summarised = [config.middle_blocks(self.tokens)] * self.layout.layers
        self.tally = Tally()

    def query(self) -> Floats:
        """A new query."""
        return self._random.standard_normal((self._sizes.heads, self.layout.head_dim), np.float32)

    def next_layer(self) -> int:
        """The layers in turn: what one call has left in the caches is not what the next one wants."""
        self._turn = (self._turn + 1) % self.layout.layers
        return self._turn

    def timed_read(self, layer: int) -> Timed:
        """Read all KV of a layer and do nothing with it."""
        bases = [self._table.page(number).base for number in range(self._count)]
        runs = np.array(bases, np.uint64) + np.uint64(layer * self.layout.layer_bytes)
        size = self.layout.layer_bytes
        return timed_with_cpu_s(lambda: kvpool_native.read_plainly(self._team, runs, run_bytes=size))

    def timed_dense(self, layer: int, query: Floats) -> Timed:
        """Attend to everything."""
        return timed_with_cpu_s(lambda: self.dense_attention(layer, query))

    def timed_recall(self, layer: int, query: Floats) -> Timed:
        """Choose blocks and estimate the others."""
        return timed_with_cpu_s(lambda: self._recall(layer, query))

    def timed_choice(self, layer: int, query: Floats) -> Timed:
        """Choose blocks without an estimate of the others."""
        blocks = self.config.middle_blocks(self.tokens)
        records = self._table.records(layer, self._init_runs, blocks)
        take, recall = (
            self.config.blocks_to_take(blocks),
            self._native_recall(self._sizes.heads // self.layout.kv_heads),
        )
        return timed_with_cpu_s(lambda: recall.run(self._team, query, records, take=take, wants_tail=False))

    def timed_sparse(self, layer: int, query: Floats) -> Timed:
        """Attend to what a recall has chosen before."""
        found, wanted = self._recall(layer, query), self._every_run()
        middle = wanted[self._init_runs : self._init_runs + self.config.middle_blocks(self.tokens)]
        middle[:] = found.is_dense
        middle[found.blocks, np.arange(self.layout.kv_heads)[:, None]] = 1
        return timed_with_cpu_s(lambda: self._table.attend(layer, query, wanted, tokens=self.tokens, team=self._team))

    def timed_step(self, layer: int, query: Floats) -> Timed:
        """The whole step, as an engine calls it."""
        return timed_with_cpu_s(lambda: self.attend(layer, query))

    def _every_run(self) -> npt.NDArray[np.uint8]:
        return np.ones((self._table.runs_of(self.tokens), self.layout.kv_heads), np.uint8)

    def dense_attention(self, layer: int, query: Floats) -> Floats:
        """Attention to all tokens of a layer."""
        return self._table.attend(layer, query, self._every_run(), tokens=self.tokens, team=self._team)[1]

    def attended_bytes(self) -> int:
        """Bytes of KV that a step of this configuration attends to, where no head is dense."""
        blocks = self.config.middle_blocks(self.tokens)
        left_out = (blocks - self.config.blocks_to_take(blocks)) * self.config.block_tokens
        return (self.tokens - left_out) * self.layout.token_plane_bytes * 2

    def summary_bytes(self) -> int:
        """Bytes of the summaries that a step of this configuration reads."""
        return self.config.middle_blocks(self.tokens) * self._table.form.block_summary_bytes
