"""Views of an engine's KV tensors as blocks of bytes, in the order of memory.

Raises LayoutMismatch for tensors that are not what the geometry expects. Reads attributes alone; any thread.
"""

from collections.abc import Mapping
from math import prod

from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.identity.parts import Part
from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.surface import Tensor


def block_views(geometry: Geometry, part: Part, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Each layer's tensor as [blocks, items of a block in the order of memory]. Raises LayoutMismatch on another shape."""
    missing = [name for name in part.layer_names if name not in tensors]
    if missing:
        raise Unserved("odd_blocks", f"layer {missing[0]!r} was not registered, expected all {len(part.layer_names)}")
    if part.section is not None:
        return [
            _run_view(name, tensors[name], geometry.blocks, offset=offset, run_bytes=part.section.run_bytes)
            for name in part.layer_names
            for offset in part.section.offsets
        ]
    if geometry.ranks.is_joint:
        return [_heads_view(name, tensors[name], geometry.blocks, part.block_bytes) for name in part.layer_names]
    view = _state_view if part.is_state else _block_view
    return [view(name, tensors[name], geometry.blocks, part.block_bytes) for name in part.layer_names]


def _heads_view(name: str, tensor: Tensor, blocks: int, block_bytes: int) -> Tensor:
    """A layer's tensor as [blocks, heads, items of a head]: each head's bytes in a row, inside a block one behind the other."""
    shape, steps = [int(size) for size in tensor.shape], [int(step) for step in tensor.stride()]
    item, heads = tensor.element_size(), shape[1] if len(shape) > 1 else 0
    dense = 1
    for size, step in sorted(zip(shape[2:], steps[2:], strict=True), key=lambda axis: (axis[1], axis[0])):
        if size > 1 and step != dense:
            dense = 0
        dense *= size
    if not dense or shape[0] != blocks or heads * dense * item != block_bytes or (heads > 1 and steps[1] != dense):
        raise Unserved(
            "token_major",
            f"layer {name!r} has shape {tuple(shape)} and strides {steps}, expected [{blocks} blocks, heads, …] with each "
            f"head's bytes in a row and {block_bytes} bytes in a block",
        )
    return tensor.as_strided((blocks, heads, dense), (steps[0], dense, 1), tensor.storage_offset())


def _block_view(name: str, tensor: Tensor, blocks: int, block_bytes: int) -> Tensor:
    """Dimension 0 counts blocks (or their equal parts, where the backend's blocks are smaller); inside there are no gaps."""
    item = tensor.element_size()
    rows, inner = int(tensor.shape[0]), [int(size) for size in tensor.shape[1:]]
    steps = [int(step) for step in tensor.stride()]
    parts, rest = divmod(rows, blocks)
    dense = 1
    for size, step in sorted(zip(inner, steps[1:], strict=True), key=lambda axis: (axis[1], axis[0])):
        if size > 1 and step != dense:
            raise Unserved("odd_blocks", f"layer {name!r} has strides {steps}, expected blocks without gaps")
        dense *= size
    if rest or not parts or parts * dense * item != block_bytes:
        raise Unserved(
            "odd_blocks",
            f"layer {name!r} has shape {tuple(tensor.shape)} of {item}-byte items, expected {blocks} blocks of "
            f"{block_bytes} bytes",
        )
    if parts > 1 and steps[0] != dense:
        raise Unserved(
            "odd_blocks", f"layer {name!r} has strides {steps}, expected the parts of a block one behind the other"
        )
    block_items = parts * dense
    return tensor.as_strided((blocks, block_items), (steps[0] * parts, 1), tensor.storage_offset())


def _state_view(name: str, tensor: Tensor, blocks: int, block_bytes: int) -> Tensor:
    """States as whole blocks: vLLM shows a state's own bytes, and the rest of its block is no other layer's."""
    step = _state_step(name, tensor, blocks, range(_inner_items(tensor), block_bytes + 1))
    return tensor.as_strided((blocks, block_bytes), (step, 1), tensor.storage_offset())


def _run_view(name: str, tensor: Tensor, blocks: int, *, offset: int, run_bytes: int) -> Tensor:
    """A run of each state."""
    step = _state_step(name, tensor, blocks, range(offset + run_bytes, _inner_items(tensor) + 1))
    return tensor.as_strided((blocks, run_bytes), (step, 1), tensor.storage_offset() + offset)


def _inner_items(tensor: Tensor) -> int:
    return prod(int(size) for size in tensor.shape[1:])


def _state_step(name: str, tensor: Tensor, blocks: int, sizes: range) -> int:
    """Bytes from one state to the next, where a block has one of these sizes. Raises LayoutMismatch on another shape."""
    item, steps = tensor.element_size(), [int(step) for step in tensor.stride()]
    if item != 1 or int(tensor.shape[0]) != blocks or not sizes or sizes[-1] > steps[0] or steps[-1] != 1:
        raise Unserved(
            "odd_blocks",
            f"layer {name!r} has shape {tuple(tensor.shape)} of {item}-byte items and strides {steps}, expected {blocks} "
            f"blocks with a state of {sizes.start} to {sizes.stop - 1} bytes in each",
        )
    return steps[0]
