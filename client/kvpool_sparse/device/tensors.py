"""Tensors of a layout's dtype, and arrays of the same bytes: numpy has no bfloat16, and holds its bits.

Nothing is copied but what may not be written. Any thread.
"""

import numpy as np
import numpy.typing as npt
import torch

from kvpool.layout import Layout
from kvpool_sparse.arrays import stored_dtype

Items = npt.NDArray[np.generic]


def torch_dtype(layout: Layout) -> torch.dtype:
    """The dtype of a layout's items."""
    found = getattr(torch, layout.dtype)
    assert isinstance(found, torch.dtype)
    return found


def items_of(tensor: torch.Tensor, layout: Layout) -> Items:
    """The items of a tensor in this process's memory."""
    bits = tensor.view(torch.int16) if layout.dtype == "bfloat16" else tensor
    return np.asarray(bits.numpy()).view(stored_dtype(layout))


def tensor_of(items: Items, layout: Layout) -> torch.Tensor:
    """The tensor of items."""
    if layout.dtype == "bfloat16":
        return plain_tensor_of(items.view(np.int16)).view(torch.bfloat16)
    return plain_tensor_of(items)


def plain_tensor_of(array: Items) -> torch.Tensor:
    """The tensor of an array that torch has the dtype of; of a copy where it may not be written, of which torch warns,
    or runs backwards, which torch does not know."""
    is_plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if is_plain else array.copy())
