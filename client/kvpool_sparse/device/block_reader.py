"""Block reader: what a device needs of a sequence's pages, wherever they lie: choices, blocks, spans of tokens.

The one module here that knows a SparseSequence from within. Bytes that it has read count only while the sequence's
chunks are those that were verified: `steadily` reads again or raises SequenceLost where they are not, and whoever reads
without it asks `is_current` before the bytes go anywhere. The thread to which the sequence belongs.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError
from kvpool_sparse.device.slot_table import Numbers
from kvpool_sparse.device.tensors import Items
from kvpool_sparse.results import Floats, Recall
from kvpool_sparse.sequence import SparseSequence

# [middle block, KV head]
Mask = npt.NDArray[np.bool_]
Answer = TypeVar("Answer")


class BlockReader:
    """See the module."""

    def __init__(self, sequence: SparseSequence) -> None:
        self._sequence = sequence

    def checked_query(self, layer: int, q: object) -> Floats:
        """A query as float32 in this process's memory. Raises InvalidArgument, KVPoolError where the sequence is
        closed."""
        return self._sequence._checked_query(layer, q)

    def check_open(self) -> None:
        """Raises KVPoolError where the sequence is closed, or that of the parent process."""
        self._sequence._check_open()

    def check_layer(self, layer: int) -> None:
        """Raises InvalidArgument where there is no such layer."""
        self._sequence._check_layer(layer)

    @property
    def is_open(self) -> bool:
        """Whether the sequence is open, in the process that it belongs to."""
        try:
            self.check_open()
        except KVPoolError:
            return False
        return True

    def tokens(self, layer: int) -> int:
        """Tokens of a layer."""
        return self._sequence._tokens[layer]

    def middle_blocks(self, layer: int) -> int:
        """Middle blocks of a layer."""
        return self._sequence.config.middle_blocks(self.tokens(layer))

    def window(self, layer: int) -> range:
        """The tokens of a layer that are in no middle block, behind the first ones."""
        config = self._sequence.config
        return range(config.init_tokens + self.middle_blocks(layer) * config.block_tokens, self.tokens(layer))

    def recall(self, layer: int, query: Floats) -> Recall | None:
        """The blocks that a step needs, counted; None where the layer is attended whole. Unchecked."""
        return self._sequence._recall(layer, query) if self._sequence._is_sparse(layer) else None

    def wanted(self, layer: int, found: Recall | None) -> Mask:
        """The blocks to read after a recall, those of dense heads included."""
        shape = (self.middle_blocks(layer), self._sequence.layout.kv_heads)
        if found is None:
            return np.ones(shape, np.bool_)
        return self._mask(shape, found.blocks, found.is_dense)

    def foreseen(self, layer: int, query: Floats) -> Mask:
        """The blocks to read for a query that is like the next one; not counted. Unchecked."""
        sequence, layout = self._sequence, self._sequence.layout
        blocks = self.middle_blocks(layer)
        if not sequence._is_sparse(layer) or not blocks:
            return self.wanted(layer, None)
        records = sequence._table.records(layer, sequence._init_runs, blocks)
        take = sequence.config.blocks_to_take(blocks)
        recall = sequence._native_recall(len(query) // layout.kv_heads)
        chosen, is_dense, *_ = recall.run(sequence._team, query, records, take=take, wants_tail=False)
        return self._mask((blocks, layout.kv_heads), chosen, is_dense)

    def read(self, layer: int, blocks: Numbers, heads: Numbers, out: Items) -> None:
        """Copy blocks of one KV head each, in the order of `blocks`, to `out` [n or more, 2, block_tokens, head_dim].
        Unchecked. Fast where heads of a block follow one another."""
        sequence = self._sequence
        form = sequence._table.form
        firsts = np.flatnonzero(np.r_[True, blocks[1:] != blocks[:-1]]) if len(blocks) else np.empty(0, np.int64)
        for first, end in zip(firsts, [*firsts[1:], len(blocks)], strict=True):
            number, within = divmod(int(blocks[first]) + sequence._init_runs, form.blocks)
            rows = slice(within * form.block_tokens, (within + 1) * form.block_tokens)
            planes = sequence._table.page(number).items(layer)[:, rows]
            for at in range(first, end):
                out[at] = planes[:, :, heads[at]]

    def read_span(self, layer: int, span: range) -> Items:
        """A copy of consecutive tokens, [2, tokens, kv_heads, head_dim]. Unchecked."""
        page_tokens = self._sequence.layout.chunk_tokens
        parts = []
        for number in range(span.start // page_tokens, -(-span.stop // page_tokens)):
            begin = number * page_tokens
            rows = slice(max(span.start - begin, 0), span.stop - begin)
            parts.append(self._sequence._table.page(number).items(layer)[:, rows])
        return np.concatenate(parts, axis=1)

    def steadily(self, read: Callable[[], Answer]) -> Answer:
        """What `read` returns, where all that it read is what was verified. Raises SequenceLost."""
        return self._sequence._steadily(read)

    @property
    def is_current(self) -> bool:
        """Whether all that was read until now is what was verified."""
        return self._sequence._offload.are_current()

    @staticmethod
    def _mask(shape: tuple[int, int], chosen: npt.NDArray[np.int32], is_dense: npt.NDArray[np.bool_]) -> Mask:
        mask = np.zeros(shape, np.bool_)
        mask[:] = is_dense
        mask[chosen, np.arange(shape[1])[:, None]] = True
        return mask
