"""Staging area: memory of a device for so many blocks of one KV head each, and the way of bytes into it.

    arena, pages ──gather──► host buffer ──one copy──► landing ──spread──► slots

All memory is allocated at the start and never grows: slots and landing together have the configured number of blocks.
Host buffers are pinned where the device is CUDA, and there are two of them, so that one is filled while the other is
copied. Copies are ordered by the stream they are queued on: who reads slots on another one waits for it.

One thread at a time. It knows no blocks by name: that is the slot table's.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_sparse.device.slot_table import Numbers
from kvpool_sparse.device.tensors import Items, items_of, torch_dtype

BLOCKS_MIN = 2
# The largest piece, and its share of the area (guesses: 16 MiB of blocks with a head_dim of 128, an eighth).
PIECE_BLOCKS_MAX = 256
PIECE_SHARE = 8
HOST_BUFFERS = 2


class StagingArea:
    """See the module. `slots`: how many blocks it has at once; `piece`: how many are copied at once."""

    def __init__(self, layout: Layout, block_tokens: int, blocks: int, device: torch.device) -> None:
        """Raises InvalidArgument for less than two blocks."""
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < BLOCKS_MIN:
            raise InvalidArgument(f"staging_blocks is {blocks!r}, expected {BLOCKS_MIN} or more")
        self.device = device
        self.piece = max(1, min(PIECE_BLOCKS_MAX, blocks // PIECE_SHARE))
        self.slots = blocks - self.piece
        self._is_cuda = device.type == "cuda"
        shape, dtype = (2, block_tokens, layout.head_dim), torch_dtype(layout)
        with torch.inference_mode(False):  # written inside and outside of it
            self._blocks = torch.empty((self.slots, *shape), dtype=dtype, device=device)
            self._landing = torch.empty((self.piece, *shape), dtype=dtype, device=device)
            self._hosts = [
                torch.empty((self.piece, *shape), dtype=dtype, pin_memory=self._is_cuda) for _ in range(HOST_BUFFERS)
            ]
        self._items = [items_of(host, layout) for host in self._hosts]
        self._slot_bytes = self._blocks.nbytes // self.slots
        self._turn = 0
        self._copied = [torch.cuda.Event() for _ in range(HOST_BUFFERS)] if self._is_cuda else []
        self._side = torch.cuda.Stream(device) if self._is_cuda else None

    def __repr__(self) -> str:
        return f"<StagingArea {self.slots} slots on {self.device}>"

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory."""
        return self._blocks.nbytes + self._landing.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block of one KV head."""
        return self._slot_bytes

    def host_items(self) -> Items:
        """The next host buffer, [piece, 2, block_tokens, head_dim]: keys before values. Waits until the copy out of it
        has ended."""
        self._turn = (self._turn + 1) % HOST_BUFFERS
        if self._is_cuda:
            self._copied[self._turn].synchronize()
        return self._items[self._turn]

    def fill(self, slots: Numbers) -> None:
        """Queue the copy of the host buffer's first blocks to these slots. Two copies on the device."""
        count = len(slots)
        landing = self._landing[:count]
        with torch.no_grad():
            landing.copy_(self._hosts[self._turn][:count], non_blocking=True)
            if self._is_cuda:
                self._copied[self._turn].record()
            self._blocks.index_copy_(0, self.numbers(slots), landing)

    def read(self, slots: Numbers) -> torch.Tensor:
        """A copy of these slots, [n, 2, block_tokens, head_dim]."""
        return self._blocks.index_select(0, self.numbers(slots))

    def numbers(self, numbers: Numbers) -> torch.Tensor:
        """Indices on the device."""
        return torch.from_numpy(numbers).to(self.device)

    def begin_aside(self) -> None:
        """Order what the side stream gets from now on behind what this thread's stream has."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))

    def aside(self) -> "AbstractContextManager[object]":
        """The side stream, for one thread's copies."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def end_aside(self) -> None:
        """Order what this thread's stream gets from now on behind what the side stream has."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def close(self) -> None:
        """Give all memory back, once no copy reads or writes it any more. Idempotent."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        self._blocks, self._landing = self._blocks.new_empty(0), self._landing.new_empty(0)
        self._hosts, self._items = [], []
