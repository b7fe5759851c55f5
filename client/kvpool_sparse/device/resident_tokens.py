"""Resident tokens: keys and values of a sequence's first tokens and of its window on a device, for every layer.

    first   token t < init_tokens at t
    ring    token t >= init_tokens at (t - init_tokens) % ring_tokens

The ring has the window and one block: a block leaves the window when all its tokens have. What has left is overwritten
by what comes. All memory is allocated at the start. One thread at a time.
Invariant: of a layer with n tokens, first tokens up to n and the last `ring_tokens` behind them are in place.
"""

import torch

from kvpool.layout import Layout
from kvpool_sparse.config import SparseConfig
from kvpool_sparse.device.tensors import torch_dtype


class ResidentTokens:
    """See the module."""

    def __init__(self, layout: Layout, config: SparseConfig, device: torch.device) -> None:
        self.device = device
        self.init_tokens = config.init_tokens
        self.ring_tokens = config.local_tokens + config.block_tokens
        shape, dtype = (layout.layers, 2, layout.kv_heads), torch_dtype(layout)
        with torch.inference_mode(False):  # written inside and outside of it
            self._first = torch.empty((*shape, self.init_tokens, layout.head_dim), dtype=dtype, device=device)
            self._ring = torch.empty((*shape, self.ring_tokens, layout.head_dim), dtype=dtype, device=device)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory."""
        return self._first.nbytes + self._ring.nbytes

    def spans(self, begin: int, end: int) -> list[range]:
        """Which of the tokens `begin` … `end` - 1 are resident once all of them are written."""
        first = range(begin, min(end, self.init_tokens))
        last = range(max(begin, self.init_tokens, end - self.ring_tokens), end)
        return [span for span in (first, last) if len(span)]

    def write(self, layer: int, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write tokens from `begin` on, [tokens, kv_heads, head_dim] each; of many only those that stay resident."""
        for span in self.spans(begin, begin + len(keys)):
            rows = slice(span.start - begin, span.stop - begin)
            for plane, items in enumerate((keys, values)):
                some = items[rows].detach().transpose(0, 1)
                if span.start < self.init_tokens:
                    self._copy(self._first[layer, plane], span.start, some)
                else:
                    self._copy_around(self._ring[layer, plane], span.start - self.init_tokens, some)

    def parts(self, layer: int, window: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the tokens of a window and of the first tokens before it, [kv_heads, tokens, head_dim]
        each, where they lie. Requires: the window is the sequence's end."""
        parts = [self._first[layer, :, :, : min(self.init_tokens, window.stop)]]
        begin = max(window.start, self.init_tokens) - self.init_tokens
        count = window.stop - self.init_tokens - begin
        if count > 0:
            assert count <= self.ring_tokens
            at = begin % self.ring_tokens
            parts.append(self._ring[layer, :, :, at : at + count])
            parts.append(self._ring[layer, :, :, : max(0, at + count - self.ring_tokens)])
        return [(part[0], part[1]) for part in parts if part.shape[2]]

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self._first, self._ring = self._first.new_empty(0), self._ring.new_empty(0)

    def _copy_around(self, ring: torch.Tensor, begin: int, some: torch.Tensor) -> None:
        at = begin % self.ring_tokens
        before = min(some.shape[1], self.ring_tokens - at)
        self._copy(ring, at, some[:, :before])
        self._copy(ring, 0, some[:, before:])

    @staticmethod
    def _copy(target: torch.Tensor, at: int, some: torch.Tensor) -> None:
        if some.shape[1]:
            with torch.no_grad():
                target[:, at : at + some.shape[1]].copy_(some, non_blocking=True)
