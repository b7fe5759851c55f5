"""Engine memory: each form's geometry, checked byte by byte against indexing, and what is refused."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import Layout
from kvpool_client.copying import buffers
from kvpool_client.copying.buffers import PagedGeometry, contiguous_address, describe_layers

LAYOUT = Layout(layers=2, kv_heads=3, head_dim=4, dtype="float16", chunk_tokens=32)
MLA = Layout(layers=2, kv_heads=1, head_dim=12, dtype="float16", chunk_tokens=32, planes=1)
PACKED = Layout(layers=2, kv_heads=3, head_dim=4, dtype="float16", chunk_tokens=32, format="x", block_tokens=8)
BLOCKS, TOKENS = 5, 8

Array = npt.NDArray[Any]


def _layers(shape: tuple[int, ...], dtype: str = "float16") -> list[Array]:
    return [np.arange(np.prod(shape)).astype(dtype).reshape(shape) + layer for layer in range(2)]


def _block_address(geometry: PagedGeometry, layer: int, plane: int, block: int) -> int:
    return geometry.addresses[layer] + plane * geometry.plane_stride + block * geometry.block_stride


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@pytest.mark.parametrize("tail", [(3, 4), (12,), (4, 3), (1, 12, 1)])
@pytest.mark.parametrize("form", ["auto", "kv_first"])
def test_kv_first(tail: tuple[int, ...], form: str) -> None:
    layers = _layers((2, BLOCKS, TOKENS, *tail))
    geometry = describe_layers(layers, LAYOUT, TOKENS, form)
    assert (geometry.form, geometry.blocks, geometry.plane_block_bytes, geometry.device) == ("kv_first", 5, 192, "cpu")
    for layer, plane, block in itertools.product(range(2), range(2), range(BLOCKS)):
        assert _block_address(geometry, layer, plane, block) == _address(layers[layer][plane, block])


@pytest.mark.parametrize("form", ["auto", "block_first"])
def test_block_first(form: str) -> None:
    layers = _layers((BLOCKS, 2, TOKENS, 3, 4))
    geometry = describe_layers(layers, LAYOUT, TOKENS, form)
    assert (geometry.form, geometry.planes, geometry.block_tokens) == ("block_first", 2, TOKENS)
    for layer, plane, block in itertools.product(range(2), range(2), range(BLOCKS)):
        assert _block_address(geometry, layer, plane, block) == _address(layers[layer][block, plane])


def test_one_plane() -> None:
    layers = _layers((BLOCKS, TOKENS, 12))
    geometry = describe_layers(layers, MLA, TOKENS, "auto")
    assert (geometry.planes, geometry.blocks, geometry.plane_block_bytes) == (1, 5, 192)
    assert [_block_address(geometry, 1, 0, block) for block in range(5)] == [_address(layers[1][b]) for b in range(5)]


@pytest.mark.parametrize("form", ["auto", "packed"])
@pytest.mark.parametrize("shape", [(BLOCKS, 2, TOKENS, 12), (BLOCKS, 3, 2, 32), (BLOCKS, 192)])
def test_packed_blocks_are_opaque(form: str, shape: tuple[int, ...]) -> None:
    geometry = describe_layers(_layers(shape), PACKED, TOKENS, form)
    assert (geometry.form, geometry.planes, geometry.plane_block_bytes, geometry.blocks) == ("packed", 1, 384, 5)


def test_packed_items_may_have_any_size() -> None:
    geometry = describe_layers(_layers((BLOCKS, 384), "uint8"), PACKED, TOKENS, "auto")
    assert (geometry.plane_block_bytes, geometry.block_stride) == (384, 384)


def test_gaps_between_blocks_are_strides() -> None:
    whole = _layers((2, 2 * BLOCKS, TOKENS, 12))
    layers = [layer[:, ::2] for layer in whole]
    geometry = describe_layers(layers, LAYOUT, TOKENS, "auto")
    assert (geometry.blocks, geometry.block_stride, geometry.plane_stride) == (BLOCKS, 384, 1920)
    assert _block_address(geometry, 1, 1, 4) == _address(whole[1][1, 8])


def test_layers_of_one_allocation_keep_their_strides() -> None:
    """The cross-layer arrangement: one array [blocks, layers, 2, tokens, …], a layer being a view of it."""
    whole = np.zeros((BLOCKS, 2, 2, TOKENS, 12), np.float16)
    geometry = describe_layers([whole[:, 0], whole[:, 1]], LAYOUT, TOKENS, "auto")
    assert (geometry.form, geometry.block_stride) == ("block_first", 768)
    assert _block_address(geometry, 1, 1, 3) == _address(whole[3, 1, 1])


@pytest.mark.parametrize("swap", [(0, 1), (1, 0)])
def test_the_order_in_memory_may_differ_from_the_order_of_axes(swap: tuple[int, int]) -> None:
    """A [2, blocks, …] view of memory that lies as [blocks, 2, …], as engines make them, is still kv_first."""
    layers = [np.zeros((BLOCKS, 2, TOKENS, 12), np.float16).transpose(1, 0, 2, 3) for _ in range(2)]
    geometry = describe_layers(layers, LAYOUT, TOKENS, "auto")
    assert (geometry.form, geometry.plane_stride, geometry.block_stride) == ("kv_first", 192, 384)
    assert _block_address(geometry, 0, *swap) == _address(layers[0][swap])


def test_an_ambiguous_shape_needs_its_form() -> None:
    layers = _layers((2, 2, TOKENS, 12))
    with pytest.raises(LayoutMismatch, match="pass form="):
        describe_layers(layers, LAYOUT, TOKENS, "auto")
    assert describe_layers(layers, LAYOUT, TOKENS, "kv_first").plane_stride == 384
    assert describe_layers(layers, LAYOUT, TOKENS, "block_first").plane_stride == 192


@pytest.mark.parametrize(
    "layers",
    [
        _layers((2, BLOCKS, TOKENS, 11)),
        _layers((2, BLOCKS, 2 * TOKENS, 12)),
        _layers((3, BLOCKS, TOKENS, 12)),
        _layers((BLOCKS, TOKENS, 12)),
        _layers((2, BLOCKS, TOKENS, 12), "float32"),
        _layers((2, BLOCKS, TOKENS, 12))[:1],
        [*_layers((2, BLOCKS, TOKENS, 12)), np.zeros((2, BLOCKS, TOKENS, 12), np.float16)],
        [_layers((2, 5, TOKENS, 12))[0], _layers((2, 6, TOKENS, 12))[0]],
        [_layers((2, 5, TOKENS, 12))[0], _layers((2, 10, TOKENS, 12))[0][:, ::2]],
        [layer[..., ::2] for layer in _layers((2, BLOCKS, TOKENS, 24))],
        [layer.swapaxes(2, 3) for layer in _layers((2, BLOCKS, 12, TOKENS))],
        [layer[:, ::-1] for layer in _layers((2, BLOCKS, TOKENS, 12))],
        [np.lib.stride_tricks.as_strided(x, (2, 5, 8, 12), (960, 96, 24, 2)) for x in _layers((2, 5, 8, 12))],
        [np.zeros((), np.float16)] * 2,
        [],
    ],
    ids=[
        "token size",
        "block tokens",
        "planes",
        "missing planes",
        "item size",
        "too few",
        "too many",
        "shapes differ",
        "strides differ",
        "gaps in a token",
        "token axis inside",
        "backwards",
        "overlapping",
        "no axes",
        "no layers",
    ],
)
def test_arrays_that_do_not_fit_are_refused(layers: list[Array]) -> None:
    with pytest.raises(LayoutMismatch):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


PACKED_ONLY, BOTH, NEITHER = (False, True), (True, True), (False, False)


@pytest.mark.parametrize(
    ("stored", "named", "is_taken"),  # by a plain and by a packed layout
    [
        ("bfloat16", "float16", NEITHER),  # 1.5 would be loaded as 0.125
        ("bfloat16", "int16", PACKED_ONLY),
        ("bfloat16", "uint16", BOTH),
        ("bfloat16", "V2", BOTH),  # so array interfaces show it
        ("float16", "V2", PACKED_ONLY),
        ("float16", "float16", BOTH),
        ("float16", ">f2", NEITHER),
        ("float8_e4m3fn", "int8", PACKED_ONLY),
        ("float8_e4m3fn", "uint8", BOTH),
        ("float8_e5m2", "V1", BOTH),
        ("int8", "uint8", BOTH),
        ("uint8", "int8", BOTH),
        ("float32", "int32", PACKED_ONLY),
        ("float32", [("key", "f2"), ("value", "f2")], NEITHER),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_items_are_those_of_the_layout_or_its_bits(
    stored: str, named: Any, is_taken: tuple[bool, bool], is_packed: bool
) -> None:
    layout = replace(PACKED if is_packed else LAYOUT, dtype=stored)
    layers = [np.zeros((2, BLOCKS, TOKENS, 12), named) for _ in range(2)]
    if is_packed:
        layers = [layer.reshape(BLOCKS, -1) for layer in layers]
    if is_taken[is_packed]:
        assert describe_layers(layers, layout, TOKENS, "auto").blocks == BLOCKS
    else:
        bits = f"uint{8 * np.dtype(named).itemsize}"
        with pytest.raises(
            LayoutMismatch, match=f"items are .*, expected the layout's {stored}, or {bits} for its bits"
        ):
            describe_layers(layers, layout, TOKENS, "auto")


def test_a_dtype_is_named_with_its_byte_order() -> None:
    layers = [np.zeros((2, BLOCKS, TOKENS, 12), ">f2")] * 2
    with pytest.raises(
        LayoutMismatch, match="items are float16 of the other byte order, expected the layout's float16"
    ):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


def test_layers_of_two_dtypes_are_refused() -> None:
    layers = [np.zeros((2, BLOCKS, TOKENS, 12), dtype) for dtype in ("float16", "uint16")]
    with pytest.raises(LayoutMismatch, match=r"layer 1 has shape .* of uint16, layer 0 has .* of float16"):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


@pytest.mark.parametrize(
    ("layout", "block_tokens", "form"),
    [
        (LAYOUT, 5, "auto"),
        (LAYOUT, 64, "auto"),
        (LAYOUT, TOKENS, "block_first"),
        (LAYOUT, TOKENS, "packed"),
        (PACKED, 16, "auto"),
        (PACKED, TOKENS, "kv_first"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(layout: Layout, block_tokens: int, form: str) -> None:
    with pytest.raises(LayoutMismatch):
        describe_layers(_layers((2, BLOCKS, TOKENS, 12)), layout, block_tokens, form)


@pytest.mark.parametrize(("block_tokens", "form"), [(0, "auto"), (True, "auto"), (8.0, "auto"), (8, "nhd")])
def test_meaningless_arguments_are_refused(block_tokens: int, form: str) -> None:
    with pytest.raises(InvalidArgument):
        describe_layers(_layers((2, BLOCKS, TOKENS, 12)), LAYOUT, block_tokens, form)


@pytest.mark.parametrize("layer", [None, 7, {}, [1, 2], b"read-only bytes"], ids=str)
def test_a_value_that_is_no_array_is_refused(layer: object) -> None:
    with pytest.raises(InvalidArgument):
        describe_layers([layer, layer], LAYOUT, TOKENS, "auto")


def test_read_only_memory_is_refused() -> None:
    layers = _layers((2, BLOCKS, TOKENS, 12))
    layers[1].flags.writeable = False
    with pytest.raises(InvalidArgument, match="layer 1 is read-only"):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


def test_a_flat_target_is_used_at_its_address() -> None:
    array = np.zeros((3, LAYOUT.chunk_bytes), np.uint8)
    assert contiguous_address(array, LAYOUT, is_target=True) == (_address(array), 3)
    assert contiguous_address(array[1:], LAYOUT, is_target=True) == (_address(array) + LAYOUT.chunk_bytes, 2)


def test_only_a_source_may_be_read_only() -> None:
    array = np.zeros((1, LAYOUT.chunk_bytes), np.uint8)
    array.flags.writeable = False
    assert contiguous_address(array, LAYOUT, is_target=False) == (_address(array), 1)
    with pytest.raises(InvalidArgument, match="into is read-only"):
        contiguous_address(array, LAYOUT, is_target=True)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(LAYOUT.chunk_bytes, np.uint8),
        np.zeros((2, LAYOUT.chunk_bytes - 1), np.uint8),
        np.zeros((2, LAYOUT.chunk_bytes), np.uint16),
        np.zeros((4, LAYOUT.chunk_bytes), np.uint8)[::2],
        np.zeros((LAYOUT.chunk_bytes, 2), np.uint8).T,
        bytearray(LAYOUT.chunk_bytes),
        None,
    ],
    ids=["one axis", "size", "items", "gaps", "order", "bytes", "nothing"],
)
def test_a_flat_target_of_another_form_is_refused(array: object) -> None:
    with pytest.raises(InvalidArgument):
        contiguous_address(array, LAYOUT, is_target=True)


class OnDevice:
    """An array that its library has put on a CUDA device, as this interface describes it."""

    def __init__(self, array: Array, **changes: object) -> None:
        data = (array.__array_interface__["data"][0], False)
        described = {"shape": array.shape, "typestr": array.dtype.str, "data": data, "version": 3, "strides": None}
        self.__cuda_array_interface__ = {**described, **changes}


@pytest.fixture
def _device_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that knows every address as one of its second device."""
    monkeypatch.setattr(buffers, "ordinal_of", lambda address: 1 if address else None)


@pytest.mark.usefixtures("_device_one")
@pytest.mark.parametrize("form", ["kv_first", "block_first"])
@pytest.mark.parametrize("has_strides", [False, True])
def test_an_array_on_a_device_has_the_geometry_of_one_in_host_memory(form: str, has_strides: bool) -> None:
    axes = (2, BLOCKS) if form == "kv_first" else (BLOCKS, 2)
    host = _layers((*axes, TOKENS, 3, 4))
    changes = {"strides": host[0].strides} if has_strides else {"version": 2}
    geometry = describe_layers([OnDevice(array, **changes) for array in host], LAYOUT, TOKENS, form)
    assert geometry.device == "cuda:1"
    assert geometry == replace(describe_layers(host, LAYOUT, TOKENS, form), device="cuda:1")


@pytest.mark.usefixtures("_device_one")
def test_arrays_of_a_type_that_numpy_lacks_count_by_their_size() -> None:
    """bfloat16 of other libraries is two opaque bytes."""
    layers = [OnDevice(array, typestr="|V2") for array in _layers((BLOCKS, 2, TOKENS, 3, 4))]
    layout = replace(LAYOUT, dtype="bfloat16")
    assert describe_layers(layers, layout, TOKENS, "auto").plane_block_bytes == 192


@pytest.mark.usefixtures("_device_one")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": (0, False)}, "no device memory"),
        ({"data": (64, True)}, "read-only"),
        ({"mask": object()}, "masked"),
        ({"typestr": "quaternion"}, "cannot be read"),
        ({"strides": (2, 2)}, "5 dimensions and 2 strides"),
        ({"shape": "wide"}, "cannot be read"),
    ],
)
def test_an_array_that_cannot_be_used_is_refused_in_words(changes: dict[str, object], words: str) -> None:
    layers = [OnDevice(array, **changes) for array in _layers((BLOCKS, 2, TOKENS, 3, 4))]
    with pytest.raises(InvalidArgument, match=words):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


@pytest.mark.usefixtures("_device_one")
def test_a_contiguous_array_is_in_host_memory() -> None:
    rows = np.zeros((2, LAYOUT.chunk_bytes), np.uint8)
    with pytest.raises(InvalidArgument, match="is on cuda:1, expected host memory"):
        contiguous_address(OnDevice(rows), LAYOUT, is_target=True)


def test_a_process_without_a_driver_learns_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_CUDA_DRIVER", "/no/such/libcuda.so")
    layers = [OnDevice(array) for array in _layers((BLOCKS, 2, TOKENS, 3, 4))]
    with pytest.raises(InvalidArgument, match=r"/no/such/libcuda\.so.*KVPOOL_CUDA_DRIVER"):
        describe_layers(layers, LAYOUT, TOKENS, "auto")
