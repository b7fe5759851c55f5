"""Geometry of engine memory: which bytes of an engine's paged KV belong to which block, plane and layer.

`describe_layers` turns the arrays that an engine registers into one geometry for the native copies, or raises with what does
not fit: host arrays by DLPack or the buffer protocol, torch tensors, and arrays on a CUDA device by their
`__cuda_array_interface__`. Nothing is copied and nothing is allocated; the arrays are kept alive by the Cache. Pure but for
reading the arrays' attributes, and for asking the driver which device has an address; any thread.

    kv_first     [2, blocks, block_tokens, …]      the same token-major bytes are stored for both,
    block_first  [blocks, 2, block_tokens, …]      so engines with different block_tokens share chunks
    packed       [blocks, …]                       opaque bytes, declared in the Layout
    (planes = 1: [blocks, block_tokens, …])
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import ITEM_BYTES, Layout
from kvpool_client.copying.device.driver import ordinal_of
from kvpool_client.copying.runs import Axes, GroupRuns, check_apart, group_runs, is_contiguous

FORMS = ("auto", "kv_first", "block_first", "packed")
# Data types of layouts that numpy does not know by itself.
_WITHOUT_NAME = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
# Where arrays begin of which only the place is asked: any number but 0.
_PLACE = 1 << 20
_HEAD_MAJOR = "memory with a head's tokens together has a Layout of one head a group, head_groups=kv_heads"


@dataclass(frozen=True, slots=True)
class ArrayBytes:
    """An array's memory: address, shape, strides in bytes, item size, device, and the name of its dtype, with a byte order
    where that is not the machine's."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class PagedGeometry:
    """One geometry for all layers, in bytes. Block b of plane p of layer l begins at
    `addresses[l] + p * plane_stride + b * block_stride` and has `plane_block_bytes` bytes: contiguous, or in `runs` runs that
    are `run_stride` apart. With head groups every group of every layer is a layer here, layer by layer."""

    addresses: tuple[int, ...]
    planes: int
    blocks: int
    block_tokens: int
    plane_block_bytes: int
    plane_stride: int
    block_stride: int
    form: str
    device: str
    runs: int = 1
    run_stride: int = 0


def describe_layers(
    layers: Sequence[object], layout: Layout, block_tokens: int, form: str, *, has_head_groups: bool = False
) -> PagedGeometry:
    """The geometry of an engine's KV, one array for each layer. `has_head_groups`: of chunks with head groups, though `layout`,
    a share's, may have one alone.

    Raises InvalidArgument for arguments without meaning, and LayoutMismatch for arrays that do not fit the layout or are
    ambiguous.
    """
    if form not in FORMS:
        raise InvalidArgument(f"form is {form!r}, expected one of {', '.join(FORMS)}")
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, (int, np.integer)) or block_tokens < 1:
        raise InvalidArgument(f"block_tokens is {block_tokens!r}, expected a positive integer")
    block_tokens = int(block_tokens)
    if layout.chunk_tokens % block_tokens:
        raise LayoutMismatch(
            f"block_tokens is {block_tokens}, expected a divisor of chunk_tokens {layout.chunk_tokens}"
        )
    if layout.is_packed and block_tokens != layout.block_tokens:
        raise LayoutMismatch(f"block_tokens is {block_tokens}, the layout declares {layout.block_tokens}")
    arrays = [_array_bytes(layer, f"layer {number}") for number, layer in enumerate(layers)]
    if len(arrays) != layout.layers:
        raise LayoutMismatch(f"{len(arrays)} layers are registered, the layout has {layout.layers}")
    first = arrays[0]
    for number, array in enumerate(arrays):
        if replace(array, address=first.address) != first:
            raise LayoutMismatch(
                f"layer {number} has {_words(array)}, layer 0 has {_words(first)}: expected all alike, or a Layout with groups"
            )
    _check_dtype(first, layout)
    item_bytes = ITEM_BYTES[layout.dtype]
    if not layout.is_packed and first.item_bytes != item_bytes:
        raise LayoutMismatch(f"items have {first.item_bytes} bytes, {layout.dtype} has {item_bytes}")
    chosen = _choose_form(first, layout, block_tokens, form)
    if chosen != "packed":
        _check_order(first, layout, block_tokens, chosen, is_named=form != "auto")
    geometry = _geometry(arrays, layout, chosen, block_tokens=block_tokens, has_head_groups=has_head_groups)
    _check_apart_in_memory(arrays)
    return geometry


def contiguous_address(array: object, layout: Layout, name: str, *, is_target: bool) -> tuple[int, int]:
    """`(address, chunks)` of a C-contiguous uint8 array [chunks, chunk_bytes]. Raises InvalidArgument on anything else, by the
    array's `name`."""
    described = _array_bytes(array, name, needs_write=is_target)
    shape, chunk_bytes = described.shape, layout.chunk_bytes
    if described.dtype != "uint8" or len(shape) != 2 or shape[1] != chunk_bytes:
        raise InvalidArgument(
            f"{name} has shape {shape} of {described.dtype}, expected {_expected_rows(chunk_bytes)}: view its bytes as uint8"
        )
    if shape[0] and not is_contiguous(shape, described.strides, 1):
        raise InvalidArgument(f"{name} has strides {described.strides}, expected {_expected_rows(chunk_bytes)}")
    if described.device != "cpu":
        raise InvalidArgument(f"{name} is on {described.device}, expected host memory")
    return described.address, shape[0]


def _expected_rows(chunk_bytes: int) -> str:
    return f"C-contiguous uint8 [chunks, {chunk_bytes}]"


def _check_dtype(array: ArrayBytes, layout: Layout) -> None:
    """Items of another kind would be loaded as other numbers, all of them there.

    Bits alone are: unsigned integers, as numpy holds bfloat16 and engines 8-bit floats; what numpy has no name for (`<V2`, as
    array interfaces show bfloat16) where it has none for the layout's either; all of a layout of uint8; integers of packed
    blocks.
    """
    is_of_bits = layout.dtype == "uint8" or array.dtype.startswith(("uint", "bits"))
    is_of_bits |= array.dtype.startswith("void") and (layout.is_packed or layout.dtype in _WITHOUT_NAME)
    is_of_bits |= array.dtype.startswith("int") and layout.is_packed
    if array.dtype != layout.dtype and not is_of_bits:
        bits = f"uint{8 * ITEM_BYTES[layout.dtype]}"
        raise LayoutMismatch(f"items are {array.dtype}, expected the layout's {layout.dtype}, or {bits} for its bits")


def _array_bytes(array: object, name: str, *, needs_write: bool = True) -> ArrayBytes:
    if isinstance(array, np.ndarray):
        view = array
    elif hasattr(array, "data_ptr") and hasattr(array, "element_size"):
        return _tensor_bytes(array, name)
    elif (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
        return _device_bytes(interface, name)
    else:
        try:
            view = np.asarray(array) if hasattr(array, "__array_interface__") else _from_exchange(array)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise InvalidArgument(f"{name} is {type(array).__name__}, expected an array or tensor: {error}") from error
    if needs_write and not view.flags.writeable:
        raise InvalidArgument(f"{name} is read-only, expected memory that a load may write")
    address: int = view.__array_interface__["data"][0]
    return ArrayBytes(address, view.shape, view.strides, view.itemsize, "cpu", _name_of(view.dtype))


def _from_exchange(array: object) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    if isinstance(array, (bytes, bytearray, memoryview)):
        return np.asarray(memoryview(array))
    if hasattr(array, "__dlpack__"):
        return np.from_dlpack(array)
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # raises TypeError for what has no buffer


def _tensor_bytes(tensor: object, name: str) -> ArrayBytes:
    """A torch tensor, read through its own attributes: torch is not imported for it."""
    try:
        address, strides = int(tensor.data_ptr()), tensor.stride()  # type: ignore[attr-defined]  # duck-typed torch.Tensor
    except RuntimeError as error:
        raise InvalidArgument(f"{name} has no memory that can be read, expected a dense tensor: {error}") from error
    shape = tuple(int(size) for size in tensor.shape)  # type: ignore[attr-defined]  # likewise
    device = str(tensor.device)  # type: ignore[attr-defined]  # likewise
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on {device}, expected host memory or a CUDA device")
    if not address and 0 not in shape:
        raise InvalidArgument(f"{name} has shape {shape} and no memory, expected a tensor with its storage")
    item_bytes = int(tensor.element_size())  # type: ignore[attr-defined]  # likewise
    if getattr(tensor, "is_neg", bool)() or getattr(tensor, "is_conj", bool)():
        raise InvalidArgument(
            f"{name} is a view of other signs than its memory has, expected resolve_neg() or resolve_conj()"
        )
    steps = tuple(int(stride) * item_bytes for stride in strides)
    dtype = str(tensor.dtype).rpartition(".")[2]  # type: ignore[attr-defined]  # likewise
    return ArrayBytes(address, shape, steps, item_bytes, device, dtype)


def _device_bytes(interface: object, name: str) -> ArrayBytes:
    """An array on a CUDA device, by version 2 or 3 of its interface."""
    try:
        assert isinstance(interface, dict)
        shape = tuple(int(size) for size in interface["shape"])
        address, is_read_only = interface["data"]
        dtype = np.dtype(interface["typestr"])
        item_bytes = dtype.itemsize
        given = interface.get("strides")
        strides = _packed_strides(shape, item_bytes) if given is None else tuple(int(stride) for stride in given)
        has_mask = interface.get("mask") is not None
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} has a __cuda_array_interface__ that cannot be read: {error!r}") from error
    if has_mask or is_read_only:
        raise InvalidArgument(
            f"{name} is {'masked' if has_mask else 'read-only'}, expected memory that a load may write"
        )
    if len(strides) != len(shape):
        raise InvalidArgument(f"{name} has {len(shape)} dimensions and {len(strides)} strides")
    ordinal = ordinal_of(int(address))
    if ordinal is None:
        raise InvalidArgument(f"{name} begins at {address:#x}, which is no device memory to the CUDA driver")
    return ArrayBytes(int(address), shape, strides, item_bytes, f"cuda:{ordinal}", _name_of(dtype))


@lru_cache(64)
def _name_of(dtype: "np.dtype[np.generic]") -> str:
    """A dtype's name, made once: numpy works it out anew each time."""
    if not dtype.isnative:
        return f"{dtype.name} of the other byte order"
    return "a structure" if dtype.names else dtype.name


def _packed_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Strides in bytes of an array without gaps."""
    return tuple(item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _choose_form(array: ArrayBytes, layout: Layout, block_tokens: int, form: str) -> str:
    if layout.is_packed or form == "packed":
        if not layout.is_packed:
            raise LayoutMismatch("form is 'packed', expected a Layout that declares format and block_tokens")
        if form not in ("auto", "packed"):
            raise LayoutMismatch(f"form is {form!r}, the layout declares the packed format {layout.format!r}")
        return "packed"
    fitting = [name for name in ("kv_first", "block_first") if _fits(array, layout, block_tokens, name)]
    if form != "auto":
        if form not in fitting:
            raise LayoutMismatch(_misfit(array, layout, block_tokens, form))
        return form
    if not fitting:
        raise LayoutMismatch(_misfit(array, layout, block_tokens, "kv_first or block_first"))
    if len(fitting) == 2 and layout.planes == 2:
        raise LayoutMismatch(f"shape {array.shape} reads as kv_first and as block_first: pass form=")
    return fitting[0]


def _fits(array: ArrayBytes, layout: Layout, block_tokens: int, form: str) -> bool:
    shape = array.shape
    if layout.planes == 1:
        return len(shape) >= 2 and shape[1] == block_tokens and _token_fits(array, 2, layout)
    plane_axis = 0 if form == "kv_first" else 1
    has_axes = len(shape) >= 3 and shape[plane_axis] == layout.planes and shape[2] == block_tokens
    return has_axes and _token_fits(array, 3, layout)


def _token_fits(array: ArrayBytes, axis: int, layout: Layout) -> bool:
    return prod(array.shape[axis:]) * array.item_bytes == layout.token_plane_bytes


def _misfit(array: ArrayBytes, layout: Layout, block_tokens: int, form: str) -> str:
    axes = f"[blocks, {block_tokens}, …]" if layout.planes == 1 else f"2, blocks and {block_tokens} tokens ({form})"
    found = f"shape {array.shape} does not fit: expected {axes} with {layout.token_plane_bytes} bytes per token"
    axis = _tokens_axis(layout)
    has_heads_first = len(array.shape) == axis + 3 and array.shape[axis] != block_tokens == array.shape[axis + 1]
    return f"{found}; {_cure_of_heads_first(axis, layout)}" if has_heads_first else found


def _cure_of_heads_first(axis: int, layout: Layout) -> str:
    """What to do with arrays that have a head's tokens together."""
    view = f"its heads come before its tokens: pass the view swapaxes({axis}, {axis + 1})"
    return view if layout.head_groups == layout.kv_heads else f"{view}; {_HEAD_MAJOR}"


def _cure_of_gaps(array: ArrayBytes, layout: Layout) -> str:
    axis = _tokens_axis(layout)
    is_head_major = len(array.shape) > axis + 1 and array.strides[axis + 1] > array.strides[axis]
    return f"; {_HEAD_MAJOR}" if is_head_major and array.shape[axis + 1] > 1 else ""


def _tokens_axis(layout: Layout) -> int:
    return 1 if layout.planes == 1 else 2


def _check_order(array: ArrayBytes, layout: Layout, block_tokens: int, form: str, *, is_named: bool) -> None:
    """Check that what is behind the tokens is [kv_heads, head_dim], in one axis or more, as far as shapes can show it; where
    they cannot, the caller names the form. Raises LayoutMismatch."""
    axis = _tokens_axis(layout)
    axes = tuple(size for size in array.shape[axis + 1 :] if size > 1)
    heads, dim = layout.kv_heads, layout.head_dim
    if len(axes) > 1 and dim not in (prod(axes[number:]) for number in range(len(axes))):
        swapped = ": its heads and dims are swapped" if axes == (dim, heads) else ""
        raise LayoutMismatch(
            f"shape {array.shape} ends in {axes} behind the tokens, expected {heads} heads of {dim} items, or one axis of "
            f"{heads * dim}{swapped}"
        )
    if not is_named and axes == (heads, dim) and heads == block_tokens:
        raise LayoutMismatch(
            f"shape {array.shape} reads as [tokens, heads, dim] and as [heads, tokens, dim]: pass form={form!r} if it is the "
            "first; docs/layouts.md has what to do with others"
        )


def _words(array: ArrayBytes) -> str:
    return f"shape {array.shape} of {array.dtype} with strides {array.strides} on {array.device}"


class _Bytes:
    """An array of this shape somewhere, for questions about its place: nothing reads it."""

    def __init__(self, array: ArrayBytes, place: int) -> None:
        self.__array_interface__ = {
            "shape": (*array.shape, array.item_bytes),
            "strides": (*array.strides, 1),
            "typestr": "|u1",
            "data": (_PLACE + place, False),
            "version": 3,
        }


def _check_apart_in_memory(arrays: Sequence[ArrayBytes]) -> None:
    """Check that no two layers have a byte in common. They are alike, so it depends on how far they are apart: of layers that
    are views of one array there are few distances. Raises LayoutMismatch."""
    first = arrays[0]
    span = sum((size - 1) * stride for size, stride in zip(first.shape, first.strides, strict=True)) + first.item_bytes
    order = sorted(range(len(arrays)), key=lambda number: arrays[number].address)
    apart: set[int] = set()
    for place, low in enumerate(order):
        for high in order[place + 1 :]:
            distance = arrays[high].address - arrays[low].address
            if distance >= span:
                break
            if distance not in apart and np.shares_memory(
                np.asarray(_Bytes(first, 0)), np.asarray(_Bytes(first, distance))
            ):
                one, other = sorted((low, high))
                raise LayoutMismatch(
                    f"layers {one} and {other} overlap in memory, expected memory of its own for each: a load of one would "
                    "overwrite the other"
                )
            apart.add(distance)


def _geometry(
    arrays: list[ArrayBytes], layout: Layout, form: str, *, block_tokens: int, has_head_groups: bool
) -> PagedGeometry:
    array = arrays[0]
    planes = 1 if form == "packed" else layout.planes
    plane_bytes = layout.planes * layout.plane_bytes(block_tokens) // planes
    if form == "packed" or planes == 1:
        block_axis, inner_axis, plane_stride = 0, 1, 0
    elif form == "kv_first":
        block_axis, inner_axis, plane_stride = 1, 2, array.strides[0]
    else:
        block_axis, inner_axis, plane_stride = 0, 2, array.strides[1]
    inner = array.shape[inner_axis:]
    if not array.shape or prod(inner) * array.item_bytes != plane_bytes:
        raise LayoutMismatch(
            f"a block has shape {inner} of {array.item_bytes}-byte items, expected {plane_bytes} bytes"
        )
    blocks, block_stride, groups = array.shape[block_axis], array.strides[block_axis], layout.head_groups
    steps = [(blocks, block_stride)] + ([(planes, plane_stride)] if planes > 1 else [])
    part = GroupRuns(1, plane_bytes, 0, 0)
    if has_head_groups:
        axes = Axes(inner, array.strides[inner_axis:], array.item_bytes)
        part = group_runs(axes, groups, is_packed=form == "packed")
        steps += [(groups, part.group_stride), (part.runs, part.run_stride)]
    elif not is_contiguous(inner, array.strides[inner_axis:], array.item_bytes):
        raise LayoutMismatch(
            f"strides {array.strides} leave gaps inside a block's plane, expected contiguous bytes"
            f"{_cure_of_gaps(array, layout)}"
        )
    check_apart(steps, part.run_bytes, array.strides)
    return PagedGeometry(
        addresses=tuple(entry.address + group * part.group_stride for entry in arrays for group in range(groups)),
        planes=planes,
        blocks=blocks,
        block_tokens=block_tokens,
        plane_block_bytes=part.runs * part.run_bytes,
        plane_stride=plane_stride,
        block_stride=block_stride,
        form=form,
        device=array.device,
        runs=part.runs,
        run_stride=part.run_stride,
    )
