"""Device tensors of the blocks, one for each layer, and the copy of a block's head into another block.

`[num_blocks, 2, tokens_per_block, kv_heads, head_dim]`, zeroed once: attention over a block's unused rows meets finite
numbers. A copy is queued on the calling thread's current stream, behind what the engine has queued there, and ahead of what
it queues next. It decides nothing. One thread.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvpool.errors import InvalidArgument
from kvpool.layout import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Geometry of all blocks. Raises InvalidArgument, naming the field, its value and what was expected."""

    layers: int
    num_blocks: int
    tokens_per_block: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "dtype"}
        for name, value in counts.items():
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name} is {value!r}, expected a number from 1")
            object.__setattr__(self, name, int(value))
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgument(f"dtype is {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        tokens = self.layers * 2 * self.tokens_per_block
        return tokens * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]


class BlockMemory:
    """The tensors. See the module."""

    def __init__(self, shape: BlockShape, device: str | torch.device) -> None:
        device = checked_device(device)
        size = (shape.num_blocks, 2, shape.tokens_per_block, shape.kv_heads, shape.head_dim)
        dtype = getattr(torch, shape.dtype)
        self.layers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]

    def copy_head(self, source: int, target: int, *, tokens: int) -> None:
        """Copy the first `tokens` tokens of a block into another one, in every layer."""
        assert source != target
        for layer in self.layers:
            layer[target, :, :tokens].copy_(layer[source, :, :tokens], non_blocking=True)


def checked_device(device: str | torch.device | None) -> torch.device:
    """The device of this name; None: CUDA, or the CPU where torch has no CUDA device. Raises InvalidArgument for another than
    those that torch has here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError, TypeError) as error:  # torch raises the first where it is built without
        words = str(error).split("\n")[0]
        raise InvalidArgument(f"device is {str(device)!r}, expected one that torch has here: {words}") from error
    return found


def dtype_name(dtype: object) -> str:
    """The layout's name of a torch dtype, or of its name."""
    return str(dtype).removeprefix("torch.")
