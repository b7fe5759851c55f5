"""Arrays of keys, values and queries as callers have them: numpy or torch, in the layout's dtype.

bfloat16 is `uint16` in numpy: its bits. torch is not imported: a tensor is known by its methods. Any thread.
"""

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout

GROUP_MAX = 16  # query heads of a KV head
HEAD_DIM_STEP = 32
HEAD_DIM_MAX = 256
DTYPES = ("float32", "float16", "bfloat16")
_STORED: "dict[str, np.dtype[np.generic]]" = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def check_layout(layout: Layout, block_tokens: int) -> None:
    """Check that KV of this layout can be attended to in blocks of so many tokens. Raises InvalidArgument."""
    is_plain = layout.rank is not None and not layout.is_packed and layout.head_groups == 1
    if not is_plain or layout.planes != 2 or layout.dtype not in DTYPES:
        raise InvalidArgument(
            f"layout is {layout!r}, expected one of a rank, with planes=2, not packed, without head groups, "
            f"of {', '.join(DTYPES)}"
        )
    if layout.head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= layout.head_dim <= HEAD_DIM_MAX:
        raise InvalidArgument(
            f"layout head_dim is {layout.head_dim}, expected a multiple of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        )
    if layout.chunk_tokens % block_tokens:
        raise InvalidArgument(
            f"block_tokens is {block_tokens}, expected a divisor of the layout's chunk_tokens {layout.chunk_tokens}"
        )


def stored_dtype(layout: Layout) -> "np.dtype[np.generic]":
    """The numpy dtype in which items of the layout's dtype are held."""
    return _STORED[layout.dtype]


def is_tensor(array: object) -> bool:
    """Whether this is a torch tensor."""
    return hasattr(array, "data_ptr") and hasattr(array, "element_size")


def as_items(name: str, array: object, layout: Layout) -> npt.NDArray[np.generic]:
    """Keys or values [tokens, kv_heads, head_dim] as items of the layout's dtype. Raises InvalidArgument."""
    dtype = stored_dtype(layout)
    if is_tensor(array):
        found = str(array.dtype).removeprefix("torch.")  # type: ignore[attr-defined]  # a torch.Tensor
        if found != layout.dtype:
            raise InvalidArgument(f"{name} has dtype {found}, expected the layout's {layout.dtype}")
        items = _tensor_bits(array, layout.dtype)
    else:
        items = np.asarray(array)
        is_bits = layout.dtype == "bfloat16" and (items.dtype == np.uint16 or items.dtype.name == "bfloat16")
        if not is_bits and items.dtype != dtype:
            raise InvalidArgument(f"{name} has dtype {items.dtype}, expected {dtype} for the layout's {layout.dtype}")
        items = items.view(dtype)
    if items.ndim != 3 or items.shape[1:] != (layout.kv_heads, layout.head_dim):
        raise InvalidArgument(
            f"{name} has shape {items.shape}, expected [tokens, {layout.kv_heads}, {layout.head_dim}]"
        )
    return items


def as_query(query: object, layout: Layout) -> npt.NDArray[np.float32]:
    """A query [heads, head_dim] as float32. Raises InvalidArgument."""
    if not isinstance(query, np.ndarray) and is_tensor(query):
        if not query.is_floating_point():  # type: ignore[attr-defined]  # a torch.Tensor
            raise InvalidArgument(f"q has dtype {query.dtype}, expected floating point numbers")  # type: ignore[attr-defined]  # likewise
        query = query.detach().float().cpu().numpy()  # type: ignore[attr-defined]  # a torch.Tensor
    found = np.asarray(query)
    if found.dtype == np.uint16 and layout.dtype == "bfloat16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    if found.dtype.kind != "f" and found.dtype.name != "bfloat16":
        raise InvalidArgument(f"q has dtype {found.dtype}, expected floating point numbers")
    if found.ndim != 2 or found.shape[1] != layout.head_dim or not found.shape[0]:
        raise InvalidArgument(f"q has shape {found.shape}, expected [heads, {layout.head_dim}]")
    if found.shape[0] % layout.kv_heads or found.shape[0] > GROUP_MAX * layout.kv_heads:
        raise InvalidArgument(
            f"q has {found.shape[0]} heads, expected a multiple of the layout's {layout.kv_heads}, "
            f"at most {GROUP_MAX} times that"
        )
    return np.ascontiguousarray(found, dtype=np.float32)


def as_blocks(blocks: object, layout: Layout, middle: int) -> npt.NDArray[np.int64]:
    """Numbers of middle blocks [kv_heads, n], of which there are `middle`. Raises InvalidArgument."""
    chosen = np.asarray(blocks)
    if chosen.ndim != 2 or chosen.shape[0] != layout.kv_heads or chosen.dtype.kind not in "iu":
        raise InvalidArgument(f"blocks has shape {chosen.shape}, expected integers [{layout.kv_heads}, n]")
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < middle:
        raise InvalidArgument(f"blocks reach from {chosen.min()} to {chosen.max()}, expected 0..{middle - 1}")
    return chosen.astype(np.int64)


def _tensor_bits(tensor: object, dtype: str) -> npt.NDArray[np.generic]:
    host = tensor.detach().cpu()  # type: ignore[attr-defined]  # a torch.Tensor
    if dtype == "bfloat16":
        import torch  # the caller has passed a tensor

        host = host.view(torch.uint16)
    return np.asarray(host.numpy())


def as_given(items: npt.NDArray[np.generic], layout: Layout, is_torch: bool) -> object:
    """Items as the caller has them: an array, or a tensor of the same memory."""
    if not is_torch:
        return items
    import torch  # keys came as tensors

    tensor = torch.from_numpy(items)
    return tensor.view(torch.bfloat16) if layout.dtype == "bfloat16" else tensor
